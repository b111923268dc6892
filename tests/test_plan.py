"""The kernel that `explain` reports is the kernel that runs, on both sides of every threshold."""

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax import plan
from attention_jax.diagnostics import capture
from attention_jax.kernels import blockwise, dense, flash, per_head, problem, tiling
from attention_jax.masks.data import Padding
from attention_jax.masks.patterns import Causal
from attention_jax.plan import KERNELS

H, V = 4, 3
RNG = np.random.default_rng(0)
ADDITIVE = aj.scores.additive(
    *(RNG.normal(size=shape).astype(np.float32) for shape in ((H, 5), (H, 5), (5,)))
)
DROPOUT = {"dropout_rate": 0.5, "dropout_key": np.zeros(2, np.uint32)}
CAUSAL = {"mask": aj.masks.causal()}
STATISTICS = {"statistics": True}


def case(name, T, S, N=2, K=2, implementation=None, **options):
    named = [] if implementation is None else np.ravel(implementation).tolist()
    label = "-".join(map(str, (name, T, S, N, K, *options, *named)))
    if implementation is not None:
        options["implementation"] = implementation
    return pytest.param(name, (T, S, N, K), options, id=label)


CASES = [
    # 64 × 64 pairs: without a loop over heads
    case("dense", 64, 64),
    case("short", 64, 65),
    case("short", 65, 64),
    case("dense", 64, 64, **CAUSAL),
    case("flash", 64, 65, **CAUSAL),
    case("dense", 64, 64, **DROPOUT),
    case("flash", 65, 64, **DROPOUT),
    case("dense", 64, 64, score=ADDITIVE),
    case("flash", 65, 64, score=ADDITIVE),
    case("dense", 64, 64, bias=np.ones((64, 64), np.float32)),
    case("flash", 65, 64, bias=np.ones((65, 64), np.float32)),
    case("dense", 64, 64, **STATISTICS),
    case("flash", 65, 64, **STATISTICS),
    case("dense", 2, 2048),
    case("flash", 2, 2049),
    # lengths of 256: all planes in cache
    case("short", 256, 256),
    case("short", 256, 256, N=4),
    case("flash", 256, 257),
    case("flash", 257, 256),
    case("flash", 65, 64, block_size=64),
    case("flash", 9, 8, block_size=4),
    # one query
    case("single_query", 1, 1),
    case("single_query", 1, 4096),
    case("flash", 1, 4097),
    case("single_query", 1, 30, N=6, **CAUSAL),
    case("single_query", 1, 30, **STATISTICS),
    case("single_query", 1, 30, N=16, K=16),
    case("dense", 1, 30, N=17, K=17),
    case("single_query", 1, 30, N=32, K=16),
    case("dense", 1, 30, score=ADDITIVE),
    case("dense", 1, 30, **DROPOUT),
    case("flash", 1, 30, block_size=8),
    # a name is what runs
    *(case(name, T, 30, implementation=name) for T in (1, 70) for name in ("dense", "flash")),
    *(case("blockwise", T, 30, implementation="blockwise") for T in (1, 70)),
    case("short", 9, 8, implementation="short"),
    case("single_query", 1, 5000, implementation="single_query"),
    case("dense", 70, 70, implementation=("single_query", "dense", "short")),
]


@pytest.fixture
def ran(monkeypatch):
    """The names of the kernels that are run, in order."""
    names: list[str] = []

    def recording(name: str, run: Any) -> Any:
        def recorded(*arguments: Any) -> Any:
            names.append(name)
            return run(*arguments)

        return recorded

    for name, kernel in KERNELS.items():
        monkeypatch.setattr(kernel, "run", recording(name, kernel.run))
    jax.clear_caches()
    yield names
    jax.clear_caches()


def arrays(sizes):
    T, S, N, K = sizes
    return [jnp.ones(shape) for shape in ((1, T, N, H), (1, S, K, H), (1, S, K, V))]


def loss(*arrays, statistics=False, **options):
    if not statistics:
        return aj.attend(*arrays, **options).sum()
    out, stats = aj.attend_with_stats(*arrays, **options)
    return out.sum() + stats.lse.sum()


