"""The cost of additive and dot-product attention by length."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from experiments.core.run import RunFolder
from experiments.core.settings import FROM_PRESET, StudyOptions
from experiments.report import blocks as report
from experiments.report.published import rabe_staats

PASSES = {"forward": "Forward", "gradient": "Forward and backward"}


@dataclasses.dataclass(frozen=True)
class Cost(StudyOptions):
    """What do additive and dot-product attention cost, in time and memory, against length?

    Both as the textbook writes them and as this library computes them, forward and with gradient:
    median times of interleaved rounds, temporaries from the compiled functions, and the lengths
    where each stops paying on this machine. No number is given of a form that is wrong.

    Beside it: Rabe and Staats 2021 (arXiv 2112.05682), and the claims "the dot product is 2-3
    times faster than additive; use additive up to 512 and dot beyond".

    Command: python -m experiments cost. Takes 4 minutes on two cores; quick 45 s, full 15 minutes.
    Expected: textbook additive is far slower than dot at every length and out of memory first;
    ours needs memory that grows with the length, not with its square.
    """

    lengths: tuple[int, ...] = FROM_PRESET
    """Lengths (T = S) to time; from the preset when not given."""
    memory_lengths: tuple[int, ...] = FROM_PRESET
    """Further lengths that are compiled for their memory but not run."""
    heads: int = 1
    """Query heads (N)."""
    depth: int = 64
    """Depth of a head (H)."""
    hidden: int = 64
    """Hidden width of the additive score (A)."""
    rounds: int = FROM_PRESET
    """Interleaved rounds that each median is over."""
    run_limit: int = 2048
    """Forms whose temporaries exceed this many MiB are compiled, not run."""

    study: ClassVar[str] = "cost"
    may_be_empty: ClassVar = ("memory_lengths",)
    preset_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "quick": {
            "lengths": (64, 256, 1024), "memory_lengths": (4096,), "rounds": 3, "seeds": 1,
        },
        "default": {
            "lengths": (32, 64, 128, 256, 512, 1024, 2048), "memory_lengths": (4096, 16384),
            "rounds": 5, "seeds": 3,
        },
        "full": {
            "lengths": (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
            "memory_lengths": (16384, 65536), "rounds": 9, "seeds": 5,
        },
    }  # fmt: skip

    def run(self) -> Path:
        """Check the forms, measure them and write the report."""
        from experiments.bench import forms

        lengths = sorted(set(self.lengths or ()))
        longer = sorted(set(self.memory_lengths or ()) - set(lengths))
        total = self.seeds * len(lengths) + len(longer)
        with RunFolder.open(self, total) as run:
            progress = run.progress
            wrong = run.cell("check", lambda: {name: forms.check(name) for name in forms.FORMS})
            for name, fault in wrong.items():
                verdict = f"WRONG, {fault}; not measured" if fault else "checked"
                progress.say(f"{name}: {verdict}")
            good = [name for name, fault in wrong.items() if fault is None]
            timed = []
            for length in lengths:
                with progress.piece(f"length {length}", self.seeds) as piece:
                    arguments = functools.partial(self._inputs, length)
                    compiled = functools.cache(lambda a=arguments: _compiled(good, a(0)))
                    for seed in range(self.seeds):
                        work = functools.partial(_measure, self, length, seed, compiled)
                        timed.append(run.cell(f"length{length}-seed{seed}", work))
                        piece.advance(f"seed {seed}")
            sizes = {cell["length"]: cell["temporaries"] for cell in timed}
            with progress.piece("memory", len(longer)) as piece:
                for length in longer:
                    work = functools.partial(_compiled_only, self, good, length)
                    sizes[length] = run.cell(f"memory{length}", work)["temporaries"]
                    piece.advance(f"length {length}")
            return run.conclude(_results(self, wrong, timed, sizes), build_report)

    def _inputs(self, length: int, seed: int) -> Any:
        from experiments.bench import forms

        return forms.inputs(seed, length, heads=self.heads, depth=self.depth, hidden=self.hidden)


def _compiled(names: list[str], arguments: Any) -> dict[tuple[str, str], Any]:
    from experiments.bench import forms
    from experiments.bench.contest import gradient
    from experiments.core.measure import compile_for

    compiled = {}
    for name in names:
        form = forms.FORMS[name][1]
        compiled[name, "forward"] = compile_for(form, arguments)
        compiled[name, "gradient"] = compile_for(gradient(form), arguments)
    return compiled


def _measure(options: Cost, length: int, seed: int, compile_all: Any) -> dict[str, Any]:
    """Return times and temporaries of the forms that ``compile_all`` compiles, at one length."""
    from experiments.core.measure import interleaved

    arguments = options._inputs(length, seed)
    compiled = compile_all()
    limit = options.run_limit * 2**20
    times: dict[str, dict[str, Any]] = {}
    for which in PASSES:
        calls = {
            name: (lambda c=c: c.call(*arguments))
            for (name, p), c in compiled.items()
            if p == which and (c.temporaries or 0) <= limit
        }
        times[which] = interleaved(calls, rounds=options.rounds) if calls else {}
    return {"seed": seed, "milliseconds": times, **_sizes(length, arguments, compiled)}


def _compiled_only(options: Cost, names: list[str], length: int) -> dict[str, Any]:
    """Return the temporaries at a length that is too long to run."""
    import jax

    arguments = jax.eval_shape(lambda: options._inputs(length, 0))
    return _sizes(length, arguments, _compiled(names, arguments))


def _sizes(length: int, arguments: Any, compiled: dict[tuple[str, str], Any]) -> dict[str, Any]:
    from experiments.bench import forms

    sizes: dict[str, dict[str, Any]] = {p: {} for p in PASSES}
    for (name, which), made in compiled.items():
        sizes[which][name] = made.temporaries
    picked = {score: forms.picked(score, arguments) for score in forms.SCORES}
    return {"length": length, "temporaries": sizes, "picked": picked}


def _results(
    options: Cost, wrong: dict[str, str | None], timed: list[dict[str, Any]], sizes: dict
) -> dict[str, Any]:
    """Return the study's part of results.json: checks, measurements, summaries, crossovers."""
    from experiments.core.measure import crossover

    lengths = sorted({c["length"] for c in timed})
    names = [n for n, fault in wrong.items() if fault is None]

    def values(which: str, name: str, length: int) -> list[float | None]:
        cells = [c for c in timed if c["length"] == length]
        return [c["milliseconds"][which].get(name, {}).get("median") for c in cells]

    medians = {
        p: {n: [report.mean(values(p, n, length)) for length in lengths] for n in names}
        for p in PASSES
    }
    crossings = [
        {
            "pass": which, "slower": first, "faster": second,
            "from": crossover(lengths, medians[which][first], medians[which][second]),
        }
        for which in PASSES
        for first, second in _PAIRS
        if first in names and second in names
    ]  # fmt: skip
    picked = {c["length"]: c["picked"] for c in timed}
    return {
        "checks": {n: fault or "agrees with float64" for n, fault in wrong.items()},
        "lengths": lengths,
        "measurements": timed,
        "milliseconds": {
            p: {n: [values(p, n, length) for length in lengths] for n in names} for p in PASSES
        },
        "mean_milliseconds": medians,
        "temporaries": {str(n): sizes[n] for n in sorted(sizes)},
        "crossovers": crossings,
        "picked": {str(n): picked[n] for n in lengths},
    }


