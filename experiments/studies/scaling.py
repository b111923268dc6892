"""The effect of the dot product's scale, before and during training."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from experiments.core.run import RunFolder
from experiments.core.settings import FROM_PRESET, TrainingOptions
from experiments.report import blocks as report
from experiments.report.published import UNTRAINED, VASWANI

# Exponent p of the scale 1 / depth^p, by name.
SCALES = {"no scale": 0.0, "too weak": 0.25, "1/√d": 0.5, "too strong": 1.0}


@dataclasses.dataclass(frozen=True)
class Scaling(TrainingOptions):
    """What does the scale 1/√d do to attention, before and during training?

    Without training: entropy, largest weight and the norm of the softmax's Jacobian, by depth, of
    the unscaled dot, the scaled dot and the additive score. In training, on associative recall:
    loss, entropy and gradient norm over the steps with no scale, 1/√d, one too strong (1/d: the
    weights flatten) and one too weak (1/d^¼: they sharpen).

    Beside it: Vaswani et al. 2017 (arXiv 1706.03762) §3.2.1, and "unscaled starts slowly;
    entropy is what to watch".

    Command: python -m experiments scaling. Takes 3 minutes on two cores; quick 30 s, full 12
    minutes.
    Expected: unscaled weights are nearly one-hot at depth 256 and above, scaled ones do not change
    with the depth; in training, no scale starts sharp and learns slowest at large depth.
    """

    depths: tuple[int, ...] = (4, 16, 64, 256, 1024)
    """Depths of the table without training."""
    train_depths: tuple[int, ...] = FROM_PRESET
    """Depths to train at."""
    pairs: int = 32
    """Pairs to remember (S)."""
    queries: int = 16
    """Questions on each list (T)."""

    study: ClassVar[str] = "scaling"
    defaults: ClassVar = {"batch_size": 32, "learning_rate": 0.001}
    preset_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "quick": {"train_depths": (256,), "steps": 150, "seeds": 1},
        "default": {"train_depths": (64, 512), "steps": 500, "seeds": 3},
        "full": {"train_depths": (64, 256, 1024), "steps": 1500, "seeds": 5},
    }

    def run(self) -> Path:
        """Make the table, train, and write the report."""
        from experiments import untrained

        seeds = range(self.seeds)
        models = {
            f"depth{depth}-p{SCALES[name]:g}-seed{seed}": (depth, name, seed)
            for depth, name, seed in itertools.product(self.train_depths, SCALES, seeds)
        }
        with RunFolder.open(self, len(models) * self.steps) as run:
            table = [
                run.cell(f"untrained-depth{d}-seed{s}", lambda d=d, s=s: untrained.measure(d, s))
                for d, s in itertools.product(self.depths, seeds)
            ]
            results = {"untrained": table, "trained": run.all_trained(models, _train)}
            return run.conclude(results, build_report)


_WORDS = 64
_WIDTH = 64
_FIRST = 20  # steps


def _train(
    options: Scaling, run: RunFolder, key: str, depth: int, name: str, seed: int
) -> dict[str, Any]:
    from flax import nnx

    from experiments.core.optim import Recipe
    from experiments.models import recall

    scale = float(depth) ** -SCALES[name]
    task = recall.task(
        f"depth {depth}, {name}, seed {seed}",
        recall.Recall(_WORDS, _WIDTH, depth, scale, rngs=nnx.Rngs(seed)),
        seed=seed, batch_size=options.batch_size, pairs=options.pairs, queries=options.queries,
        words=_WORDS,
    )  # fmt: skip
    recipe = Recipe.short(options.steps, options.learning_rate, observations=25)
    history = run.train(key, task, recipe).history
    return {"depth": depth, "name": name, "scale": scale, "seed": seed, **history.record()}


Cells = Sequence[report.Results]
_SCORES = {"dot": "unscaled", "scaled_dot": "scaled", "additive": "additive"}
_MEASURES = {
    "entropy": "entropy / ln n",
    "largest": "largest weight",
    "jacobian": "Jacobian norm",
}
_CURVES = {
    "loss": "Loss in training, nats",
    "entropy": "Entropy of the attention / ln n",
    "gradient_norm": "Gradient norm",
}
_SOURCE = "figures given with the study's design, same set-up: 32 keys, 400 queries"


def build_report(results: report.Results, folder: Path) -> report.Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    settings = results["settings"]

    learning = [
        *(
            report.training(
                folder, results["trained"], name, words, line=lambda m: m["name"],
                panel=lambda m: f"depth {m['depth']}", log=name != "entropy",
            )
            for name, words in _CURVES.items()
        ),
        _trained_table(results),
    ]  # fmt: skip
    return report.Report(
        title="What the scale of the dot product does",
        answer=[*_before(results), *(s for d in _depths(results) for s in _during(results, d))],
        warnings=report.diverged(
            (f"{c['name']} at depth {c['depth']}, seed {c['seed']},", c["diverged_at"])
            for c in results["trained"]
        ),
        sections=[
            report.Section(
                "Before training",
                [
                    "Queries and keys with entries N(0, 1), 32 keys, 400 queries. Entropy (over ln "
                    "n: 1 is uniform, 0 is one key taking all) and largest weight are means over "
                    "the queries; the Frobenius norm of the softmax's Jacobian, the part of a "
                    "gradient that the softmax lets through, is their median. The additive score "
                    "has W and v with entries N(0, 1/d)."
                ],
                [_untrained_picture(results, folder), _untrained_table(results)],
            ),
            report.Section(
                "During training",
                [
                    "Associative recall: a list of key–value pairs, then keys whose values are "
                    f"asked for, one attention layer with one head. {settings['pairs']} "
                    f"pairs, {settings['queries']} questions, batches of "
                    f"{settings['batch_size']}, the same learning rate for all. The "
                    "scale is 1/d^p: no scale p = 0, too weak p = ¼, 1/√d p = ½, too strong p = 1.",
                ],
                learning,
            ),
            report.Section("Beside the claims", _claims(results)),
        ],
    )


def _depths(results: report.Results, where: str = "trained") -> list[int]:
    return sorted({c["depth"] for c in results[where]})


def _by_name(results: report.Results, depth: int) -> dict[str, list[report.Results]]:
    """Return the trained models of one depth, by the name of their scale."""
    return report.runs((c for c in results["trained"] if c["depth"] == depth), "name", lambda c: c)


def _untrained(results: report.Results, depth: int, score: str, measure: str) -> list[float]:
    return [c[score][measure] for c in results["untrained"] if c["depth"] == depth]


def _before(results: report.Results) -> list[str]:
    low, high = (_depths(results, "untrained")[i] for i in (0, -1))

    def shown(depth: int, score: str, measure: str, form: str) -> str:
        return report.number(report.mean(_untrained(results, depth, score, measure)), form)

    def entropies(score: str) -> str:
        ends = (f"{shown(d, score, 'entropy', '.3f')} at depth {d}" for d in (low, high))
        return " of ln n and ".join(ends)

    return [
        f"Before training, the unscaled dot gives one key {shown(high, 'dot', 'largest', '.0%')} "
        f"of the weight on average at depth {high} ({shown(low, 'dot', 'largest', '.0%')} at depth "
        f"{low}); its softmax lets through a median gradient of "
        f"{shown(high, 'dot', 'jacobian', '.4f')} there ({shown(low, 'dot', 'jacobian', '.3f')}).",
        f"Scaled by 1/√d the entropy is {entropies('scaled_dot')}; that of the additive score is "
        f"{entropies('additive')}.",
    ]


def _last(cells: Cells, name: str) -> float | None:
    return report.mean(c["observed"][-1][name] for c in cells)


def _half(cells: Cells) -> float | None:
    """Return the mean step at which held-out loss has halved; None if it never does for a seed."""
    steps = []
    for cell in cells:
        losses = [(o["step"], v) for o in cell["observed"] for v in report.known([o["valid_loss"]])]
        start = cell["observed"][0]["valid_loss"]
        found = [step for step, loss in losses if report.known([start]) and loss <= start / 2]
        if not found:
            return None
        steps.append(found[0])
    return report.mean(steps)


def _during(results: report.Results, depth: int) -> list[str | None]:
    cells = _by_name(results, depth)
    ends = report.listed({n: _last(c, "valid_loss") for n, c in cells.items()}, ".2f", best=min)
    half = {n: _half(c) for n, c in cells.items()}
    reached = sorted((v, n) for n, v in half.items() if v is not None)
    never = report.joined(n for n, v in half.items() if v is None)
    words = report.joined(f"{n} at step {v:.0f}" for v, n in reached)
    return [
        f"After {results['settings']['steps']} steps at depth {depth}, held-out loss by scale, "
        f"best first: {ends}."
        if ends
        else None,
        f"Half of the starting loss is reached, at depth {depth}, by {words}"
        + (f"; not at all by {never}." if never else ".")
        if words
        else None,
    ]


def _untrained_picture(results: report.Results, folder: Path) -> report.Picture:
    panels = []
    for measure, words in _MEASURES.items():
        cells = sorted(results["untrained"], key=lambda c: c["depth"])
        series = {
            score: list(
                report.runs(
                    cells, "seed", lambda c, s=score, m=measure: (c["depth"], c[s][m])
                ).values()
            )
            for score in _SCORES
        }
        panels.append((words, series))
    return report.picture(
        folder, "untrained", "curves", panels, x="depth", y=["", "", ""], log_x=True, markers=True,
        low_y=0,
        alt="Three panels against depth: entropy, largest weight and Jacobian norm of the unscaled "
        "dot, the scaled dot and the additive score. The numbers are in the table.",
        caption="Weights before any training, by depth of the score.",
    )  # fmt: skip


def _untrained_table(results: report.Results) -> report.Table:
    rows: list[report.Row] = []
    for depth in _depths(results, "untrained"):
        ours = [
            report.mean_sd(_untrained(results, depth, score, measure), 3)
            for score in _SCORES
            for measure in _MEASURES
        ]
        sds = [c["sd"] for c in results["untrained"] if c["depth"] == depth]
        rows.append(report.Row([f"{depth}, ours", report.mean_sd(sds, 2), *ours]))
        if depth in UNTRAINED:
            sd, *scores = UNTRAINED[depth]
            given = [report.number(value, ".3f") for score in scores for value in score]
            rows.append(report.Row([f"{depth}, given", f"{sd:g}", *given], published=True))
    columns = [f"{n}: {m}" for n in _SCORES.values() for m in ("entropy", "largest", "Jacobian")]
    return report.Table(
        f"Entropy / ln n, largest weight, median Jacobian norm ({report.seeds(results)})",
        ["depth", "sd of q·k", *columns],
        rows,
        note=f"“given”: {_SOURCE}; – where it gives none. The claim is {VASWANI}, §3.2.1.",
    )


def _trained_table(results: report.Results) -> report.Table:
    rows = [
        [
            f"{depth}, {name}",
            f"{cells[0]['scale']:.4g}",
            *(report.mean_sd([c["observed"][at]["entropy"] for c in cells], 2) for at in (0, -1)),
            report.mean_sd([c["observed"][-1]["valid_loss"] for c in cells], 3),
            report.mean_sd([c["observed"][-1]["accuracy"] for c in cells], 1, percent=True),
            report.mean_sd([_first_norms(c) for c in cells], 2),
        ]
        for depth in _depths(results)
        for name, cells in _by_name(results, depth).items()
    ]
    columns = [
        "depth, scale", "factor", "entropy before", "entropy after", "held-out loss",
        "right answers", "gradient norm, first steps",
    ]  # fmt: skip
    return report.Table(f"After training ({report.seeds(results)})", columns, rows)


def _first_norms(cell: report.Results) -> float | None:
    return report.mean(norm for step, norm in cell["gradient_norm"] if step <= _FIRST)


def _claims(results: report.Results) -> list[str]:
    said = [
        f"{VASWANI}, §3.2.1: for large depth the unscaled dot product pushes the softmax into "
        "regions of extremely small gradients. Here: the table without training. "
        f"({report.COMPARE_THE_SHAPE}.)"
    ]
    for depth in _depths(results):
        cells = _by_name(results, depth)
        half = {n: _half(c) for n, c in cells.items()}
        slow, right = half.get("no scale"), half.get("1/√d")
        if "no scale" in half and right is not None:
            steps = f": step {slow:.0f} against {right:.0f} for half the loss" if slow else ""
            verdict = (
                "it is so here: it never halves its loss"
                if slow is None
                else f"it is {'so' if slow > right else 'not so'} here{steps}"
            )
            said.append(f"The articles: unscaled starts slowly. At depth {depth} {verdict}.")
        starts = {n: [c["observed"][0]["entropy"] for c in own] for n, own in cells.items()}
        names = "too weak", "1/√d", "too strong"
        weak, one, strong = (report.mean(starts.get(name, ())) for name in names)
        if weak is not None and one is not None and strong is not None:
            said.append(
                "The articles: too strong a scale flattens the weights, too weak a one sharpens "
                f"them. At depth {depth} entropy before training is {weak:.2f} with too weak a "
                f"scale, {one:.2f} with 1/√d and {strong:.2f} with too strong a one: "
                f"{'as claimed' if weak < one < strong else 'not as claimed'}."
            )
    return said
