"""Which position schemes carry over to inputs longer than any trained on."""

import dataclasses
import functools
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from experiments.core.run import RunFolder
from experiments.core.settings import StudyOptions, check_choice, check_positive, flag
from experiments.errors import UsageError

# As experiments.schemes.SCHEMES, which would load JAX.
SCHEMES = (
    "none", "log-n", "sinusoidal", "learned", "rotary", "rotary-linear", "rotary-ntk",
    "rotary-yarn", "alibi", "t5", "shaw", "transformer-xl",
)  # fmt: skip
TASKS = ("max", "copy", "reverse", "sort")


@dataclasses.dataclass(frozen=True)
class Positions(StudyOptions):
    """Which position schemes carry over to inputs longer than any trained on?

    A small causal Transformer is trained with each scheme on lists of up to --length, and tested on
    longer ones: max retrieval, copying, reversing, sorting. Schemes: none, none with log-n scaled
    logits, sinusoidal, learned, rotary (as it is, and with linear, NTK and YaRN scaling at test
    time), ALiBi, T5, Shaw, Transformer-XL.

    Beside it: ALiBi (arXiv 2108.12409), T5 (1910.10683), RoFormer (2104.09864), Kazemnejad et
    al. 2023 (2305.19466), scalable softmax (2501.19399), Chiang and Cholak 2022 (2202.12172).

    Command: python -m experiments positions. Takes 5 minutes on two cores; quick 1 minute, full 3
    hours.
    Expected: the retrieval of a maximum fades with the length, least with log-n; learned and
    sinusoidal positions and rotary without a scaling disturb it more than none, T5 and Shaw less.
    """

    schemes: tuple[str, ...] = SCHEMES
    """Position schemes."""
    tasks: tuple[str, ...] | None = None
    """max, copy, reverse, sort."""
    length: int = 16
    """The longest list trained on."""
    ratios: tuple[int, ...] | None = None
    """Test lengths over the trained one; 1 is always among them."""
    steps: int | None = None
    """Training steps of each model."""
    batch_size: int | None = None
    """Problems in a batch, a multiple of 4: they have four lengths."""
    learning_rate: float = 3e-3
    """The highest learning rate, after the warm-up."""

    study: ClassVar[str] = "positions"
    preset_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "quick": {
            "tasks": ("max",), "ratios": (1, 2, 4), "steps": 150, "batch_size": 32, "seeds": 1,
        },
        "default": {
            "tasks": ("max", "sort", "copy"), "ratios": (1, 2, 4, 8), "steps": 400,
            "batch_size": 32, "seeds": 1,
        },
        "full": {
            "tasks": TASKS, "ratios": (1, 2, 4, 8, 16, 64), "steps": 5000, "batch_size": 64,
            "seeds": 3,
        },
    }  # fmt: skip

    def check(self) -> None:
        """Raise UsageError where a value makes no sense."""
        super().check()
        for name, choices in (("schemes", SCHEMES), ("tasks", TASKS)):
            given = getattr(self, name) or ()
            for value in given:
                check_choice(flag(name), value, choices)
            if not given or len(set(given)) < len(given):
                raise UsageError(f"{flag(name)} must name at least one, each once")
        check_positive("--length", self.length, least=4)
        check_positive("--steps", self.steps)
        check_positive("--learning-rate", self.learning_rate, least=0)
        for value in self.ratios or ():
            check_positive("--ratios", value)
        check_positive("--batch-size", self.batch_size, least=4)
        if self.batch_size and self.batch_size % 4:
            raise UsageError(f"--batch-size {self.batch_size} must be a multiple of 4")

    def run(self) -> Path:
        """Train with each scheme, test at each length and write the report."""
        from experiments import schemes
        from experiments.compiling import Executables
        from experiments.progress import Progress
        from experiments.reports.positions import build

        trained = dict.fromkeys(schemes.trained_as(scheme) for scheme in self.schemes)
        models = [
            (task, scheme, seed)
            for task in self.tasks or ()
            for scheme in trained
            for seed in range(self.seeds or 1)
        ]
        with RunFolder.open(self) as folder, Progress(len(models) * (self.steps or 0)) as progress:
            executables = Executables()
            cells = [_trained(self, folder, progress, executables, *model) for model in models]
            return folder.conclude(_results(self, cells), build)


_QUESTION = (
    "Attention does not know where its keys stand unless it is told. The ways to tell it agree at "
    "the lengths that a model was trained on. Which of them still work on inputs that are longer?"
)
_TESTED = 256  # problems at each length, fewer at long ones
_TESTED_PLACES = 2**14  # places of all of them together, at most


def _trained(
    options: Positions, folder: RunFolder, progress: Any, executables: Any, *model: Any
) -> dict[str, Any]:
    """Return the finished cell of one model, training and testing it if it is not there."""
    task, scheme, seed = model
    key = f"{task}-{scheme}-seed{seed}"
    if folder.has(key):
        progress.skip(options.steps)
    cell = folder.cell(key, lambda: _train(options, folder, progress, executables, key, *model))
    folder.drop_checkpoints(key)
    return cell


