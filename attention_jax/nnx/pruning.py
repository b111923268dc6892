"""Head pruning for NNX."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from attention_jax.layers import pruning
from attention_jax.layers.attention import MultiHeadAttention
from attention_jax.layers.flavours import for_flavour
from attention_jax.layers.head_arrays import check_linear
from attention_jax.layers.position_recipes import GivenBias
from attention_jax.layers.pruning import PROJECTIONS, Attention, Heads, Model, layers_of, together


def _model(model: Any) -> Model:
    copy = nnx.clone(model)
    name = type(model).__name__ if isinstance(model, MultiHeadAttention) else None

    def replaced(attentions: dict[str, Attention]) -> Any:
        for path, attention in attentions.items():
            _write(_layer(copy, path, ""), attention)
        return copy

    return Model(name, lambda path, given: _read(_layer(copy, path, given), path), replaced)


def _layer(model: Any, path: str, name: str) -> Any:
    layer: Any = model
    for step in path.split("/") if path else ():
        try:
            layer = layer[int(step)] if step.isdigit() else getattr(layer, step)
        except (AttributeError, IndexError, KeyError, TypeError):
            layer = None
            break
    if not isinstance(layer, MultiHeadAttention):
        raise ValueError(f"{name}: {path!r} leads to no MultiHeadAttention")
    return layer


def _read(layer: Any, path: str) -> Attention:
    check_linear(path, {part: list(nnx.state(getattr(layer, part))) for part in PROJECTIONS})
    kernel = layer.query.kernel[...]
    projections = {
        part: {
            name: x[...] for name in ("kernel", "bias") if (x := getattr(made, name)) is not None
        }
        for part in PROJECTIONS
        for made in [getattr(layer, part)]
    }
    score, positions = (
        {name: getattr(part, name)[...] for name in part.names}
        for part in (layer.score, layer.positions)
    )
    whole = Heads(projections, score, positions, layer.mask)
    recipes = (layer.score.recipe, layer.positions.recipe)
    layers = layers_of(whole, path, kernel)
    return Attention(
        path, layer.num_heads, layer.num_kv_heads, *recipes, layers, scanned=kernel.ndim == 4
    )


def _write(layer: Any, new: Attention) -> None:
    heads = together(new.layers, scanned=new.scanned)
    for part, arrays in heads.projections.items():
        _set(getattr(layer, part), arrays)
    _set(layer.score, heads.score)
    if isinstance(new.positions, GivenBias) and not isinstance(layer.positions.recipe, GivenBias):
        # Its arrays remain constants.
        layer.positions.names = tuple(heads.positions)
        for name, x in heads.positions.items():
            setattr(layer.positions, name, nnx.Variable(x))
    else:
        _set(layer.positions, heads.positions)
    layer.positions.recipe = new.positions
    layer.mask = nnx.data(heads.mask)
    (depth, value_depth), count, kv = new.depths, new.num_heads, new.num_kv_heads
    layer.query.out_features, layer.out.in_features = (count, depth), (count, value_depth)
    layer.key.out_features, layer.value.out_features = (kv, depth), (kv, value_depth)
    layer.num_heads, layer.num_kv_heads = count, kv
    layer.qkv_features, layer.value_features = count * depth, count * value_depth
    layer._drop_cache()  # it holds the removed heads' keys


def _set(module: Any, arrays: Mapping[str, Any]) -> None:
    for name, x in arrays.items():
        variable = getattr(module, name)
        variable.set_value(x.astype(variable.dtype))


prune_heads = for_flavour(
    pruning.prune_heads,
    _model,
    """For NNX.

    Args:
        model: A `MultiHeadAttention`, or any NNX model that contains some; it is not changed.

    Returns:
        A model of the same class. The state of an optimiser of `model` does not fit it.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from attention_jax.nnx import MultiHeadAttention, prune_heads
        >>> layer = MultiHeadAttention(4, 16, score="additive", rngs=nnx.Rngs(0))
        >>> small = prune_heads(layer, [0, 2])
        >>> small.num_heads, small.query.kernel.shape, small(jnp.ones((3, 16))).shape
        (2, (16, 2, 4), (3, 16))
    """,
)
merge_similar_heads = for_flavour(
    pruning.merge_similar_heads,
    _model,
    """For NNX.

    Args:
        model: A `MultiHeadAttention`, or any NNX model that contains some; it is not changed.

    Returns:
        A model of the same class.
    """,
)
