"""What additive and dot-product attention cost, against length."""

import dataclasses
import functools
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from experiments.core.run import RunFolder
from experiments.core.settings import StudyOptions, check_positive, flag
from experiments.errors import UsageError

PASSES = {"forward": "forward", "gradient": "forward and backward"}


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

    lengths: tuple[int, ...] | None = None
    """Lengths (T = S) to time; from the preset when not given."""
    memory_lengths: tuple[int, ...] | None = None
    """Further lengths that are compiled for their memory but not run."""
    heads: int = 1
    """Query heads (N)."""
    depth: int = 64
    """Depth of a head (H)."""
    hidden: int = 64
    """Hidden width of the additive score (A)."""
    rounds: int | None = None
    """Interleaved rounds that each median is over."""
    run_limit: int = 2048
    """Forms whose temporaries exceed this many MiB are compiled, not run."""

    study: ClassVar[str] = "cost"
    preset_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "quick": {
            "lengths": (64, 256, 1024),
            "memory_lengths": (4096,),
            "rounds": 3,
            "seeds": 1,
        },
        "default": {
            "lengths": (32, 64, 128, 256, 512, 1024, 2048),
            "memory_lengths": (4096, 16384),
            "rounds": 5,
            "seeds": 3,
        },
        "full": {
            "lengths": (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
            "memory_lengths": (16384, 65536),
            "rounds": 9,
            "seeds": 5,
        },
    }

    def check(self) -> None:
        """Raise UsageError where a value makes no sense."""
        super().check()
        for name in ("heads", "depth", "hidden", "rounds", "run_limit"):
            check_positive(flag(name), getattr(self, name))
        for name in ("lengths", "memory_lengths"):
            for value in getattr(self, name) or ():
                check_positive(flag(name), value)
        if not self.lengths:
            raise UsageError("--lengths is empty; give at least one, such as --lengths 256")

    def run(self) -> Path:
        """Check the forms, measure them and write the report."""
        from experiments.bench import forms
        from experiments.progress import Progress
        from experiments.reports.cost import build

        lengths = sorted(set(self.lengths or ()))
        longer = sorted(set(self.memory_lengths or ()) - set(lengths))
        total = self.seeds * len(lengths) + len(longer)
        with RunFolder.open(self) as folder, Progress(total) as progress:
            wrong = folder.cell("check", lambda: {name: forms.check(name) for name in forms.FORMS})
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
                        timed.append(folder.cell(f"length{length}-seed{seed}", work))
                        piece.advance(f"seed {seed}")
            sizes = {cell["length"]: cell["temporaries"] for cell in timed}
            with progress.piece("memory", len(longer)) as piece:
                for length in longer:
                    work = functools.partial(_sizes, self, good, length)
                    sizes[length] = folder.cell(f"memory{length}", work)["temporaries"]
                    piece.advance(f"length {length}")
            return folder.conclude(_results(self, wrong, timed, sizes), build)

    def _inputs(self, length: int, seed: int) -> Any:
        from experiments.bench import forms

        return forms.inputs(seed, length, heads=self.heads, depth=self.depth, hidden=self.hidden)


def _compiled(names: list[str], arguments: Any) -> dict[tuple[str, str], Any]:
    from experiments.bench import forms
    from experiments.bench.contest import gradient
    from experiments.measure import compile_for

    compiled = {}
    for name in names:
        form = forms.FORMS[name][1]
        compiled[name, "forward"] = compile_for(form, arguments)
        compiled[name, "gradient"] = compile_for(gradient(form), arguments)
    return compiled


def _measure(options: Cost, length: int, seed: int, compile_all: Any) -> dict[str, Any]:
    """Return times and temporaries of the forms that ``compile_all`` compiles, at one length."""
    from experiments.bench import forms
    from experiments.measure import interleaved

    arguments = options._inputs(length, seed)
    compiled = compile_all()
    names = list(dict.fromkeys(name for name, _ in compiled))
    limit = options.run_limit * 2**20
    times: dict[str, dict[str, Any]] = {}
    for which in PASSES:
        calls = {
            name: (lambda c=c: c.call(*arguments))
            for (name, p), c in compiled.items()
            if p == which and (c.temporaries or 0) <= limit
        }
        times[which] = interleaved(calls, rounds=options.rounds) if calls else {}
    return {
        "length": length,
        "seed": seed,
        "milliseconds": times,
        "temporaries": _temporaries(names, compiled),
        "picked": {s: forms.picked(s, arguments) for s in forms.SCORES},
    }


def _sizes(options: Cost, names: list[str], length: int) -> dict[str, Any]:
    """Return the temporaries at a length that is compiled but not run."""
    import jax

    from experiments.bench import forms

    arguments = jax.eval_shape(lambda: options._inputs(length, 0))  # too long to run
    return {
        "length": length,
        "temporaries": _temporaries(names, _compiled(names, arguments)),
        "picked": {s: forms.picked(s, arguments) for s in forms.SCORES},
    }


def _temporaries(names: list[str], compiled: dict[tuple[str, str], Any]) -> dict[str, Any]:
    return {p: {name: compiled[name, p].temporaries for name in names} for p in PASSES}


def _results(
    options: Cost, wrong: dict[str, str | None], timed: list[dict[str, Any]], sizes: dict
) -> dict[str, Any]:
    """Return what results.json holds: checks, measurements, summaries, crossovers."""
    from experiments.measure import crossover

    lengths = sorted({c["length"] for c in timed})
    names = [n for n, fault in wrong.items() if fault is None]

    def values(which: str, name: str, length: int) -> list[float | None]:
        cells = [c for c in timed if c["length"] == length]
        return [c["milliseconds"][which].get(name, {}).get("median") for c in cells]

    medians: dict[str, dict[str, list[float | None]]] = {}
    for which in PASSES:
        medians[which] = {}
        for name in names:
            row = [[v for v in values(which, name, n) if v is not None] for n in lengths]
            medians[which][name] = [statistics.fmean(v) if v else None for v in row]
    crossings = []
    for which in PASSES:
        for first, second in _PAIRS:
            if first in names and second in names:
                at = crossover(lengths, medians[which][first], medians[which][second])
                crossings.append({"pass": which, "slower": first, "faster": second, "from": at})
    picked = {c["length"]: c["picked"] for c in timed}
    return {
        "question": _QUESTION,
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
    ("textbook additive", "textbook dot"),
    ("textbook additive", "our additive"),
    ("textbook dot", "our dot"),
    ("our additive", "our dot"),
    ("our additive", "textbook dot"),
)
_QUESTION = (
    "Additive attention asks a small network about every pair of positions, dot-product attention "
    "multiplies two matrices. What does each cost in time and memory as the length grows, written "
    "as in the textbook and as this library computes it, and at which length does each stop paying "
    "on this machine?"
)