def _ratios(options: Positions) -> list[int]:
    return sorted({1, *(options.ratios or ())})


def _train(
    options: Positions, folder: RunFolder, progress: Any, executables: Any, key: str,
    task: str, scheme: str, seed: int,
) -> dict[str, Any]:  # fmt: skip
    from experiments import schemes, train_reader
    from experiments.data import tasks
    from experiments.models import reader

    longest = options.length

    def room(ratio: int) -> int:
        """Places of the longest list at a ratio, with its answers."""
        return ratio * longest + tasks.answers_of(task, ratio * longest)

    def problems(step: int) -> tasks.Batch:
        """Problems of four lengths, any up to the longest."""
        rng = tasks.generator(task, seed, step)
        size = (options.batch_size or 4) // 4
        lengths = rng.integers(1, longest, size=4, endpoint=True).tolist()
        made = [tasks.TASKS[task](rng, size, length) for length in lengths]
        return tasks.joined([tasks.causal(some, room(1)) for some in made])

    ratios = _ratios(options)
    # A causal model does not see the padding behind, so one shape does for all longer tests.
    tests = {r: _test(task, seed, r * longest, room(1 if r == 1 else ratios[-1])) for r in ratios}
    model = _model(options, scheme, 1, seed, task)
    longer = [
        functools.partial(reader.prepare_observe, model, tests[r]) for r in ratios[-1:] if r > 1
    ]
    model, history = train_reader.train_reader(
        model,
        problems,
        tests[1],
        steps=options.steps or 1,
        learning_rate=options.learning_rate,
        seed=seed,
        checkpoints=folder.checkpoints(key),
        progress=progress,
        name=f"{task}, {scheme}, seed {seed}",
        executables=executables,
        besides=() if scheme in schemes.STRETCHED else longer,
    )
    tested = [
        {"scheme": other, "ratio": ratio, **_look(options, model, other, ratio, seed, task, tests)}
        for other in options.schemes
        if schemes.trained_as(other) == scheme
        for ratio in ratios
    ]
    recorded = train_reader.record(model, history)
    return {"task": task, "scheme": scheme, "seed": seed, **recorded, "tested": tested}


def _test(task: str, seed: int, length: int, places: int) -> Any:
    """Return the test problems of one length."""
    from experiments.data import tasks

    count = max(16, min(_TESTED, _TESTED_PLACES // places))
    rng = tasks.generator(f"{task} {length}", seed, tasks.HELD_OUT)
    return tasks.causal(tasks.TASKS[task](rng, count, length), places)


def _model(options: Positions, scheme: str, ratio: int, seed: int, task: str) -> Any:
    """Return a fresh model with the scheme as it is at this ratio."""
    from flax import nnx

    from experiments import schemes
    from experiments.data import tasks
    from experiments.models import reader

    size = reader.Size()
    trained = options.length + tasks.answers_of(task, options.length)
    layer = schemes.layer(
        scheme, trained=trained, tested=trained * ratio, width=size.features,
        head_depth=size.features // size.heads,
    )  # fmt: skip
    longest = trained * _ratios(options)[-1]
    return reader.Reader(
        size, layer, position_embedding=schemes.position_embedding(scheme), length=longest,
        rngs=nnx.Rngs(seed),
    )  # fmt: skip


def _look(
    options: Positions, model: Any, scheme: str, ratio: int, seed: int, task: str, tests: Any
) -> dict[str, float]:
    """Return the scores of a trained model at one ratio, with the scheme as it is there."""
    from flax import nnx

    from experiments import schemes
    from experiments.data import tasks
    from experiments.models import reader

    batch = tests[ratio]
    if scheme in schemes.STRETCHED and ratio > 1:
        stretched = _model(options, scheme, ratio, seed, task)
        nnx.update(stretched, nnx.state(model))
        model = stretched
        if scheme == "log-n":  # it goes by the number of keys, so there must be no padding
            length = ratio * options.length
            batch = _test(task, seed, length, length + tasks.answers_of(task, length))
    return reader.observe(model, batch)


def _results(options: Positions, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what results.json holds."""
    from experiments.data import tasks

    ratios = _ratios(options)
    accuracy: dict[str, dict[str, list[list[float]]]] = {}
    for task in options.tasks or ():
        rows = {scheme: [[] for _ in ratios] for scheme in options.schemes}
        for cell in cells:
            for test in cell["tested"] if cell["task"] == task else ():
                rows[test["scheme"]][ratios.index(test["ratio"])].append(test["accuracy"])
        accuracy[task] = rows
    return {
        "question": _QUESTION,
        "trained_length": options.length,
        "ratios": ratios,
        "accuracy": accuracy,
        "mean_accuracy": {
            task: {s: [statistics.fmean(v) for v in row] for s, row in rows.items()}
            for task, rows in accuracy.items()
        },
        "chance": {task: tasks.CHANCE[task] for task in accuracy},
        "models": cells,
    }
