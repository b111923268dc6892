"""Speed of the library against other libraries and its targets."""

import contextlib
import dataclasses
import functools
import gc
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from experiments.core.run import RunFolder
from experiments.core.settings import FROM_PRESET, PRESETS, StudyOptions
from experiments.errors import UsageError
from experiments.report import blocks as report


@dataclasses.dataclass(frozen=True)
class Bench(StudyOptions):
    """How fast is this library's attention, and how much memory does it need?

    Ratios of medians from interleaved rounds, so that a slow spell of the machine hits all
    contestants alike: ours against jax.nn, Flax and PyTorch (where installed), sparse against full,
    additive against dot. Compile time and temporaries apart. Before anything is timed, each of our
    kernels passes the conformance suite; of one that does not, no number is given.

    Beside it: Dao et al. 2022 (arXiv 2205.14135), figure 3.

    Command: python -m experiments bench. Takes 10 minutes on two cores; quick 3 minutes.
    Expected: ours below 0.4 of jax.nn's time on a CPU; cost follows the visited blocks; memory that
    grows with the length, not with its square.
    """

    cases: tuple[str, ...] = ()
    """Names of the cases to measure; all of the preset when not given."""
    rounds: int = FROM_PRESET
    """Interleaved rounds that each median is over; --seeds repeats them, and takes the median of
    those."""

    study: ClassVar[str] = "bench"
    may_be_empty: ClassVar = ("cases",)
    preset_values: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "quick": {"rounds": 3, "seeds": 1},
        "default": {"rounds": 5, "seeds": 1},
        "full": {"rounds": 11, "seeds": 3},
    }

    def run(self) -> Path:
        """Check the kernels, measure the cases and write the report."""
        chosen = self._chosen()
        with RunFolder.open(self, len(chosen)) as run:
            progress = run.progress
            thorough = self.preset != "quick"
            faults = {}
            for kernel in _kernels():
                work = functools.partial(_faults, kernel, thorough=thorough)
                faults[kernel] = run.cell(f"conformance-{kernel}", work)["fault"]
                progress.say(f"{kernel}: {faults[kernel] or 'conforms'}")
            measured = []
            if not any(faults.values()):
                for case in chosen:
                    with progress.piece(case.name, 1) as piece:
                        work = functools.partial(_measure, case, self.rounds, self.seeds)
                        measured.append(run.cell(f"case-{case.name}", work))
                        piece.advance(_short(measured[-1]))
            return run.conclude({"conformance": faults, "cases": measured}, build_report)

    def _chosen(self) -> list[Any]:
        from experiments.bench.table import table

        every = {case.name: case for case in table()}
        unknown = [name for name in self.cases if name not in every]
        if unknown:
            raise UsageError(f"--cases {' '.join(unknown)} unknown; choose from {', '.join(every)}")
        size = PRESETS.index(self.preset)
        return [
            case
            for case in every.values()
            if (case.name in self.cases if self.cases else PRESETS.index(case.sized) <= size)
        ]


def _kernels() -> list[str]:
    """Return the kernels that this device has."""
    import jax

    from attention_jax.plan import KERNELS, VENDORS

    own = VENDORS.get(jax.default_backend())
    return [name for name in KERNELS if name == own or name not in VENDORS.values()]


def _faults(kernel: str, *, thorough: bool) -> dict[str, Any]:
    """Return the failure of a kernel in the conformance suite, or None."""
    import attention_jax as aj
    from attention_jax.plan import VENDORS

    everything = set(aj.testing.FEATURES) - {"scale"}
    if not thorough:
        everything &= {"mask", "bias", "lengths", "grouped_heads", "gradients", "bias_gradient"}
    if kernel in VENDORS.values() or kernel in _NARROW:
        return {"fault": _unlike_dense(kernel)}
    f = functools.partial(aj.attend, implementation=kernel)
    spaces: dict[str, Any] = {"scores": aj.scores, "masks": aj.masks} if thorough else {}
    with _unoptimised():
        try:
            aj.testing.check_attention(f, everything, **spaces)
        except AssertionError as error:
            return {"fault": str(error)}
    return {"fault": None}


