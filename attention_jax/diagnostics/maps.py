"""Similarity between heads, block by block in O(T + S) memory, and attention rollout, [T, T]."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from attention_jax._core.axes import Array
from attention_jax._core.leading_axes import join_head_axes, map_leading
from attention_jax._core.numerics import NEG_INF, precision_of_products
from attention_jax.kernels.block import block_logits, cut, dtypes_of, narrow
from attention_jax.kernels.block_loops import block_start, scan_rows
from attention_jax.kernels.per_head import lower_heads
from attention_jax.kernels.problem import Problem, Static
from attention_jax.kernels.request import Request
from attention_jax.kernels.tiling import tile


def head_similarity(request: Request, lse: Array, visible: Array) -> Array:
    """Cosines between the heads' weights, centred at uniform weights, `[*B, N, N]`.

        c_mn = <P_m - U_m, P_n - U_n> / (|P_m - U_m| |P_n - U_n|),  U_ts = 1 / visible keys of t

    Args:
        request: the request.
        lse: `[*B, N, T, 2]`, maximum and ln of the total.
        visible: number of visible keys, `[*B, N, T]`.
    """
    layout = request.layout
    with precision_of_products(request.precision):
        tiling = tile(request)
        loop, (rows, columns) = tiling.loop, tiling.block
        if (rows, columns) != (layout.T, layout.S):
            rows = max(rows // layout.N, 1)  # a block of all heads is as large as one of one head
            tiling = tile(dataclasses.replace(request, block_size=(rows, columns)))
        heads = lower_heads(request, tiling._replace(loop=False))
        kinds = heads.kinds.reshape(heads.kinds.shape[-2:])  # joined over heads
        problem = join_head_axes(heads.problem, layout)
        dtypes = dtypes_of(problem)

        def one(parts: tuple[Problem, Array, Array]) -> Array:
            rows = _products(*parts, dtypes, heads.facts, tiling.block, kinds)
            return jnp.sum(rows, axis=0)

        products = map_leading(one, (problem, lse, visible), layout.batch, loop=loop)
    lengths = jnp.sqrt(jnp.maximum(jnp.diagonal(products, axis1=-2, axis2=-1), 0))
    both = lengths[..., :, None] * lengths[..., None, :]
    return jnp.where(both > 0, products / jnp.where(both > 0, both, 1), 0)


def _products(
    heads: Problem,
    lse: Array,
    visible: Array,
    dtypes: Problem,
    facts: Static,
    block: tuple[int, int],
    kinds: Any,
) -> Array:
    """Inner products between all pairs of heads, row by row, `[T, N, N]`."""
    many, length = facts.layout.N, facts.layout.T

    def fetch(i: Array, j: Array) -> Any:
        at = block_start(i, block[0], length)
        rows = (
            jax.lax.dynamic_slice_in_dim(x, at, block[0], axis=1)
            for x in (lse[..., 0], lse[..., 1], visible)
        )

        def one(head: Problem) -> Problem:
            return narrow(cut(head, facts, block, i, j), dtypes)

        return map_leading(one, heads, (many,)), tuple(rows)

    def step(state: Array, fetched: Any, j: Array, partial: bool) -> Array:
        block, (top, log_total, count) = fetched

        def logits_of(head: Problem) -> Array:
            return block_logits(head, facts, partial=partial)

        logits = jax.vmap(logits_of)(block).astype(state.dtype)
        weights = jnp.exp((logits - top[..., None]) - log_total[..., None])
        uniform = 1 / jnp.maximum(count, 1).astype(state.dtype)
        centred = jnp.where(logits == NEG_INF, 0, weights - uniform[..., None])
        return state + jnp.einsum("mts,nts->tmn", centred, centred)

    def begin(i: Array) -> Array:
        return jnp.zeros((block[0], many, many), lse.dtype)

    return scan_rows(length, block[0], kinds, begin, fetch, step, lambda i, state: state)


def rollout(maps: Mapping[str, Any]) -> dict[str, Array]:
    """Attention rollout: the product of the attention matrices of a stack of layers.

        R_0 = I,   R_l = (A_l + I) / 2 · R_{l-1}

    A is the mean of the heads' weights, and the identity represents the residual connection.
    Attentions with "cross" in their path are left out.

    Args:
        maps: the mean weights `[*B, T, T]` by the attention's path, in order of execution. Paths
            that differ in numbers only belong to one stack.

    Returns:
        `[*B, T, T]` for each stack, by its path with `*` in place of numbers.

    References:
        Abnar, Zuidema 2020, "Quantifying Attention Flow in Transformers", arXiv:2005.00928, §3.
    """
    found: dict[str, Array] = {}
    for path, x in maps.items():
        if x.shape[-1] == x.shape[-2] and "cross" not in path:
            stack = re.sub(r"\d+", "*", path)
            before = found.get(
                stack, jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape)
            )
            found[stack] = (jnp.matmul(jnp.asarray(x), before) + before) / 2
    return found
