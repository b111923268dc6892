"""Attention with fewer heads: a smaller module and its variables, which say the same."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flax.core import meta

from attention_jax._modules import places, recipes
from attention_jax._modules.pruning import (
    Arrays,
    Plan,
    clusters,
    make_plan,
    merge_projections,
    prune_projections,
    prune_term,
)
from attention_jax._modules.recipes import Given
from attention_jax.linen.attention import MultiHeadAttention
from attention_jax.linen.scores import is_factory

Pruned = tuple[MultiHeadAttention, dict[str, Any]]


def prune_heads(
    module: MultiHeadAttention, variables: Mapping[str, Any], heads: Sequence[int]
) -> Pruned:
    """A smaller attention and its variables, whose output is as if the other heads put out 0.

    Key/value heads that no query head uses any more go too; where groups are left with unequal
    numbers of query heads, every query head gets a key/value head of its own.

    Args:
        module: a `MultiHeadAttention`.
        variables: its variables, `{"params": ...}`.
        heads: the heads that go.

    Returns:
        The module and its variables.

    Raises:
        ValueError: a head that is not there, or no head left.
        NotImplementedError: a score made by a function, or a mask held by the module.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from attention_jax.linen import MultiHeadAttention, prune_heads
        >>> layer, x = MultiHeadAttention(4), jnp.ones((3, 16))
        >>> small, variables = prune_heads(layer, layer.init(jax.random.key(0), x), [0, 2])
        >>> small.num_heads, small.apply(variables, x).shape
        (2, (3, 16))

    References:
        Michel, Levy, Neubig 2019, "Are Sixteen Heads Really Better than One?", arXiv:1905.10650.
    """
    params, count, kv = _parameters(module, variables)
    plan = make_plan(count, kv, heads)
    return _smaller(module, params, plan, prune_projections(params, plan))


def merge_similar_heads(
    module: MultiHeadAttention,
    variables: Mapping[str, Any],
    similarity: Any,
    *,
    threshold: float = 0.98,
) -> Pruned:
    """A smaller attention and its variables, in which heads with like maps are one.

    The first of a group looks for all of it; its value and output kernels become the matrices of
    that rank which come closest to what the group's added up to.

    Args:
        module: a `MultiHeadAttention`.
        variables: its variables, `{"params": ...}`.
        similarity: `[*B, N, N]`, as in a reading of `capture(..., similarity=True)`.
        threshold: from which cosine on two heads are alike.

    Returns:
        The module and its variables, as they were where no two heads are alike.

    Raises:
        ValueError: a similarity that does not fit.
        NotImplementedError: as `prune_heads`.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must lie in (0, 1], got {threshold}")
    params, count, kv = _parameters(module, variables)
    shape = np.shape(similarity)
    if shape[-2:] != (count, count):
        raise ValueError(
            f"similarity has shape {list(shape)} but must be [*B, N, N] with N = {count}"
        )
    groups = clusters(similarity, threshold)
    pruned = [n for group in groups for n in group[1:]]
    if not pruned:
        return module, {"params": params}
    plan = make_plan(count, kv, pruned, apart=True)
    return _smaller(module, params, plan, merge_projections(params, groups, plan))


def _parameters(module: Any, variables: Mapping[str, Any]) -> tuple[dict[str, Any], int, int]:
    if not isinstance(module, MultiHeadAttention):
        raise TypeError(f"module must be a MultiHeadAttention, got {type(module).__name__}")
    if module.mask is not None:
        raise NotImplementedError("a mask held by the module: give it in the call instead")
    if is_factory(module.score):
        raise NotImplementedError("a score made by a function: give the score itself")
    if "params" not in variables:
        raise ValueError('variables must hold "params"')
    params: dict[str, Any] = dict(meta.unbox(variables["params"]))
    return params, params["query"]["kernel"].shape[-2], params["key"]["kernel"].shape[-2]


def _smaller(module: Any, params: Mapping[str, Any], plan: Plan, arrays: Arrays) -> Pruned:
    count, kept, depth = module.num_heads, plan.kept, params["query"]["kernel"].shape[-1]
    score, its = _score(module.score, params.get("score", {}), count, kept, depth)
    where, own = _positions(module.positions, params.get("positions", {}), count, kept, depth)
    small = module.clone(
        num_heads=len(kept),
        num_kv_heads=len(plan.kv),
        qkv_features=len(kept) * depth,
        value_features=len(kept) * arrays["value"]["kernel"].shape[-1],
        out_features=arrays["out"]["kernel"].shape[-1],
        score=score,
        positions=where,
    )
    new: dict[str, Any] = {**params, **arrays}
    for name, values in (("score", its), ("positions", own)):
        new.pop(name, None)
        if values:
            new[name] = values
    return small, {"params": new}


def _score(given: Any, values: Any, count: int, kept: Any, depth: int) -> tuple[Any, Any]:
    recipe = recipes.recipe(given)
    new = prune_term(lambda x, _: recipe.build(x), _constants(recipe, values), count, kept, depth)
    if new is None:
        raise ValueError(f"cannot tell which parameters of {given!r} belong to which head")
    is_object = isinstance(recipe, Given)
    return (recipe.build(new) if is_object else given), _trained(new, values)


def _positions(given: Any, values: Any, count: int, kept: Any, depth: int) -> tuple[Any, Any]:
    recipe = places.recipe(given)
    whole = _constants(getattr(recipe, "given", None), values)
    bias = recipe.bias(whole, count)
    if bias is None:
        return given, {}

    new = prune_term(recipe.bias, whole, count, kept, depth)
    if new is not None and not isinstance(recipe, places.GivenBias):
        return given, _trained(new, values)
    fixed = Given.of(bias)
    new = prune_term(lambda x, _: fixed.build(x), fixed.arrays, count, kept, depth)
    if new is None:
        raise ValueError(f"cannot tell which arrays of {bias!r} belong to which head")
    # An object's floating arrays are parameters: what followed from the number of heads trains now.
    floating = {n: x for n, x in new.items() if np.issubdtype(np.dtype(x.dtype), np.floating)}
    return fixed.build(new), floating


def _constants(recipe: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The present values, with those arrays of an object that are no parameters."""
    return {**(recipe.arrays if isinstance(recipe, Given) else {}), **values}


def _trained(new: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in new.items() if name in values}
