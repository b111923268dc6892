"""Attention with fewer heads: modules that are smaller, and say the same."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from flax import nnx

from attention_jax._modules.places import GivenBias
from attention_jax._modules.pruning import (
    Arrays,
    Plan,
    apart,
    by_attention,
    by_layer,
    check_linear,
    clusters,
    in_layers,
    make_plans,
    merge_projections,
    prune_mask,
    prune_projections,
    prune_term,
    together,
)
from attention_jax._modules.recipes import Given
from attention_jax.nnx.attention import MultiHeadAttention
from attention_jax.nnx.scores import PositionParameters

Model = TypeVar("Model", bound=nnx.Module)
_PARTS = ("query", "key", "value", "out")


def prune_heads(model: Model, heads: Mapping[str, Sequence[int]] | Sequence[int]) -> Model:
    """A copy of a model with some heads gone, whose output is as if they put out 0.

    Projections, score and positions keep the other heads' parameters. Key/value heads that no
    query head uses any more go too; where groups are left with unequal numbers of query heads,
    every query head gets a key/value head of its own.

    Args:
        model: a `MultiHeadAttention`, or any NNX model that has some; it stays as it is.
        heads: for each attention by path, as `capture` names them, the heads that go; for a single
            attention the heads alone. Of scanned layers as many go in each; a path without a
            number is for all of them.

    Returns:
        A model of the same class. Optimiser states do not fit it: begin them anew.

    Raises:
        ValueError: a path that leads to no `MultiHeadAttention`, a head that is not there, an
            attention without a head left, scanned layers that would not be of one shape.
        NotImplementedError: projections with other arrays than a kernel and a bias.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import MultiHeadAttention, prune_heads
        >>> layer = MultiHeadAttention(4, 16, score="additive", rngs=nnx.Rngs(0))
        >>> small = prune_heads(layer, [0, 2])
        >>> small.num_heads, small.query.kernel.shape, small(jnp.ones((3, 16))).shape
        (2, (16, 2, 4), (3, 16))

    References:
        Michel, Levy, Neubig 2019, "Are Sixteen Heads Really Better than One?", arXiv:1905.10650.
        Voita et al. 2019, "Analyzing Multi-Head Self-Attention", arXiv:1905.09418.
    """
    copy = nnx.clone(model)
    for path, layer, given in _layers(copy, heads, "heads"):
        pruned = by_layer(given, layer.query.kernel, "heads", path, ())
        plans = make_plans(layer.num_heads, layer.num_kv_heads, pruned, path)
        _become(layer, plans, lambda arrays, i, plans=plans: prune_projections(arrays, plans[i]))
    return copy


def merge_similar_heads(model: Model, similarity: Any, *, threshold: float = 0.98) -> Model:
    """A copy of a model in which heads with like maps are one.

    The first of a group looks for all of it; its value and output kernels become the matrices of
    that rank which come closest to what the group's added up to. Where the maps are equal and the
    sum has no higher rank, the output is the same.

    Args:
        model: a `MultiHeadAttention`, or any NNX model that has some; it stays as it is.
        similarity: for each attention by path `[*B, N, N]`, or a `Capture` made with
            `similarity=True`; for a single attention the array alone.
        threshold: from which cosine on two heads are alike.

    Returns:
        A model of the same class, every query head of a merged attention with a key/value head of
        its own.

    Raises:
        ValueError: as `prune_heads`; a capture without similarity.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must lie in (0, 1], got {threshold}")
    if isinstance(similarity, Mapping):
        similarity = {path: getattr(x, "similarity", x) for path, x in similarity.items()}
        if any(x is None for x in similarity.values()):
            raise ValueError("similarity: the capture has none; capture(..., similarity=True)")
    copy = nnx.clone(model)
    for path, layer, given in _layers(copy, similarity, "similarity"):
        count = layer.num_heads
        groups = []
        for similar in by_layer(given, layer.query.kernel, "similarity", path, np.eye(count)):
            shape = np.shape(similar)
            if shape[-2:] != (count, count):
                raise ValueError(
                    f"similarity has shape {list(shape)} but must be [*B, N, N] with N = {count}"
                )
            groups.append(clusters(similar, threshold))
        pruned = [[n for group in each for n in group[1:]] for each in groups]
        if any(pruned):
            plans = make_plans(count, layer.num_kv_heads, pruned, path, apart=True)

            def merged(arrays: Arrays, i: int, groups: Any = groups, plans: Any = plans) -> Arrays:
                return merge_projections(arrays, groups[i], plans[i])

            _become(layer, plans, merged)
    return copy


