"""Linear attention: a product of feature maps replaces the exponential of the score."""

import functools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from attention_jax._core.axes import Batch, Key, MaskLike, Query, Value
from attention_jax._core.checks import as_array, check_count
from attention_jax._core.compiled import compiled
from attention_jax._core.docstrings import arguments_of
from attention_jax._core.pytrees import Record, pytree
from attention_jax.masks.mask import Mask
from attention_jax.subquadratic.features import FeatureMap, Features, as_feature_map
from attention_jax.subquadratic.problem import (
    Problem,
    as_given,
    finish,
    group,
    non_finite_rows,
    usable_keys,
)
from attention_jax.subquadratic.recurrence import (
    LOWEST,
    Keys,
    Ready,
    Sums,
    absorb_in_order,
    aligned,
    chunks,
    divide,
    read,
    steps,
    together,
)
from attention_jax.subquadratic.visibility import mask_object

FORMS = ("chunked", "parallel", "recurrent")
_CHUNK = 64


@pytree
class LinearState(Record):
    """The recurrent state of linear attention, of a size independent of the number of tokens.

    The sums are relative to `exp(shift)`.

    Attributes:
        numerator: `Σ_s φ(k_s) v_sᵀ`, `[*B, K, F, V]`, float32 at least.
        denominator: `Σ_s φ(k_s)`, `[*B, K, F]`.
        shift: `[*B, K]`, the logarithm of the factor by which both are divided.
        index: int32 scalar, the number of positions so far.
    """

    numerator: Any
    denominator: Any
    shift: Any
    index: Any

    @classmethod
    def init(
        cls,
        batch: Batch,
        heads: int,
        features: int,
        depth: int,
        dtype: Any = jnp.float32,
    ) -> "LinearState":
        """The state before the first token.

        Args:
            batch: `*B`, one size or a tuple.
            heads: K, key/value heads.
            features: F, number of features of a key.
            depth: V, depth of a value.
            dtype: dtype of the sums, float32 or float64.
        """
        lead = (*(batch if isinstance(batch, (tuple, list)) else (batch,)), heads)
        return cls(
            jnp.zeros((*lead, features, depth), dtype),
            jnp.zeros((*lead, features), dtype),
            jnp.full(lead, LOWEST, dtype),
            jnp.zeros((), jnp.int32),
        )


def linear_attention(
    query: Query,
    key: Key,
    value: Value,
    *,
    feature_map: Features = None,
    mask: Mask | MaskLike | None = None,
    form: str | None = None,
    chunk_size: int | None = None,
) -> Float[Array, "*B T N V"]:
    """Linear attention: weights are products of features, in O(T + S) time and memory.

        out_t = Σ_s (φ(q_t) · φ(k_s)) v_s / Σ_s φ(q_t) · φ(k_s)   over the visible keys s

    Args:
        query: `[*B, T, N, H]`, floating.
        key: `[*B, S, K, H]`; query head n uses key/value head n // (N // K).
        value: `[*B, S, K, V]`.
        feature_map: φ, `elu_features()` by default; or a function `[..., H] -> [..., F]`.
        mask: causal order and padding: `causal()`, `padding(...)`, `prefix(n)`, a bool array of
            keys `[*B, N, 1, S]` or of queries `[*B, N, T, 1]`, or several joined by `&`. Masked
            keys are excluded from both sums, after the feature map.
        form: the order of the additions. "chunked": pairs within a chunk, sums before it.
            "parallel": all pairs, O(T·S). "recurrent": token by token; its gradient stores one
            state per token. None is "chunked".
        chunk_size: tokens per chunk, for "chunked" only; chosen by default.

    Returns:
        `[*B, T, N, V]` with the query's dtype; sums in float32 at least. 0 for an empty row, and
        for a query whose features are orthogonal to those of all visible keys.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: sizes that do not match, an unknown form, or a mask other than causal order and
            padding.

    Example:
        >>> import jax.numpy as jnp
        >>> import attention_jax as aj
        >>> x = jnp.ones((2, 300, 4, 8))
        >>> aj.subquadratic.linear_attention(x, x, x, mask=aj.masks.causal()).shape
        (2, 300, 4, 8)

    References:
        Katharopoulos et al. 2020, "Transformers are RNNs: Fast Autoregressive Transformers with
        Linear Attention", arXiv:2006.16236, eq. 5 (parallel), eq. 9 (causal), eq. 18 (recurrent).
        Hua et al. 2022, "Transformer Quality in Linear Time", arXiv:2202.10447 (chunks).
    """
    return linear_attention_with_state(
        query,
        key,
        value,
        feature_map=feature_map,
        mask=mask,
        form=form,
        chunk_size=chunk_size,
    )[0]


