"""Lower a request to the arrays that one head of one example needs.

Arrays are sorted by the axes that they have: query data, key data, pair data and parameters. A
block is then one slice of each, for any score, mask and bias.

Masked entries must not affect results, even if they are NaN. Therefore, if any pair may be masked,
non-finite rows of queries and keys are replaced by ones before the score is evaluated, and their
visible logits are set to NaN afterwards.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array, Layout, Shape
from attention_jax._core.leading_axes import head_axes, merge_axes
from attention_jax._core.mesh_axes import vary_as, whole_behind
from attention_jax._core.numerics import NEG_INF, arange
from attention_jax._core.term import Sides, Term
from attention_jax.dropout import row_and_column_bits
from attention_jax.kernels.block_order import join_kinds
from attention_jax.kernels.request import Request, Result
from attention_jax.kernels.tiling import Tiling, without_mask
from attention_jax.masks.block_map import kinds_of, verdict
from attention_jax.masks.mask import Mask, View, spread
from attention_jax.scores.score import Sum
from attention_jax.softmax import Stats


class Problem(NamedTuple):
    """One head of one example, or all of them behind leading axes; a pytree.

    Attributes:
        term: score plus bias, its parameters for one head.
        mask: the mask, or None.
        sides: query data `[T, ...]`, key data `[S, ...]` and pair data `[#T, #S]`, each a dict:
            "term", "mask", "position", "dropout" (bits), "bad" (non-finite rows) and "value".
        bad_value: whether any value is not finite; None if no pair can be masked.
    """

    term: Term
    mask: Mask | None
    sides: Sides
    bad_value: Any


class Static(NamedTuple):
    """The static facts of a problem; hashable."""

    layout: Layout
    sizes: Shape
    guarded: bool
    may_hide: bool
    dropout_rate: float | int
    statistics: bool
    accumulator: np.dtype


def lower(request: Request, *, merge: bool = True) -> tuple[Problem, Static]:
    """The problem with leading axes `sizes`, and the static facts about it.

    Without `merge` the leading axes are always `[*B, K, G]`: joining two sharded axes would gather
    them.
    """
    layout = request.layout
    term = request.score if request.bias is None else Sum(request.score, request.bias)
    beyond = tuple(map(_beyond_int32, (request.query_positions, request.key_positions)))
    guarded = request.mask is not None or term.may_hide or beyond != (None, None)
    lead = len(layout.batch) + 1
    query, key, value = (
        whole_behind(jnp.swapaxes(jnp.asarray(x), -2, -3), lead)
        for x in (request.query, request.key, request.value)
    )
    positions = tuple(
        _positions(given, size, len(layout.batch))
        for given, size in (
            (request.query_positions, layout.T),
            (request.key_positions, layout.S),
        )
    )
    on_query: dict[str, Any] = {"position": positions[0]}
    on_key: dict[str, Any] = {"position": positions[1], "value": value}
    on_pair: dict[str, Any] = {}
    bad_value = None
    if guarded:
        query, on_query["bad"] = _clean(query)
        key, on_key["bad"] = _clean(key)
        bad_value = ~jnp.all(jnp.isfinite(value))
        for side, positions_beyond in zip((on_query, on_key), beyond, strict=True):
            if positions_beyond is not None:
                side["bad"] = side["bad"] | positions_beyond.reshape(side["position"].shape)
    prepared = term.prepare(query, key)
    if guarded:
        # finite inputs can overflow when projected
        rows, on_query["bad"] = _clean_rows(prepared.query, query, on_query["bad"], layout)
        columns, on_key["bad"] = _clean_rows(prepared.key, key, on_key["bad"], layout)
        prepared = prepared._replace(query=rows, key=columns)
    on_query["term"], on_key["term"], on_pair["term"] = prepared
    if request.mask is not None:
        on_query["mask"], on_key["mask"], on_pair["mask"] = request.mask_data
        overflowed = request.mask.overflowed()
        if overflowed is not None:
            on_query["bad"] = on_query["bad"] | overflowed
    if request.dropout_rate > 0:
        on_query["dropout"], on_key["dropout"], _ = row_and_column_bits(
            request.dropout_key, layout, *positions, shared=request.shared_dropout
        )
    mask = None if request.mask is None else request.mask.per_head()
    (own_term, own_mask), sides = head_axes(
        ((term.per_head(), mask), Sides(on_query, on_key, on_pair)), layout
    )
    sizes = (*layout.batch, layout.K, layout.group)
    sides = jax.tree.map(lambda x: whole_behind(x, len(sizes)), sides)
    if bad_value is not None:
        bad_value = bad_value.reshape((1,) * len(sizes))
    problem = Problem(own_term, own_mask, sides, bad_value)
    if merge:
        problem, sizes = merge_axes(problem, sizes)
    problem = vary_as(problem, problem)
    facts = Static(
        layout,
        sizes,
        guarded,
        term.may_hide,
        request.dropout_rate,
        request.statistics,
        request.accumulator,
    )
    return problem, facts


def _positions(given: Any, size: Any, batch_rank: int) -> Any:
    if given is None:
        return arange(size).reshape((1,) * (batch_rank + 1) + (size,))
    given = jnp.asarray(given).astype(jnp.int32)
    batch = given.shape[:-1] or (1,) * batch_rank
    return given.reshape(*batch, 1, size)


def may_exceed_int32(dtype: Any) -> bool:
    """Whether an integer dtype has values outside the range of int32."""
    return jnp.iinfo(dtype).max > np.iinfo(np.int32).max


def _beyond_int32(positions: Any) -> Array | None:
    """Which traced positions exceed 32 bits: their rows are NaN. Concrete ones raise earlier."""
    if positions is None or not may_exceed_int32(positions.dtype):
        return None
    positions = jnp.asarray(positions)
    return positions.astype(jnp.int32).astype(positions.dtype) != positions


def _clean(x: Array) -> tuple[Array, Array]:
    """`x` with non-finite rows replaced by ones, and which rows those are."""
    bad = ~jnp.all(jnp.isfinite(x), axis=-1)
    return jnp.where(bad[..., None], jnp.ones((), x.dtype), x), bad


def _clean_rows(tree: Any, clean: Array, bad: Array, layout: Layout) -> tuple[Any, Array]:
    """`_clean` of one side's prepared data, leaves `[*#B, #N, length, ...]`; and all bad rows.

    The array `clean`, which was the argument of `prepare`, is not checked again.
    """
    rank = len(layout.batch) + 2
    leaves, structure = jax.tree.flatten(tree)
    for at, x in enumerate(leaves):
        if x is clean or not jnp.issubdtype(x.dtype, jnp.floating):
            continue
        own = ~jnp.all(jnp.isfinite(x), axis=tuple(range(min(rank, x.ndim), x.ndim)))
        rows = own.reshape(*own.shape, *(1,) * (x.ndim - own.ndim))
        leaves[at] = jnp.where(rows, jnp.ones((), x.dtype), x)
        own = own.reshape((1,) * (rank - own.ndim) + own.shape)
        heads = bad.shape[-2], own.shape[-2]
        if 1 not in heads and heads[0] != heads[1]:  # K and N
            bad, own = (jnp.repeat(y, layout.N // y.shape[-2], axis=-2) for y in (bad, own))
        bad = bad | own
    return jax.tree.unflatten(structure, leaves), bad


def block_kinds(problem: Problem, facts: Static, tiling: Tiling) -> Any:
    """The kinds of blocks, int8: 0 skipped, 1 partial, 2 full.

    NumPy `[nT, nS]` if they are known while tracing. Otherwise traced, `[*#sizes, nT, nS]`, and
    joined into one map if heads are vectorised.
    """
    if tiling.kinds is not None:
        return tiling.kinds.array
    most = without_mask(facts.layout, tiling.block, may_hide=facts.may_hide)
    ones = (1,) * len(facts.sizes)
    sides = spread(part(problem.sides, "mask"))
    positions = spread(part(problem.sides, "position"))
    assert problem.mask is not None  # all other kinds are in the tiling
    view = View(sides, positions.query, positions.key)
    kinds = jnp.asarray(kinds_of(verdict(problem.mask, view, tiling.block)))
    lead = kinds.shape[:-2] or ones
    kinds = jnp.broadcast_to(kinds, (*lead, *most.shape))
    kinds = jnp.minimum(kinds, most.reshape(*ones, *most.shape))
    if tiling.loop:
        return kinds
    return join_kinds(kinds, tuple(range(len(ones)))).reshape(*ones, *most.shape)


def part(sides: Sides, name: str) -> Sides:
    """The data of one name: "term", "mask", "position" or "dropout"."""
    return Sides(*(side.get(name, ()) for side in sides))


def finish(request: Request, facts: Static, out: Array, *statistics: Array) -> Result:
    """Converts the kernels' leading axes to the public layout.

    Args:
        request: the request.
        facts: its static facts.
        out: `[*sizes, T, V]`.
        statistics: lse, entropy and the largest logit, `[*sizes, T]` each; ignored if the request
            has no statistics.
    """
    layout = facts.layout
    out = out.reshape(*layout.batch, layout.N, layout.T, layout.V)
    out = jnp.swapaxes(out, -2, -3).astype(request.query.dtype)
    if not facts.statistics:
        return Result(out)
    shape = (*layout.batch, layout.N, layout.T)
    lse, entropy, top = (x.reshape(shape) for x in statistics)
    empty = lse == NEG_INF
    return Result(out, Stats(jnp.where(empty, 0, lse), entropy, jnp.where(empty, 0, top)), empty)