def _layers(
    model: Any, given: Any, name: str
) -> list[tuple[str, MultiHeadAttention, dict[int | None, Any]]]:
    if not isinstance(given, Mapping):
        given = {"": given}
    elif isinstance(model, MultiHeadAttention):  # a capture names it by its class
        given = {"" if path == type(model).__name__ else path: x for path, x in given.items()}
    found = []
    for path, x in by_attention(given).items():
        layer: Any = model
        for step in path.split("/") if path else ():
            try:
                layer = layer[int(step)] if step.isdigit() else getattr(layer, step)
            except (AttributeError, IndexError, KeyError, TypeError):
                layer = None
                break
        if not isinstance(layer, MultiHeadAttention):
            raise ValueError(f"{name}: {path!r} leads to no MultiHeadAttention")
        check_linear(path, {part: list(nnx.state(getattr(layer, part))) for part in _PARTS})
        found.append((path, layer, x))
    return found


def _arrays(layer: MultiHeadAttention) -> Arrays:
    parts = {part: getattr(layer, part) for part in _PARTS}
    return {
        name: {"kernel": part.kernel[...]} | ({} if part.bias is None else {"bias": part.bias[...]})
        for name, part in parts.items()
    }


def _become(
    layer: MultiHeadAttention, plans: Sequence[Plan], project: Callable[[Arrays, int], Arrays]
) -> None:
    """Makes the layer one with the heads of the plans, and the projections `project` gives."""
    count, scanned = layer.num_heads, layer.query.kernel.ndim == 4
    arrays = in_layers(project, _arrays(layer), len(plans), scanned=scanned)
    _prune_score(layer, plans, scanned=scanned)
    _prune_positions(layer, plans, scanned=scanned)
    if layer.mask is not None:

        def fewer(mask: Any, i: int) -> Any:
            return prune_mask(mask, count, plans[i].kept)

        layer.mask = nnx.data(in_layers(fewer, layer.mask, len(plans), scanned=scanned))
    for name, new in arrays.items():
        part = getattr(layer, name)
        part.kernel.set_value(new["kernel"])
        if part.bias is not None:
            part.bias.set_value(new["bias"])
    heads, kv_heads = len(plans[0].kept), len(plans[0].kv)
    layer.query.out_features = (heads, layer.head_dim)
    layer.key.out_features = (kv_heads, layer.head_dim)
    layer.value.out_features = (kv_heads, layer.value_dim)
    layer.out.in_features = (heads, layer.value_dim)
    layer.num_heads, layer.num_kv_heads = heads, kv_heads
    layer.qkv_features = heads * layer.head_dim
    layer._forget_cache()  # a cache of keys of the old heads


def _prune_score(layer: MultiHeadAttention, plans: Sequence[Plan], *, scanned: bool) -> None:
    score = layer.score

    def build(values: dict[str, Any], heads: int) -> Any:
        return score.recipe.build(values)

    def fewer(values: dict[str, Any], i: int) -> dict[str, Any]:
        new = prune_term(build, values, layer.num_heads, plans[i].kept, layer.head_dim)
        if new is None:
            term = score.recipe.build(values)
            raise ValueError(f"cannot tell which parameters of {term!r} belong to which head")
        return new

    for name, value in in_layers(fewer, score.values(), len(plans), scanned=scanned).items():
        _set(getattr(score, name), value)


def _prune_positions(layer: MultiHeadAttention, plans: Sequence[Plan], *, scanned: bool) -> None:
    places = layer.positions
    assert places is not None  # a layer with projections has a scheme, if an empty one
    recipe, given, depth = places.recipe, layer.num_heads, layer.head_dim
    every = apart(places.values(), len(plans), scanned=scanned)
    biases = [bias for values in every if (bias := recipe.bias(values, given)) is not None]
    if biases:
        new = [
            prune_term(recipe.bias, values, given, plan.kept, depth)
            for values, plan in zip(every, plans, strict=True)
        ]
        if any(x is None for x in new):
            # what follows from the number of heads becomes an object with its arrays
            fixed = Given.of(biases[0])
            new = [
                prune_term(
                    lambda x, _: fixed.build(x), Given.of(bias).arrays, given, plan.kept, depth
                )
                for bias, plan in zip(biases, plans, strict=True)
            ]
            if any(x is None for x in new):
                raise ValueError(f"cannot tell which arrays of {biases[0]!r} belong to which head")
            _hold(places, fixed, together(new, scanned=scanned))
        else:
            for name, value in together(new, scanned=scanned).items():
                _set(getattr(places, name), value)
    places.num_heads = len(plans[0].kept)


def _hold(places: PositionParameters, fixed: Given, values: Mapping[str, Any]) -> None:
    """The scheme becomes a given bias; its arrays do not train, as they did not before."""
    places.recipe = GivenBias(fixed.bare())
    places.names = tuple(values)
    for name, value in values.items():
        setattr(places, name, nnx.Variable(value))


def _set(variable: Any, value: Any) -> None:
    variable.set_value(value.astype(variable.dtype))
