"""Argument checks and conversions shared by the modules of both flavours."""

from collections.abc import Set
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from attention_jax import masks
from attention_jax._core.axes import AnyArray, BiasLike, MaskLike, Shape
from attention_jax._core.checks import as_array, check_count, check_floating, fits_int32
from attention_jax._core.numerics import is_concrete
from attention_jax._core.term import Term
from attention_jax.masks import Mask
from attention_jax.plan import check_names

AnyMask = Mask | MaskLike | None
AnyBias = Term | BiasLike | None

# Shapes of the users' arguments, for documentation only: the functions below raise errors with
# clear messages, which a checked annotation would preempt.
QueryInputs = Annotated[Any, Float[Array, "*B T Dq"]]
KeyInputs = Annotated[Any, Float[Array, "*B S Dk"]]
ValueInputs = Annotated[Any, Float[Array, "*B S Dv"]]
Features = Annotated[Any, Float[Array, "*B T D"]]
Memory = Annotated[Any, Float[Array, "*B S D"]]
Source = Annotated[Any, Int[Array, "*B S"]]
Target = Annotated[Any, Int[Array, "*B T"]]


def head_depth(features: int, num_heads: int, num_kv_heads: int) -> int:
    """The depth of one head, H = D // N.

    Args:
        features: D, the width that the heads share.
        num_heads: N, query heads.
        num_kv_heads: K, key/value heads.

    Raises:
        ValueError: If D is not a multiple of N, or N is not a multiple of K.
    """
    check_count("qkv_features", features, 1)
    check_count("num_heads", num_heads, 1)
    check_count("num_kv_heads", num_kv_heads, 1)
    if features % num_heads:
        raise ValueError(
            f"qkv_features {features} (D) must be a multiple of num_heads {num_heads} (N)"
        )
    if num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads {num_heads} (N) must be a multiple of num_kv_heads {num_kv_heads} (K)"
        )
    return features // num_heads


def check_choice(name: str, value: str, *choices: str) -> str:
    """Returns `value` if it is one of the choices.

    Raises:
        ValueError: If it is not; the message lists them.
    """
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {listed}, got {value!r}")
    return value


def check_implementation(given: Any) -> Any:
    """Returns `given` if it is a valid `implementation`: None, a kernel's name, or several.

    Raises:
        TypeError: If it is none of these.
        ValueError: If there is no kernel of a name, or an empty sequence.
    """
    if given is not None:
        check_names(given)
    return given


def check_activation(given: Any) -> Any:
    """Returns `given` if it is callable.

    Raises:
        TypeError: If it is not.
    """
    if not callable(given):
        raise TypeError(f"activation must be a function, such as jax.nn.gelu, got {given!r}")
    return given


def check_width(name: str, x: Any, features: int, letters: str) -> None:
    """Checks an input `[*B, length, features]`.

    Args:
        name: The argument's name.
        x: The argument.
        features: The required size of its last axis.
        letters: The shape in letters, for the message.

    Raises:
        TypeError: If it is not a floating-point array.
        ValueError: If it has another shape.
    """
    check_floating(name, as_array(name, x))
    shape = tuple(x.shape)
    if len(shape) < 2 or shape[-1] != features:
        raise ValueError(
            f"{name} must be {letters} with {features} features in its last axis, "
            f"got shape {list(shape)}"
        )


def is_integer(x: Any) -> bool:
    """Whether `x` is an integer, or an array of them, traced or not; booleans do not count."""
    if hasattr(x, "dtype"):
        return jnp.issubdtype(x.dtype, jnp.integer)
    return isinstance(x, int) and not isinstance(x, bool)


def token_ids(name: str, given: Any, vocab: int | None) -> Array:
    """Converts token ids: an integer, an array of integers, or a sequence of these.

    Args:
        name: The argument's name.
        given: The ids.
        vocab: Size of the vocabulary; None is unknown.

    Returns:
        int32; a sequence becomes a leading axis.

    Raises:
        TypeError: If one is not an integer.
        ValueError: If one is known and lies outside the vocabulary.
    """
    if isinstance(given, list | tuple | range | Set):
        parts = [token_ids(name, part, vocab) for part in given]
        return jnp.stack(parts) if parts else jnp.zeros((0,), jnp.int32)
    if not is_integer(given):
        kind = f"dtype {np.dtype(given.dtype).name}" if hasattr(given, "dtype") else repr(given)
        raise TypeError(f"{name} must be a token id, an integer, got {kind}")
    if (wrong := _outside(given, vocab)) is not None:
        raise ValueError(f"{name} is {wrong}, but the vocabulary has {vocab}")
    if not isinstance(given, jax.Array) and not fits_int32(np.asarray(given)):
        raise ValueError(f"{name} must fit in 32 bits, got {given}")
    return jnp.asarray(given).astype(jnp.int32)


def check_tokens(name: str, ids: Any, vocab: int | None = None, mask: AnyMask = None) -> None:
    """Checks token ids `[*B, length]`.

    Args:
        name: The argument's name.
        ids: The ids.
        vocab: Size of the vocabulary; None is unknown.
        mask: Which tokens are real: a mask of keys, or a boolean array that broadcasts to the ids'
            shape. Ids that are masked for every query may have any value.

    Raises:
        TypeError: If it is not an array of integers.
        ValueError: If it has no axis of length, or a real id is known and lies outside the
            vocabulary.
    """
    if not jnp.issubdtype(as_array(name, ids).dtype, jnp.integer):
        raise TypeError(f"{name} must hold token ids, got dtype {np.dtype(ids.dtype).name}")
    if ids.ndim < 1:
        raise ValueError(f"{name} must be [*B, length], got a scalar")
    if _outside(ids, vocab) is None or not is_concrete(mask):
        return
    wrong = _outside(ids, vocab, _visible(mask, ids.shape))
    if wrong is not None:
        raise ValueError(f"{name} holds id {wrong}, but the vocabulary has {vocab}")


