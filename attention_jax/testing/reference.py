"""Reference attention and its gradients in float64 NumPy, one query at a time.

For query t of head n, the visible keys s are those where the mask is True and the logit not -inf::

    logits_s = score(q_t, k_s) + bias_ts
    lse_t    = log Σ_s exp(logits_s)
    P_s      = exp(logits_s - lse_t)
    out_t    = Σ_s P_s · c_s · v_s,    c_s = keep_ts / (1 - rate)

and backwards, for the cotangents dO of out, dL of lse and dH of the entropy lse - Σ P·logits::

    dP_s     = c_s · (dO_t · v_s)
    dlogits  = P · (dP - Σ P·dP  +  dL  -  (logits - Σ P·logits) · dH)
    dv_s    += P_s · c_s · dO_t
    dq_t, dk_s, dparams  +=  the score's derivative at dlogits

Masked entries are never read. A query without visible keys has weights 0, out 0, lse -inf and
gradient 0. Kernels are compared with this implementation, which shares no code with them.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from attention_jax._core.docstrings import arguments_of
from attention_jax.testing.reference_inputs import (
    Inputs,
    named_params,
    read_cotangent,
    read_inputs,
)
from attention_jax.testing.reference_scores import Numbers, RowScore


class Reference(NamedTuple):
    """The result of `reference_attention`, in float64.

    Attributes:
        out: `[*B, T, N, V]`.
        weights: `[*B, N, T, S]`, before dropout; rows sum to 1, or to 0 without visible keys.
        lse: `[*B, N, T]`, the log-sum-exp of the logits, -inf without visible keys.
    """

    out: Float64[np.ndarray, "*B T N V"]
    weights: Float64[np.ndarray, "*B N T S"]
    lse: Float64[np.ndarray, "*B N T"]


class Gradients(NamedTuple):
    """The result of `reference_gradients`, in float64, each with the shape of its input.

    Attributes:
        query: `[*B, T, N, H]`; zeros if `scores` are given.
        key: `[*B, S, K, Hk]`; zeros if `scores` are given.
        value: `[*B, S, K, V]`.
        bias: the bias's own shape, summed over broadcast axes; None without a bias.
        scores: the shape of `scores`; None without.
        params: an entry for every parameter of the score.
    """

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    bias: np.ndarray | None
    scores: np.ndarray | None
    params: dict[str, np.ndarray]


class _Row(NamedTuple):
    """The visible keys of one query, their logits and weights."""

    visible: np.ndarray  # [n] key indices
    logits: np.ndarray  # [n]
    weights: np.ndarray  # [n]
    lse: float


def reference_attention(
    query: Numbers,
    key: Numbers,
    value: Numbers,
    *,
    score: str | RowScore = "scaled_dot",
    params: Mapping[str, Numbers] | None = None,
    scale: Numbers | None = None,
    scores: Numbers | None = None,
    mask: Numbers | None = None,
    bias: Numbers | None = None,
    dropout_rate: float | int = 0.0,
    dropout_mask: Numbers | None = None,
) -> Reference:
    """Attention in float64: out_t = Σ_s softmax_s(score(q_t, k_s) + bias_ts) · v_s over visible s.

    Args:
        query: `[*B, T, N, H]`, any dtype and any number of leading axes.
        key: `[*B, S, K, Hk]`, N a multiple of K; query head n uses key head `n // (N // K)`.
        value: `[*B, S, K, V]`.
        score: a name of `reference_scores.SCORES`, such as "additive", or a `RowScore`.
        params: the score's parameters by name, those of the factory in `attention_jax.scores`. Each
            may have a leading axis N, one entry per query head.
        scale: the same as `params={"scale": scale}`, a number or `[N]`.
        scores: `[*B, N, T, S]` or broadcasting to it, instead of a score.
        mask: bool, broadcasting to `[*B, N, T, S]`, True = may attend.
        bias: float, broadcasting to `[*B, N, T, S]`, added to the scores; -inf masks the pair.
        dropout_rate: in [0, 1); kept weights are divided by 1 - rate.
        dropout_mask: bool, broadcasting to `[*B, N, T, S]`, True = kept. Returned weights
            are those before dropout.

    Returns:
        `Reference(out [*B, T, N, V], weights [*B, N, T, S], lse [*B, N, T])`.

    Raises:
        TypeError: a mask that is not boolean.
        ValueError: shapes that do not match, or a missing parameter.

    Example:
        >>> import numpy as np
        >>> query, key = np.ones((1, 1, 4)), np.ones((3, 1, 4))
        >>> value = np.arange(3.0)[:, None, None]
        >>> ref = reference_attention(query, key, value, mask=np.array([True, True, False]))
        >>> ref.weights.tolist(), ref.out.tolist()
        ([[[0.5, 0.5, 0.0]]], [[[0.5]]])

    References:
        Vaswani et al. 2017, "Attention Is All You Need" (arXiv:1706.03762), eq. 1.
    """
    p = read_inputs(
        query, key, value, score, params, scale, scores, mask, bias, dropout_rate, dropout_mask
    )
    (size, t_len, n_heads, _), s_len = p.query.shape, p.key.shape[1]
    out = np.zeros((size, t_len, n_heads, p.value.shape[-1]))
    weights = np.zeros((size, n_heads, t_len, s_len))
    lse = np.full((size, n_heads, t_len), -np.inf)
    for b, n, t in np.ndindex(size, n_heads, t_len):
        row = _row(p, b, n, t)
        kept = row.weights * p.keep[b, n, t, row.visible]
        out[b, t, n] = kept @ p.value[b, row.visible, n // p.heads_per_group]
        weights[b, n, t, row.visible] = row.weights
        lse[b, n, t] = row.lse
    return Reference(*(x.reshape(p.batch + x.shape[1:]) for x in (out, weights, lse)))


@arguments_of(reference_attention)
def reference_gradients(  # noqa: D417
    query: Numbers,
    key: Numbers,
    value: Numbers,
    d_out: Numbers | None = None,
    *,
    d_lse: Numbers | None = None,
    d_entropy: Numbers | None = None,
    score: str | RowScore = "scaled_dot",
    params: Mapping[str, Numbers] | None = None,
    scale: Numbers | None = None,
    scores: Numbers | None = None,
    mask: Numbers | None = None,
    bias: Numbers | None = None,
    dropout_rate: float | int = 0.0,
    dropout_mask: Numbers | None = None,
) -> Gradients:
    """The gradient of `Σ d_out·out + Σ d_lse·lse + Σ d_entropy·entropy`, in closed form.

    Empty rows contribute 0 for any cotangents.

    Args:
        d_out: `[*B, T, N, V]`, the cotangent of out; None is zero.
        d_lse: `[*B, N, T]`, the cotangent of lse; None is zero.
        d_entropy: `[*B, N, T]`, the cotangent of each row's entropy; None is zero.
        scores: `[*B, N, T, S]`, instead of a score; the gradients of query and key are then 0.

    Returns:
        `Gradients(query, key, value, bias, scores, params)`, each in the shape of its input.

    Raises:
        TypeError: a mask that is not boolean.
        ValueError: shapes that do not match, or a missing parameter.

    Example:
        >>> import numpy as np
        >>> q, k, v = np.ones((1, 1, 1)), np.zeros((2, 1, 1)), np.array([[[0.0]], [[1.0]]])
        >>> reference_gradients(q, k, v, np.ones((1, 1, 1))).key.ravel().tolist()
        [-0.25, 0.25]
    """
    p = read_inputs(
        query, key, value, score, params, scale, scores, mask, bias, dropout_rate, dropout_mask
    )
    (size, t_len, n_heads, _), s_len = p.query.shape, p.key.shape[1]
    d_out = read_cotangent("d_out", d_out, (*p.batch, t_len, n_heads, p.value.shape[-1]), size)
    d_lse = read_cotangent("d_lse", d_lse, (*p.batch, n_heads, t_len), size)
    d_entropy = read_cotangent("d_entropy", d_entropy, (*p.batch, n_heads, t_len), size)

    d_query, d_key, d_value = (np.zeros_like(x) for x in (p.query, p.key, p.value))
    d_logits = np.zeros((size, n_heads, t_len, s_len))
    d_params = [{name: np.zeros_like(x) for name, x in head.items()} for head in p.params]
    for b, n, t in np.ndindex(size, n_heads, t_len):
        visible, logits, weights, _ = _row(p, b, n, t)
        if not visible.size:
            continue
        group, keep = n // p.heads_per_group, p.keep[b, n, t, visible]
        d_weights = keep * (p.value[b, visible, group] @ d_out[b, t, n])
        d_row = weights * (d_weights - weights @ d_weights) + weights * d_lse[b, n, t]
        d_row -= weights * (logits - weights @ logits) * d_entropy[b, n, t]
        d_value[b, visible, group] += np.outer(weights * keep, d_out[b, t, n])
        d_logits[b, n, t, visible] = d_row
        if p.scores is None:
            keys = p.key[b, visible, group]
            d_q, d_k, d_theta = p.score.backward(p.query[b, t, n], keys, p.params[n], d_row)
            d_query[b, t, n] += d_q
            d_key[b, visible, group] += d_k
            for name, d_parameter in d_theta.items():
                d_params[n][name] += d_parameter

    d_logits = d_logits.reshape(p.batch + d_logits.shape[1:])
    given = named_params(params, scale)
    return Gradients(
        *(x.reshape(p.batch + x.shape[1:]) for x in (d_query, d_key, d_value)),
        bias=None if bias is None else _sum_to(d_logits, np.shape(bias)),
        scores=None if scores is None else _sum_to(d_logits, np.shape(scores)),
        params={
            name: _merge_heads([head[name] for head in d_params], np.shape(x))
            for name, x in given.items()
        },
    )


def _row(p: Inputs, b: int, n: int, t: int) -> _Row:
    """Softmax over the visible keys of query t of head n; reads no other key, score or bias."""
    visible = np.flatnonzero(p.mask[b, n, t] & (p.bias[b, n, t] != -np.inf))
    if p.scores is None:
        keys = p.key[b, visible, n // p.heads_per_group]
        logits = p.score.forward(p.query[b, t, n], keys, p.params[n])
    else:
        logits = p.scores[b, n, t, visible]
    logits = logits + p.bias[b, n, t, visible]
    visible, logits = visible[logits != -np.inf], logits[logits != -np.inf]
    if not visible.size:
        return _Row(visible, logits, logits, -np.inf)
    shifted = np.exp(logits - logits.max())
    lse = float(logits.max() + np.log(shifted.sum()))
    return _Row(visible, logits, shifted / shifted.sum(), lse)


def _merge_heads(heads: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """The gradient in the shape of the parameter: stacked if per head, summed if shared."""
    stacked = np.stack(heads) if heads else np.zeros((0, *shape))
    return stacked if stacked.shape == shape else np.asarray(stacked.sum(axis=0))


def _sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sums over broadcast axes, to `shape`."""
    x = x.sum(axis=tuple(range(x.ndim - len(shape))))
    ones = tuple(i for i, n in enumerate(shape) if n == 1 and x.shape[i] != 1)
    return np.asarray(x.sum(axis=ones, keepdims=True))
