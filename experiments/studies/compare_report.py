"""The report of the compare study."""

import statistics
from pathlib import Path
from typing import Any

import numpy as np

from experiments.report import blocks as report
from experiments.report.look import drawable
from experiments.report.published import LUONG, LUONG_ERROR, VASWANI, bahdanau, britz, luong


def build_report(results: report.Results, folder: Path) -> report.Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    data, settings, summary = results["data"], results["settings"], results["summary"]
    depth = settings["features"] // settings["heads"]
    ours = {
        f"{report.label(s)}, here at depth {depth}": report.mean_sd(row["bleu"])
        for s, row in summary.items()
    }
    quick = settings["preset"] == "quick"
    return report.Report(
        title="Attention to the source in translation",
        answer=[
            f"BLEU over all {data['sentences']['test']:,} test sentences: "
            f"{_list(results, 'bleu', best=max)}.",
            f"On sentences of up to 20 {_unit(results)} alone: {_list(results, 'bleu_to_20')}."
            if _has_longer(results) and _list(results, "bleu_to_20")
            else None,
            *_by_lengths(results),
            _unscaled(results, depth),
            "Alignment error against the gold alignment (0 is perfect): "
            f"{_list(results, 'alignment_error', form='.2f')}."
            if _list(results, "alignment_error")
            else None,
            costs_in_words(results),
        ],
        warnings=[
            *([_HASTY] if quick else []),
            *report.diverged(
                (f"{report.label(m['score'])}, seed {m['seed']},", m["train"]["diverged_at"])
                for m in results["models"]
            ),
        ],
        sections=[
            report.Section(
                "Quality of the translation",
                [
                    f"{data['source_language']} to {data['target_language']}, "
                    f"{data['sentences']['test']:,} held-out sentences, greedy decoding; BLEU and "
                    "chrF by sacrebleu (0 to 100). The same encoder–decoder every time: "
                    f"{settings['layers']} + {settings['layers']} layers, width "
                    f"{settings['features']}, {settings['heads']} heads of depth {depth}, "
                    f"{settings['steps']:,} steps of {settings['batch_size']} sentences. "
                    + _model_in_words(settings),
                ],
                [_quality(results), britz(ours), bahdanau(), luong()],
            ),
            report.Section(
                "By length",
                [_lengths_in_words(data)],
                [
                    _bleu_picture(results, folder),
                    _by_length(results, "bleu", f"BLEU by {_unit(results)} in the source"),
                    _by_length(results, "chrf", f"chrF by {_unit(results)} in the source"),
                ],
            ),
            report.Section("Attention to the source", *_attention(results, folder)),
            report.Section("How it learns", [_LEARNING], _learning_pictures(results, folder)),
            report.Section("What it costs", [_COSTS], [_cost(results)]),
            report.Section(
                "Translations",
                ["The first test sentence of each range of lengths, by the models of seed 0."],
                _translations(results),
            ),
            report.Section("Data", [data["provenance"], _data_in_words(data)]),
        ],
    )


_HASTY = (
    "The quick preset stops long before the models have learnt to translate: it shows that all of "
    "this runs, not how the models compare."
)
_LEARNING = (
    "Cross-entropy a target token, in training and on held-out sentences; and the mean entropy of "
    "the attention to the source, over the logarithm of the number of source tokens."
)
_COSTS = (
    "Step time is the median over all training steps, compiling apart. Temporaries are what the "
    "compiled step needs beside parameters and batch, by XLA's memory analysis, at the largest "
    "shape of batch."
)


def _unit(results: report.Results) -> str:
    return results["data"]["length_unit"]


def _list(results: report.Results, name: str, form: str = ".1f", best: Any = None) -> str:
    """Return the mean of a figure of the summary for each score, as a list."""
    values = {s: report.mean(row.get(name) or []) for s, row in results["summary"].items()}
    return report.listed(values, form, best=best, words=report.label)


def _has_longer(results: report.Results) -> bool:
    return results["data"]["lengths"]["test"][1] > 20


