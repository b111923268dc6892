"""The report of the study of pruning."""

from pathlib import Path

from experiments.report.blocks import (
    Picture,
    Report,
    Results,
    Section,
    Table,
    capital,
    claims,
    diverged,
    joined,
    known,
    mean,
    mean_sd,
    number,
    seeds,
)
from experiments.report.figures import curves, picture

WORDS = {"self": "self-attention", "cross": "attention to the source"}
_ORDERS = {"importance": "least important first", "random": "at random"}
_UNNOTICED = 0.98  # of the whole model's BLEU
_LEARNT = 5.0  # BLEU: with less, removing heads measures nothing


def build(results: Results, folder: Path) -> Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    settings = results["settings"]
    how = (
        f"A Transformer of {settings['layers']} + {settings['layers']} layers, width "
        f"{settings['features']} and {settings['heads']} heads, trained for {settings['steps']:,} "
        f"steps of {settings['batch_size']} sentences of the English–German grammar. A head is "
        "important as the mean loss depends on a gate before it (Michel et al., eq. 2), divided by "
        "the length of its attention's values. Every attention keeps one head; nothing is trained "
        "again after heads are removed."
    )
    drawn = [
        _draw(results, folder, "bleu", "BLEU"),
        _draw(results, folder, "valid_loss", "held-out loss, nats"),
    ]
    tables = [_table(results, part) for part in results["parts"]]
    return Report(
        title="Fewer heads",
        question=results["question"],
        answer=_answer(results),
        warnings=diverged((f"seed {m['seed']}", m["diverged_at"]) for m in results["models"]),
        sections=[
            Section("Quality against heads removed", [how], [*drawn, *tables]),
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


def half(results: Results, part: str) -> tuple[int, float]:
    """Return about half of the removable heads, of the numbers measured, and the BLEU they cost.

    The least important heads are removed; the cost is a share of the whole model's BLEU.
    """
    removed, means = results["parts"][part]["removed"], _means(results, part, "importance")
    count = min(removed[1:], key=lambda n: abs(n - removed[-1] / 2))
    return count, 1 - means[removed.index(count)] / means[0] if means[0] else 0.0


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
    halves = {part: half(results, part) for part in results["parts"]}
    worst = max(halves, key=lambda part: halves[part][1])
    costs = joined(
        f"{count} heads of {WORDS[part]} cost {100 * share:.0f} % of BLEU"
        for part, (count, share) in halves.items()
    )
    return [
        *said,
        f"About half of what may go, the least important first: {costs}; {WORDS[worst]} bears it "
        "least.",
    ]


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
    return picture(
        folder, measure, curves, panels, x="heads removed", y=words, markers=True,
        low_y=0 if measure == "bleu" else None,
        alt=f"{capital(words)} against heads removed; the numbers are in the tables below.",
        caption=f"{capital(words)} against heads removed, mean and range over seeds and random "
        "orders.",
    )  # fmt: skip


def _table(results: Results, part: str) -> Table:
    found = results["parts"][part]
    rows = [
        [
            f"{count}",
            *(mean_sd(found["bleu"][order][at]) for order in _ORDERS),
            *(mean_sd(found["valid_loss"][order][at], 3) for order in _ORDERS),
        ]
        for at, count in enumerate(found["removed"])
    ]
    columns = [f"{what}, {words}" for what in ("BLEU", "loss") for words in _ORDERS.values()]
    return Table(
        f"{capital(WORDS[part])}: {found['heads']} heads ({seeds(results)})",
        ["heads removed", *columns],
        rows,
        note="At random the spread is over the orders too.",
    )


def _importance(results: Results) -> Table:
    cells = results["models"]
    most = max(len(values) for values in cells[0]["importance"].values())
    rows = [
        [path, *(mean_sd([c["importance"][path][n] for c in cells], 2) for n in range(most))]
        for path in cells[0]["importance"]
    ]
    columns = ["attention", *(f"head {n}" for n in range(most))]
    return Table("Importance of the heads", columns, rows)


def _saved(results: Results) -> Table:
    rows = []
    for at, part in enumerate(results["parts"]):
        made = [cell["pruned"][at] for cell in results["models"]]
        sizes = f"{results['models'][0]['parameters']:,} → {made[0]['parameters']:,}"
        most = number(max(known(p["difference"] for p in made), default=None), ".1e")
        rows.append([WORDS[part], str(made[0]["removed"]), sizes, most])
    return Table(
        "Half of what may go, pruned for good (prune_heads)",
        ["part", "heads removed", "parameters", "largest difference of a logit"],
        rows,
        note="The difference is that between the smaller model and the old one with the outputs of "
        "those heads set to 0.",
    )


def _claims(results: Results) -> Table:
    learnt = _means(results, "self", "importance")[0] >= _LEARNT
    total = sum(found["heads"] for found in results["parts"].values())
    gone = {part: unnoticed(results, part, "importance") for part in results["parts"]}
    share = sum(gone.values()) / total
    both = joined(f"{100 * half(results, part)[1]:.0f} % in {WORDS[part]}" for part in gone)
    michel = "Michel et al. 2019, arXiv 1905.10650 (second-hand)"
    rows = [
        (
            michel,
            "About 20 % of the heads of a WMT model go without notice.",
            f"{sum(gone.values())} of {total}, each part by itself: {100 * share:.0f} %",
        ),
        (
            michel,
            "The attention to the source is the most sensitive.",
            f"BLEU lost with about half of what may go gone: {both}",
        ),
        (
            "Voita et al. 2019, arXiv 1905.09418",
            "38 of 48 encoder heads go for 0.15 BLEU, trained to go.",
            f"{gone['self']} of {results['parts']['self']['heads']} heads of self-attention go for "
            "at most 2 % of BLEU, not trained again",
        ),
        (
            "Vaswani et al. 2017, arXiv 1706.03762, Table 3 (A)",
            "1, 4, 8, 16, 32 heads at constant compute: BLEU 24.9, 25.5, 25.8, 25.8, 25.4.",
            "not trained with other numbers of heads",
        ),
    ]
    return claims((*row[:2], row[2] if learnt else "") for row in rows)
