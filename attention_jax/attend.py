"""The four public functions: check the arguments, choose a kernel, run it.

out = Σ_s softmax_s( score(q_t, k_s) + bias(t, s) where mask(t, s) ) · v_s
"""

import functools
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention_jax._core.axes import (
    BiasLike,
    Key,
    KeyPositions,
    MaskLike,
    Query,
    QueryPositions,
    Value,
)
from attention_jax._core.checks import (
    as_array,
    check_inputs,
    check_key,
    check_known,
    check_mask,
    check_positions,
    check_precision,
    check_rate,
)
from attention_jax._core.compiled import compiled
from attention_jax._core.docstrings import arguments_of
from attention_jax._core.numerics import without_float8, zeros
from attention_jax._core.observers import observer
from attention_jax._core.term import Sides, Term
from attention_jax.kernels import dense
from attention_jax.kernels.request import Request, Result
from attention_jax.kernels.tiling import Tiling
from attention_jax.masks.block_map import block_pair
from attention_jax.masks.buffer import over_rolling_cache, refuse_index, rolling_length
from attention_jax.masks.data import from_array
from attention_jax.masks.mask import Lengths, Mask
from attention_jax.plan import KERNELS, Plan, explained, make_plan
from attention_jax.positions.array_bias import ArrayBias
from attention_jax.scores.score import Score
from attention_jax.scores.similarity import scaled_dot
from attention_jax.softmax import Stats

Implementation = str | Sequence[str] | None


def attend(
    query: Query,
    key: Key,
    value: Value,
    *,
    score: Score | None = None,
    mask: Mask | MaskLike | None = None,
    bias: Term | BiasLike | None = None,
    query_positions: QueryPositions | None = None,
    key_positions: KeyPositions | None = None,
    dropout_rate: float | int = 0.0,
    dropout_key: Any = None,
    implementation: Implementation = None,
    block_size: int | tuple[int, int] | None = None,
    precision: Any = None,
) -> Float[Array, "*B T N V"]:
    """Attention with any score, any mask and any bias.

        out_t = Σ_s p_ts v_s,  p_t = softmax_s( score(q_t, k_s) + bias(t, s) where mask(t, s) )

    Args:
        query: `[*B, T, N, H]`, floating.
        key: `[*B, S, K, H]`; query head n uses key/value head n // (N // K).
        value: `[*B, S, K, V]`.
        score: a score object; `scores.scaled_dot()` by default.
        mask: a mask object, or a bool array that broadcasts to `[*B, N, T, S]`; True is visible.
        bias: added to the scores: a bias object, or a floating array that broadcasts to
            `[*B, N, T, S]`; an entry of -inf masks its pair.
        query_positions: ints `[T]` or `[*B, T]`, 0..T-1 by default.
        key_positions: ints `[S]` or `[*B, S]`, 0..S-1 by default.
        dropout_rate: probability that a weight is dropped, in [0, 1); the others are scaled by
            1 / (1 - rate).
        dropout_key: a PRNG key, needed with a rate above 0.
        implementation: "dense", "blockwise", "flash", "short", "single_query", "cudnn", "splash", a
            sequence of names to try in order, or None to let the plan choose. A named kernel
            computes the call or raises; there is no fallback.
        block_size: size of a block, an int or a pair (query, key); not for "dense".
        precision: of the matrix products, as in `jax.default_matmul_precision`.

    Returns:
        `[*B, T, N, V]` with the query's dtype; softmax and accumulation in float32 at least. An
        empty row is 0. Masked keys and values, NaN included, do not affect the result.

    Raises:
        TypeError: a mask that is not boolean, a bias that is not floating, an argument of the
            wrong type.
        ValueError: shapes, rates or positions that do not fit.
        NotImplementedError: a named implementation does not support a part of the request.

    References:
        Bahdanau et al. 2014, arXiv:1409.0473; Luong et al. 2015, arXiv:1508.04025;
        Vaswani et al. 2017, arXiv:1706.03762; Dao et al. 2022, arXiv:2205.14135.
    """
    request = make_request(
        query,
        key,
        value,
        score=score,
        mask=mask,
        bias=bias,
        query_positions=query_positions,
        key_positions=key_positions,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        block_size=block_size,
        precision=precision,
    )
    return execute(request, implementation).out


