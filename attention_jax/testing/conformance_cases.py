"""The cases of the conformance suite, a row each: a name, needed features, and a check.

Problems have the most general sizes that the implementation supports, so that simple cases already
run with T ≠ S, V ≠ H and grouped heads.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attention_jax.testing.conformance_transforms import (
    check_dropout,
    check_eager,
    check_float16_range,
    check_forward_mode,
    check_hidden,
    check_second_order,
    check_vmap,
)
from attention_jax.testing.problems import Problem, random_mask, random_problem
from attention_jax.testing.reference_scores import SCORES
from attention_jax.testing.runner import Runner


@dataclass(frozen=True)
class Case:
    """A case of the suite.

    Attributes:
        name: unique name.
        needs: names from `FEATURES`.
        check: runs the case; raises `Mismatch` if a result is wrong.
    """

    name: str
    needs: frozenset[str]
    check: Callable[[Runner], Any]


def _case(name: str, needs: str, check: Callable[[Runner], Any]) -> Case:
    return Case(name, frozenset(needs.split()), check)


def _random(mask: bool = False, bias: bool = False, **sizes: Any) -> Callable[[Runner], Any]:
    """A random problem; `sizes` replace the runner's by letter."""

    def check(runner: Runner) -> Any:
        size = runner.sizes(**sizes)
        return runner.check(random_problem(runner.rng, size, mask=mask, bias=bias))

    return check


def _dtype(name: str, **more: Any) -> Callable[[Runner], Any]:
    def check(runner: Runner) -> Any:
        problem = random_problem(runner.rng, runner.sizes(), mask=True, dtype=name, **more)
        return runner.check(problem)

    return check


def _float64(runner: Runner) -> None:
    import jax

    with jax.enable_x64(True):
        _dtype("float64")(runner)


def _mixed(runner: Runner) -> None:
    low = random_problem(runner.rng, runner.sizes(), dtype="bfloat16")
    full = random_problem(runner.rng, runner.sizes())
    runner.check(replace(low, key=full.key))
    if "bias" in runner.supports:
        biased = random_problem(runner.rng, runner.sizes(), bias=True, dtype="float16")
        runner.check(replace(full, value=low.value, bias=biased.bias))


def _empty_rows(runner: Runner) -> None:
    problem = random_problem(runner.rng, runner.sizes(), mask=True)
    assert problem.mask is not None
    for rows in ([0], [1, 2], [problem.mask.shape[-2] - 1], range(problem.mask.shape[-2])):
        mask = problem.mask.copy()
        mask[..., list(rows), :] = False
        runner.check(replace(problem, mask=mask))


def _minus_infinity(runner: Runner) -> None:
    problem = random_problem(runner.rng, runner.sizes(), bias=True)
    assert problem.bias is not None
    hidden = ~random_mask(runner.rng, problem.bias.shape)
    hidden[..., 1, :] = True
    bias = np.where(hidden, -np.inf, problem.bias).astype(np.float32)
    runner.check(replace(problem, bias=bias))


def _low_bias(runner: Runner) -> None:
    """A large negative but finite bias is only added: its row is not empty."""
    problem = random_problem(runner.rng, runner.sizes(), bias=True)
    assert problem.bias is not None
    bias = problem.bias.copy()
    bias[..., 0, :] = np.float32(-1e30)
    bias[..., 1, ::2] = np.float32(-1e9)
    runner.check(replace(problem, bias=bias))


def _large(runner: Runner) -> None:
    """Scores of several hundred, visible or masked, do not overflow.

    The scaled dot product of small integers at depth 4 is exact in float32.
    """
    sizes = runner.sizes(H=4) if "value_depth" in runner.supports else runner.sizes(H=4, V=4)
    problem = random_problem(runner.rng, sizes, mask=True)
    assert problem.mask is not None
    query, key, mask = np.round(problem.query), np.round(problem.key), problem.mask.copy()
    key[..., 2, :, :] *= 256
    runner.check(replace(problem, query=query, key=key))
    mask[..., 2], mask[..., 3] = False, True
    runner.check(replace(problem, query=query, key=key, mask=mask))


_MASK_AXES = ("B11S", "1N1S", "11T1")
_BIAS_AXES = ("1NTS", "B1T1", "111S")


def _broadcast(mask_axes: tuple[str, ...], bias_axes: tuple[str, ...]) -> Callable[[Runner], Any]:
    """Masks and biases with these axes, 1 for a broadcast axis."""

    def check(runner: Runner) -> None:
        sizes = runner.sizes()
        length = dict(zip("BNTS", sizes.pairs, strict=True)) | {"1": 1}
        problem = random_problem(runner.rng, sizes)
        for mask_letters, bias_letters in zip(mask_axes, bias_axes, strict=True):
            arrays: dict[str, Any] = {}
            if "mask" in runner.supports:
                shape = tuple(length[letter] for letter in mask_letters)
                arrays["mask"] = random_mask(runner.rng, shape)
            if "bias" in runner.supports:
                shape = tuple(length[letter] for letter in bias_letters)
                arrays["bias"] = runner.rng.normal(size=shape).astype(np.float32)
            runner.check(replace(problem, **arrays))

    return check