def _by_lengths(results: report.Results) -> list[str]:
    """Return the change of BLEU from short sentences to the longest trained on, and beyond."""
    summary = results["summary"]
    if "none" not in summary or len(summary) < 2:
        return []
    buckets, trained = summary["none"]["by_length"], results["data"]["longest_trained"]
    inside = [i for i, b in enumerate(buckets) if b["low"] <= trained]
    said = []

    def bleu(at: int) -> dict[str, float | None]:
        return {s: report.mean(row["by_length"][at]["bleu"]) for s, row in summary.items()}

    first, last = bleu(inside[0]), bleu(inside[-1])
    if len(inside) > 1 and len(report.known([first["none"], last["none"]])) == 2:
        changes = {s: (a, last[s]) for s, a in first.items() if report.known([a, last[s]])[1:]}
        none = changes.pop("none")
        ends = (f"{report.label(s)} from {a:.0f} to {b:.0f}" for s, (a, b) in changes.items())
        rest = report.joined(ends)
        short, long = _span(buckets[inside[0]]), _span(buckets[inside[-1]])
        said.append(
            f"Without attention BLEU goes from {none[0]:.0f} at {short} {_unit(results)} to "
            f"{none[1]:.0f} at {long}; with it, {rest}."
        )
    if len(inside) < len(buckets):
        said.append(
            f"At {_span(buckets[-1])} {_unit(results)}, beyond the {trained} of training, BLEU is "
            f"{report.listed(bleu(len(buckets) - 1), '.0f', words=report.label)}."
        )
    return said


def _unscaled(results: report.Results, depth: int) -> str | None:
    both = [results["summary"].get(s, {}).get("bleu", []) for s in ("dot", "scaled_dot")]
    plain, scaled = map(report.mean, both)
    if plain is None or scaled is None:
        return None
    spread = max((statistics.stdev(v) for v in map(report.known, both) if len(v) > 1), default=None)
    verdict = (
        "one seed cannot say whether that is more than chance"
        if spread is None
        else f"more than twice the spread over seeds ({spread:.1f})"
        if abs(scaled - plain) > 2 * spread
        else f"no more than twice the spread over seeds ({spread:.1f}), so it may be chance"
    )
    return (
        f"At this depth ({depth}), leaving out the scale 1/√d "
        f"{'costs' if scaled > plain else 'gains'} {abs(scaled - plain):.1f} BLEU: {verdict}. The "
        f"claim is about large depths ({VASWANI}, §3.2.1); the scaling study measures there."
    )


def _quality(results: report.Results) -> report.Table:
    longer = [f"BLEU, up to 20 {_unit(results)}"] if _has_longer(results) else []
    rows = [
        [
            report.label(score),
            report.mean_sd(row["bleu"]),
            report.mean_sd(row["chrf"]),
            *(report.mean_sd(row.get("bleu_to_20") or [None]) for _ in longer),
            report.mean_sd(row["valid_loss"], 3),
            f"{row['parameters']:,}",
        ]
        for score, row in results["summary"].items()
    ]
    columns = ["attention", "BLEU", "chrF", *longer, "held-out loss", "parameters"]
    return report.Table(
        f"Held-out sentences of all lengths ({report.seeds(results)})", columns, rows
    )


def _by_length(results: report.Results, metric: str, caption: str, digits: int = 1) -> report.Table:
    """Return a metric by score and range of lengths, with the whole where it is in no other."""
    first = next(iter(results["summary"].values()))["by_length"]
    whole = ["all"] if metric == "alignment_error" else []
    rows = [
        [
            report.label(score),
            *(report.mean_sd(row[metric], digits) for _ in whole),
            *(report.mean_sd(bucket[metric], digits) for bucket in row["by_length"]),
        ]
        for score, row in results["summary"].items()
        if not whole or score != "none"
    ]
    if not whole:
        rows.append(["sentences", *(str(bucket["sentences"]) for bucket in first)])
    columns = ["attention", *whole, *map(_span, first)]
    return report.Table(f"{caption} ({report.seeds(results)})", columns, rows)


