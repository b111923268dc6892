"""The report of the study of pruning."""

from collections.abc import Mapping
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

Results = Mapping[str, Any]
WORDS = {"self": "self-attention", "cross": "attention to the source"}
_ORDERS = {"importance": "least important first", "random": "at random"}
_UNNOTICED = 0.98  # of the whole model's BLEU
_LEARNT = 5.0  # BLEU: with less there is nothing that heads could be missed for


def build(results: Results, folder: Path) -> Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    (folder / "figures").mkdir(exist_ok=True)
    settings = results["settings"]
    how = (
        f"A Transformer of {settings['layers']} + {settings['layers']} layers, width "
        f"{settings['features']} and {settings['heads']} heads, trained for {settings['steps']:,} "
        f"steps of {settings['batch_size']} sentences of the English–German grammar. A head is "
        "important as the mean loss depends on a gate before it (Michel et al., eq. 2), divided by "
        "the length of its attention's values. Every attention keeps one head; nothing is trained "
        "again after heads have gone."
    )
    return Report(
        title="Fewer heads",
        question=results["question"],
        answer=_answer(results),
        warnings=diverged((f"seed {m['seed']}", m["diverged_at"]) for m in results["models"]),
        sections=[
            Section(
                "Quality against heads removed",
                [how],
                [
                    _draw(results, folder, "bleu", "BLEU"),
                    _draw(results, folder, "valid_loss", "held-out loss, nats"),
                    *(_table(results, part) for part in results["parts"]),
                ],
            ),
            Section("The heads", [], [_importance(results), _saved(results)]),
            Section("What the papers say", [], [_claims(results)]),
        ],
    )


def _means(results: Results, part: str, order: str) -> list[float]:
    """Return the mean BLEU by number of heads removed, 0 where no seed has one."""
    return [mean(values) or 0.0 for values in results["parts"][part]["bleu"][order]]


def unnoticed(results: Results, part: str, order: str) -> int:
    """Return how many heads of a part go before BLEU falls below 98 % of the whole model's."""
    means = _means(results, part, order)
    found = 0
    for count, bleu in zip(results["parts"][part]["removed"], means, strict=True):
        if bleu < _UNNOTICED * means[0]:
            break
        found = count
    return found


def _answer(results: Results) -> list[str]:
    whole = _means(results, "self", "importance")[0]
    said = [f"The whole model has BLEU {whole:.1f}."]
    if whole < _LEARNT:
        return [
            *said,
            f"It has not learnt to translate in {results['settings']['steps']:,} steps, so nothing "
            "can be said of its heads.",
        ]
    for part, found in results["parts"].items():
        gone = {order: unnoticed(results, part, order) for order in _ORDERS}
        last = {order: _means(results, part, order)[-1] for order in _ORDERS}
        said.append(
            f"Of {found['heads']} heads of {WORDS[part]}, {gone['importance']} go with at most 2 % "
            f"of BLEU lost where the least important go first, {gone['random']} at random; with "
            f"{found['removed'][-1]} gone BLEU is {last['importance']:.1f} and "
            f"{last['random']:.1f}."
        )
    lost = {part: share_lost(results, part) for part in results["parts"]}
    worst = max(lost, key=lost.__getitem__)
    costs = [
        f"{_half(results, part)} heads of {WORDS[part]} cost {100 * share:.0f} % of BLEU"
        for part, share in lost.items()
    ]
    said.append(
        f"About half of what may go, the least important first: {joined(costs)}; {WORDS[worst]} "
        "bears it least."
    )
    return said


def _half(results: Results, part: str) -> int:
    """Return the number of removed heads, of those measured, nearest to half of what may go."""
    removed = results["parts"][part]["removed"]
    return min(removed[1:], key=lambda count: abs(count - removed[-1] / 2))


def share_lost(results: Results, part: str) -> float:
    """Return the share of BLEU lost with about half of what may go gone, by importance."""
    means, removed = _means(results, part, "importance"), results["parts"][part]["removed"]
    at = removed.index(_half(results, part))
    return 1 - means[at] / means[0] if means[0] else 0.0


