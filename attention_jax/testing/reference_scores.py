"""The scores of the reference and their derivatives, for one query and its visible keys.

A row score is a pair of functions of a query `q [H]` and n visible keys `[n, Hk]`::

    forward(q, keys, params)            -> scores [n]
    backward(q, keys, params, d_scores) -> d_q [H], d_keys [n, Hk], d_params

`params` are the parameters of one head by name, in float64. To test another score, pass such a pair
to `reference_attention`.

NumPy only; shares no code with the library under test.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

Numbers = ArrayLike | int | float
"""An array, or anything that NumPy converts to one."""

Params = Mapping[str, np.ndarray]


class RowScore(NamedTuple):
    """The scores of one query and its keys, and their derivative.

    Attributes:
        forward: `(query [H], keys [n, Hk], params) -> [n]`.
        backward: `(query, keys, params, d_scores [n]) -> (d_query, d_keys, d_params)`; `d_params`
            has an entry for every differentiable parameter used.
    """

    forward: Callable[..., np.ndarray]
    backward: Callable[..., tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]


class Activation(NamedTuple):
    """An elementwise function and its derivative."""

    value: Callable[[np.ndarray], np.ndarray]
    slope: Callable[[np.ndarray], np.ndarray]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


_GELU = np.sqrt(2.0 / np.pi)


def _gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1.0 + np.tanh(_GELU * (x + 0.044715 * x**3)))


def _gelu_slope(x: np.ndarray) -> np.ndarray:
    t = np.tanh(_GELU * (x + 0.044715 * x**3))
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * _GELU * (1.0 + 3 * 0.044715 * x * x)


ACTIVATIONS: Mapping[str, Activation] = {
    "tanh": Activation(np.tanh, lambda x: 1.0 - np.tanh(x) ** 2),
    "sigmoid": Activation(_sigmoid, lambda x: _sigmoid(x) * (1.0 - _sigmoid(x))),
    "relu": Activation(lambda x: np.maximum(x, 0.0), lambda x: np.where(x > 0, 1.0, 0.0)),
    "leaky_relu": Activation(
        lambda x: np.where(x >= 0, x, 0.01 * x), lambda x: np.where(x >= 0, 1.0, 0.01)
    ),
    "gelu": Activation(_gelu, _gelu_slope),
    "identity": Activation(lambda x: x, np.ones_like),
}
"""Activations of `additive` and `concat`; gelu is the tanh approximation, as in `jax.nn.gelu`."""


def dot() -> RowScore:
    """The dot product, e = q · k."""

    def forward(q: np.ndarray, keys: np.ndarray, params: Params) -> np.ndarray:
        return keys @ q

    def backward(q: np.ndarray, keys: np.ndarray, params: Params, d: np.ndarray):
        return d @ keys, np.outer(d, q), {}

    return RowScore(forward, backward)


def scaled_dot() -> RowScore:
    """The scaled dot product, e = scale · (q · k); `scale` is 1/√H unless given as a parameter."""

    def scale_of(q: np.ndarray, params: Params) -> Any:
        return params.get("scale", 1.0 / np.sqrt(max(q.shape[0], 1)))

    def forward(q: np.ndarray, keys: np.ndarray, params: Params) -> np.ndarray:
        return scale_of(q, params) * (keys @ q)

    def backward(q: np.ndarray, keys: np.ndarray, params: Params, d: np.ndarray):
        scale = scale_of(q, params)
        d_params = {"scale": np.asarray(d @ (keys @ q))} if "scale" in params else {}
        return scale * (d @ keys), scale * np.outer(d, q), d_params

    return RowScore(forward, backward)


def general() -> RowScore:
    """The bilinear score, e = qᵀ W k; parameter `weight [H, Hk]`."""

    def forward(q: np.ndarray, keys: np.ndarray, params: Params) -> np.ndarray:
        return keys @ (q @ params["weight"])

    def backward(q: np.ndarray, keys: np.ndarray, params: Params, d: np.ndarray):
        pull = d @ keys
        d_params = {"weight": np.outer(q, pull)}
        return params["weight"] @ pull, np.outer(d, q @ params["weight"]), d_params

    return RowScore(forward, backward)


def _activation(activation: str | Activation) -> Activation:
    if isinstance(activation, Activation):
        return activation
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} must be one of {sorted(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


def additive(activation: str | Activation = "tanh") -> RowScore:
    """The additive score, e = v · f(q W_query + k W_key).

    Parameters `w_query [H, A]`, `w_key [Hk, A]`, `v [A]`.
    """
    f, slope = _activation(activation)

    def hidden(q: np.ndarray, keys: np.ndarray, params: Params) -> np.ndarray:
        return q @ params["w_query"] + keys @ params["w_key"]

    def forward(q: np.ndarray, keys: np.ndarray, params: Params) -> np.ndarray:
        return f(hidden(q, keys, params)) @ params["v"]

    def backward(q: np.ndarray, keys: np.ndarray, params: Params, d: np.ndarray):
        x = hidden(q, keys, params)
        d_x = d[:, None] * params["v"] * slope(x)
        d_params = {
            "w_query": np.outer(q, d_x.sum(axis=0)),
            "w_key": keys.T @ d_x,
            "v": d @ f(x),
        }
        return params["w_query"] @ d_x.sum(axis=0), d_x @ params["w_key"].T, d_params

    return RowScore(forward, backward)


def concat(activation: str | Activation = "tanh") -> RowScore:
    """The concatenation score, e = v · f([q; k] W).

    Parameters `weight [H + Hk, A]`, the query's rows first, and `v [A]`.
    """
    inner = additive(activation)

    def split(q: np.ndarray, params: Params) -> dict[str, np.ndarray]:
        weight = params["weight"]
        return {"w_query": weight[: len(q)], "w_key": weight[len(q) :], "v": params["v"]}

    def forward(q: np.ndarray, keys: np.ndarray, params: Params) -> np.ndarray:
        return inner.forward(q, keys, split(q, params))

    def backward(q: np.ndarray, keys: np.ndarray, params: Params, d: np.ndarray):
        d_q, d_keys, parts = inner.backward(q, keys, split(q, params), d)
        weight = np.concatenate([parts["w_query"], parts["w_key"]])
        return d_q, d_keys, {"weight": weight, "v": parts["v"]}

    return RowScore(forward, backward)


def cosine() -> RowScore:
    """The cosine, e = scale · q · k / (|q| |k|), 0 for zero vectors.

    `scale` is 1 unless given as a parameter.
    """

    def unit(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        norm = np.sqrt((x * x).sum(axis=-1, keepdims=True))
        safe = np.where(norm == 0, 1.0, norm)
        return x / safe, np.where(norm == 0, 0.0, 1.0 / safe)

    def forward(q: np.ndarray, keys: np.ndarray, params: Params) -> np.ndarray:
        return params.get("scale", 1.0) * (unit(keys)[0] @ unit(q)[0])

    def backward(q: np.ndarray, keys: np.ndarray, params: Params, d: np.ndarray):
        (q1, q_inverse), (k1, k_inverse) = unit(q), unit(keys)
        cos = k1 @ q1
        scaled = params.get("scale", 1.0) * d
        d_q = (scaled @ k1 - (scaled @ cos) * q1) * q_inverse
        d_keys = scaled[:, None] * (q1[None, :] - cos[:, None] * k1) * k_inverse
        d_params = {"scale": np.asarray(d @ cos)} if "scale" in params else {}
        return d_q, d_keys, d_params

    return RowScore(forward, backward)


def temperature(score: RowScore) -> RowScore:
    """A score divided by its temperature, e / tau; adds the parameter `tau`."""

    def forward(q: np.ndarray, keys: np.ndarray, params: Params) -> np.ndarray:
        return score.forward(q, keys, params) / params["tau"]

    def backward(q: np.ndarray, keys: np.ndarray, params: Params, d: np.ndarray):
        tau = params["tau"]
        d_q, d_keys, d_params = score.backward(q, keys, params, d / tau)
        d_tau = np.asarray(-(d @ score.forward(q, keys, params)) / tau**2)
        return d_q, d_keys, {**d_params, "tau": d_tau}

    return RowScore(forward, backward)


def elementwise(score: RowScore, activation: Activation) -> RowScore:
    """A score with an elementwise function, f(e).

    A soft cap, for example: `elementwise(dot(), Activation(lambda e: c * np.tanh(e / c),
    lambda e: 1 - np.tanh(e / c) ** 2))`.
    """

    def forward(q: np.ndarray, keys: np.ndarray, params: Params) -> np.ndarray:
        return activation.value(score.forward(q, keys, params))

    def backward(q: np.ndarray, keys: np.ndarray, params: Params, d: np.ndarray):
        slope = activation.slope(score.forward(q, keys, params))
        return score.backward(q, keys, params, d * slope)

    return RowScore(forward, backward)


class NamedScore(NamedTuple):
    """A score that `reference_attention` takes by name.

    Attributes:
        make: returns the score.
        parameters: the axes of each parameter of one head, in the letters of the sizes, such as
            "H A"; "H+H" is one axis.
        optional: whether the parameters have defaults.
        drawn: whether random problems have the parameters.
    """

    make: Callable[[], RowScore]
    parameters: Mapping[str, str] = MappingProxyType({})
    optional: bool = False
    drawn: bool = True


SCORES: Mapping[str, NamedScore] = {
    "scaled_dot": NamedScore(scaled_dot, {"scale": ""}, optional=True, drawn=False),
    "dot": NamedScore(dot),
    "general": NamedScore(general, {"weight": "H H"}),
    "additive": NamedScore(additive, {"w_query": "H A", "w_key": "H A", "v": "A"}),
    "concat": NamedScore(concat, {"weight": "H+H A", "v": "A"}),
    "cosine": NamedScore(cosine, {"scale": ""}, optional=True),
}
"""The scores of `reference_attention`, of random problems and of the conformance suite."""