@arguments_of(linear_attention)
def linear_attention_with_state(  # noqa: D417
    query: Query,
    key: Key,
    value: Value,
    state: Any = None,
    *,
    feature_map: Features = None,
    mask: Mask | MaskLike | None = None,
    form: str | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "*B T N V"], LinearState]:
    """`linear_attention` of one part of a sequence, `(out, state)`.

    Every query attends to all keys in the state, and to the keys of this part that are visible
    under the mask. The feature map is the same in every part. One causal call on a whole sequence
    equals successive calls on its parts with the state passed between them.

    Args:
        state: the state after the previous part; None for the first part.
        mask: a mask of this part, of causal order and padding as in `linear_attention`.

    Returns:
        The output, and the state that includes all visible keys of this part.
    """
    if form is not None and form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(map(repr, FORMS))}, got {form!r}")
    if chunk_size is not None:
        check_count("chunk_size", chunk_size, 1)
        if form not in (None, "chunked"):
            raise ValueError(f"form {form!r} takes no chunk_size")
    if state is not None and not isinstance(state, LinearState):
        raise TypeError(f"state must be a LinearState, got {type(state).__name__}")
    mask = mask_object(mask)
    chosen = as_feature_map(feature_map)
    arrays = (as_array(*pair) for pair in (("query", query), ("key", key), ("value", value)))
    return _run(*arrays, state, mask, chosen, form or "chunked", chunk_size)


@arguments_of(linear_attention)
def linear_attention_step(  # noqa: D417
    query: Annotated[Any, Float[Array, "*B N H"]],
    key: Annotated[Any, Float[Array, "*B K H"]],
    value: Annotated[Any, Float[Array, "*B K V"]],
    state: Any = None,
    *,
    feature_map: Features = None,
) -> tuple[Float[Array, "*B N V"], LinearState]:
    """One decoding step of causal linear attention, in constant time.

        state ← state + (φ(k) vᵀ, φ(k)),   out = φ(q) · state

    Args:
        query: `[*B, N, H]`, one token.
        key: `[*B, K, H]`.
        value: `[*B, K, V]`.
        state: the state after the previous token; None for the first token.

    Returns:
        `[*B, N, V]`, and the state that includes this token.
    """

    def token(name: str, x: Any) -> Array:
        if as_array(name, x).ndim < 2:
            raise ValueError(f"{name} must be [*B, heads, depth] of one token, got {list(x.shape)}")
        return jnp.expand_dims(x, -3)

    out, state = linear_attention_with_state(
        token("query", query),
        token("key", key),
        token("value", value),
        state,
        feature_map=feature_map,
    )
    return out[..., 0, :, :], state


@functools.partial(compiled, static=(6, 7))
def _run(
    query: Any,
    key: Any,
    value: Any,
    state: LinearState | None,
    mask: Mask | None,
    feature_map: FeatureMap,
    form: str,
    chunk_size: int | None,
) -> tuple[Array, LinearState]:
    problem = as_given("linear_attention", query, key, value, mask)
    layout, see = problem.layout, problem.mask
    feature_map.check(layout.H, max(see.start + layout.T, layout.S))
    index = jnp.zeros((), jnp.int32) if state is None else state.index

    def token_positions(length: int, start: int) -> Array:
        return (index + (np.arange(length, dtype=np.int32) + np.int32(start)))[None, None]

    queries = QueryTokens(problem.query, ~problem.bad_query, token_positions(layout.T, see.start))
    keys = KeyTokens(problem.key, problem.value, usable_keys(problem), token_positions(layout.S, 0))
    ready = Ready(
        lambda tokens: _query_features(feature_map, tokens, problem.kv_heads),
        lambda tokens: _key_features(feature_map, tokens),
    )
    shapes = jax.eval_shape(ready.query, queries), jax.eval_shape(ready.keys, keys).features
    if shapes[0].shape[-1] != shapes[1].shape[-1]:
        raise ValueError(
            f"feature_map gives {shapes[0].shape[-1]} features of a query and "
            f"{shapes[1].shape[-1]} of a key: they must match (F)"
        )
    sums = _sums(problem, shapes[1], state)
    out, nonempty, sums = _add(queries, keys, sums, see.offset, form, chunk_size, ready)
    heads = (out.shape[0], layout.N)
    out = finish(
        problem,
        out.reshape(*heads, *out.shape[3:]),
        non_finite_rows(problem),
        nonempty.reshape(*heads, layout.T),
    )
    return out, _state(problem, sums, index)


