"""Head pruning for Linen: a smaller module and its variables."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax.core import meta

from attention_jax.layers import position_recipes, pruning, recipes
from attention_jax.layers.arguments import as_mask
from attention_jax.layers.attention import MultiHeadAttention
from attention_jax.layers.flavours import for_flavour
from attention_jax.layers.head_arrays import check_linear
from attention_jax.layers.pruning import PROJECTIONS, Attention, Heads, Model, layers_of, together
from attention_jax.layers.recipes import Given
from attention_jax.linen.layer import Layer, Parts


class Pruned(nn.Module):
    """A user's module with changed settings of some of its attentions.

    It supports `apply` and `init`, as `module` does.
    """

    module: nn.Module
    parts: Parts

    def apply(self, *args: Any, **options: Any) -> Any:
        """The module's `apply`."""
        with _setting(self.parts):
            return self.module.apply(*args, **options)

    def init_with_output(self, *args: Any, **options: Any) -> Any:
        """The module's `init_with_output`, which `init` calls."""
        with _setting(self.parts):
            return self.module.init_with_output(*args, **options)

    def bind(self, *args: Any, **options: Any) -> Any:
        """Not supported: a bound module is set up outside of `apply`."""
        raise NotImplementedError("a pruned module of another class: call apply(variables, ...)")


@contextmanager
def _setting(parts: Parts) -> Iterator[None]:
    changes = dict(parts)

    def change(call: Any, args: Any, options: Any, context: Any) -> Any:
        module: Any = context.module
        if context.method_name == "setup" and _is_attention(module):
            for name, value in changes.get("/".join(module.path), ()):
                object.__setattr__(module, name, value)
        return call(*args, **options)

    with nn.intercept_methods(change):
        yield


def _model(module: nn.Module, variables: Mapping[str, Any]) -> Model:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a Linen module, got {type(module).__name__}")
    if "params" not in variables:
        raise ValueError('variables must hold "params"')
    params: dict[str, Any] = meta.unbox(variables["params"])

    def replaced(attentions: dict[str, Attention]) -> tuple[nn.Module, dict[str, Any]]:
        changes, new = {}, params
        for path, attention in attentions.items():
            steps = path.split("/") if path else []
            own = _at(params, steps)
            changes[path] = tuple(_settings(_layer(module, path, ""), attention).items())
            new = _with(new, steps, _parameters(own, attention))
        kept = {name: part for name, part in variables.items() if name not in ("params", "cache")}
        return _changed(module, changes), {**kept, "params": new}

    name = type(module).__name__ if _is_attention(module) else None
    return Model(name, lambda path, given: _read(module, params, path, given), replaced)


def _read(module: nn.Module, params: Any, path: str, name: str) -> Attention:
    layer = _layer(module, path, name)
    if recipes.is_factory(layer.score):
        raise NotImplementedError(f"{path!r}: a score made by a function: give the score itself")
    own = _at(params, path.split("/") if path else [])
    check_linear(path, {part: own.get(part, {}) for part in PROJECTIONS})
    score, positions = recipes.recipe(layer.score), position_recipes.recipe(layer.positions)
    kernel, key = own["query"]["kernel"], own["key"]["kernel"]
    projections = {part: own[part] for part in PROJECTIONS}
    held = (own.get("score", {}), own.get("positions", {}))
    layers = [
        # Arrays of an object that are not parameters stay in the object.
        heads._replace(
            score={**_constants(score), **heads.score},
            positions={**_constants(getattr(positions, "given", None)), **heads.positions},
            mask=as_mask(layer.mask),
        )
        for heads in layers_of(Heads(projections, *held, None), path, kernel)
    ]
    sizes = (kernel.shape[-2], key.shape[-2])
    return Attention(path, *sizes, score, positions, layers, scanned=kernel.ndim == 4)


def _constants(recipe: Any) -> dict[str, Any]:
    return dict(recipe.arrays) if isinstance(recipe, Given) else {}