@pytest.mark.parametrize(("name", "sizes", "options"), CASES)
def test_the_kernel_that_is_explained_runs(name, sizes, options, ran):
    given = arrays(sizes)
    told = {key: x for key, x in options.items() if key != "statistics"}
    if "statistics" not in options:
        assert aj.explain(*given, **told).implementation == name
    jax.eval_shape(lambda *x: loss(*x, **options), *given)
    assert ran == [name]
    ran.clear()
    jax.clear_caches()
    jax.eval_shape(jax.grad(lambda *x: loss(*x, **options), (0, 1, 2)), *given)
    assert set(ran) == {name}


@pytest.mark.parametrize(("name", "sizes", "options"), CASES[::4])
def test_the_kernel_that_is_recorded_is_the_one_that_is_explained(name, sizes, options):
    facts = capture(lambda *x: loss(*x, **options), *arrays(sizes))["attend"].facts
    assert facts.implementation == name


STEPS = (
    (plan, "choose"), (problem, "lower"), (per_head, "lower"), (dense, "lower"),
    (tiling, "verdict"), (problem, "verdict"), (flash, "tile"), (blockwise, "tile"),
    (dense, "tile"), (Causal, "prepare"), (Padding, "prepare"),
)  # fmt: skip


@pytest.fixture
def counts(monkeypatch):
    """The number of calls of each step of planning and lowering, by name."""
    calls: collections.Counter[str] = collections.Counter()

    def counting(name: str, function: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*args, **options)

        return counted

    for owner, name in STEPS:
        monkeypatch.setattr(owner, name, counting(name, getattr(owner, name)))
    jax.clear_caches()
    yield calls
    jax.clear_caches()


@pytest.mark.parametrize("implementation", [None, "blockwise", "dense"])
@pytest.mark.parametrize("mask", [aj.masks.causal(), aj.masks.padding(np.array([900]))])
def test_each_step_runs_once_in_a_call(implementation, mask, counts):
    given = arrays((1024, 1024, 2, 2))
    for first in (True, False):
        counts.clear()
        aj.attend(*given, mask=mask, implementation=implementation)
        wanted = {"choose": 1, "tile": 1, "prepare": 1}
        compiled = {"lower": 1} if first else {}  # a second call finds the compiled program
        static = not jax.tree.leaves(mask)
        if implementation != "dense" and (first or static):
            compiled["verdict"] = 1
        assert counts == {**wanted, **compiled}


@pytest.mark.parametrize(
    ("name", "T", "S", "options"),
    [
        ("dense", 256, 256, {}),
        ("flash", 256, 257, {}),
        ("dense", 1, 65536, {}),
        ("flash", 1, 65537, CAUSAL),
    ],
)
def test_with_heads_vectorised_up_to_256_by_256_pairs_are_one_block(
    name, T, S, options, monkeypatch
):
    monkeypatch.setattr(tiling, "on_one_cpu", lambda: False)
    shapes = (jax.ShapeDtypeStruct((1, n, 2, H), np.float32) for n in (T, S, S))
    assert aj.explain(*shapes, **options).implementation == name


def test_the_plan_says_of_every_other_kernel_why_it_does_not_run():
    for sizes in ((9, 8, 2, 2), (1, 8, 2, 2), (70, 70, 2, 2), (300, 300, 2, 2)):
        found = aj.explain(*arrays(sizes))
        assert set(found.reasons) == set(KERNELS) - {found.implementation}
        assert all(found.reasons.values())


@pytest.mark.parametrize("sizes", [(9, 8, 2, 2), (1, 8, 2, 2), (70, 70, 2, 2)])
def test_a_kernel_without_blocks_is_planned_as_one_block_of_all_pairs(sizes):
    found = aj.explain(*arrays(sizes))
    assert found.block_size == sizes[:2]
    assert (found.visited, found.skipped) == (1, 0)
    planes = 2 * sizes[0] * sizes[1] * sizes[2] * 4  # logits and weights, float32
    assert found.temporaries >= planes
