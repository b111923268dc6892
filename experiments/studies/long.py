"""The cost of patterns and sub-quadratic families by length, and their accuracy on tasks."""

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from experiments.core.run import RunFolder
from experiments.core.settings import FROM_PRESET, TrainingOptions
from experiments.errors import UsageError

# As experiments.families.MAKERS and experiments.data.tasks.TASKS, which would load JAX.
NAMES = (
    "full", "window", "block-diagonal", "dilated", "strided", "random", "prefix", "global",
    "longformer", "bigbird", "axial", "linear-elu", "linear-relu", "linear-cosine",
    "linear-favor", "low-rank", "nystrom", "memory-compressed", "lsh", "routed",
)  # fmt: skip
TASKS = ("recall", "max", "listops", "copy", "reverse", "sort")
PASSES = ("forward", "gradient")


@dataclasses.dataclass(frozen=True)
class Long(TrainingOptions):
    """What do sparse patterns and sub-quadratic families cost against length, and what is lost?

    Cost: medians of interleaved rounds and temporaries of the compiled functions from length 512
    to 16,384, with exponents fitted by least squares in log-log: 1 is linear, 2 the square. Each is
    compared with NumPy first. Quality: one small Transformer trained with each, on associative
    recall, max retrieval, ListOps, copying, reversing and sorting.

    Beside it: Tay et al. 2020 (arXiv 2011.04006, Long Range Arena, second-hand), averages.

    Command: python -m experiments long. Takes 5 minutes on two cores; quick 1 minute, full 3 hours.
    Expected: windows, linear attention and LSH near exponent 1, full attention near 2; what needs a
    far token is lost by a window, recall of many pairs by linear attention.
    """

    names: tuple[str, ...] = NAMES
    """Patterns and families to time; full is the one the others are compared with."""
    lengths: tuple[int, ...] = FROM_PRESET
    """Lengths (T = S) to time."""
    passes: tuple[str, ...] = FROM_PRESET
    """forward, gradient (forward and backward)."""
    reach: int = 256
    """Approximate number of keys per query: window, rank, four blocks."""
    heads: int = 1
    """Query heads (N) in timing."""
    depth: int = 64
    """Depth of a head (H) in timing."""
    rounds: int = FROM_PRESET
    """Interleaved rounds that each median is over."""
    tasks: tuple[str, ...] = FROM_PRESET
    """Tasks to train on: recall, max, listops, copy, reverse, sort."""
    trained: tuple[str, ...] = FROM_PRESET
    """Patterns and families to train."""
    places: int = FROM_PRESET
    """Length of a problem with its answers; a query attends to about a quarter of it."""

    study: ClassVar[str] = "long"
    defaults: ClassVar = {"learning_rate": 0.003}
    choices: ClassVar = {"names": NAMES, "trained": NAMES, "passes": PASSES, "tasks": TASKS}
    intervals: ClassVar = {"reach": "[4, inf)", "places": "[16, inf)", "lengths": "[4, inf)"}
    may_be_empty: ClassVar = ("tasks", "trained")
    preset_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "quick": {
            "lengths": (512, 4096), "passes": ("forward",), "rounds": 3, "seeds": 1,
            "tasks": ("recall",), "trained": ("full", "window", "linear-elu"),
            "places": 32, "steps": 160, "batch_size": 32,
        },
        "default": {
            "lengths": (512, 1024, 2048, 4096, 8192, 16384), "passes": ("forward",), "rounds": 3,
            "seeds": 1, "tasks": ("recall", "max", "listops", "reverse"),
            "trained": (
                "full", "window", "bigbird", "linear-elu", "linear-favor", "low-rank", "lsh",
                "routed",
            ),
            "places": 32, "steps": 300, "batch_size": 32,
        },
        "full": {
            "lengths": (512, 1024, 2048, 4096, 8192, 16384), "passes": PASSES, "rounds": 7,
            "seeds": 3, "tasks": TASKS, "trained": NAMES, "places": 64, "steps": 1000,
            "batch_size": 32,
        },
    }  # fmt: skip

    def check(self) -> None:
        """Raise UsageError where a value makes no sense."""
        super().check()
        if "recall" in (self.tasks or ()) and (self.places or 0) > _MOST_PLACES:
            raise UsageError(
                f"--places {self.places} is too many for recall, which has 64 keys; it must be "
                f"{_MOST_PLACES} or fewer"
            )

    def run(self) -> Path:
        """Check and time all of them, train the small models and write the report."""
        from experiments.studies.long_report import build_report

        lengths = sorted(set(self.lengths or ()))
        models = {
            f"{task}-{name}-seed{seed}": (task, name, seed)
            for task, name, seed in itertools.product(self.tasks, self.trained, range(self.seeds))
        }
        with RunFolder.open(self, len(lengths) + len(models) * self.steps) as run:
            progress = run.progress
            wrong = run.cell("check", lambda: _check(self))
            for name, fault in wrong.items():
                if fault:
                    progress.say(f"{name}: WRONG, {fault}; not measured")
            good = [name for name in self.names if wrong[name] is None]
            progress.say(f"{len(good)} of {len(wrong)} agree with NumPy")
            timed = []
            for length in lengths:
                with progress.piece(f"length {length}", 1) as piece:
                    work = functools.partial(_measure, self, good, length)
                    timed.append(run.cell(f"length{length}", work))
                    piece.advance(f"{len(good)} timed")
            trained = run.all_trained(models, _train)
            return run.conclude(_results(wrong, good, timed, trained, self.passes), build_report)


