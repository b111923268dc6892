"""The report of the scaling study."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.report.blocks import (
    COMPARE_THE_SHAPE,
    Picture,
    Report,
    Results,
    Row,
    Section,
    Table,
    diverged,
    joined,
    known,
    listed,
    mean,
    mean_sd,
    number,
    observations,
    runs,
    seeds,
)
from experiments.report.figures import curves, picture
from experiments.report.published import UNTRAINED, VASWANI

Cells = Sequence[Results]
_SCORES = {"dot": "unscaled", "scaled_dot": "scaled", "additive": "additive"}
_MEASURES = {
    "entropy": "entropy / ln n",
    "largest": "largest weight",
    "jacobian": "Jacobian norm",
}
_SOURCE = "figures given with the study's design, same set-up: 32 keys, 400 queries"


def build(results: Results, folder: Path) -> Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    settings = results["settings"]

    def thinned(name: str) -> Callable[[Results], Any]:
        return lambda cell: _thinned(cell[name])

    learning = [
        _curve(results, folder, "loss", "Loss in training, nats", thinned("loss")),
        _curve(results, folder, "entropy", "Entropy of the attention / ln n"),
        _curve(results, folder, "gradient_norm", "Gradient norm", thinned("gradient_norm")),
        _trained_table(results),
    ]
    return Report(
        title="What the scale of the dot product does",
        question=results["question"],
        answer=[*_before(results), *(s for d in _depths(results) for s in _during(results, d))],
        warnings=diverged(
            (f"{c['name']} at depth {c['depth']}, seed {c['seed']},", c["diverged_at"])
            for c in results["trained"]
        ),
        sections=[
            Section(
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
            Section(
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
            Section("Beside the claims", _claims(results)),
        ],
    )


def _depths(results: Results, where: str = "trained") -> list[int]:
    return sorted({c["depth"] for c in results[where]})


def _by_name(results: Results, depth: int) -> dict[str, list[Results]]:
    """Return the trained models of one depth, by the name of their scale."""
    return runs((c for c in results["trained"] if c["depth"] == depth), "name", lambda c: c)


def _untrained(results: Results, depth: int, score: str, measure: str) -> list[float]:
    return [c[score][measure] for c in results["untrained"] if c["depth"] == depth]


def _before(results: Results) -> list[str]:
    low, high = (_depths(results, "untrained")[i] for i in (0, -1))

    def shown(depth: int, score: str, measure: str, form: str) -> str:
        return number(mean(_untrained(results, depth, score, measure)), form)

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
    return mean(c["observed"][-1][name] for c in cells)


def _half(cells: Cells) -> float | None:
    """Return the mean step at which held-out loss is half of what it was; None if one never is."""
    steps = []
    for cell in cells:
        losses = [(o["step"], v) for o in cell["observed"] for v in known([o["valid_loss"]])]
        start = cell["observed"][0]["valid_loss"]
        found = [step for step, loss in losses if known([start]) and loss <= start / 2]
        if not found:
            return None
        steps.append(found[0])
    return mean(steps)


def _during(results: Results, depth: int) -> list[str | None]:
    cells = _by_name(results, depth)
    ends = listed({n: _last(c, "valid_loss") for n, c in cells.items()}, ".2f", best=min)
    half = {n: _half(c) for n, c in cells.items()}
    reached = sorted((v, n) for n, v in half.items() if v is not None)
    never = joined(n for n, v in half.items() if v is None)
    words = joined(f"{n} at step {v:.0f}" for v, n in reached)
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


def _untrained_picture(results: Results, folder: Path) -> Picture:
    panels = []
    for measure, words in _MEASURES.items():
        cells = sorted(results["untrained"], key=lambda c: c["depth"])
        series = {
            score: list(
                runs(cells, "seed", lambda c, s=score, m=measure: (c["depth"], c[s][m])).values()
            )
            for score in _SCORES
        }
        panels.append((words, series))
    return picture(
        folder, "untrained", curves, panels, x="depth", y=["", "", ""], log_x=True, markers=True,
        low_y=0,
        alt="Three panels against depth: entropy, largest weight and Jacobian norm of the unscaled "
        "dot, the scaled dot and the additive score. The numbers are in the table.",
        caption="Weights before any training, by depth of the score.",
    )  # fmt: skip


def _untrained_table(results: Results) -> Table:
    rows: list[Row] = []
    for depth in _depths(results, "untrained"):
        ours = [
            mean_sd(_untrained(results, depth, score, measure), 3)
            for score in _SCORES
            for measure in _MEASURES
        ]
        sds = [c["sd"] for c in results["untrained"] if c["depth"] == depth]
        rows.append(Row([f"{depth}, ours", mean_sd(sds, 2), *ours]))
        if depth in UNTRAINED:
            sd, *scores = UNTRAINED[depth]
            given = [number(value, ".3f") for score in scores for value in score]
            rows.append(Row([f"{depth}, given", f"{sd:g}", *given], published=True))
    columns = [f"{n}: {m}" for n in _SCORES.values() for m in ("entropy", "largest", "Jacobian")]
    return Table(
        f"Entropy / ln n, largest weight, median Jacobian norm ({seeds(results)})",
        ["depth", "sd of q·k", *columns],
        rows,
        note=f"“given”: {_SOURCE}; – where it gives none. The claim is {VASWANI}, §3.2.1.",
    )


def _thinned(values: Sequence[float | None]) -> list[tuple[int, float | None]]:
    """Return means of stretches, some 50 of them, each at its last step."""
    stretch = max(1, len(values) // 50)
    parts = [(at, values[at : at + stretch]) for at in range(0, len(values), stretch)]
    return [(at + len(part), mean(part)) for at, part in parts]


def _curve(
    results: Results,
    folder: Path,
    measure: str,
    title: str,
    curve: Callable[[Results], Any] | None = None,
) -> Picture:
    """Draw one quantity over the steps, with a logarithmic axis where it is no observation."""
    log, curve = curve is not None, curve or (lambda cell: observations(cell, measure))
    panels, ends = [], []
    for depth in _depths(results):
        cells = _by_name(results, depth)
        series = {name: [curve(cell) for cell in own] for name, own in cells.items()}
        last = {n: [run[-1][1] for run in own if run] for n, own in series.items()}
        words = ", ".join(f"{n} {mean_sd(v, 3 if log else 2)}" for n, v in last.items())
        panels.append((f"depth {depth}", series))
        ends.append(f"depth {depth}: {words}")
    return picture(
        folder, measure, curves, panels, x="step", y=title, log_y=log, low_y=None if log else 0,
        alt=f"{title} over the steps. At the end: {'; '.join(ends)}.",
        caption=f"{title}, over the steps; lines are means over the seeds, bands their range.",
    )  # fmt: skip


def _trained_table(results: Results) -> Table:
    rows = [
        [
            f"{depth}, {name}",
            f"{cells[0]['scale']:.4g}",
            *(mean_sd([c["observed"][at]["entropy"] for c in cells], 2) for at in (0, -1)),
            mean_sd([c["observed"][-1]["valid_loss"] for c in cells], 3),
            mean_sd([c["observed"][-1]["accuracy"] for c in cells], 1, percent=True),
            mean_sd([mean(c["gradient_norm"][:20]) for c in cells], 2),
        ]
        for depth in _depths(results)
        for name, cells in _by_name(results, depth).items()
    ]
    columns = [
        "depth, scale", "factor", "entropy before", "entropy after", "held-out loss",
        "right answers", "gradient norm, first steps",
    ]  # fmt: skip
    return Table(f"After training ({seeds(results)})", columns, rows)


def _claims(results: Results) -> list[str]:
    said = [
        f"{VASWANI}, §3.2.1: for large depth the unscaled dot product pushes the softmax into "
        "regions of extremely small gradients. Here: the table without training. "
        f"({COMPARE_THE_SHAPE}.)"
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
        start = {n: mean(c["observed"][0]["entropy"] for c in own) for n, own in cells.items()}
        weak, one, strong = (start.get(n) for n in ("too weak", "1/√d", "too strong"))
        if weak is not None and one is not None and strong is not None:
            said.append(
                "The articles: too strong a scale flattens the weights, too weak a one sharpens "
                f"them. At depth {depth} entropy before training is {weak:.2f} with too weak a "
                f"scale, {one:.2f} with 1/√d and {strong:.2f} with too strong a one: "
                f"{'as claimed' if weak < one < strong else 'not as claimed'}."
            )
    return said
