"""Attention with queries and keys sharded along the sequence.

    out = Σ_i exp(lse_i - lse) out_i,   lse = log Σ_i exp(lse_i)

Every device computes attention of its queries to its keys, at their true positions. Results of
devices with different keys are merged by their log-sum-exps, so only outputs and statistics are
communicated.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float

from attention_jax._core.axes import AnyArray, Array, Key, Query, Value
from attention_jax._core.checks import check_inputs
from attention_jax._core.docstrings import arguments_of
from attention_jax._core.numerics import NEG_INF, lowest, stats_dtype, widen_low
from attention_jax._core.term import Term
from attention_jax.attend import attend, execute, make_request
from attention_jax.masks import Mask
from attention_jax.scores import Score
from attention_jax.sharding.placement import AxisNames, check_names, flat


def merge(
    outs: AnyArray, lses: AnyArray
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B N T"]]:
    """Merges attention over disjoint parts of the keys, `(out, lse)`.

        lse = log Σ_i exp(lse_i),   out = Σ_i exp(lse_i - lse) out_i

    Args:
        outs: outputs over each part's keys, `[parts, *B, T, N, V]`.
        lses: their log-sum-exps, `[parts, *B, N, T]`; -inf for empty rows.

    Returns:
        out `[*B, T, N, V]` and lse `[*B, N, T]`, differentiable; 0 and -inf for a row that is empty
        in every part.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import attention_jax as aj
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 8, 2, 4))
        >>> parts = [aj.attend_with_stats(q, k[i::2], v[i::2]) for i in range(2)]
        >>> outs = jnp.stack([out for out, _ in parts])
        >>> lses = jnp.stack([stats.lse for _, stats in parts])
        >>> bool(jnp.allclose(aj.sharding.merge(outs, lses)[0], aj.attend(q, k, v), atol=1e-6))
        True

    References:
        Dao et al. 2022, "FlashAttention", arXiv:2205.14135, §3.1.
    """
    outs, lses = jnp.asarray(outs), jnp.asarray(lses)
    if outs.ndim != lses.ndim + 1 or _rows(outs.shape) != lses.shape:
        raise ValueError(
            f"outs has shape {list(outs.shape)} for [parts, *B, T, N, V] and lses has shape "
            f"{list(lses.shape)}: it must be [parts, *B, N, T]"
        )

    def largest(x: Array) -> Array:
        return jnp.max(x, axis=0, keepdims=True)

    def total(x: Array) -> Array:
        return jnp.sum(x, axis=0, keepdims=True)

    nonempty = lses != NEG_INF
    out, top, weights = _merged(outs, jnp.where(nonempty, lses, 0), nonempty, largest, total)
    some = weights > 0
    lse = jnp.where(some, top + jnp.log(jnp.where(some, weights, 1)), NEG_INF)
    return out[0], lse[0]


def _rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    *lead, T, N, _ = shape
    return (*lead, N, T)


def _merged(
    out: Array, lse: Array, nonempty: Array, largest: Any, total: Any
) -> tuple[Array, Array, Array]:
    """The output over all parts; the largest lse of a part and the sum of `exp(lse - largest)`."""
    dtype = out.dtype
    top = jax.lax.stop_gradient(jnp.where(nonempty, lse, lowest(lse.dtype)))
    top = jax.lax.stop_gradient(largest(top))
    weight = jnp.where(nonempty, jnp.exp(jnp.where(nonempty, lse - top, 0)), 0)
    weights = total(weight)
    safe = jnp.where(weights > 0, weights, 1)
    shares = jnp.swapaxes(weight, -1, -2)[..., None]
    whole = total(shares * out.astype(stats_dtype(dtype)))
    whole = whole / jnp.swapaxes(safe, -1, -2)[..., None]
    return whole.astype(dtype), top, weights


@arguments_of(attend)
def attend_split(  # noqa: D417
    query: Query,
    key: Key,
    value: Value,
    *,
    mesh: Mesh,
    batch: AxisNames = None,
    heads: AxisNames = None,
    queries: AxisNames = None,
    keys: AxisNames = None,
    score: Score | None = None,
    mask: Any = None,
    implementation: Any = None,
    block_size: Any = None,
    precision: Any = None,
) -> Float[Array, "*B T N V"]:
    """`attend` with the sequence sharded among devices.

    Every device computes 1 / (queries · keys) of the plane: its memory is O(T / queries + S /
    keys), and it skips blocks that are empty at their true positions. Outputs over different keys
    are merged by their log-sum-exp. Differentiable like `attend`.

    Args:
        mesh: the device mesh.
        batch: mesh axes that shard the first batch axis.
        heads: mesh axes that shard the heads, including key/value heads.
        queries: mesh axes that shard T.
        keys: mesh axes that shard S.
        score: a score object, without array parameters if `heads` is given; the scaled dot product
            by default.
        mask: a mask of positions, such as `causal() & window(255, 0)`.

    Returns:
        `[*B, T, N, V]`, sharded as the queries.

    Raises:
        ValueError: a size that is not a multiple of the number of devices, or an unknown mesh axis.
        TypeError: a mask with arrays, which are indexed by the whole sequence.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import attention_jax as aj
        >>> mesh = jax.make_mesh((1,), ("seq",))
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 8, 2, 4))
        >>> split = aj.sharding.attend_split(q, k, v, mesh=mesh, keys="seq", mask=aj.masks.causal())
        >>> bool(jnp.allclose(split, aj.attend(q, k, v, mask=aj.masks.causal()), atol=1e-6))
        True

    References:
        Liu et al. 2023, "Ring Attention with Blockwise Transformers", arXiv:2310.01889, §3.
    """
    layout = check_inputs(query, key, value)
    check_names(mesh, batch=batch, heads=heads, queries=queries, keys=keys)
    lead = layout.batch
    if batch is not None and not lead:
        raise ValueError(f"batch {batch!r} shards a batch axis, but query has none")
    for argument, names, letter, size in (
        ("batch", batch, "B", lead[0] if lead else 1),
        ("heads", heads, "K", layout.K),
        ("queries", queries, "T", layout.T),
        ("keys", keys, "S", layout.S),
    ):
        devices = math.prod(mesh.shape[name] for name in flat(names))
        if size % devices:
            raise ValueError(
                f"{argument} {names!r}: {letter} = {size} is not a multiple of {devices} devices"
            )
    if mask is not None and (not isinstance(mask, Mask) or jax.tree.leaves(mask)):
        raise TypeError(
            "mask must be a mask of positions, such as causal() or window(...): arrays of the "
            f"whole sequence are not sharded, got {mask!r}"
        )
    _check_whole(score, heads)

    def place(sequence: AxisNames) -> PartitionSpec:
        axes = (batch, *(None,) * (len(lead) - 1)) if lead else ()
        return PartitionSpec(*axes, sequence, heads, None)

    def piece(query: Array, key: Array, value: Array, score: Any) -> Array:
        request = make_request(
            query,
            key,
            value,
            score=score,
            mask=mask,
            query_positions=_positions(query.shape[-3], queries, mesh),
            key_positions=_positions(key.shape[-3], keys, mesh),
            block_size=block_size,
            precision=precision,
            statistics=bool(flat(keys)),
        )
        out, rows, empty = execute(request, implementation)
        if rows is None or empty is None:
            return out

        def largest(x: Array) -> Array:
            return jax.lax.pmax(x, flat(keys))

        return _merged(out, rows.lse, ~empty, largest, lambda x: jax.lax.psum(x, flat(keys)))[0]

    specs = place(queries), place(keys), place(keys)
    # wide outside: devices add up the gradients of the score's parameters, which all of them hold
    dtypes = jax.tree.map(lambda x: x.dtype, score)

    def narrowed(query: Array, key: Array, value: Array, score: Any) -> Array:
        return piece(query, key, value, jax.tree.map(lambda x, y: x.astype(y), score, dtypes))

    split: Any = jax.shard_map(
        narrowed, mesh=mesh, in_specs=(*specs, PartitionSpec()), out_specs=place(queries)
    )
    arrays = (jnp.asarray(x) for x in (query, key, value))
    placed = (_placed(x, mesh, spec) for x, spec in zip(arrays, specs, strict=True))
    return split(*placed, widen_low(score))


def _placed(x: Array, mesh: Mesh, spec: PartitionSpec) -> Array:
    """Under explicit mesh axes the sharding is part of an array's type, so it is set here."""
    explicit = AxisType.Explicit in mesh.axis_types
    return jax.reshard(x, NamedSharding(mesh, spec)) if explicit else x


def _check_whole(score: Term | None, heads: AxisNames) -> None:
    """Checks that a score has no parameters if heads are sharded: parameters are replicated."""
    if flat(heads) and jax.tree.leaves(score):
        raise ValueError(
            f"heads {heads!r}: the parameters of {score!r} cannot be sharded with the heads; use "
            "attend under jax.jit with aj.sharding.placement(...)"
        )


def _positions(length: int, names: AxisNames, mesh: Mesh) -> Array | None:
    index = jnp.arange(length, dtype=jnp.int32)
    if not flat(names):
        return index
    return index + jax.lax.axis_index(flat(names)).astype(jnp.int32) * length