_MOST_PLACES = 85  # 64 pairs and 21 questions
_CHECKED = 96  # the length at which all are compared with NumPy


def _check(options: Long) -> dict[str, str | None]:
    """Return the error of each pattern and family, or None."""
    import jax

    from experiments import families
    from experiments.core.compiling import all_at_once, compiler_options

    found: dict[str, str | None] = dict.fromkeys(options.names)

    def one(name: str) -> None:
        reach, depth = 16, 8
        given = families.arguments(name, _CHECKED, reach, heads=2, depth=depth, seed=1)
        function = families.MAKERS[name](_CHECKED, reach, depth)
        out = jax.jit(function, compiler_options=compiler_options(fast_compile=True))(*given)
        found[name] = families.fault(name, out, given, reach)

    all_at_once([functools.partial(one, name) for name in options.names])
    return found


def _measure(options: Long, names: list[str], length: int) -> dict[str, Any]:
    """Return times and temporaries of all at one length, and the share of pairs of the patterns."""
    from experiments import families
    from experiments.bench.contest import gradient
    from experiments.core.compiling import all_at_once
    from experiments.core.measure import Compiled, compile_for, interleaved

    sizes = {"heads": options.heads, "depth": options.depth}
    made = {n: families.MAKERS[n](length, options.reach, options.depth) for n in names}
    given = {n: families.arguments(n, length, options.reach, **sizes, seed=0) for n in names}
    times: dict[str, Any] = {}
    temporaries: dict[str, Any] = {}
    for which in options.passes or ():
        compiled: dict[str, Compiled] = {}

        def prepare(name: str, which: str = which, kept: dict[str, Compiled] = compiled) -> None:
            function = made[name] if which == "forward" else gradient(made[name])
            kept[name] = compile_for(function, given[name])

        all_at_once([functools.partial(prepare, name) for name in names])
        calls = {n: functools.partial(compiled[n].call, *given[n]) for n in names}
        times[which] = interleaved(calls, rounds=options.rounds or 1) if calls else {}
        temporaries[which] = {n: compiled[n].temporaries for n in names}
    pairs = {n: families.pairs(n, length, options.reach) for n in names}
    return {"length": length, "milliseconds": times, "temporaries": temporaries, "pairs": pairs}


def _train(
    options: Long, run: RunFolder, key: str, task: str, name: str, seed: int
) -> dict[str, Any]:
    from flax import nnx

    from experiments import families
    from experiments.data import tasks
    from experiments.models import reader

    size = reader.Size()
    places = options.places
    layer = families.layer(name, places, max(places // 4, 4), size.features // size.heads)
    length = tasks.longest(task, places)

    def problems(step: int, count: int = options.batch_size) -> tasks.Batch:
        rng = tasks.generator(task, seed, step)
        return tasks.bidirectional(tasks.TASKS[task](rng, count, length), places)

    held_out = problems(tasks.HELD_OUT, reader.HELD_OUT_SIZE)
    model = reader.Reader(
        size, layer, position_embedding="learned", length=places, rngs=nnx.Rngs(seed)
    )
    title = f"{task}, {name}, seed {seed}"
    asked = reader.task(title, model, problems, held_out, seed=seed)
    trained = run.train(key, asked, reader.recipe(options.steps, options.learning_rate))
    return {"task": task, "name": name, "seed": seed, **reader.record(*trained)}


def _results(
    wrong: dict[str, str | None],
    good: list[str],
    timed: list[dict[str, Any]],
    trained: list[dict[str, Any]],
    passes: tuple[str, ...] | None,
) -> dict[str, Any]:
    """Return the study's part of results.json."""
    from experiments.data import tasks
    from experiments.fitting import exponent

    lengths = [cell["length"] for cell in timed]
    times = {
        which: {n: [c["milliseconds"][which][n]["median"] for c in timed] for n in good}
        for which in passes or ()
    }
    sizes = {
        which: {n: [c["temporaries"][which][n] for c in timed] for n in good}
        for which in passes or ()
    }
    fits = {
        which: {
            n: {
                "time_exponent": exponent(lengths, times[which][n]),
                "memory_exponent": exponent(lengths, sizes[which][n]),
            }
            for n in good
        }
        for which in times
    }
    accuracy: dict[str, dict[str, list[float]]] = {}
    for model in trained:
        of_task = accuracy.setdefault(model["task"], {})
        of_task.setdefault(model["name"], []).append(model["accuracy"])
    return {
        "checks": {n: fault or "agrees with NumPy" for n, fault in wrong.items()},
        "lengths": lengths,
        "milliseconds": times,
        "temporaries": sizes,
        "pairs": {n: [c["pairs"][n] for c in timed] for n in good},
        "fits": fits.get("forward", fits.get("gradient", {})),
        "gradient_fits": fits.get("gradient", {}),
        "measurements": timed,
        "chance": {task: tasks.CHANCE[task] for task in accuracy},
        "accuracy": accuracy,
        "mean_accuracy": {
            task: {n: statistics.fmean(values) for n, values in rows.items()}
            for task, rows in accuracy.items()
        },
        "models": trained,
    }
