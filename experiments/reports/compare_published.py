"""The published tables that the compare study's report puts beside its own."""

from collections.abc import Mapping
from typing import Any

from experiments.report.blocks import COMPARE_THE_SHAPE, Row, Table, mean_sd
from experiments.report.figures import label
from experiments.report.published import (
    BAHDANAU,
    BAHDANAU_ROWS,
    BRITZ,
    BRITZ_DEPTHS,
    BRITZ_ROWS,
    LUONG,
    LUONG_ROWS,
)

Results = Mapping[str, Any]


def published_tables(results: Results, depth: int) -> list[Table]:
    """BLEU by depth of the score, without and with attention, and by score."""
    return [_britz(results, depth), _bahdanau(), _luong()]


def _britz(results: Results, depth: int) -> Table:
    ours = [
        Row([f"{label(s)}, here at depth {depth}", *[mean_sd(row["bleu"])], "", "", ""])
        for s, row in results["summary"].items()
    ]
    return Table(
        f"Published: BLEU by depth of the score ({BRITZ}): {COMPARE_THE_SHAPE}",
        ["type", *(str(d) for d in BRITZ_DEPTHS)],
        [*BRITZ_ROWS, *ours],
        note="Ours has one depth, put into the first column. It adds the line the paper lacks, the "
        "scaled dot.",
    )


def _bahdanau() -> Table:
    return Table(
        f"Published: BLEU without and with additive attention ({BAHDANAU}): {COMPARE_THE_SHAPE}",
        ["system", "all", "no unknown words"],
        BAHDANAU_ROWS,
        note="Their Figure 2: without attention BLEU falls past 30 words, with it there is no fall "
        "at 50.",
    )


def _luong() -> Table:
    return Table(
        f"Published: attention by score ({LUONG}): {COMPARE_THE_SHAPE}",
        ["attention", "perplexity", "BLEU", "after replacing unknown words"],
        LUONG_ROWS,
        note="Concat has no BLEU row there (perplexity 6.7, a footnote).",
    )
