"""Key/value cache: keys and values of previous tokens, so that each token is projected once.

    append(k_t, v_t):  key[index], value[index] ← k_t, v_t;  index ← index + 1

Every method returns a new cache; under jit with the old cache donated, updates are in place. The
buffer's slots are shared by the batch and positions are per example, so that prompts of unequal
length share one index.
"""

import dataclasses
from typing import Annotated, Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from attention_jax._core.axes import Batch, Shape, Size
from attention_jax._core.checks import (
    as_array,
    check_count,
    check_dtype,
    check_flag,
    check_floating,
    check_known,
    check_size,
)
from attention_jax._core.docstrings import arguments_of
from attention_jax._core.pytrees import Record, pytree, static
from attention_jax.masks.buffer import Latest, Written
from attention_jax.masks.mask import Mask

_NewKeys = Annotated[Any, Shaped[Array, "*B T K H"]]
_NewValues = Annotated[Any, Shaped[Array, "*B T K V"]]
_Valid = Annotated[Any, Bool[Array, "*#B T"]]
_Order = Annotated[Any, Int[Array, "*#B beams"]]


@pytree
class KVCache(Record):
    """Key/value cache: keys and values of previous tokens, in a buffer of fixed length.

    Made by `KVCache.init`, and used as

        cache = cache.append(key, value)
        out = attend(query, cache.key, cache.value, mask=cache.mask() & causal(),
                     query_positions=..., key_positions=cache.positions())

    `mask` masks slots that were never written; their content, NaN included, has no effect.

    Attributes:
        key: `[*B, length, K, H]`.
        value: `[*B, length, K, V]`.
        index: int32 scalar, the number of tokens appended so far.
        token_positions: int32 `[*B, length]`, the position of each slot's token; -1 is none.
        lengths: int32 `[*B]`, the number of real tokens, which is the position of the next one.
        overflowed: bool `[*B]`, whether a token did not fit; outputs are NaN from then on.
        window: the number of tokens visible to a query, including itself, in a rolling cache, which
            overwrites the oldest tokens; None in a cache that is not rolling.

    Example:
        >>> import jax.numpy as jnp
        >>> import attention_jax as aj
        >>> cache = aj.cache.KVCache.init(2, 8, heads=1, depth=4)
        >>> cache = cache.append(jnp.ones((2, 3, 1, 4)), jnp.ones((2, 3, 1, 4)))
        >>> int(cache.index), cache.key.shape
        (3, (2, 8, 1, 4))
        >>> query, causal = jnp.ones((2, 3, 1, 4)), aj.masks.causal()
        >>> aj.attend(
        ...     query, cache.key, cache.value, mask=cache.mask() & causal,
        ...     query_positions=jnp.arange(3), key_positions=cache.positions(),
        ... ).shape
        (2, 3, 1, 4)

    References:
        Shazeer 2019, "Fast Transformer Decoding: One Write-Head is All You Need",
        arXiv:1911.02150, §2.3 (incremental multi-head attention).
        Beltagy et al. 2020, "Longformer", arXiv:2004.05150, §3.1 (the window of a rolling cache).
    """

    key: Any
    value: Any
    index: Any
    token_positions: Any
    lengths: Any
    overflowed: Any
    window: int | None = static(default=None)

    def _call(self) -> tuple[str, dict[str, Any]]:
        fields = {"key": self.key, "value": self.value, "index": self.index}
        return "KVCache", {**fields, "window": self.window}

    @classmethod
    def init(
        cls,
        batch: Batch,
        length: Size,
        heads: int,
        depth: int,
        *,
        dtype: Any = jnp.float32,
        value_depth: int | None = None,
        rolling: bool = False,
    ) -> "KVCache":
        """An empty cache.

        Args:
            batch: `*B`: an int, or a tuple of them; `()` for no batch axis.
            length: The number of slots.
            heads: K, key/value heads.
            depth: H, depth of a key head.
            dtype: The dtype of stored keys and values.
            value_depth: V, depth of a value head; None is `depth`.
            rolling: Whether new tokens overwrite the oldest, for windowed attention. The keys
                visible to a query at p then begin at p - length + 1; a mask with a longer window is
                an error.

        Returns:
            A cache with index 0.

        Raises:
            TypeError: If a size is not an integer or the dtype is not floating.
            ValueError: If a size is out of range.
        """
        check_known("KVCache.init", length=length)
        axes = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
        axes = tuple(check_size("batch", axis) for axis in axes)
        length = check_count("length", length, 1 if rolling else 0)
        heads, depth = check_count("heads", heads, 1), check_count("depth", depth)
        values = depth if value_depth is None else check_count("value_depth", value_depth)
        dtype = check_dtype("dtype", dtype)
        check_flag("rolling", rolling)
        return cls(
            key=jnp.zeros((*axes, length, heads, depth), dtype),
            value=jnp.zeros((*axes, length, heads, values), dtype),
            index=jnp.zeros((), jnp.int32),
            token_positions=jnp.full((*axes, length), -1, jnp.int32),
            lengths=jnp.zeros(axes, jnp.int32),
            overflowed=jnp.zeros(axes, bool),
            window=length if rolling else None,
        )

    @property
    def batch(self) -> Shape:
        """`*B`."""
        return tuple(self.key.shape[:-3])

    @property
    def length(self) -> int:
        """The number of slots."""
        return self.key.shape[-3]

    @property
    def rolling(self) -> bool:
        """Whether new tokens overwrite the oldest ones."""
        return self.window == self.length

    def append(self, key: _NewKeys, value: _NewValues, valid: _Valid | None = None) -> "KVCache":
        """Appends tokens.

        Args:
            key: `[*B, T, K, H]`; stored in the cache's dtype.
            value: `[*B, T, K, V]`.
            valid: bool, broadcastable to `[*B, T]`: which tokens are real. Padding occupies a slot,
                is masked and has no position, so a prompt may be padded on the left, on the right
                or in between. None: all tokens are real.

        Returns:
            A new cache. A rolling one keeps the latest `length` real tokens of each example, the
            one at position p in slot `p % length`. With a traced index, tokens beyond the
            length are not written, and all later outputs under `mask` are NaN.

        Raises:
            TypeError: If an argument is not floating, or `valid` not boolean.
            ValueError: If shapes do not fit, or tokens exceed the length.
        """
        new, lengths = self._columns(key, value, valid)
        T = key.shape[-3]
        if self.rolling:
            slots = self._ring(new["token_positions"], lengths)
            written = {name: self._roll(getattr(self, name), x, slots) for name, x in new.items()}
            return dataclasses.replace(self, **written, index=self.index + T, lengths=lengths)
        self._check_fits(T)
        fits = self.index + T <= self.length
        written = {name: self._write(getattr(self, name), x, fits) for name, x in new.items()}
        return dataclasses.replace(
            self,
            **written,
            index=jnp.where(fits, self.index + T, self.index),
            lengths=jnp.where(fits, lengths, self.lengths),
            overflowed=self.overflowed | ~fits,
        )

    @arguments_of(append)
    def concatenate(
        self, key: _NewKeys, value: _NewValues, valid: _Valid | None = None
    ) -> "KVCache":
        """Previous and new tokens in one longer cache, without overwriting tokens.

        A chunk that is appended to a rolling cache overwrites tokens that are visible to its first
        queries. Attend to this cache instead, and append the chunk afterwards.

        Returns:
            A cache of `length + T` slots.
        """
        new, lengths = self._columns(key, value, valid)
        axis = len(self.batch)
        both = {
            name: jnp.concatenate([getattr(self, name), x], axis=axis) for name, x in new.items()
        }
        return dataclasses.replace(self, **both, index=self.index + key.shape[-3], lengths=lengths)

    @arguments_of(append)
    def next_positions(  # noqa: D417
        self, length: Size, valid: _Valid | None = None
    ) -> Int[Array, "*B T"]:
        """Positions of the next tokens, for queries and rotary embeddings.

        Args:
            length: T, the number of tokens.

        Returns:
            int32 `[*B, T]`. Padding has the position of the next real token.
        """
        check_known("KVCache.next_positions", T=length)
        T = check_count("length", length)
        if valid is None:
            before = jnp.arange(T, dtype=jnp.int32)
        else:
            real = self._valid(valid, T).astype(jnp.int32)
            before = jnp.cumsum(real, axis=-1, dtype=jnp.int32) - real
        shape = (*self.batch, T)
        return jnp.broadcast_to(self.lengths[..., None], shape) + jnp.broadcast_to(before, shape)

    def positions(self) -> Int[Array, "*B length"]:
        """The position of each slot, as `key_positions`.

        Returns:
            int32 `[*B, length]`; an unwritten slot has the position of its future token, a slot of
            padding has 0.
        """
        slots = jnp.arange(self.length, dtype=jnp.int32)
        ahead = jnp.broadcast_to(slots - self.index, self.token_positions.shape)
        coming = jnp.where(ahead < 0, 0, self.lengths[..., None] + ahead)
        if self.rolling:  # a token at position p goes to slot p % length
            coming = jnp.broadcast_to(slots, self.token_positions.shape)
        return jnp.where(self.token_positions < 0, coming, self.token_positions)

    def mask(self) -> Mask:
        """The mask of slots with a real token; it does not include causality.

        Returns:
            A mask object over the slots. The mask of a rolling cache is also a window of `length`
            positions: in conjunction with a longer window, or with a mask of array indices
            (`from_array`, `segments`), it is an error, and `padding` compares positions. After an
            overflow, outputs under the mask are NaN.
        """
        written = Written(self.token_positions >= 0, self.overflowed)
        return written if self.window is None else written & Latest(self.window - 1, None)

    def reorder(self, order: _Order, axis: int = -1) -> "KVCache":
        """Reorders the cache for beam search: entry i becomes that of beam `order[i]`.

        All arrays with a batch axis are reordered; the index is shared.

        Args:
            order: ints `[beams]`, along one batch axis; or of the batch's shape, with an order for
                each entry of the other axes. Beams may be repeated or omitted.
            axis: The batch axis of the beams.

        Returns:
            A new cache.

        Raises:
            TypeError: If the order is not of integers.
            ValueError: If there is no such batch axis, or a concrete order is out of range.
        """
        if not jnp.issubdtype(as_array("order", order).dtype, jnp.integer):
            raise TypeError(f"order must be integers, got dtype {np.dtype(order.dtype).name}")
        rank = len(self.batch)
        if not -rank <= axis < rank:
            raise ValueError(
                f"axis {axis} is not a batch axis of a cache with batch {list(self.batch)}"
            )
        axis %= rank
        beams = self.batch[axis]
        rest = self.batch[:axis] + self.batch[axis + 1 :]
        if order.ndim not in (1, rank) or (
            order.ndim > 1 and (*order.shape[:axis], *order.shape[axis + 1 :]) != rest
        ):
            raise ValueError(
                f"order has shape {list(order.shape)} but must be [beams] or the batch's shape, "
                f"{list(self.batch)}, with any number of beams"
            )
        if not isinstance(order, jax.core.Tracer) and order.size:
            known = np.asarray(order)  # jnp.min would be traced inside a jit
            low, high = int(known.min()), int(known.max())
            if low < 0 or high >= beams:
                raise ValueError(f"order must lie in 0..{beams - 1}, got {low}..{high}")
        order = jnp.asarray(order)

        def move(x: Array) -> Array:
            if order.ndim == 1:
                return jnp.take(x, order, axis=axis)
            index = order.reshape(order.shape + (1,) * (x.ndim - rank))
            return jnp.take_along_axis(x, index, axis=axis)

        names = ("key", "value", "token_positions", "lengths", "overflowed")
        return dataclasses.replace(self, **{name: move(getattr(self, name)) for name in names})

    def _check_new(self, name: str, x: Any, buffer: Any) -> None:
        check_floating(name, as_array(name, x))
        width = "H" if name == "key" else "V"
        if x.ndim < 3 or x.shape[:-3] != self.batch or x.shape[-2:] != buffer.shape[-2:]:
            shown = ", ".join([*map(str, self.batch), "T", *map(str, buffer.shape[-2:])])
            raise ValueError(
                f"{name} must be [*B, T, K, {width}] = [{shown}] for this cache, "
                f"got {list(x.shape)}"
            )

    def _columns(self, key: Any, value: Any, valid: Any) -> tuple[dict[str, Array], Array]:
        """Checks new tokens; returns their entries of each buffer, and the new lengths."""
        self._check_new("key", key, self.key)
        self._check_new("value", value, self.value)
        T = key.shape[-3]
        check_known("KVCache.append", T=T)
        if value.shape[-3] != T:
            raise ValueError(f"key length {T} and value length {value.shape[-3]} must match (T)")
        at, lengths = self.next_positions(T, valid), self.lengths + T
        if valid is not None:
            real = self._valid(valid, T)
            at = jnp.where(real, at, -1)
            lengths = self.lengths + jnp.sum(real, axis=-1, dtype=jnp.int32)
        columns = {"key": jnp.asarray(key), "value": jnp.asarray(value), "token_positions": at}
        return {name: x.astype(getattr(self, name).dtype) for name, x in columns.items()}, lengths

    def _check_fits(self, T: int) -> None:
        known = not isinstance(self.index, jax.core.Tracer)
        index = int(self.index) if known else 0
        if index + T > self.length:
            raise ValueError(
                f"{T} more tokens do not fit: the cache has room for {self.length}"
                + (f" and holds {index}" if index else "")
            )

    def _valid(self, valid: Any, T: int) -> Array:
        if as_array("valid", valid).dtype != np.bool_:
            raise TypeError(f"valid must be boolean, got dtype {np.dtype(valid.dtype).name}")
        shape = (*self.batch, T)
        try:
            return jnp.broadcast_to(jnp.asarray(valid), shape)
        except ValueError:
            raise ValueError(
                f"valid has shape {list(valid.shape)}, which does not broadcast to "
                f"[*B, T] = {list(shape)}"
            ) from None

    def _write(self, buffer: Array, new: Array, fits: Array) -> Array:
        """`new` at the index, if it fits: O(T), in place if donated."""
        axis, T = len(self.batch), new.shape[len(self.batch)]
        at = jnp.minimum(self.index, self.length - T)
        old = jax.lax.dynamic_slice_in_dim(buffer, at, T, axis)
        return jax.lax.dynamic_update_slice_in_dim(buffer, jnp.where(fits, new, old), at, axis)

    def _ring(self, positions: Array, lengths: Array) -> Array:
        """The slots `[*B, T]` of a rolling cache's new tokens, by position.

        Padding, and tokens that are overwritten by newer ones of the same chunk, have a slot beyond
        the buffer, where nothing is written.
        """
        T = positions.shape[-1]
        kept = (positions >= 0) & (positions >= lengths[..., None] - self.length)
        beyond = jnp.broadcast_to(self.length + jnp.arange(T, dtype=jnp.int32), positions.shape)
        return jnp.where(kept, positions % self.length, beyond)

    def _roll(self, buffer: Array, new: Array, slots: Array) -> Array:
        """`new` at the slots of each example."""

        def put(buffer: Array, new: Array, slots: Array) -> Array:
            return buffer.at[slots].set(new, mode="drop", unique_indices=True)

        for _ in self.batch:
            put = jax.vmap(put)
        return put(buffer, new, slots)