_PAIRS = (
    ("textbook additive", "textbook dot"), ("textbook additive", "our additive"),
    ("textbook dot", "our dot"), ("our additive", "our dot"), ("our additive", "textbook dot"),
)  # fmt: skip


_FAMILIES = {"textbook": "As the textbook writes them", "our": "In this library"}


def build_report(results: report.Results, folder: Path) -> report.Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    faults = [f"{n}: {f}" for n, f in results["checks"].items() if not f.startswith("agrees")]
    lengths = results["lengths"]
    times = [
        report.Table(
            f"{words}: milliseconds, by length",
            ["form", *(f"{n:,}" for n in lengths)],
            [
                [name, *(report.mean_sd(values, 2) for values in row)]
                for name, row in results["milliseconds"][which].items()
            ],
            note="– : not run, its temporaries exceed the limit.",
        )
        for which, words in PASSES.items()
    ]
    sizes = {int(n): cell for n, cell in results["temporaries"].items()}
    temporaries = [
        report.Table(
            f"{words}: temporaries, by length",
            ["form", *(f"{n:,}" for n in sorted(sizes))],
            [
                [name, *(report.memory(sizes[n][which].get(name)) for n in sorted(sizes))]
                for name in sizes[min(sizes)][which]
            ],
        )
        for which, words in PASSES.items()
    ]
    crossovers = report.Table(
        "Crossovers on this machine, among the lengths measured",
        ["pair", "pass", "length"],
        [
            [
                f"{c['slower']} is slower than {c['faster']}",
                PASSES[c["pass"]].lower(),
                f"from {c['from']:,} on" if c["from"] else f"not up to {max(lengths):,}",
            ]
            for c in results["crossovers"]
        ],
        note="The least length from which the first stays slower at all longer ones measured.",
    )
    return report.Report(
        title="What additive and dot-product attention cost",
        answer=_answer(results),
        warnings=[f"A form was wrong and is not measured. {fault}." for fault in faults],
        sections=[
            report.Section(
                "Time",
                [
                    "Medians of interleaved rounds, without compiling, then mean and standard "
                    "deviation over the seeds (fresh inputs each). A form that would need more "
                    f"than {results['settings']['run_limit']} MiB of temporaries is not run.",
                ],
                [_times_picture(results, folder), *times],
            ),
            report.Section(
                "Memory",
                [
                    "Temporaries of the compiled function, as XLA's memory analysis gives them "
                    "without running it: what is needed beside inputs and results."
                ],
                [_memory_picture(results, folder), *temporaries, rabe_staats()],
            ),
            report.Section("Where each stops paying", _claims(results), [crossovers]),
        ],
    )