@arguments_of(attend)
def attend_with_stats(
    query: Query,
    key: Key,
    value: Value,
    *,
    score: Score | None = None,
    mask: Mask | MaskLike | None = None,
    bias: Term | BiasLike | None = None,
    query_positions: QueryPositions | None = None,
    key_positions: KeyPositions | None = None,
    dropout_rate: float | int = 0.0,
    dropout_key: Any = None,
    implementation: Implementation = None,
    block_size: int | tuple[int, int] | None = None,
    precision: Any = None,
) -> tuple[Float[Array, "*B T N V"], Stats]:
    """Attention and statistics of its weights, at little extra cost.

    Returns:
        `(out, stats)`: stats.lse, stats.entropy and stats.max_logit are `[*B, N, T]`, of the
        weights before dropout, differentiable, float32 (float64 for float64 inputs); an empty row
        has -inf, 0 and -inf.
    """
    request = make_request(
        query,
        key,
        value,
        score=score,
        mask=mask,
        bias=bias,
        query_positions=query_positions,
        key_positions=key_positions,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        block_size=block_size,
        precision=precision,
        statistics=True,
    )
    result = execute(request, implementation)
    stats = result.stats
    assert stats is not None  # requested above
    return result.out, stats


@arguments_of(attend)
def attention_weights(
    query: Query,
    key: Key,
    *,
    score: Score | None = None,
    mask: Mask | MaskLike | None = None,
    bias: Term | BiasLike | None = None,
    query_positions: QueryPositions | None = None,
    key_positions: KeyPositions | None = None,
    precision: Any = None,
) -> Float[Array, "*B N T S"]:
    """Attention weights `p_ts`, in O(T·S) memory.

    Returns:
        `[*B, N, T, S]` with the query's dtype; rows sum to 1, or to 0 if they are empty.
    """
    as_array("key", key)
    value = key[..., :0]
    request = make_request(
        query,
        key,
        value,
        score=score,
        mask=mask,
        bias=bias,
        query_positions=query_positions,
        key_positions=key_positions,
        precision=precision,
    )
    layout = request.layout
    shape = (*layout.batch, layout.N, layout.T, layout.S)
    return zeros(shape, query.dtype) if 0 in shape else _weights(request)


@arguments_of(attend)
def explain(
    query: Query,
    key: Key,
    value: Value,
    *,
    score: Score | None = None,
    mask: Mask | MaskLike | None = None,
    bias: Term | BiasLike | None = None,
    query_positions: QueryPositions | None = None,
    key_positions: KeyPositions | None = None,
    dropout_rate: float | int = 0.0,
    dropout_key: Any = None,
    implementation: Implementation = None,
    block_size: int | tuple[int, int] | None = None,
    precision: Any = None,
) -> Plan:
    """The plan of a call of `attend` with these arguments; computes nothing.

    Any array may be a `jax.ShapeDtypeStruct`.

    Returns:
        A `Plan`: the kernel, its blocks, and the reasons against the other kernels.
    """
    parts = (score, mask, bias, query_positions, key_positions, dropout_key)
    plans = []

    def plan(parts: Any) -> None:
        score, mask, bias, query_positions, key_positions, dropout_key = parts
        request = make_request(
            query,
            key,
            value,
            score=score,
            mask=mask,
            bias=bias,
            query_positions=query_positions,
            key_positions=key_positions,
            dropout_rate=dropout_rate,
            dropout_key=dropout_key,
            block_size=block_size,
            precision=precision,
        )
        layout = request.layout
        check_known("explain", **{"*B": sum(layout.batch)}, T=layout.T, S=layout.S)
        plans.append(explained(request, implementation))

    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(parts)):
        jax.eval_shape(plan, parts)
    else:
        plan(parts)
    return plans[0]


