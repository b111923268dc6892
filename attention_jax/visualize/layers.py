"""Reads weights and tokens: the weights of one example by layer, and labels of its tokens."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np

from attention_jax._core.checks import as_array, check_count, check_floating

Words = Sequence[str] | np.ndarray
Tokens = Words | Mapping[str, Words] | None
Example = int | np.integer | Sequence[int] | None


class Layer(NamedTuple):
    """The weights of one attention on one example: its name, and float32 `[N, T, S]`."""

    name: str
    weights: np.ndarray


def read_layers(name: str, weights: Any, example: Example) -> list[Layer]:
    """The layers of a `weights` argument, without batch axes.

    Args:
        name: name of the argument, for errors.
        weights: `[N, T, S]` of one layer, `[L, N, T, S]` of several, or a list or mapping of
            layers `[*B, N, T, S]`, or of objects with such `weights` (`diagnostics.capture`).
        example: an index into the batch axes, which precede N; None without batch axes, or for a
            single example.

    Raises:
        TypeError: not a floating array.
        ValueError: wrong axes, an index out of range, numbers that are not weights.
    """
    index = read_example(example)
    if isinstance(weights, Mapping):
        found = [Layer(str(key), _array(f"{name}[{key!r}]", x)) for key, x in weights.items()]
        stacked = False
    elif isinstance(weights, (list, tuple)):
        found = [Layer(f"layer {i}", _array(f"{name}[{i}]", x)) for i, x in enumerate(weights)]
        stacked = False
    else:
        array = _array(name, weights)
        batch = 0 if index is None else len(index)
        stacked = array.ndim == 4 + batch
        found = [Layer(f"layer {i}", x) for i, x in enumerate(array if stacked else array[None])]
    layers = [Layer(key, _one_example(f"{name} of {key!r}", x, index)) for key, x in found]
    if not layers:
        raise ValueError(f"{name} has no layer")
    for key, x in layers:
        check_weights(f"{name} of {key!r}", x)
    return layers


def read_example(example: Example) -> tuple[int, ...] | None:
    """The index of an example as a tuple with an entry for each batch axis."""
    if example is None:
        return None
    given = example if isinstance(example, (tuple, list)) else (example,)
    return tuple(check_count("example", i, -(2**31)) for i in given)


def _array(name: str, x: Any) -> np.ndarray:
    if hasattr(x, "weights"):
        x = x.weights
        if x is None:
            raise ValueError(f"{name} has no weights: use capture(..., weights=True)")
    as_array(name, x)
    check_floating(name, x)
    return np.asarray(x).astype(np.float32)


def _one_example(name: str, x: np.ndarray, example: tuple[int, ...] | None) -> np.ndarray:
    """`[*B, N, T, S]` at one index of `*B`."""
    shape = list(x.shape)
    if x.ndim < 3:
        raise ValueError(f"{name} must be [*B, N, T, S], got {shape}")
    batch = shape[:-3]
    if example is None:
        if any(size != 1 for size in batch):
            raise ValueError(
                f"{name} has batch axes *B = {batch}: choose one example, example="
                f"{0 if len(batch) == 1 else (0,) * len(batch)}"
            )
        example = (0,) * len(batch)
    if len(example) != len(batch) or any(
        not -size <= i < size for i, size in zip(example, batch, strict=True)
    ):
        raise ValueError(
            f"example {example} is not an index into the batch axes *B = {batch} of {name}"
        )
    return x[example]


def check_weights(name: str, x: np.ndarray) -> None:
    """Raises unless weights `[N, T, S]`, or fewer axes, are not empty, finite and in [0, 1]."""
    letters = ("N", "T", "S")[-x.ndim :]
    for letter, size in zip(letters, x.shape, strict=True):
        if size == 0:
            raise ValueError(f"{name} is empty: {letter} = 0 in {list(x.shape)}")
    if not np.isfinite(x).all():
        at = np.argwhere(~np.isfinite(x))[0]
        where = ", ".join(f"{letter} = {i}" for letter, i in zip("nts"[-x.ndim :], at, strict=True))
        raise ValueError(f"{name} must be finite, and is not at {where}")
    low, high = float(x.min()), float(x.max())
    if low < -0.01 or high > 1.01:
        raise ValueError(
            f"{name} must lie in [0, 1], got {low:.3g} to {high:.3g}: weights, not logits"
        )


def labels(name: str, tokens: Any, letter: str, size: int) -> list[str]:
    """The labels of an axis: its tokens, or its indices."""
    if tokens is None:
        return [str(i) for i in range(size)]
    if isinstance(tokens, np.ndarray):
        tokens = tokens.tolist()
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise TypeError(f"{name} must be a list of strings, got {type(tokens).__name__}")
    for token in tokens:
        if not isinstance(token, str):
            raise TypeError(f"{name} must be strings, got {type(token).__name__}")
    if len(tokens) != size:
        raise ValueError(f"{name} has {len(tokens)} tokens but {letter} = {size}")
    return [str(token) for token in tokens]


def layer_labels(layer: Layer, tokens: Tokens, key_tokens: Tokens) -> tuple[list[str], list[str]]:
    """The labels of a layer's queries and keys.

    In a mapping, the first pattern that matches the layer's name counts. Without key tokens, keys
    have the labels of the queries if T = S.
    """
    _, T, S = layer.weights.shape
    queries = _matching(layer, tokens)
    keys = _matching(layer, key_tokens)
    if keys is None and T == S:
        keys = queries
    elif keys is None and queries is not None:
        raise ValueError(
            f"{layer.name!r} has T = {T} queries and S = {S} keys: give key_tokens too"
        )
    return labels("tokens", queries, "T", T), labels("key_tokens", keys, "S", S)


def _matching(layer: Layer, tokens: Tokens) -> Words | None:
    if not isinstance(tokens, Mapping):
        return tokens
    return next((t for pattern, t in tokens.items() if fnmatchcase(layer.name, pattern)), None)


def entropy(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean entropy of each head, in nats and relative to ln of the number of visible keys.

    Args:
        weights: `[N, T, S]`.

    Returns:
        Nats `[N]`, means over rows with visible keys; relative entropies `[N]`, means over rows
        with at least two. NaN without such rows.
    """
    visible = (weights > 0).sum(-1)
    safe = np.where(weights > 0, weights, 1)
    nats = -(safe * np.log(safe)).sum(-1)
    share = nats / np.log(np.maximum(visible, 2))
    return _mean(nats, visible >= 1), _mean(share, visible >= 2)


def _mean(rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
    total = counts.sum(-1)
    return np.where(total > 0, (rows * counts).sum(-1) / np.maximum(total, 1), np.nan)