def ratio(results: report.Results, which: str, first: str, second: str) -> dict[int, float]:
    """Return the ratio of the times of ``first`` and ``second``, by length."""
    table = results["mean_milliseconds"][which]
    if first not in table or second not in table:
        return {}
    triples = zip(results["lengths"], table[first], table[second], strict=True)
    return {n: a / b for n, a, b in triples if a is not None and b}


def _answer(results: report.Results) -> list[str]:
    said = []
    for family, words in _FAMILIES.items():
        both = [ratio(results, p, f"{family} additive", f"{family} dot") for p in PASSES]
        if all(both):
            forward, gradient = map(_range, both)
            said.append(
                f"{words}, additive attention takes {forward} times as long as the dot product "
                f"forward and {gradient} times with the gradient, over lengths {min(both[0])} to "
                f"{max(both[0])}."
            )
    for kind in ("additive", "dot"):
        gains = ratio(results, "gradient", f"textbook {kind}", f"our {kind}")
        if gains:
            gain = gains[max(gains)]
            fast = f"{gain:.1f} times as fast as", f"{1 / gain:.1f} times as slow as"
            said.append(
                f"At length {max(gains)}, our {kind} attention with its gradient is "
                f"{fast[gain < 1]} the textbook's."
            )
    longest = max(results["lengths"])
    for kind in ("additive", "dot"):
        words = report.joined(
            f"{PASSES[c['pass']].lower()} "
            + (f"from length {c['from']:,} on" if c["from"] else f"at no length up to {longest:,}")
            for c in results["crossovers"]
            if (c["slower"], c["faster"]) == (f"textbook {kind}", f"our {kind}")
        )
        if words:
            said.append(f"The textbook's {kind} form stops paying against ours {words}.")
    return [*said, *_shrunk(results)] or ["Nothing was measured: see the warnings above."]