def _outside(ids: Any, vocab: int | None, real: Any = True) -> Any:
    """The first of the real ids that is known and lies outside the vocabulary; None if none is."""
    if vocab is None or not is_concrete(ids) or not getattr(ids, "is_fully_addressable", True):
        return None
    known = np.asarray(ids)
    wrong = known[((known < 0) | (known >= vocab)) & real]
    return wrong.flat[0] if wrong.size else None


def _visible(mask: AnyMask, shape: Shape) -> Any:
    """Which tokens, of shape `shape`, are visible to any query under a concrete mask of keys."""
    if mask is None:
        return True
    if not isinstance(mask, Mask):
        return np.broadcast_to(np.asarray(mask), shape)
    with jax.ensure_compile_time_eval():
        kinds: Any = np.asarray(mask.block_map(shape[-1], shape[-1], (shape[-1], 1)).kinds)
    visible = (kinds != 0).any(axis=tuple(range(-min(kinds.ndim, 3), -1)))
    return np.broadcast_to(visible, shape)


def vocabulary(embedding: Any) -> int | None:
    """The vocabulary size of an embedding; None for a module without that attribute."""
    return getattr(embedding, "num_embeddings", None)


def embeddable(ids: Any, vocab: int | None, mask: AnyMask = None) -> Array:
    """Ids for an embedding lookup: the embedding of an id outside the vocabulary is NaN.

    Args:
        ids: Ids `[*B, length]`.
        vocab: Size of the vocabulary; None leaves ids as they are.
        mask: As in `check_tokens`. A masked id outside the vocabulary becomes 0.
    """
    ids = jnp.asarray(ids)
    if vocab is None:
        return ids
    ids = ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids
    other = jnp.full(ids.shape, vocab, ids.dtype)
    if mask is not None and not isinstance(mask, Mask) and np.ndim(mask) <= ids.ndim:
        other = jnp.where(jnp.broadcast_to(jnp.asarray(mask), ids.shape), other, 0)
    return jnp.where((ids < 0) | (ids >= vocab), other, ids)


def as_mask(mask: AnyMask) -> Mask | None:
    """The mask object of a mask or a boolean array.

    Raises:
        TypeError: If an array is not boolean.
    """
    return mask if mask is None or isinstance(mask, Mask) else masks.from_array(mask)


def combine(*given: AnyMask) -> Mask | None:
    """The conjunction of masks: a pair is visible where it is in all of them.

    Args:
        *given: Mask objects, boolean arrays that broadcast to `[*B, N, T, S]`, or None.

    Returns:
        Their conjunction; None if all are None.
    """
    combined = None
    for mask in map(as_mask, given):
        if mask is not None:
            combined = mask if combined is None else combined & mask
    return combined


def token_mask(name: str, mask: AnyMask, shape: Shape) -> Mask | None:
    """Converts a mask of tokens to a mask of keys.

    Args:
        name: The argument's name.
        mask: A mask object; or a boolean array, `[*B, L]`, True for a real token; or a mask of
            pairs, `[*#B, #N, #T, #L]`.
        shape: The shape of the ids, `[*B, L]`.

    Returns:
        A mask in which the real tokens are visible to every query.

    Raises:
        ValueError: If an array has neither of the two shapes.
    """
    if mask is None or isinstance(mask, Mask):
        return mask
    given = tuple(np.shape(mask))
    if given == tuple(shape):
        return masks.from_array(jnp.asarray(mask)[..., None, None, :])
    if len(given) == len(shape) + 2:
        return masks.from_array(mask)
    raise ValueError(
        f"{name} has shape {list(given)}: it must be that of the tokens, {list(shape)}, "
        f"or that of a mask of pairs with {len(shape) + 2} axes [*B, N, T, S]"
    )


def real_positions(mask: AnyMask, shape: Shape) -> Array | None:
    """Positions that count real tokens only, given a mask `[*B, T]` of them.

    Args:
        mask: As in `token_mask`.
        shape: The shape of the ids, `[*B, T]`.

    Returns:
        The number of real tokens before each token, int32 `[*B, T]`; trailing padding continues
        the count. None if the mask is not an array of that shape: positions are then 0..T-1, which
        is also the result for padding on the right.
    """
    if mask is None or isinstance(mask, Mask) or np.shape(mask) != tuple(shape):
        return None
    real = jnp.asarray(mask).astype(jnp.int32)
    ahead = jax.lax.cummax(real, axis=real.ndim - 1, reverse=True)
    skipped = ahead - real  # padding before a real token
    before = jnp.cumsum(skipped, axis=-1, dtype=jnp.int32) - skipped
    return jnp.arange(real.shape[-1], dtype=jnp.int32).reshape(_row(real)) - before


def _row(x: Array) -> Shape:
    return (1,) * (x.ndim - 1) + x.shape[-1:]


def token_positions(given: Any, mask: AnyMask, shape: Shape) -> Any:
    """Positions as given, or else as `real_positions` has them; None for 0..T-1."""
    return real_positions(mask, shape) if given is None else given


def cast(x: AnyArray, dtype: Any) -> AnyArray:
    """`x` in the module's dtype; unchanged if the module has none."""
    return x if dtype is None else jnp.asarray(x).astype(dtype)
