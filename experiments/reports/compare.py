"""The report of the compare study: what it says."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.report import blocks as report
from experiments.report.blocks import (
    COMPARE_THE_SHAPE,
    Report,
    Row,
    Section,
    Table,
    duration,
    joined,
    mean_sd,
    memory,
)
from experiments.report.figures import label
from experiments.report.published import LUONG, LUONG_ALIGNMENT_ERROR, VASWANI
from experiments.reports import compare_figures
from experiments.reports.compare_models import besides
from experiments.reports.compare_published import published_tables
from experiments.reports.compare_words import costs_in_words, data_in_words, lengths_in_words, span

Results = Mapping[str, Any]


def build(results: Results, folder: Path) -> Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    pictures = compare_figures.draw(results, folder)
    data, settings = results["data"], results["settings"]
    depth = settings["features"] // settings["heads"]
    itself = besides(settings)
    return Report(
        title="How a translator looks at its source",
        question=results["question"],
        answer=_answer(results, depth),
        warnings=_warnings(results),
        sections=[
            Section(
                "Quality of the translation",
                [
                    f"{data['source_language']} to {data['target_language']}, "
                    f"{data['sentences']['test']:,} held-out sentences, greedy decoding; BLEU and "
                    "chrF by sacrebleu (0 to 100). The same encoder–decoder every time: "
                    f"{settings['layers']} + {settings['layers']} layers, width "
                    f"{settings['features']}, {settings['heads']} heads of depth {depth}, "
                    f"{settings['steps']:,} steps of {settings['batch_size']} sentences. {itself}",
                ],
                [_quality(results), *published_tables(results, depth)],
            ),
            Section(
                "By length",
                [lengths_in_words(data)],
                [
                    pictures["bleu"],
                    _by_length(results, "bleu", "BLEU"),
                    _by_length(results, "chrf", "chrF"),
                ],
            ),
            Section("Where it looks", _looking(results), _looking_blocks(results, pictures)),
            Section(
                "How it learns",
                [
                    "Cross-entropy a target token, in training and on held-out sentences; and how "
                    "widely the decoder looks: the mean entropy of its attention to the source, "
                    "over the logarithm of the number of source tokens."
                ],
                [pictures["loss"], *([pictures["entropy"]] if "entropy" in pictures else [])],
            ),
            Section(
                "What it costs",
                [
                    "Step time is the median over all training steps, compiling apart. Temporaries "
                    "are what the compiled step needs beside parameters and batch, by XLA's memory "
                    "analysis, at the largest shape of batch."
                ],
                [_cost(results)],
            ),
            Section(
                "Translations",
                ["The first test sentence of each range of lengths, by the models of seed 0."],
                _translations(results),
            ),
            Section("Data", [data["provenance"], data_in_words(data)]),
        ],
    )


def mean(results: Results, score: str, *path: Any) -> float | None:
    """Return the mean over seeds of a figure of the summary, None if it was not measured."""
    value: Any = results["summary"].get(score)
    for step in path:
        value = None if value is None else value[step]
    return report.mean(value or [])


def _warnings(results: Results) -> list[str]:
    hasty = [
        "The quick preset stops long before the models have learnt to translate: it shows that all "
        "of this runs, not how the models compare."
    ]
    return (hasty if results["settings"]["preset"] == "quick" else []) + report.diverged(
        (f"{label(m['score'])}, seed {m['seed']},", m["train"]["diverged_at"])
        for m in results["models"]
    )


def _answer(results: Results, depth: int) -> list[str]:
    """Return the findings as sentences, each computed from the numbers."""
    said = [_overall(results), _short_sentences(results), *_falling(results)]
    said += [_unscaled(results, depth), _alignment(results), costs_in_words(results)]
    return [sentence for sentence in said if sentence]


def _overall(results: Results) -> str:
    scores = {s: mean(results, s, "bleu") for s in results["summary"]}
    ranked = sorted(((v, s) for s, v in scores.items() if v is not None), reverse=True)
    listed = joined([f"{label(s)} {v:.1f}" for v, s in ranked])
    return f"BLEU over all {results['data']['sentences']['test']:,} test sentences: {listed}."


def _has_longer(results: Results) -> bool:
    """Return whether scores of up to 20 words differ from those of all sentences."""
    return results["data"]["lengths"]["test"][1] > 20


def _short_sentences(results: Results) -> str | None:
    if not _has_longer(results):
        return None
    found = {}
    for score, row in results["summary"].items():
        value = report.mean(row.get("bleu_to_20") or [])
        if value is not None:
            found[score] = value
    if not found:
        return None
    listed = joined([f"{label(s)} {v:.1f}" for s, v in found.items()])
    return f"On sentences of up to 20 {_unit(results)} alone: {listed}."


def _falling(results: Results) -> list[str]:
    """Return how BLEU changes from short sentences to the longest trained on, and beyond."""
    if "none" not in results["summary"]:
        return []
    buckets = results["summary"]["none"]["by_length"]
    trained = results["data"]["longest_trained"]
    inside = [i for i, b in enumerate(buckets) if b["low"] <= trained]
    beyond = [i for i, b in enumerate(buckets) if b["low"] > trained]
    others = [s for s in results["summary"] if s != "none"]
    said = []
    if len(inside) > 1 and others:
        first, last = inside[0], inside[-1]
        falls = {}
        for score in results["summary"]:
            a = mean(results, score, "by_length", first, "bleu")
            b = mean(results, score, "by_length", last, "bleu")
            if a is not None and b is not None:
                falls[score] = (a, b)
        words = [span(buckets[i]) for i in (first, last)]
        if "none" in falls:
            a, b = falls.pop("none")
            rest = joined([f"{label(s)} from {x:.0f} to {y:.0f}" for s, (x, y) in falls.items()])
            said.append(
                f"Without attention BLEU goes from {a:.0f} at {words[0]} {_unit(results)} to "
                f"{b:.0f} at {words[1]}; with it, {rest}."
            )
    if beyond and others:
        i = beyond[-1]
        listed = [
            f"{label(s)} {v:.0f}"
            for s in results["summary"]
            if (v := mean(results, s, "by_length", i, "bleu")) is not None
        ]
        said.append(
            f"At {span(buckets[i])} {_unit(results)}, beyond the {trained} of training, "
            f"BLEU is {joined(listed)}: none of them was made to translate lengths it never saw."
        )
    return said


def _unscaled(results: Results, depth: int) -> str | None:
    plain, scaled = mean(results, "dot", "bleu"), mean(results, "scaled_dot", "bleu")
    if plain is None or scaled is None:
        return None
    gap = scaled - plain
    runs = [report.known(results["summary"][s]["bleu"]) for s in ("dot", "scaled_dot")]
    spreads = [statistics.stdev(run) for run in runs if len(run) > 1]
    if not spreads:
        verdict = "one seed cannot say whether that is more than chance"
    else:
        spread = max(spreads)
        verdict = (
            f"more than twice the spread over seeds ({spread:.1f})"
            if abs(gap) > 2 * spread
            else f"no more than twice the spread over seeds ({spread:.1f}), so it may be chance"
        )
    return (
        f"At this depth ({depth}), leaving out the scale 1/√d {'costs' if gap > 0 else 'gains'} "
        f"{abs(gap):.1f} BLEU: {verdict}. The claim is about large depths ({VASWANI}, §3.2.1); the "
        "scaling study looks there."
    )


def _alignment(results: Results) -> str | None:
    found = {s: mean(results, s, "alignment_error") for s in results["summary"]}
    known = {s: v for s, v in found.items() if v is not None}
    if not known:
        return None
    listed = joined([f"{label(s)} {v:.2f}" for s, v in known.items()])
    return f"Alignment error against the gold alignment (0 is perfect): {listed}."


def _quality(results: Results) -> Table:
    longer = _has_longer(results)
    rows = [
        Row(
            [
                label(score),
                mean_sd(row["bleu"]),
                mean_sd(row["chrf"]),
                *([mean_sd(row.get("bleu_to_20") or [None])] if longer else []),
                mean_sd(row["valid_loss"], 3),
                f"{row['parameters']:,}",
            ]
        )
        for score, row in results["summary"].items()
    ]
    return Table(
        "Held-out sentences of all lengths" + _seeds(results),
        [
            "looks by",
            "BLEU",
            "chrF",
            *([f"BLEU, up to 20 {_unit(results)}"] if longer else []),
            "held-out loss",
            "parameters",
        ],
        rows,
    )


def _by_length(results: Results, metric: str, words: str) -> Table:
    first = next(iter(results["summary"].values()))
    rows = [
        Row([label(score), *(mean_sd(b[metric]) for b in row["by_length"])])
        for score, row in results["summary"].items()
    ]
    counts = Row(["sentences", *(str(b["sentences"]) for b in first["by_length"])])
    return Table(
        f"{words} by {_unit(results)} in the source" + _seeds(results),
        ["looks by", *(span(b) for b in first["by_length"])],
        [*rows, counts],
    )


def _looking(results: Results) -> list[str]:
    said = [
        "Rows are the words the decoder says, columns the words it looks at; each row sums to 1, "
        "the mean over layers and heads. The decoder was given the reference, so that all models "
        "say the same words."
    ]
    if results["data"]["aligned"]:
        said.append(
            "Orange frames are the gold alignment. Alignment error links each said word to the "
            f"source word with the most weight. Luong et al. report {LUONG_ALIGNMENT_ERROR} "
            f"({LUONG}): {COMPARE_THE_SHAPE}."
        )
    return said


def _looking_blocks(results: Results, pictures: Mapping[str, Any]) -> list[Any]:
    blocks = [picture for name, picture in pictures.items() if name.startswith("attention")]
    if results["data"]["aligned"]:
        first = next(iter(results["summary"].values()))
        rows = [
            Row(
                [
                    label(s),
                    mean_sd(row["alignment_error"], 3),
                    *(mean_sd(b["alignment_error"], 3) for b in row["by_length"]),
                ]
            )
            for s, row in results["summary"].items()
            if s != "none"
        ]
        columns = ["looks by", "all", *(span(b) for b in first["by_length"])]
        blocks.append(
            Table(
                f"Alignment error rate, by {_unit(results)} in the source" + _seeds(results),
                columns,
                rows,
            )
        )
    return blocks


def _cost(results: Results) -> Table:
    rows = []
    for score, row in results["summary"].items():
        own = [m for m in results["models"] if m["score"] == score]
        rows.append(
            Row(
                [
                    label(score),
                    mean_sd(row["step_milliseconds"]),
                    memory(max(report.known(row["temporaries"]), default=None)),
                    mean_sd([m["train"]["compile_seconds"] for m in own]),
                    duration(report.mean(m["seconds"]["training"] for m in own)),
                    mean_sd([m["seconds"]["scoring"] for m in own]),
                ]
            )
        )
    return Table(
        "Cost of a model" + _seeds(results),
        ["looks by", "step, ms", "temporaries", "compiling, s", "training", "translating, s"],
        rows,
        note="Training includes compiling and looking at held-out sentences.",
    )


def _translations(results: Results) -> list[Table]:
    first = [m for m in results["models"] if m["seed"] == 0]
    if not first:
        return []
    tables = []
    for i, example in enumerate(first[0]["test"]["translations"]):
        rows = [Row(["source", example["source"]]), Row(["reference", example["reference"]])]
        rows += [
            Row([label(m["score"]), m["test"]["translations"][i]["translation"] or "(nothing)"])
            for m in first
        ]
        caption = f"{example['words']} {_unit(results)}"
        tables.append(Table(caption, ["", "text"], rows, prose=True))
    return tables


def _unit(results: Results) -> str:
    return results["data"]["length_unit"]


def _seeds(results: Results) -> str:
    count = results["settings"]["seeds"]
    return " (quick: one seed)" if count == 1 else f", mean ± standard deviation, {count} seeds"