def _bleu_picture(results: report.Results, folder: Path) -> report.Picture:
    summary = results["summary"]
    groups = [_span(b) for b in next(iter(summary.values()))["by_length"]]
    return report.picture(
        folder, "bleu_by_length", "bars", groups,
        {s: [b["bleu"] for b in row["by_length"]] for s, row in summary.items()},
        x=f"{_unit(results)} in the source sentence", y="BLEU",
        alt=f"Bars of BLEU for {len(groups)} ranges of sentence length and {len(summary)} models; "
        "the numbers are in the table below.",
        caption="BLEU by length of the source sentence.",
    )  # fmt: skip


def _learning_pictures(results: report.Results, folder: Path) -> list[report.Block]:
    words = {
        "loss": "Loss in training, nats a token",
        "valid_loss": "Held-out loss, nats a token",
        "entropy": "Entropy of the attention to the source / ln S",
    }
    attend = [m for m in results["models"] if m["score"] != "none"]
    models = {name: attend if name == "entropy" else results["models"] for name in words}
    return [
        report.training(folder, models[name], name, text, line=lambda m: m["score"])
        for name, text in words.items()
        if models[name]
    ]


def _attention(results: report.Results, folder: Path) -> tuple[list[str], list[report.Block]]:
    said = [
        "Rows are the target words, columns the source words; each row is the step that predicts "
        "its word and sums to 1, the mean over layers and heads. The decoder was given the "
        "reference, so that all models predict the same words."
    ]
    models: Any = [m for m in results["models"] if m["seed"] == 0 and m["test"]["attention"]]
    blocks: list[report.Block] = []
    shown: list[Any] = models[0]["test"]["attention"] if models else []
    for i, example in enumerate(shown):
        source, target = example["source"], example["target"]
        panels = [
            (report.label(m["score"]), np.array(m["test"]["attention"][i]["weights"], float))
            for m in models
        ]
        gold = [(s, t) for s, t in example["gold"]]
        caption = f"Attention for “{' '.join(source[:-1])}”, predicting “{' '.join(target[:-1])}”."
        drawn = report.picture(
            folder, f"attention{i + 1}", "alignments", panels, source, target, gold,
            alt="Attention weights, target words down, source words across. "
            + " ".join(f"{title}: {_strongest(w, example)}." for title, w in panels),
            caption=caption,
        )  # fmt: skip
        # Without a font for these words the PNG would have boxes in their place.
        html = report.Heatmap(caption, panels, source, target, gold)
        blocks.append(drawn if drawable([*source, *target]) else html)
    if results["data"]["aligned"]:
        said.append(
            "Orange frames are the gold alignment. Alignment error links each target word to the "
            f"source word with the most weight. Luong et al. report {LUONG_ERROR} "
            f"({LUONG}): {report.COMPARE_THE_SHAPE}."
        )
        caption = f"Alignment error rate, by {_unit(results)} in the source"
        blocks.append(_by_length(results, "alignment_error", caption, 3))
    return said, blocks


def _strongest(weights: np.ndarray, example: report.Results) -> str:
    if not np.isfinite(weights).all():
        return "diverged"
    links = zip(example["target"], weights.argmax(1), strict=True)
    return ", ".join(f"{word} → {example['source'][s]}" for word, s in links)


def _cost(results: report.Results) -> report.Table:
    of = report.runs(results["models"], "score", lambda model: model)
    rows = [
        [
            report.label(score),
            report.mean_sd(row["step_milliseconds"]),
            report.memory(max(report.known(row["temporaries"]), default=None)),
            report.mean_sd([m["train"]["compile_seconds"] for m in of[score]]),
            report.duration(report.mean(m["seconds"]["training"] for m in of[score])),
            report.mean_sd([m["seconds"]["scoring"] for m in of[score]]),
        ]
        for score, row in results["summary"].items()
    ]
    return report.Table(
        f"Cost of a model ({report.seeds(results)})",
        ["attention", "step, ms", "temporaries", "compiling, s", "training", "translating, s"],
        rows,
        note="Training includes compiling and observing held-out sentences.",
    )


