"""The report of the study of distillation."""

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
    mean,
    mean_sd,
)

Results = Mapping[str, Any]
WORDS = {
    "teacher": "the teacher",
    "none": "references alone",
    "logits": "logits",
    "logits and maps": "logits and maps",
    "sequences": "teacher's sentences",
}
_LEARNT = 5.0  # BLEU: with less there is nothing to rank students by


def build(results: Results, folder: Path) -> Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    (folder / "figures").mkdir(exist_ok=True)
    settings = results["settings"]
    how = (
        f"The teacher has {settings['teacher_layers']} + {settings['teacher_layers']} layers and "
        f"width {settings['teacher_features']} and trains for {settings['teacher_steps']:,} steps; "
        f"students have {settings['layers']} + {settings['layers']} layers and width "
        f"{settings['features']} and train for {settings['steps']:,} steps of "
        f"{settings['batch_size']} sentences of the English–German grammar, from the same start "
        f"with the same batches. All have {settings['heads']} heads. Logits: half the loss is the "
        f"divergence from the teacher's predictions at temperature {settings['temperature']:g}. "
        "Maps: the divergence of every attention's map from that of the teacher's layer, with "
        f"weight {settings['maps_weight']:g}. Translations are greedy."
    )
    return Report(
        title="What a student learns from a teacher",
        question=results["question"],
        answer=_answer(results),
        warnings=diverged(
            (f"{WORDS[m['way']]}, seed {m['seed']},", m["diverged_at"]) for m in results["models"]
        ),
        sections=[
            Section("After training", [how], [_bars(results, folder), _table(results)]),
            Section(
                "During training",
                [],
                [
                    _curve(results, folder, "valid_loss", "Held-out loss, nats"),
                    _curve(results, folder, "entropy", "Entropy of the attention / ln S"),
                ],
            ),
            Section("What the papers say", [], [_claims(results)]),
        ],
    )


def _best(results: Results) -> float:
    """Return the best student's mean BLEU."""
    return max(v for way, v in _means(results).items() if way != "teacher")


def _means(results: Results) -> dict[str, float]:
    """Return the mean BLEU of each way of learning, 0 where no seed has one."""
    return {way: mean(found["bleu"]) or 0.0 for way, found in results["summary"].items()}


def gains(results: Results) -> dict[str, float]:
    """Return the mean BLEU that each way of learning gains over the references alone."""
    means = _means(results)
    if "none" not in means:
        return {}
    others = [way for way in means if way not in ("none", "teacher")]
    return {way: means[way] - means["none"] for way in others}


def _answer(results: Results) -> list[str]:
    summary = results["summary"]
    means = _means(results)
    students = {way: bleu for way, bleu in means.items() if way != "teacher"}
    if (best := _best(results)) < _LEARNT:
        steps = results["settings"]["steps"]
        return [
            f"The teacher has BLEU {means['teacher']:.1f} and the best student {best:.1f}: in "
            f"{steps:,} steps none has learnt to translate, so nothing can be said of what each "
            "learnt from."
        ]
    ranked = sorted(students.items(), key=lambda item: -item[1])
    listed = joined([f"{WORDS[way]} {bleu:.1f}" for way, bleu in ranked])
    smaller = summary["teacher"]["parameters"] / summary[ranked[0][0]]["parameters"]
    said = [
        f"BLEU of the teacher {means['teacher']:.1f}; of students with {smaller:.0f} times fewer "
        f"parameters, by what they learn from, best first: {listed}."
    ]
    if gained := gains(results):
        listed = joined([f"{WORDS[way]} {gain:+.1f}" for way, gain in gained.items()])
        said.append(f"Over the references alone: {listed} BLEU.")
    if {"logits", "logits and maps"} <= means.keys():
        more = means["logits and maps"] - means["logits"]
        said.append(f"Maps beside logits change BLEU by {more:+.1f}.")
    return said


def _bars(results: Results, folder: Path) -> Picture:
    summary = results["summary"]
    groups = [WORDS[way] for way in summary]
    values = [found["bleu"] for found in summary.values()]
    figures.bars(folder / "figures/bleu.png", groups, {"BLEU": values}, x="learnt from", y="BLEU")
    return Picture(
        "figures/bleu.png",
        "BLEU of the teacher and of each student; the numbers are in the table.",
        "BLEU of the teacher and of students by what they learn from, with the deviation over the "
        "seeds where there are several.",
    )


def _table(results: Results) -> Table:
    rows = [
        Row(
            [
                WORDS[way],
                f"{found['parameters']:,}",
                mean_sd(found["bleu"]),
                mean_sd(found["valid_loss"], 3),
                mean_sd(found["step_milliseconds"], 0),
            ]
        )
        for way, found in results["summary"].items()
    ]
    seeds = results["settings"]["seeds"]
    words = "quick: one seed" if seeds == 1 else f"mean ± standard deviation, {seeds} seeds"
    return Table(
        f"After training ({words})",
        ["learnt from", "parameters", "BLEU", "held-out loss", "ms a step"],
        rows,
        note="The time of a step leaves out what the teacher computes for it.",
    )


def _curve(results: Results, folder: Path, name: str, words: str) -> Picture:
    series = {
        WORDS[way]: [
            [(row["step"], row[name]) for row in model["observed"]]
            for model in results["models"]
            if model["way"] == way
        ]
        for way in results["summary"]
    }
    file = f"figures/{name}.png"
    figures.curves(folder / file, [("", series)], x="step", y=words)
    return Picture(
        file, f"{words} over the steps, by what is learnt from.",
        f"{words} over the steps, mean and range over the seeds.",
    )  # fmt: skip


def _claims(results: Results) -> Table:
    gained = gains(results) if _best(results) >= _LEARNT else {}

    def ours(*ways: str) -> str:
        found = [f"{WORDS[way]} {gained[way]:+.1f} BLEU" for way in ways if way in gained]
        return joined(found) or "–"

    rows = [
        (
            "Kim and Rush 2016, arXiv 1606.07947",
            "Learning from the teacher's translations: +4.2 BLEU with greedy decoding.",
            ours("sequences"),
        ),
        (
            "Hinton et al. 2015, arXiv 1503.02531",
            "Softened predictions tell how a model generalises.",
            ours("logits"),
        ),
        (
            "Jiao et al. 2020, arXiv 1909.10351",
            "Maps beside logits help a small student.",
            ours("logits", "logits and maps"),
        ),
    ]
    return Table(
        f"Published: {COMPARE_THE_SHAPE}", ["paper", "claim", "ours"],
        [Row(row, published=True) for row in rows], prose=True,
    )  # fmt: skip
