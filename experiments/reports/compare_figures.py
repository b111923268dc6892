"""The pictures of the compare study."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.report import figures
from experiments.report.blocks import Heatmap, Picture, known, number

Results = Mapping[str, Any]


def draw(results: Results, folder: Path) -> dict[str, Any]:
    """Draw all figures into ``folder/figures`` and return them by name."""
    (folder / "figures").mkdir(exist_ok=True)
    made: dict[str, Any] = {"bleu": _bleu(results, folder), "loss": _loss(results, folder)}
    if any(m["score"] != "none" for m in results["models"]):
        made["entropy"] = _entropy(results, folder)
    return made | _attention(results, folder)


def _bleu(results: Results, folder: Path) -> Picture:
    summary = results["summary"]
    buckets = next(iter(summary.values()))["by_length"]
    groups = [f"{b['low']}–{b['high']}" for b in buckets]
    figures.bars(
        folder / "figures/bleu_by_length.png",
        groups,
        {s: [b["bleu"] for b in row["by_length"]] for s, row in summary.items()},
        x=f"{results['data']['length_unit']} in the source sentence",
        y="BLEU",
    )
    return Picture(
        "figures/bleu_by_length.png",
        f"Bars of BLEU for {len(groups)} ranges of sentence length and {len(summary)} models; the "
        "numbers are in the table below.",
        "BLEU by length of the source sentence.",
    )


def _loss(results: Results, folder: Path) -> Picture:
    names = list(results["summary"])

    def runs(name: str) -> list[Any]:
        return [m["train"] for m in results["models"] if m["score"] == name]

    training = {n: [t["loss"] for t in runs(n)] for n in names}
    held_out = {
        n: [[(o["step"], o["valid_loss"]) for o in t["observed"]] for t in runs(n)] for n in names
    }
    figures.curves(
        folder / "figures/loss.png",
        [("Training", training), ("Held out", held_out)],
        x="step",
        y="loss, nats a token",
    )
    return Picture(
        "figures/loss.png",
        f"Loss over the steps; held out it ends at: {_ends(held_out)}.",
        "Loss over the steps, in training (means of some steps each) and on held-out sentences.",
    )


def _entropy(results: Results, folder: Path) -> Picture:
    series: dict[str, Any] = {}
    for m in results["models"]:
        if m["score"] != "none":
            points = [(o["step"], o["entropy"]) for o in m["train"]["observed"]]
            series.setdefault(m["score"], []).append(points)
    figures.curves(
        folder / "figures/entropy.png",
        [("Entropy of the attention to the source", series)],
        x="step",
        y="entropy / ln S",
        low_y=0,
    )
    return Picture(
        "figures/entropy.png",
        f"Entropy over the steps; it ends at: {_ends(series)}.",
        "1 is attention spread over all source tokens alike, 0 is one token taking all.",
    )


def _ends(series: Mapping[str, Any]) -> str:
    """Return the last value of the first run of each, in words."""
    ends = {n: runs[0][-1][1] for n, runs in series.items() if runs and runs[0]}
    return ", ".join(
        f"{figures.label(n)} {number(v, '.2f') if known([v]) else 'diverged'}"
        for n, v in ends.items()
    )


def _attention(results: Results, folder: Path) -> dict[str, Any]:
    """Return one picture a sentence, all models of seed 0 side by side."""
    models = [m for m in results["models"] if m["seed"] == 0 and m["test"]["attention"]]
    if not models:
        return {}
    made: dict[str, Any] = {}
    for i, example in enumerate(models[0]["test"]["attention"]):
        panels = [
            (figures.label(m["score"]), np.array(m["test"]["attention"][i]["weights"], float))
            for m in models
        ]
        gold = [(s, t) for s, t in example["gold"]]
        file = f"figures/attention{i + 1}.png"
        words = [*example["source"], *example["target"]]
        figures.alignments(folder / file, panels, example["source"], example["target"], gold)
        text = " ".join(example["source"][:-1])
        picture = Picture(
            file,
            "Attention weights, target words down, source words across. "
            + " ".join(f"{title}: {_strongest(w, example)}." for title, w in panels),
            f"Attention while saying “{' '.join(example['target'][:-1])}” for “{text}”.",
        )
        # Without a font for these words the PNG would have boxes in their place.
        made[f"attention{i}"] = (
            picture
            if figures.drawable(words)
            else Heatmap(picture.caption, panels, example["source"], example["target"], gold)
        )
    return made


def _strongest(weights: np.ndarray, example: Mapping[str, Any]) -> str:
    """Return in words where each target word looks most, for those who cannot see the picture."""
    if not np.isfinite(weights).all():
        return "diverged"
    links = zip(example["target"], weights.argmax(1), strict=True)
    return ", ".join(f"{word} → {example['source'][s]}" for word, s in links)
