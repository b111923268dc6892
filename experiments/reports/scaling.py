"""The report of the scaling study."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.report import figures
from experiments.report.blocks import (
    COMPARE_THE_SHAPE,
    Picture,
    Report,
    Row,
    Section,
    Table,
    diverged,
    joined,
    known,
    mean,
    mean_sd,
    number,
)
from experiments.report.published import UNTRAINED, VASWANI

Results = Mapping[str, Any]
_MEASURES = {
    "entropy": "entropy / ln n",
    "largest": "largest weight",
    "jacobian": "Jacobian norm",
}
_SOURCE = "figures given with the study's design, same set-up: 32 keys, 400 queries"


def build(results: Results, folder: Path) -> Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    (folder / "figures").mkdir(exist_ok=True)
    return Report(
        title="What the scale of the dot product does",
        question=results["question"],
        answer=[s for s in (*_before(results), *_during(results)) if s],
        warnings=_warnings(results),
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
                    f"asked for, one attention layer with one head. {results['settings']['pairs']} "
                    f"pairs, {results['settings']['queries']} questions, batches of "
                    f"{results['settings']['batch_size']}, the same learning rate for all. The "
                    "scale is 1/d^p: no scale p = 0, too weak p = ¼, 1/√d p = ½, too strong p = 1.",
                ],
                [
                    _curve(results, folder, "loss", "Loss in training, nats", log=True),
                    _curve(results, folder, "entropy", "Entropy of the attention / ln n"),
                    _curve(results, folder, "gradient_norm", "Gradient norm", log=True),
                    _trained_table(results),
                ],
            ),
            Section("Beside the claims", _claims(results)),
        ],
    )  # fmt: skip


def _cells(results: Results, depth: int, name: str) -> list[Mapping[str, Any]]:
    return [c for c in results["trained"] if c["depth"] == depth and c["name"] == name]


def _depths(results: Results) -> list[int]:
    return sorted({c["depth"] for c in results["trained"]})


def _names(results: Results) -> list[str]:
    return list(dict.fromkeys(c["name"] for c in results["trained"]))


def _untrained(results: Results, depth: int, score: str, measure: str) -> list[float]:
    return [c[score][measure] for c in results["untrained"] if c["depth"] == depth]


def _before(results: Results) -> list[str]:
    depths = sorted({c["depth"] for c in results["untrained"]})
    low, high = depths[0], depths[-1]

    def shown(depth: int, score: str, measure: str, form: str) -> str:
        return number(mean(_untrained(results, depth, score, measure)), form)

    return [
        f"Before training, the unscaled dot gives one key {shown(high, 'dot', 'largest', '.0%')} "
        f"of the weight on average at depth {high} ({shown(low, 'dot', 'largest', '.0%')} at depth "
        f"{low}); its softmax lets through a median gradient of "
        f"{shown(high, 'dot', 'jacobian', '.4f')} there ({shown(low, 'dot', 'jacobian', '.3f')}).",
        "Scaled by 1/√d it hardly changes with the depth: entropy "
        f"{shown(low, 'scaled_dot', 'entropy', '.3f')} of ln n at depth {low}, "
        f"{shown(high, 'scaled_dot', 'entropy', '.3f')} at {high}. The additive score stays broad "
        f"as well: {shown(low, 'additive', 'entropy', '.3f')} and "
        f"{shown(high, 'additive', 'entropy', '.3f')}.",
    ]


def _during(results: Results) -> list[str]:
    said = []
    for depth in _depths(results):
        ends = {n: _last(_cells(results, depth, n), "valid_loss") for n in _names(results)}
        ranked = sorted((v, n) for n, v in ends.items() if v is not None)
        if ranked:
            listed = joined([f"{n} {v:.2f}" for v, n in ranked])
            said.append(
                f"After {results['settings']['steps']} steps at depth {depth}, held-out loss by "
                f"scale, best first: {listed}."
            )
        half = {n: _half(_cells(results, depth, n)) for n in _names(results)}
        reached = sorted((v, n) for n, v in half.items() if v is not None)
        if reached:
            words = joined([f"{n} at step {v:.0f}" for v, n in reached])
            never = [n for n, v in half.items() if v is None]
            said.append(
                f"Half of the starting loss is reached, at depth {depth}, by {words}"
                + (f"; not at all by {joined(never)}." if never else ".")
            )
    return said


def _last(cells: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return mean(c["observed"][-1][name] for c in cells)


def _half(cells: Sequence[Mapping[str, Any]]) -> float | None:
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


def _warnings(results: Results) -> list[str]:
    return diverged(
        (f"{c['name']} at depth {c['depth']}, seed {c['seed']},", c["diverged_at"])
        for c in results["trained"]
    )


def _untrained_picture(results: Results, folder: Path) -> Picture:
    depths = sorted({c["depth"] for c in results["untrained"]})
    scores = ("dot", "scaled_dot", "additive")
    panels = []
    for measure, words in _MEASURES.items():
        series = {}
        for score in scores:
            rows = [_untrained(results, d, score, measure) for d in depths]
            series[score] = [
                [(d, row[i]) for d, row in zip(depths, rows, strict=True)]
                for i in range(len(rows[0]))
            ]
        panels.append((words, series))
    figures.curves(
        folder / "figures/untrained.png", panels, x="depth", y="", log_x=True, markers=True,
        same_y=False, low_y=0,
    )  # fmt: skip
    return Picture(
        "figures/untrained.png",
        "Three panels against depth: entropy, largest weight and Jacobian norm. The unscaled dot's "
        "entropy and Jacobian norm fall towards 0 and its largest weight rises towards 1; the "
        "other two scores stay level. The numbers are in the table.",
        "Weights before any training, by depth of the score.",
    )


def _untrained_table(results: Results) -> Table:
    rows = []
    for depth in sorted({c["depth"] for c in results["untrained"]}):
        cells = [c for c in results["untrained"] if c["depth"] == depth]
        ours = [
            mean_sd(_untrained(results, depth, score, measure), 3)
            for score in ("dot", "scaled_dot", "additive")
            for measure in _MEASURES
        ]
        rows.append(Row([f"{depth}, ours", mean_sd([c["sd"] for c in cells], 2), *ours]))
        if depth in UNTRAINED:
            sd, *scores = UNTRAINED[depth]
            given = ["–" if v is None else f"{v:.3f}" for score in scores for v in score]
            rows.append(Row([f"{depth}, given", f"{sd:g}", *given], published=True))
    names = ("unscaled", "scaled", "additive")
    columns = [f"{n}: {m}" for n in names for m in ("entropy", "largest", "Jacobian")]
    return Table(
        "Entropy / ln n, largest weight, median Jacobian norm" + _seeds(results),
        ["depth", "sd of q·k", *columns],
        rows,
        note=f"“given”: {_SOURCE}; – where it gives none. The claim is {VASWANI}, §3.2.1.",
    )


def _curve(results: Results, folder: Path, measure: str, title: str, log: bool = False) -> Picture:
    panels = []
    for depth in _depths(results):
        series = {}
        for name in _names(results):
            cells = _cells(results, depth, name)
            if measure == "entropy":
                runs = [[(o["step"], o["entropy"]) for o in c["observed"]] for c in cells]
            else:
                runs = [_thinned(c[measure]) for c in cells]
            series[name] = runs
        panels.append((f"depth {depth}", series))
    file = f"figures/{measure}.png"
    figures.curves(
        folder / file, panels, x="step", y=title, log_y=log, low_y=None if log else 0
    )  # fmt: skip
    ends = "; ".join(
        f"depth {d}: "
        + ", ".join(f"{n} {_end(_cells(results, d, n), measure)}" for n in _names(results))
        for d in _depths(results)
    )
    return Picture(
        file,
        f"{title} over the steps. At the end: {ends}.",
        f"{title}, over the steps; lines are means over the seeds, bands their range.",
    )


def _end(cells: Sequence[Mapping[str, Any]], measure: str) -> str:
    if measure == "entropy":
        return mean_sd([c["observed"][-1]["entropy"] for c in cells], 2)
    return mean_sd([points[-1][1] for c in cells if (points := _thinned(c[measure]))], 3)


def _thinned(values: Sequence[float | None]) -> list[tuple[int, float | None]]:
    """Return means of stretches, some 50 of them, each at its last step."""
    stretch = max(1, len(values) // 50)
    points: list[tuple[int, float | None]] = []
    for start in range(0, len(values), stretch):
        part = values[start : start + stretch]
        points.append((start + len(part), mean(part)))
    return points


def _trained_table(results: Results) -> Table:
    rows = []
    for depth in _depths(results):
        for name in _names(results):
            cells = _cells(results, depth, name)
            first = [c["observed"][0]["entropy"] for c in cells]
            rows.append(
                Row(
                    [
                        f"{depth}, {name}",
                        f"{cells[0]['scale']:.4g}",
                        mean_sd(first, 2),
                        mean_sd([c["observed"][-1]["entropy"] for c in cells], 2),
                        mean_sd([c["observed"][-1]["valid_loss"] for c in cells], 3),
                        mean_sd([c["observed"][-1]["accuracy"] for c in cells], 1, percent=True),
                        mean_sd([mean(c["gradient_norm"][:20]) for c in cells], 2),
                    ]
                )
            )
    return Table(
        "After training" + _seeds(results),
        [
            "depth, scale", "factor", "entropy before", "entropy after", "held-out loss",
            "right answers", "gradient norm, first steps",
        ],
        rows,
    )  # fmt: skip


def _claims(results: Results) -> list[str]:
    said = [
        f"{VASWANI}, §3.2.1: for large depth the unscaled dot product pushes the softmax into "
        "regions of extremely small gradients. Here: the table without training. "
        f"({COMPARE_THE_SHAPE}.)"
    ]
    for depth in _depths(results):
        entropies = {
            n: mean(c["observed"][0]["entropy"] for c in _cells(results, depth, n))
            for n in _names(results)
        }
        start = {n: v for n, v in entropies.items() if v is not None}
        half = {n: _half(_cells(results, depth, n)) for n in _names(results)}
        slow, right = half.get("no scale"), half.get("1/√d")
        if right is not None:
            verdict = (
                "it is so here: it never halves its loss"
                if slow is None
                else f"it is so here: step {slow:.0f} against {right:.0f} for half the loss"
                if slow > right
                else f"it is not so here: step {slow:.0f} against {right:.0f} for half the loss"
            )
            said.append(f"The articles: unscaled starts slowly. At depth {depth} {verdict}.")
        if {"too strong", "1/√d", "too weak"} <= start.keys():
            ordered = start["too weak"] < start["1/√d"] < start["too strong"]
            said.append(
                "The articles: too strong a scale flattens the weights, too weak a one sharpens "
                f"them. At depth {depth} entropy before training is {start['too weak']:.2f} with "
                f"too weak a scale, {start['1/√d']:.2f} with 1/√d and {start['too strong']:.2f} "
                f"with too strong a one: {'as claimed' if ordered else 'not as claimed'}."
            )
    return said


def _seeds(results: Results) -> str:
    count = results["settings"]["seeds"]
    return " (quick: one seed)" if count == 1 else f", mean ± standard deviation, {count} seeds"