def _translations(results: report.Results) -> list[report.Table]:
    first: Any = [m for m in results["models"] if m["seed"] == 0]
    tables = []
    for i, example in enumerate(first[0]["test"]["translations"] if first else ()):
        rows = [["source", example["source"]], ["reference", example["reference"]]]
        own = ((report.label(m["score"]), m["test"]["translations"][i]) for m in first)
        rows += [[name, said["translation"] or "(nothing)"] for name, said in own]
        title = f"{example['words']} {_unit(results)}"
        tables.append(report.Table(title, ["", "text"], rows, prose=True))
    return tables


_NOISE = 0.1  # by which the medians of two timings of one thing may differ on a shared machine


def _span(bucket: report.Results) -> str:
    low, high = bucket["low"], bucket["high"]
    return str(low) if low >= high else f"{low}–{high}"


def costs_in_words(results: report.Results) -> str | None:
    """Return the step times as ratios, those within the noise of 1 apart from the others."""
    own = results["summary"].get("scaled_dot", {}).get("step_milliseconds", [])
    apart: dict[str, float | None] = {}
    alike = []
    for score, row in results["summary"].items():
        times = zip(row["step_milliseconds"], own, strict=False)
        ratios = report.known(t / b for t, b in times if t and b)
        if score == "scaled_dot" or not ratios:
            continue
        noise = 2 * statistics.stdev(ratios) if len(ratios) > 1 else _NOISE
        if abs(statistics.fmean(ratios) - 1) > noise:
            apart[score] = statistics.fmean(ratios)
        else:
            alike.append(report.label(score))
    if not apart and not alike:
        return None
    said = f"A training step takes {report.number(report.mean(own), '.0f')} ms with the scaled dot"
    if apart:
        said += f"; as a multiple of that: {report.listed(apart, '.2f', words=report.label)}"
    if alike:
        limit = (
            f"{_NOISE:.0%} of it, which one seed cannot tell from noise"
            if results["settings"]["seeds"] == 1
            else "twice the spread over seeds of it"
        )
        said += f"; within {limit}: {report.joined(alike)}"
    return f"{said}."


def _model_in_words(settings: report.Results) -> str:
    if settings["model"] == "gru":
        near = " near a predicted position (local-p)" if settings["location"] == "local-p" else ""
        return (
            "Encoder and decoder are recurrent (GRU). Additive attention comes before the "
            f"decoder's step, as Bahdanau's, every other one after it, as Luong's{near}."
        )
    if settings["score_in"] == "cross":
        return (
            "Self-attention is the scaled dot product in all of them: only the attention to the "
            "source differs."
        )
    return (
        "Self-attention has the model's own score too (the scaled dot product where there is no "
        "attention to the source)."
    )


def _lengths_in_words(data: report.Results) -> str:
    trained, tested = data["longest_trained"], data["lengths"]["test"][1]
    said = f"{report.capital(data['length_unit'])} of the source sentence, marks included. "
    if tested > trained:
        return f"{said}Training had none longer than {trained}: what lies beyond is extrapolation."
    return f"{said}No test sentence is longer than the {trained} of training."


def _data_in_words(data: report.Results) -> str:
    used = {
        split: f"{data['sentences'][split]:,} of {_span({'low': low, 'high': high})} "
        + data["length_unit"]
        for split, (low, high) in data["lengths"].items()
    }
    out = data["left_out_as_too_long"]
    left = report.joined(f"{n:,} of {split}" for split, n in out.items() if n)
    return (
        f"Sentences used: {used['train']} to train on, {used['valid']} to observe, {used['test']} "
        f"to test. Tokens are {data['unit']}s: {data['vocabulary']['source']:,} source and "
        f"{data['vocabulary']['target']:,} target ones, four special ones included."
        + (f" Left out before that as too long: {left}." if left else "")
    )
