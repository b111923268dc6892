"""Checks of the conformance suite for transformations, dropout and masked non-finite entries.

Second derivatives are compared with central differences of the reference gradients in float64,
which have an error of about 1e-9 at a step of 1e-5.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.testing.problems import Problem, random_problem
from attention_jax.testing.runner import Mismatch, Runner

_STEP = 1e-5
_SECOND_SLACK = 5.0  # rounding accumulates over two derivatives


def _general(runner: Runner, score: str = "additive") -> Problem:
    """A problem with all supported parts: a mask, a bias, a score with parameters."""
    score = score if "scores" in runner.supports else "scaled_dot"
    has = runner.supports
    return random_problem(
        runner.rng, runner.sizes(), mask="mask" in has, bias="bias" in has, score=score
    )


def _fixed(problem: Problem) -> dict[str, Any]:
    return {} if problem.mask is None else {"mask": problem.mask}


def _tangent(rng: np.random.Generator, floats: Mapping[str, Any]) -> dict[str, Any]:
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), dict(floats))


def _compare_trees(
    runner: Runner, what: str, got: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    for name, x in got.items():
        if name == "params":
            _compare_trees(runner, what, x, expected[name])
        else:
            runner.compare(f"{what} of {name}", x, expected[name], np.float32, slack=_SECOND_SLACK)


def check_hidden(runner: Runner) -> None:
    """Masked NaN and inf change neither outputs nor gradients, exactly.

    First in keys and values that are masked for every query; then in one value at a time, which may
    change only the queries to which it is visible.
    """
    problem = random_problem(runner.rng, runner.sizes(), mask=True, bias="bias" in runner.supports)
    assert problem.mask is not None
    mask = problem.mask.copy()
    mask[..., 2], mask[..., 3], mask[..., 1] = False, False, True
    problem = replace(problem, mask=mask)
    clean_out, clean = runner.check(problem)
    d_out = np.ones(clean_out.shape, np.float32)
    clean_out, clean = runner.run(problem, d_out)

    key, value = problem.key.copy(), problem.value.copy()
    key[..., 2, :, :], key[..., 3, :, :] = np.nan, np.inf
    value[..., 2, :, :], value[..., 3, :, :] = np.inf, np.nan
    bias = problem.bias
    if bias is not None:
        bias = np.where(mask, bias, np.nan).astype(np.float32)
    out, gradients = runner.run(replace(problem, key=key, value=value, bias=bias), d_out)
    for name, x in {"out": out, **gradients}.items():
        if not np.array_equal(x, clean_out if name == "out" else clean[name]):
            where = "out" if name == "out" else f"the gradient of {name}"
            raise Mismatch(f"poison (NaN, inf) in masked keys, values or biases changes {where}")

    group = problem.query.shape[-2] // problem.key.shape[-2]
    for s in range(min(problem.key.shape[-3], 5)):
        value = problem.value.copy()
        value[..., s, 0, :] = np.nan
        out, _ = runner.run(replace(problem, value=value), d_out)
        masked = ~np.moveaxis(mask[..., s], -2, -1)  # [*B, T, N]
        masked[..., group:] = True
        if not np.array_equal(out[masked], clean_out[masked]):
            raise Mismatch(f"NaN in value {s} changes a query or a head for which it is masked")
        if not np.isnan(out[~masked]).all():
            raise Mismatch(
                f"NaN in value {s} does not propagate to every query for which it is visible"
            )


def check_float16_range(runner: Runner) -> None:
    """A dot product of 115200 overflows float16 while the scaled score, 10182, does not."""
    sizes = runner.sizes(H=128) if "value_depth" in runner.supports else runner.sizes(H=128, V=128)
    problem = random_problem(runner.rng, sizes, dtype="float16")
    query, key = np.full_like(problem.query, 30), np.full_like(problem.key, 30)
    runner.check(replace(problem, query=query, key=key))


def check_dropout(runner: Runner) -> None:
    """Dropout agrees with the reference under the mask that uniform weights on one-hot values show.

    Entries are kept at the given rate, independently for every batch item, head, query and key. The
    mask depends on the dropout key only.
    """
    rate, keys = 0.4, 8
    sizes = runner.sizes(T=8, S=keys, H=keys, V=keys)
    problem = random_problem(runner.rng, sizes)
    one_hot = np.broadcast_to(np.eye(keys, dtype=np.float32)[:, None, :], problem.value.shape)
    flat = replace(problem, query=0 * problem.query, value=one_hot)
    d_out = np.ones(sizes.out, np.float32)
    dropped = runner.with_keywords(dropout_rate=rate)

    def kept(seed: int) -> np.ndarray:
        keywords = {"dropout_key": jax.random.key(seed)}
        out, _ = dropped.run(flat, d_out, keywords=keywords)
        return np.moveaxis(out, -2, -3) != 0  # [*B, N, T, S]

    first, second = kept(0), kept(1)
    if not np.array_equal(first, kept(0)):
        raise Mismatch("the same dropout key gives different masks")
    dropped.check(
        problem,
        keywords={"dropout_key": jax.random.key(0)},
        dropout_rate=rate,
        dropout_mask=first,
    )
    both = np.stack([first, second])
    sigma = np.sqrt(rate * (1 - rate) / both.size)
    if abs(both.mean() - (1 - rate)) > 5 * sigma:
        raise Mismatch(f"dropout at rate {rate} keeps {both.mean():.4f} of the weights")
    for axis, name in enumerate(("dropout key", "batch item", "head", "query", "key")):
        if both.shape[axis] == 1:
            continue
        a, b = np.take(both, 0, axis).ravel(), np.take(both, 1, axis).ravel()
        agree = (a == b).mean()
        chance = rate**2 + (1 - rate) ** 2
        if abs(agree - chance) > 5 * np.sqrt(chance * (1 - chance) / a.size):
            raise Mismatch(
                f"dropout masks of one {name} and the next agree in {agree:.3f} of the entries; "
                f"independent ones agree in {chance:.3f}"
            )


def check_vmap(runner: Runner) -> None:
    """Maps over a middle axis of query, key and value, and over the query alone."""
    problem = random_problem(runner.rng, runner.sizes(), mask="mask" in runner.supports)
    mask = problem.mask
    problems = [problem] + [
        replace(random_problem(runner.rng, runner.sizes()), mask=mask) for _ in range(2)
    ]
    stacked = [np.stack([getattr(p, x) for p in problems], 1) for x in ("query", "key", "value")]

    def f(query: Any, key: Any, value: Any) -> Any:
        return runner.call({"query": query, "key": key, "value": value}, _fixed(problem))

    out = jax.jit(jax.vmap(f, in_axes=1, out_axes=2))(*stacked)
    expected = np.stack([p.reference().out for p in problems], 2)
    runner.compare("out mapped over all three", out, expected, np.float32)

    alone = jax.vmap(f, in_axes=(1, None, None))
    expected = np.stack([replace(problem, query=p.query).reference().out for p in problems])
    d_out = runner.rng.normal(size=expected.shape).astype(np.float32)
    if "gradients" not in runner.supports:
        out = jax.jit(alone)(stacked[0], problem.key, problem.value)
        runner.compare("out mapped over the query", out, expected, np.float32)
        return

    def back(*arrays: Any) -> Any:
        out, pull = jax.vjp(alone, *arrays)
        return out, pull(jnp.asarray(d_out))

    out, (_, d_key, _) = jax.jit(back)(stacked[0], problem.key, problem.value)
    runner.compare("out mapped over the query", out, expected, np.float32)
    exact = sum(
        replace(problem, query=p.query).gradients(d).key
        for p, d in zip(problems, d_out, strict=True)
    )
    runner.compare("gradient of the shared key", d_key, np.asarray(exact), np.float32)


def check_forward_mode(runner: Runner) -> None:
    """The directional derivative of the output."""
    problem = _general(runner)
    floats = problem.floats()
    tangent = _tangent(runner.rng, floats)

    def f(floats: Any) -> Any:
        return runner.call(floats, _fixed(problem), score=problem.score)

    _, got = jax.jit(lambda x, dx: jax.jvp(f, (x,), (dx,)))(floats, tangent)
    ends = [problem.moved(tangent, sign * _STEP).reference().out for sign in (1, -1)]
    runner.compare("tangent of out", got, (ends[0] - ends[1]) / (2 * _STEP), np.float32)


def check_second_order(runner: Runner) -> None:
    """Directional derivatives of the gradients, in forward and in reverse mode."""
    problem = _general(runner, "general")
    floats = problem.floats()
    if "bias_gradient" not in runner.supports:
        floats.pop("bias", None)
    bias = {} if "bias" in floats or problem.bias is None else {"bias": problem.bias}
    tangent = _tangent(runner.rng, floats)
    d_out = runner.rng.normal(size=problem.reference().out.shape).astype(np.float32)

    def loss(floats: Any) -> Any:
        out = runner.call(floats, {**_fixed(problem), **bias}, score=problem.score)
        return jnp.sum(out * d_out)

    def reverse(x: Any, dx: Any) -> Any:
        return jax.grad(
            lambda x: sum(
                jnp.vdot(g, d)
                for g, d in zip(
                    jax.tree.leaves(jax.grad(loss)(x)), jax.tree.leaves(dx), strict=True
                )
            )
        )(x)

    whole = {**_tangent(runner.rng, problem.floats()), **tangent}
    if bias:
        whole["bias"] = 0 * whole["bias"]
    ends = [problem.moved(whole, sign * _STEP).gradients(d_out) for sign in (1, -1)]
    slope = {
        name: (getattr(ends[0], name) - getattr(ends[1], name)) / (2 * _STEP)
        for name in floats
        if name != "params"
    }
    slope["params"] = {
        name: (ends[0].params[name] - ends[1].params[name]) / (2 * _STEP) for name in problem.params
    }
    if "forward_mode" in runner.supports:
        forward = jax.jit(lambda x, dx: jax.jvp(jax.grad(loss), (x,), (dx,))[1])
        _compare_trees(runner, "forward-over-reverse derivative", forward(floats, tangent), slope)
    _compare_trees(
        runner, "reverse-over-reverse derivative", jax.jit(reverse)(floats, tangent), slope
    )


def check_eager(runner: Runner) -> None:
    """NumPy arrays, without jit."""
    problem = _general(runner)
    out = runner.call(problem.floats(), _fixed(problem), score=problem.score)
    runner.compare("out", out, problem.reference().out, np.float32)
