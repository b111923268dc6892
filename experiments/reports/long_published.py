"""Published figures beside the study of long sequences, and where each family comes from."""

from experiments.report.blocks import COMPARE_THE_SHAPE, Row, Table

LRA = "Tay et al. 2020, arXiv 2011.04006 (second-hand), Long Range Arena"
_LRA = {
    "full": ("Transformer", "54.39"),
    "window": ("local attention", "46.06"),
    "longformer": ("Longformer", "53.46"),
    "low-rank": ("Linformer", "51.36"),
    "lsh": ("Reformer", "50.67"),
    "bigbird": ("BigBird", "55.01"),
    "linear-elu": ("linear Transformer", "50.55"),
    "linear-favor": ("Performer", "51.41"),
}
# What each is, and its paper.
SOURCES = {
    "full": ("every pair, in blocks", "Vaswani et al. 2017, arXiv 1706.03762"),
    "window": ("reach / 2 keys on each side", "Beltagy et al. 2020, arXiv 2004.05150, §3.1"),
    "block-diagonal": ("the query's own block of reach keys", "–"),
    "dilated": ("a window with every second key", "Beltagy et al. 2020, arXiv 2004.05150, §3.1"),
    "strided": ("√T neighbours and every √T-th key", "Child et al. 2019, arXiv 1904.10509, §4.3"),
    "random": ("4 random blocks", "Zaheer et al. 2020, arXiv 2007.14062, §2"),
    "prefix": ("the first reach keys", "Raffel et al. 2020, arXiv 1910.10683, §3.2.1"),
    "global": ("reach / 4 tokens see all and are seen by all",
               "Beltagy et al. 2020, arXiv 2004.05150, §3.1"),
    "longformer": ("a window and reach / 4 global tokens", "Beltagy et al. 2020, arXiv 2004.05150"),
    "bigbird": ("3 blocks nearby, 2 global, 3 random", "Zaheer et al. 2020, arXiv 2007.14062"),
    "axial": ("one axis of a square grid", "Ho et al. 2019, arXiv 1912.12180"),
    "linear-elu": ("features elu + 1", "Katharopoulos et al. 2020, arXiv 2006.16236"),
    "linear-relu": ("features relu", "Choromanski et al. 2020, arXiv 2009.14794, §4.2"),
    "linear-cosine": ("features relu, and a cosine of the distance",
                      "Qin et al. 2022, arXiv 2202.08791"),
    "linear-favor": ("4 H positive random features", "Choromanski et al. 2020, arXiv 2009.14794"),
    "low-rank": ("reach projected keys", "Wang et al. 2020, arXiv 2006.04768"),
    "nystrom": ("reach / 4 landmarks, at least 8", "Xiong et al. 2021, arXiv 2102.03902"),
    "memory-compressed": ("means of 4 keys (trained: a convolution)",
                          "Liu et al. 2018, arXiv 1801.10198"),
    "lsh": ("the tokens of its own bucket", "Kitaev et al. 2020, arXiv 2001.04451"),
    "routed": ("the 4 best blocks by their means", "Lu et al. 2025, arXiv 2502.13189"),
}  # fmt: skip


def arena(ours: dict[str, str]) -> Table:
    """The averages of Long Range Arena beside our means over the tasks."""
    rows = [
        Row([name, average, ours.get(key, "–")], published=True)
        for key, (name, average) in _LRA.items()
    ]
    return Table(
        f"Published: average over the tasks ({LRA}): {COMPARE_THE_SHAPE}",
        ["model", "published, %", "ours, mean over our tasks"],
        rows,
    )
