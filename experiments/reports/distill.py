"""The report of the study of distillation."""

from pathlib import Path

from experiments.report.blocks import (
    Picture,
    Report,
    Results,
    Section,
    Table,
    claims,
    diverged,
    listed,
    mean,
    mean_sd,
    observations,
    runs,
    seeds,
)
from experiments.report.figures import bars, curves, picture

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
    settings, summary = results["settings"], results["summary"]
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
    bleu = picture(
        folder, "bleu", bars, [WORDS[way] for way in summary],
        {"BLEU": [found["bleu"] for found in summary.values()]}, x="learnt from", y="BLEU",
        alt="BLEU of the teacher and of each student; the numbers are in the table.",
        caption="BLEU of the teacher and of students by what they learn from, with the deviation "
        "over the seeds where there are several.",
    )  # fmt: skip
    table = Table(
        f"After training ({seeds(results)})",
        ["learnt from", "parameters", "BLEU", "held-out loss", "ms a step"],
        [
            [
                WORDS[way],
                f"{found['parameters']:,}",
                mean_sd(found["bleu"]),
                mean_sd(found["valid_loss"], 3),
                mean_sd(found["step_milliseconds"], 0),
            ]
            for way, found in summary.items()
        ],
        note="The time of a step leaves out what the teacher computes for it.",
    )
    curves = [
        _curve(results, folder, "valid_loss", "Held-out loss, nats"),
        _curve(results, folder, "entropy", "Entropy of the attention / ln S"),
    ]
    return Report(
        title="What a student learns from a teacher",
        question=results["question"],
        answer=_answer(results),
        warnings=diverged(
            (f"{WORDS[m['way']]}, seed {m['seed']},", m["diverged_at"]) for m in results["models"]
        ),
        sections=[
            Section("After training", [how], [bleu, table]),
            Section("During training", [], curves),
            Section("What the papers say", [], [_claims(results)]),
        ],
    )


def _curve(results: Results, folder: Path, name: str, words: str) -> Picture:
    series = runs(results["models"], "way", lambda m: observations(m, name), WORDS.__getitem__)
    return picture(
        folder, name, curves, [("", series)], x="step", y=words,
        alt=f"{words} over the steps, by what is learnt from.",
        caption=f"{words} over the steps, mean and range over the seeds.",
    )  # fmt: skip


def _means(results: Results) -> dict[str, float]:
    """Return the mean BLEU of each way of learning, 0 where no seed has one."""
    return {way: mean(found["bleu"]) or 0.0 for way, found in results["summary"].items()}


def _learnt(results: Results) -> bool:
    """Return whether the best student can translate, so that students can be compared."""
    return max(v for way, v in _means(results).items() if way != "teacher") >= _LEARNT


def gains(results: Results) -> dict[str, float]:
    """Return the mean BLEU that each way of learning gains over the references alone."""
    means = _means(results)
    others = [way for way in means if "none" in means and way not in ("none", "teacher")]
    return {way: means[way] - means["none"] for way in others}


def _answer(results: Results) -> list[str | None]:
    summary, means = results["summary"], _means(results)
    students = {way: bleu for way, bleu in means.items() if way != "teacher"}
    best = max(students, key=students.__getitem__)
    if not _learnt(results):
        return [
            f"The teacher has BLEU {means['teacher']:.1f} and the best student "
            f"{students[best]:.1f}: in {results['settings']['steps']:,} steps none has learnt to "
            "translate, so nothing can be said of what each learnt from."
        ]
    smaller = summary["teacher"]["parameters"] / summary[best]["parameters"]
    gained = listed(gains(results), "+.1f", words=WORDS.__getitem__)
    maps = means.get("logits and maps", 0.0) - means.get("logits", 0.0)
    return [
        f"BLEU of the teacher {means['teacher']:.1f}; of students with {smaller:.0f} times fewer "
        "parameters, by what they learn from, best first: "
        f"{listed(students, best=max, words=WORDS.__getitem__)}.",
        f"Over the references alone: {gained} BLEU." if gained else None,
        f"Maps beside logits change BLEU by {maps:+.1f}."
        if {"logits", "logits and maps"} <= means.keys()
        else None,
    ]


def _claims(results: Results) -> Table:
    gained = gains(results) if _learnt(results) else {}

    def ours(*ways: str) -> str:
        own = {f"{WORDS[way]}": gained[way] for way in ways if way in gained}
        return listed(own, "+.1f") + " BLEU" if own else ""

    return claims(
        [
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
    )