def make_request(
    query: Any,
    key: Any,
    value: Any,
    *,
    score: Any = None,
    mask: Any = None,
    bias: Any = None,
    query_positions: Any = None,
    key_positions: Any = None,
    dropout_rate: Any = 0.0,
    dropout_key: Any = None,
    shared_dropout: bool = False,
    block_size: Any = None,
    precision: Any = None,
    statistics: bool = False,
) -> Request:
    """Checks the arguments of a call and makes a `Request` of them."""
    layout = check_inputs(query, key, value)
    key, value = without_float8(key), without_float8(value)
    score = scaled_dot() if score is None else score
    if not isinstance(score, Score):
        raise TypeError(
            f"score must be a score object such as scores.scaled_dot(), got {type(score).__name__}"
        )
    score.check(layout)
    if mask is not None and not isinstance(mask, Mask):
        if not hasattr(mask, "dtype"):
            raise TypeError(
                "mask must be a mask object such as masks.causal(), or a boolean array, got "
                f"{type(mask).__name__}"
            )
        mask = from_array(mask)
    if bias is not None and not isinstance(bias, Term):
        bias = ArrayBias(as_array("bias", bias))
    if bias is not None:
        bias.check(layout)
    if mask is not None and (rolling := rolling_length(mask)) is not None:
        mask = over_rolling_cache(mask, rolling)
        for part in _array_biases((score, bias)):
            if part.array.shape[-1] != 1:
                refuse_index("bias", part, rolling)
    mask_data = Sides()
    if mask is not None:
        default = query_positions is None and key_positions is None
        lengths = Lengths(layout.T, layout.S, default, (*layout.batch, layout.N))
        mask_data = mask.prepare(lengths)
        check_mask(mask_data, layout)
    for name, positions, size in (
        ("query_positions", query_positions, layout.T),
        ("key_positions", key_positions, layout.S),
    ):
        if positions is not None:
            check_positions(name, positions, layout.batch, size)
    dropout_rate = check_rate("dropout_rate", dropout_rate)
    if dropout_rate > 0 and dropout_key is None:
        raise ValueError(f"dropout_rate = {dropout_rate} needs a dropout_key")
    if dropout_rate > 0:
        check_key("dropout_key", dropout_key)
    check_precision(precision)
    return Request(
        query,
        key,
        value,
        score,
        mask,
        mask_data,
        bias,
        query_positions,
        key_positions,
        dropout_key if dropout_rate > 0 else None,
        dropout_rate,
        shared_dropout,
        None if block_size is None else block_pair(block_size),
        precision,
        statistics,
    )


def _array_biases(terms: Any) -> list[ArrayBias]:
    def found(node: Any) -> bool:
        return isinstance(node, ArrayBias)

    return list(filter(found, jax.tree.leaves(terms, is_leaf=found)))


def execute(request: Request, implementation: Implementation, *, observed: bool = True) -> Result:
    """Runs the plan of a request; `observed` does so through the active observer, if any."""
    if observed and (observe := observer()) is not None:
        run = functools.partial(execute, implementation=implementation, observed=False)
        return observe(request, run, implementation)
    plan, layout = make_plan(request, implementation), request.layout
    if 0 in (*layout.batch, layout.T, layout.S, layout.N):
        return _nothing(request)
    result = _run(request, plan.implementation, plan.tiling)
    chex.assert_shape(result.out, (*layout.batch, layout.T, layout.N, layout.V))
    if result.rows is not None:
        chex.assert_shape(list(result.rows), (*layout.batch, layout.N, layout.T))
    return result


def _nothing(request: Request) -> Result:
    """The result without any pair: every row is empty."""
    layout = request.layout
    out = zeros((*layout.batch, layout.T, layout.N, layout.V), request.query.dtype)
    if not request.statistics:
        return Result(out)
    rows = zeros((*layout.batch, layout.N, layout.T), request.accumulator)
    return Result(out, Stats(rows, rows, rows), jnp.ones(rows.shape, bool))


@functools.partial(compiled, static=(1, 2))
def _run(request: Request, name: str, tiling: Tiling | None) -> Result:
    return KERNELS[name].run(request, tiling)


@compiled
def _weights(request: Request) -> Array:
    return dense.weights(request)