def _draw(results: Results, folder: Path, measure: str, words: str) -> Picture:
    panels = []
    for part, found in results["parts"].items():
        series = {
            _ORDERS[order]: [
                [(count, values[run]) for count, values in zip(found["removed"], rows, strict=True)]
                for run in range(len(rows[0]))
            ]
            for order, rows in found[measure].items()
        }
        panels.append((f"{WORDS[part]}, {found['heads']} heads", series))
    file = f"figures/{measure}.png"
    low = 0 if measure == "bleu" else None
    figures.curves(folder / file, panels, x="heads removed", y=words, markers=True, low_y=low)
    title = words[0].upper() + words[1:]
    return Picture(
        file, f"{title} against heads removed; the numbers are in the tables below.",
        f"{title} against heads removed, mean and range over seeds and random orders.",
    )  # fmt: skip


def _table(results: Results, part: str) -> Table:
    found = results["parts"][part]
    rows = [
        Row(
            [
                f"{count}",
                *(mean_sd(found["bleu"][order][at]) for order in _ORDERS),
                *(mean_sd(found["valid_loss"][order][at], 3) for order in _ORDERS),
            ]
        )
        for at, count in enumerate(found["removed"])
    ]
    seeds = results["settings"]["seeds"]
    title = WORDS[part][0].upper() + WORDS[part][1:]
    return Table(
        f"{title}: {found['heads']} heads "
        + ("(quick: one seed)" if seeds == 1 else f"(mean ± standard deviation, {seeds} seeds)"),
        [
            "heads removed",
            *(f"BLEU, {words}" for words in _ORDERS.values()),
            *(f"loss, {words}" for words in _ORDERS.values()),
        ],
        rows,
        note="At random the spread is over the orders too.",
    )


def _importance(results: Results) -> Table:
    cells = results["models"]
    most = max(len(values) for values in cells[0]["importance"].values())
    rows = [
        Row([path, *(mean_sd([c["importance"][path][n] for c in cells], 2) for n in range(most))])
        for path in cells[0]["importance"]
    ]
    columns = ["attention", *(f"head {n}" for n in range(most))]
    return Table("Importance of the heads", columns, rows)


def _saved(results: Results) -> Table:
    rows = []
    for at, part in enumerate(results["parts"]):
        made = [cell["pruned"][at] for cell in results["models"]]
        rows.append(
            Row(
                [
                    WORDS[part],
                    str(made[0]["removed"]),
                    f"{results['models'][0]['parameters']:,} → {made[0]['parameters']:,}",
                    number(max(known(p["difference"] for p in made), default=None), ".1e"),
                ]
            )
        )
    return Table(
        "Half of what may go, pruned for good (prune_heads)",
        ["part", "heads removed", "parameters", "largest difference of a logit"],
        rows,
        note="The difference is that between the smaller model and the old one with those heads "
        "silenced.",
    )


def _claims(results: Results) -> Table:
    learnt = _means(results, "self", "importance")[0] >= _LEARNT
    total = sum(found["heads"] for found in results["parts"].values())
    gone = sum(unnoticed(results, part, "importance") for part in results["parts"])
    both = joined(
        [f"{100 * share_lost(results, part):.0f} % in {WORDS[part]}" for part in results["parts"]]
    )
    within = f"{unnoticed(results, 'self', 'importance')} of {results['parts']['self']['heads']}"
    rows = [
        (
            "Michel et al. 2019, arXiv 1905.10650 (second-hand)",
            "About 20 % of the heads of a WMT model go without notice.",
            f"{gone} of {total}, each part by itself: {100 * gone / total:.0f} %",
        ),
        (
            "Michel et al. 2019, arXiv 1905.10650 (second-hand)",
            "The attention to the source is the most sensitive.",
            f"BLEU lost with about half of what may go gone: {both}",
        ),
        (
            "Voita et al. 2019, arXiv 1905.09418",
            "38 of 48 encoder heads go for 0.15 BLEU, trained to go.",
            f"{within} heads of self-attention go for at most 2 % of BLEU, not trained again",
        ),
        (
            "Vaswani et al. 2017, arXiv 1706.03762, Table 3 (A)",
            "1, 4, 8, 16, 32 heads at constant compute: BLEU 24.9, 25.5, 25.8, 25.8, 25.4.",
            "not trained with other numbers of heads",
        ),
    ]
    return Table(
        f"Published: {COMPARE_THE_SHAPE}", ["paper", "claim", "ours"],
        [Row([*row[:2], row[2] if learnt else "–"], published=True) for row in rows], prose=True,
    )  # fmt: skip