@contextlib.contextmanager
def _unoptimised() -> Iterator[None]:
    """Compile in half the time functions that run only once; results are not kept."""
    import jax

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
        jax.clear_caches()


# Kernels for special requests only: the number of queries, and whether they support a mask.
_NARROW = {"short": (256, False), "single_query": (1, True)}


def _unlike_dense(kernel: str) -> str | None:
    """Return the difference of a special kernel from the dense one, or None.

    A vendor's takes bfloat16 and multiples of 128, so it is compared on these, with gradients.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    import attention_jax as aj
    from experiments.bench.contest import gradient, normal

    queries, masked = _NARROW.get(kernel, (256, True))
    query, *rest = normal(0, *[(2, 256, 2, 128)] * 3, dtype=jnp.bfloat16)
    arrays = (query[:, -queries:], *rest)
    mask = aj.masks.causal(align="end") if masked else None

    def both(name: str) -> Any:
        f = functools.partial(aj.attend, mask=mask, implementation=name)
        return jax.jit(lambda *qkv: (f(*qkv), *gradient(f)(*qkv)))(*arrays)

    got, expected = both(kernel), both("dense")
    for what, a, b in zip(("out", "query", "key", "value"), got, expected, strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        error = float(np.abs(a - b).max() / np.abs(b).max())
        if not error <= 2e-2:
            return f"{what} (or its gradient) is off by {error:.1e} of its largest entry"
    return None


def _measure(case: Any, rounds: int, repeats: int) -> dict[str, Any]:
    """Return times, temporaries, compile times and verdicts of one case."""
    from experiments.core.measure import interleaved

    passes: dict[str, Any] = {}
    for which in case.passes:
        prepared = {name: prepare(which) for name, prepare in case.contestants.items()}
        calls = {name: p.call for name, p in prepared.items()}
        passes[which] = {
            "milliseconds": _merged(
                [interleaved(calls, rounds=rounds) for _ in range(repeats if case.run else 0)]
            ),
            "temporaries": {name: p.temporaries for name, p in prepared.items()},
            "compile_seconds": {name: p.compile_seconds for name, p in prepared.items()},
        }
        del prepared, calls
        gc.collect()
    rows = [row for which in passes for row in _verdicts(case, which, passes[which])]
    return {"name": case.name, "title": case.title, "passes": passes, "rows": rows}


def _merged(passes: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the median of the medians, the lowest and the highest of all, by contestant."""
    merge = {"median": statistics.median, "low": min, "high": max}
    return {
        name: {key: how(one[name][key] for one in passes) for key, how in merge.items()}
        for name in (passes[0] if passes else {})
    }


