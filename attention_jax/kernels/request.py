"""The arguments of one call, checked, in one frozen record; and the result of a kernel.

A kernel is a module with three functions: `why_not(request)` returns why the kernel cannot run a
request, or None; `tile(request)` its tiling, or None if it has none; `run(request, tiling)` the
`Result`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax._core.axes import Array, Layout
from attention_jax._core.numerics import NEG_INF, stats_dtype
from attention_jax._core.pytrees import Record, pytree, serializable_tuple, static
from attention_jax._core.term import Sides, Term
from attention_jax.masks.mask import Mask
from attention_jax.softmax import Stats


@pytree
class Request(Record):
    """One call of attention, checked.

    Attributes:
        query: `[*B, T, N, H]`.
        key: `[*B, S, K, Hk]`.
        value: `[*B, S, K, V]`.
        score: the score object.
        mask: a mask object, or None.
        mask_data: what the mask's `prepare` returned for this call.
        bias: a bias object (an array is an `ArrayBias`), or None.
        query_positions: ints `[T]` or `[*B, T]`, or None for 0..T-1.
        key_positions: ints `[S]` or `[*B, S]`, or None for 0..S-1.
        dropout_key: a PRNG key, or None without dropout.
        dropout_rate: in [0, 1).
        shared_dropout: one dropout mask for all batches and heads.
        block_size: (query, key), or None for the kernel's default.
        precision: of matrix products, as in JAX, or None.
        statistics: whether to compute entropy and largest logit.
    """

    query: Any
    key: Any
    value: Any
    score: Term
    mask: Mask | None
    mask_data: Sides
    bias: Term | None
    query_positions: Any
    key_positions: Any
    dropout_key: Any
    dropout_rate: float = static(default=0.0)
    shared_dropout: bool = static(default=False)
    block_size: tuple[int, int] | None = static(default=None)
    precision: Any = static(default=None)
    statistics: bool = static(default=False)

    @functools.cached_property
    def layout(self) -> Layout:
        """The sizes, by letter."""
        *batch, T, N, H = self.query.shape
        S, K, Hk = self.key.shape[-3:]
        return Layout(tuple(batch), T, S, N, K, H, Hk, self.value.shape[-1])

    @property
    def why_no_blocks(self) -> str | None:
        """Why the plane cannot be divided into blocks; None if it can."""
        symbolic = self.layout.symbolic_lengths
        if not symbolic:
            return None
        return f'its blocks need known lengths, got symbolic {symbolic}; "dense" supports them'

    @property
    def may_hide(self) -> bool:
        """Whether a logit may be -inf without a mask."""
        return self.score.may_hide or (self.bias is not None and self.bias.may_hide)

    @functools.cached_property
    def accumulator(self) -> np.dtype:
        """The dtype of statistics and accumulators, the same in every kernel."""
        parts = (self.query, self.key, self.value, self.score, self.bias)
        dtypes = (x.dtype for x in jax.tree.leaves(parts) if hasattr(x, "dtype"))
        return stats_dtype(*(x for x in dtypes if jnp.issubdtype(x, jnp.floating)))


class Result(NamedTuple):
    """The result of a kernel.

    Attributes:
        out: `[*B, T, N, V]` with the query's dtype.
        rows: statistics `[*B, N, T]`, all finite: 0 for an empty row. None without
            `statistics`.
        empty: bool `[*B, N, T]`, which rows are empty; None without statistics.
    """

    out: Array
    rows: Stats | None = None
    empty: Array | None = None

    @property
    def stats(self) -> Stats | None:
        """The public statistics: lse and max_logit of an empty row are -inf."""
        if self.rows is None or self.empty is None:
            return None
        lse, entropy, top = self.rows
        return Stats(
            jnp.where(self.empty, NEG_INF, lse), entropy, jnp.where(self.empty, NEG_INF, top)
        )


@serializable_tuple
class AttentionInputs(NamedTuple):
    """The inputs of one call of attention, as arguments of `attend`; a pytree.

    Attributes:
        query: `[*B, T, N, H]`, after projection, normalisation and rotary embedding.
        key: `[*B, S, K, H]`, likewise.
        value: `[*B, S, K, V]`.
        score: the score object, with the layer's parameters.
        mask: a mask object, or None.
        bias: a bias object, or None.
        query_positions: ints, or None for 0..T-1.
        key_positions: ints, or None for 0..S-1.
    """

    query: Any
    key: Any
    value: Any
    score: Any
    mask: Any
    bias: Any
    query_positions: Any
    key_positions: Any