class QueryTokens(NamedTuple):
    """Queries `[B, N, T, H]`, whether they are finite `[B, N, T]`, and positions `[1, 1, T]`."""

    query: Array
    usable: Array
    positions: Array


class KeyTokens(NamedTuple):
    """Keys `[B, K, S, H]`, values, visible finite keys `[B, K, S]`, and positions `[1, 1, S]`."""

    key: Array
    value: Array
    usable: Array
    positions: Array


def _query_features(feature_map: FeatureMap, queries: QueryTokens, kv_heads: int) -> Array:
    query = jnp.where(queries.usable[..., None], queries.query, 1)
    features = feature_map.query(query, queries.positions[0, 0])
    # The normalisation cancels any factor of a row; scaling avoids underflow of small features.
    top = jax.lax.stop_gradient(jnp.max(jnp.abs(features), axis=-1, keepdims=True, initial=0))
    return group(features / jnp.where(top > 0, top, 1), kv_heads)


def _key_features(feature_map: FeatureMap, keys: KeyTokens) -> Keys:
    """Features of keys; masked keys are set to 0 after the feature map."""
    usable = keys.usable[..., None]
    features, scale = feature_map.key(jnp.where(usable, keys.key, 1), keys.positions[0, 0])
    features = jnp.where(usable, features, 0)
    if scale is not None:
        scale = jax.lax.stop_gradient(jnp.where(keys.usable, scale, LOWEST))
    return Keys(features, jnp.where(usable & jnp.isfinite(keys.value), keys.value, 0), scale)


def _add(
    queries: QueryTokens,
    keys: KeyTokens,
    sums: Sums,
    offset: int | None,
    form: str,
    chunk_size: int | None,
    ready: Ready,
) -> tuple[Array, Array, Sums]:
    T, S = queries.query.shape[2], keys.key.shape[2]
    size = {"parallel": max(S, 1), "recurrent": 1}.get(form, chunk_size or _CHUNK)
    if form == "parallel":
        visible = None
        if offset is not None:
            visible = np.arange(S) <= np.arange(T)[:, None] + offset
        both = together(ready.query(queries), ready.keys(keys), sums, visible)
        return *divide(*both), absorb_in_order(sums, keys, size, ready)
    if offset is None or T == 0:
        whole = form == "chunked" and chunk_size is None
        sums = absorb_in_order(sums, keys, max(S, 1) if whole else size, ready)
        return *divide(*read(ready.query(queries), sums)), sums
    before, beside, after = aligned(keys, T, offset)
    sums = absorb_in_order(sums, before, size, ready)
    if form == "recurrent":
        out, nonempty, sums = steps(ready.query(queries), ready.keys(beside), sums)
    else:
        out, nonempty, sums = chunks(queries, beside, sums, size, ready)
    return out, nonempty, absorb_in_order(sums, after, size, ready)


def _sums(problem: Problem, features: Any, state: LinearState | None) -> Sums:
    """The initial sums, `[B, K, ...]`, for keys with features of this shape and dtype."""
    B, K = problem.key.shape[:2]
    F, V = features.shape[-1], problem.layout.V
    dtype = features.dtype
    if state is None:
        state = LinearState.init(B, K, F, V, dtype)
    else:
        wanted = (*problem.layout.batch, K, F, V)
        if tuple(state.numerator.shape) != wanted:
            raise ValueError(
                f"state.numerator has shape {list(state.numerator.shape)} but must be "
                f"[*B, K, F, V] = {list(wanted)}"
            )
    return Sums(
        jnp.asarray(state.numerator).astype(dtype).reshape(B, K, F, V),
        jnp.asarray(state.denominator).astype(dtype).reshape(B, K, F),
        jnp.asarray(state.shift).astype(dtype).reshape(B, K),
    )


def _state(problem: Problem, sums: Sums, index: Array) -> LinearState:
    """The new state; NaN where a visible key or value was not finite."""
    bad_key = jnp.any(problem.bad_key, axis=2)[..., None]
    bad = jnp.any(problem.bad_value, axis=2) | bad_key
    lead = (*problem.layout.batch, sums.shift.shape[1])
    numerator = jnp.where(bad[:, :, None, :], jnp.nan, sums.numerator)
    denominator = jnp.where(bad_key, jnp.nan, sums.denominator)
    return LinearState(
        numerator.reshape(*lead, *numerator.shape[2:]),
        denominator.reshape(*lead, *denominator.shape[2:]),
        sums.shift.reshape(lead),
        index + np.int32(problem.layout.S),
    )