def _verdicts(case: Any, which: str, measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the case's ratios and limits in one pass, with their targets."""

    def value(quantity: str, name: str) -> float:
        if quantity == "time":
            return measured["milliseconds"][name]["median"]
        return measured["temporaries" if quantity == "temporaries" else "compile_seconds"][name]

    rows = []
    for ratio in case.ratios:
        quotient = value(ratio.quantity, ratio.of) / value(ratio.quantity, ratio.to)
        rows.append(_row(which, ratio.quantity, ratio, quotient, ratio.at_most.get(which)))
    for limit in case.limits:
        if limit.which == which:
            got = value(limit.quantity, limit.of)
            rows.append(_row(which, limit.quantity, limit, got, limit.at_most))
    return rows


def _row(
    which: str, quantity: str, compared: Any, value: float, at_most: float | None
) -> dict[str, Any]:
    return {
        "pass": which,
        "quantity": quantity,
        "of": compared.of,
        "to": getattr(compared, "to", None),
        "value": value,
        "at_most": at_most,
        "reached": None if at_most is None else bool(value <= at_most),
    }


def _short(case: dict[str, Any]) -> str:
    ratios = [f"{row['value']:.2f}" for row in case["rows"] if row["to"]]
    return f"{case['name']} {' / '.join(ratios)}"


_PASSES = {"forward": "forward", "gradient": "forward and backward"}


def build_report(results: report.Results, folder: Path) -> report.Report:
    """Return the report on ``results`` (the document of results.json), drawing into ``folder``."""
    faults = {kernel: fault for kernel, fault in results["conformance"].items() if fault}
    timed: dict[str, dict[str, tuple[float, float | None]]] = {}
    for case in results["cases"]:
        for row in case["rows"]:
            if row["to"] and row["quantity"] == "time":
                name = f"{case['name']}: {row['of']} / {row['to']}"
                timed.setdefault(name, {})[_PASSES[row["pass"]]] = row["value"], row["at_most"]
    drawn = [
        report.picture(
            folder, "ratios", "ratios", timed,
            alt="Time ratios of all cases with their targets; the numbers are in the tables below.",
            caption="Ratios of times, on a logarithmic axis; a tick across a bar is its target.",
        )
    ] if timed else []  # fmt: skip
    return report.Report(
        title="How fast the library's attention is",
        answer=_answer(results),
        warnings=[
            f"{kernel} does not conform, so nothing is timed. {fault}"
            for kernel, fault in faults.items()
        ],
        sections=[
            report.Section("Ratios", [_HOW], [*drawn, *map(_ratios, results["cases"])]),
            report.Section(
                "Times, temporaries and compiling",
                ["Medians of the rounds, with the fastest and the slowest round."],
                [_details(case) for case in results["cases"]],
            ),
        ],
    )


_HOW = (
    "Each ratio is of two medians from the same rounds, in which the contestants take turns: a "
    "slow spell of the machine affects all of them. Below 1, the first is faster or smaller. A "
    "target is the ratio that this library aims at."
)


def _answer(results: report.Results) -> list[str]:
    rows = [(case["name"], row) for case in results["cases"] for row in case["rows"]]
    aimed = [(name, row) for name, row in rows if row["reached"] is not None]
    if not rows:
        return ["Nothing was measured: see the warnings above."]
    said = [f"{sum(row['reached'] for _, row in aimed)} of {len(aimed)} targets are reached."]
    missed = [
        f"{name} ({_PASSES[row['pass']]}): {_shown(row, 'value')} instead of "
        f"{_shown(row, 'at_most')}"
        for name, row in aimed
        if not row["reached"]
    ]
    return [*said, f"Not reached: {'; '.join(missed)}."] if missed else said


def _ratios(case: report.Results) -> report.Table:
    rows = [
        [
            f"{row['of']} / {row['to']}" if row["to"] else row["of"],
            row["quantity"],
            _PASSES[row["pass"]],
            _shown(row, "value"),
            "–" if row["at_most"] is None else f"at most {_shown(row, 'at_most')}",
            {None: "–", True: "reached", False: "missed"}[row["reached"]],
        ]
        for row in case["rows"]
    ]
    columns = ["compared", "what", "pass", "measured", "target", ""]
    return report.Table(f"{case['name']}: {case['title']}", columns, rows)


def _shown(row: report.Results, key: str) -> str:
    value = row[key]
    if row["to"]:
        return f"{value:.3f}" if value < 0.2 else f"{value:.2f}"
    return report.memory(value) if row["quantity"] == "temporaries" else f"{value:.1f} s"


def _details(case: report.Results) -> report.Table:
    rows = []
    for which, measured in case["passes"].items():
        for name, size in measured["temporaries"].items():
            time = measured["milliseconds"].get(name) or {}
            low, high = (report.number(time.get(end), ".1f") for end in ("low", "high"))
            median = report.number(time.get("median"), ".1f")
            seconds = report.number(measured["compile_seconds"][name], ".1f")
            span = f"{low} to {high}" if time else "–"
            rows.append([name, _PASSES[which], median, span, report.memory(size), seconds])
    columns = ["contestant", "pass", "ms", "range", "temporaries", "compiling, s"]
    return report.Table(case["name"], columns, rows)