def _score(score: str, per_head: bool = False) -> Callable[[Runner], Any]:
    def check(runner: Runner) -> Any:
        problem = random_problem(
            runner.rng, runner.sizes(), mask="mask" in runner.supports, score=score,
            per_head=per_head,
        )  # fmt: skip
        return runner.check(problem)

    return check


def _scale(runner: Runner) -> None:
    for scale in (0.0, 0.3):
        scaled = runner.with_keywords(scale=scale)
        scaled.check(random_problem(runner.rng, runner.sizes()), scale=scale)


def _masked(
    factory: Callable[[Any], Any], visible: Callable[..., Any], **sizes: int
) -> Callable[[Runner], Any]:
    """A mask object against `visible(t, s, T, S)`."""

    def check(runner: Runner) -> None:
        size = runner.sizes(**sizes)
        t, s = np.ogrid[: size.T, : size.S]
        mask = np.broadcast_to(visible(t, s, size.T, size.S), size.pairs[-2:])
        problem = replace(random_problem(runner.rng, size), mask=mask)
        runner.check(problem, mask_object=factory)

    return check


def _positions(runner: Runner) -> None:
    sizes = runner.sizes()
    q = np.stack([np.arange(sizes.T) + 3, np.arange(sizes.T)[::-1]]).astype(np.int32)
    k = np.stack([np.arange(sizes.S), np.arange(sizes.S) - 2]).astype(np.int32)
    for q_at, k_at in ((q[0], k[0]), (q, k)):
        mask = np.broadcast_to(k_at[..., None, :] <= q_at[..., :, None], (2, *sizes.pairs[-2:]))
        problem = replace(random_problem(runner.rng, sizes), mask=mask[:, None])
        keywords = {"query_positions": q_at, "key_positions": k_at}
        runner.check(problem, mask_object=lambda m: m.causal(), keywords=keywords)


CASES: tuple[Case, ...] = (
    _case("values", "", _random()),
    _case("values with a mask", "mask", _random(mask=True)),
    _case("values with a bias", "bias", _random(bias=True)),
    _case("mask and bias together", "mask bias", _random(mask=True, bias=True)),
    _case("one query, one key", "lengths", _random(T=1, S=1)),
    _case("one query, many keys", "lengths grouped_heads", _random(T=1, K=1)),
    _case("more queries than keys", "lengths value_depth", _random(T=9, S=4, H=1, V=9)),
    _case("no batch axis", "no_batch mask", _random(mask=True, batch=())),
    _case("two batch axes", "many_batch mask", _random(mask=True, batch=(2, 3))),
    _case("a batch of none", "no_keys", _random(batch=(0,))),
    _case("no keys", "no_keys lengths empty_rows", _random(S=0)),
    _case("no queries", "no_keys lengths", _random(T=0)),
    _case("axes of size 1", "broadcast", _broadcast(_MASK_AXES, _BIAS_AXES)),
    _case("fewer axes", "fewer_axes", _broadcast(("TS", "S"), ("NTS", "TS"))),
    _case("empty rows", "mask empty_rows", _empty_rows),
    _case("-inf through the bias", "bias minus_infinity", _minus_infinity),
    _case("a very low bias", "bias", _low_bias),
    _case("very large scores", "mask", _large),
    _case("NaN in masked entries", "mask hidden_nan", check_hidden),
    _case("float16", "float16 mask", _dtype("float16")),
    _case("float16 past its range", "float16", check_float16_range),
    _case("bfloat16", "bfloat16 mask", _dtype("bfloat16")),
    _case("float64", "float64 mask", _float64),
    _case("mixed dtypes", "mixed_dtypes bfloat16 float16", _mixed),
    _case("scale", "scale", _scale),
    *(
        _case(f"score {score}{', per head' * per_head}", "scores", _score(score, per_head))
        for score, known in SCORES.items()
        for per_head in ((False, True) if known.parameters else (False,))
        if score != Problem.score
    ),
    _case("causal", "masks", _masked(lambda m: m.causal(), lambda t, s, T, S: s <= t)),
    _case(
        "causal at the end",
        "masks empty_rows",
        _masked(lambda m: m.causal(align="end"), lambda t, s, T, S: s <= t + S - T, T=11, S=7),
    ),
    _case(
        "window",
        "masks empty_rows",
        _masked(lambda m: m.window(2, 1), lambda t, s, T, S: (s >= t - 2) & (s <= t + 1)),
    ),
    _case(
        "local and not causal",
        "masks empty_rows",
        _masked(
            lambda m: m.local(6) & ~m.causal(), lambda t, s, T, S: (s > t) & (s <= t + 3), T=9, S=8
        ),
    ),
    _case(
        "a prefix, or causal in a window",
        "masks empty_rows",
        _masked(
            lambda m: m.prefix(2) | (m.causal() & m.window(2, 0)),
            lambda t, s, T, S: (s < 2) | ((s <= t) & (s >= t - 2)),
        ),
    ),
    _case("positions", "masks positions empty_rows", _positions),
    _case("dropout", "dropout", check_dropout),
    _case("vmap", "vmap", check_vmap),
    _case("forward mode", "forward_mode", check_forward_mode),
    _case("second order", "second_order gradients", check_second_order),
    _case("without jit", "eager", check_eager),
)
"""All cases, in order."""