def _settings(layer: Any, new: Attention) -> dict[str, Any]:
    """The settings of the module of a changed attention."""
    first, (depth, value_depth) = new.layers[0], new.depths
    shared = [
        jax.tree.leaves((_fixed(heads.score), _fixed(heads.positions), heads.mask))
        for heads in new.layers
    ]
    for other in shared[1:]:
        if not all(map(np.array_equal, other, shared[0])):
            raise NotImplementedError(
                f"{new.path!r}: scanned layers share an array with a head axis; remove "
                "the same heads in each, or build the model with scan_layers=False"
            )
    positions = layer.positions
    if isinstance(new.positions, position_recipes.GivenBias):
        positions = new.positions.given.build(first.positions)
    return {
        "num_heads": new.num_heads,
        "num_kv_heads": new.num_kv_heads,
        "qkv_features": new.num_heads * depth,
        "value_features": new.num_heads * value_depth,
        "out_features": first.projections["out"]["kernel"].shape[-1],
        "score": new.score.build(first.score) if isinstance(new.score, Given) else layer.score,
        "positions": positions,
        "mask": first.mask,
    }


def _parameters(own: Mapping[str, Any], new: Attention) -> dict[str, Any]:
    """The parameters of a changed attention."""
    heads = together(
        [h._replace(score=_trained(h.score), positions=_trained(h.positions), mask=None)
         for h in new.layers],
        scanned=new.scanned,
    )  # fmt: skip
    found = {**own, **heads.projections, "score": heads.score, "positions": heads.positions}
    return {name: x for name, x in found.items() if x}


def _trained(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters, which are the floating-point arrays."""
    return {name: x for name, x in arrays.items() if np.issubdtype(x.dtype, np.floating)}


def _fixed(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in arrays.items() if name not in _trained(arrays)}


def _changed(module: nn.Module, changes: dict[str, Any]) -> nn.Module:
    """The module with new settings of its attentions, by path; "" is the module itself."""
    own = dict(changes.pop("", ()))
    if not changes:
        return module.clone(**own) if own else module
    before = dict(getattr(module, "parts", ()))
    parts = tuple({**before, **changes}.items())
    if isinstance(module, Layer | Pruned):
        return module.clone(parts=parts)
    return Pruned(module, parts)


def _layer(module: Any, path: str, name: str) -> Any:
    """The attention at a path, unbound."""
    found: Any = module
    if path:
        outer = module.module if isinstance(module, Pruned) else module
        with _setting(getattr(module, "parts", ())):
            found = outer.bind({})
            for step in path.split("/"):
                found = None if found is None else _part(found, step)
            if _is_attention(found):
                _part(found, "")  # runs its setup, which defines its settings
                found = found.clone(parent=None)
    if not _is_attention(found):
        raise ValueError(
            f"{name}: {path!r} leads to no MultiHeadAttention that a setup makes; one that is made "
            "in a compact method is pruned by itself"
        )
    return found


def _is_attention(module: Any) -> bool:
    return isinstance(module, MultiHeadAttention)


def _part(module: nn.Module, name: str) -> Any:
    """The submodule of that name, or None."""
    getattr(module, "_not_there", None)  # access to a missing attribute triggers setup
    own = {key: x for key, x in vars(module).items() if key != "parent"}
    found = jax.tree.leaves(own, is_leaf=lambda x: isinstance(x, nn.Module))
    return next((x for x in found if isinstance(x, nn.Module) and x.name == name), None)


def _at(params: Any, steps: Sequence[str]) -> Any:
    for step in steps:
        params = params[step]
    return params


def _with(tree: Mapping[str, Any], steps: Sequence[str], new: Any) -> Any:
    """The tree with the branch at a path replaced."""
    if not steps:
        return new
    return {**tree, steps[0]: _with(tree[steps[0]], steps[1:], new)}


prune_heads = for_flavour(
    pruning.prune_heads,
    _model,
    """For Linen.

    Args:
        module: A `MultiHeadAttention`, or a module whose `setup` makes some, at any depth.
        variables: Its variables, `{"params": ...}`; caches are dropped.

    Returns:
        The module and its variables. The result for a user-defined class supports only `apply` and
        `init`.

    Raises:
        NotImplementedError: If a score is made by a function.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import TransformerEncoder, prune_heads
        >>> model, x = TransformerEncoder(2, 4, 16, 32), jnp.ones((3, 16))
        >>> variables = model.init(jax.random.key(0), x)
        >>> small, fewer = prune_heads(model, variables, {"layers_1/self_attention": [0, 2]})
        >>> fewer["params"]["layers_1"]["self_attention"]["query"]["kernel"].shape
        (16, 2, 4)
        >>> small.apply(fewer, x).shape
        (3, 16)
    """,
)
merge_similar_heads = for_flavour(
    pruning.merge_similar_heads,
    _model,
    """For Linen.

    Args:
        module: As in `prune_heads`.
        variables: As in `prune_heads`.

    Returns:
        The module and its variables; the module itself if no two heads are similar.
    """,
)