def _shrunk(results: report.Results) -> list[str]:
    longest = max(results["temporaries"], key=int)
    row = results["temporaries"][longest]["gradient"]
    parts = [
        f"{report.memory(row[f'textbook {kind}'])} for the textbook's {kind} form and "
        f"{report.memory(row[f'our {kind}'])} for ours"
        for kind in ("dot", "additive")
        if row.get(f"textbook {kind}") and row.get(f"our {kind}")
    ]
    said = f"The gradient at length {int(longest):,} needs temporaries of {'; '.join(parts)}."
    return [said] if parts else []


def _claims(results: report.Results) -> list[str]:
    """Return the papers' claims, each with our measurement."""
    said = ["The articles claim: the dot product is 2–3 times faster than additive attention."]
    for family in _FAMILIES:
        for which, words in PASSES.items():
            ratios = ratio(results, which, f"{family} additive", f"{family} dot")
            if ratios:
                shown = report.joined(f"{r:.1f} at {n}" for n, r in ratios.items())
                said.append(f"{words}, {family} forms, measured here: {shown}.")
    said.append("They also claim: use additive attention up to length 512, the dot product beyond.")
    for family in _FAMILIES:
        ratios = ratio(results, "gradient", f"{family} additive", f"{family} dot")
        within = [n for n, r in ratios.items() if r <= 3]
        beyond = [n for n, r in ratios.items() if within and r > 3 and n > max(within)]
        if ratios and not within:
            said.append(
                f"On this machine the {family} additive form costs more than three dot products at "
                "every length measured, so no length speaks for it by time alone; its quality must."
            )
        elif ratios:
            said.append(
                f"On this machine the {family} additive form costs at most three dot products "
                f"(gradient included) at lengths {report.joined(map(str, within))}"
                + (f" and more from {min(beyond)} on." if beyond else ".")
            )
    return said


def _times_picture(results: report.Results, folder: Path) -> report.Picture:
    def lines(row: Sequence[Sequence[float | None]]) -> list[Any]:
        """Return one line a seed from the values by length and seed."""
        points = list(zip(results["lengths"], row, strict=True))
        most = max(map(len, row), default=0)
        return [[(n, v[i] if i < len(v) else None) for n, v in points] for i in range(most)]

    panels = [
        (words, {name: lines(row) for name, row in results["milliseconds"][which].items()})
        for which, words in PASSES.items()
    ]
    return report.picture(
        folder, "time", "curves", panels, x="length (T = S)", y="milliseconds", log_x=True,
        log_y=True, markers=True, missing="not run",
        alt="Time against length, forward and with gradient; the numbers are in the tables below.",
        caption="Time against length, both axes logarithmic. A line of slope 2 grows with the "
        "square.",
    )  # fmt: skip


def _memory_picture(results: report.Results, folder: Path) -> report.Picture:
    sizes = {int(n): cell for n, cell in results["temporaries"].items()}

    def line(which: str, name: str) -> list[Any]:
        return [[(n, (sizes[n][which].get(name) or 0) / 2**20) for n in sorted(sizes)]]

    names = {which: list(sizes[min(sizes)][which]) for which in PASSES}
    panels = [(words, {n: line(p, n) for n in names[p]}) for p, words in PASSES.items()]
    return report.picture(
        folder, "memory", "curves", panels, x="length (T = S)", y="temporaries, MiB", log_x=True,
        log_y=True, markers=True, missing="not measured",
        alt="Temporaries against length, forward and with gradient; the numbers are in the tables "
        "below.",
        caption="Temporaries against length, both axes logarithmic.",
    )  # fmt: skip


def _range(ratios: Mapping[int, float]) -> str:
    return " to ".join(dict.fromkeys(f"{end(ratios.values()):.1f}" for end in (min, max)))
