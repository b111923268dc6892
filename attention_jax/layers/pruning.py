"""Attentions with fewer heads: removed, or merged where they are similar; for both flavours."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention_jax.layers.head_arrays import (
    Arrays,
    Plan,
    clusters,
    make_plans,
    merge_projections,
    prune_projections,
    prune_term,
)
from attention_jax.layers.position_recipes import GivenBias, PositionRecipe
from attention_jax.layers.recipes import Given, ScoreRecipe
from attention_jax.masks.mask import Mask

PROJECTIONS = ("query", "key", "value", "out")


class Heads(NamedTuple):
    """What one layer has for its heads.

    Attributes:
        projections: The arrays of query, key, value and out.
        score: The arrays of the score by name.
        positions: The arrays of the position scheme by name.
        mask: The layer's own mask, or None.
    """

    projections: Arrays
    score: dict[str, Any]
    positions: dict[str, Any]
    mask: Mask | None


class Attention(NamedTuple):
    """An attention in a model, or those that are scanned in one place.

    Attributes:
        path: Where it is in the model.
        num_heads: N.
        num_kv_heads: K.
        score: The recipe of the score.
        positions: The recipe of the position scheme.
        layers: One, or one for each scanned layer.
        scanned: Whether there is an axis of layers.
    """

    path: str
    num_heads: int
    num_kv_heads: int
    score: ScoreRecipe
    positions: PositionRecipe
    layers: list[Heads]
    scanned: bool

    @property
    def depths(self) -> tuple[int, int]:
        """H and V."""
        arrays = self.layers[0].projections
        return arrays["query"]["kernel"].shape[-1], arrays["value"]["kernel"].shape[-1]

    def of_layers(self, given: Mapping[int | None, Any], name: str, otherwise: Any) -> list[Any]:
        """What is given for each layer.

        Args:
            given: By layer; what is given for None is for all of them.
            name: The argument, for messages.
            otherwise: For layers that are not mentioned.

        Raises:
            ValueError: If a number is given without scanned layers, or one that is not there.
        """
        if None in given and len(given) > 1:
            raise ValueError(
                f"{name}: give {self.path!r} with the numbers of layers or without, not both"
            )
        count = len(self.layers) if self.scanned else 0
        wrong = [i for i in given if i is not None and i >= count]
        if wrong:
            has = f"layers 0 to {count - 1}" if count else "no scanned layers"
            raise ValueError(f"{name}: {self.path!r} has {has}, and no [{wrong[0]}]")
        if None in given:
            return [given[None]] * len(self.layers)
        return [given.get(i, otherwise) for i in range(len(self.layers))]

    def smaller(
        self, plans: Sequence[Plan], project: Callable[[Arrays, int], Arrays]
    ) -> "Attention":
        """The attention with the heads of the plans, and projections `project(arrays, layer)`."""
        count, depth = self.num_heads, self.depths[0]
        positions, biases = self._positions(plans)
        layers = []
        for i, (layer, plan, bias) in enumerate(zip(self.layers, plans, biases, strict=True)):
            score = prune_term(
                lambda x, _: self.score.build(x), layer.score, count, plan.kept, depth
            )
            if score is None:
                term = self.score.build(layer.score)
                raise ValueError(f"cannot tell which parameters of {term!r} belong to which head")
            mask = None if layer.mask is None else layer.mask.take_heads(plan.kept, count)
            layers.append(Heads(project(layer.projections, i), score, bias, mask))
        kept, kv = len(plans[0].kept), len(plans[0].kv)
        return self._replace(num_heads=kept, num_kv_heads=kv, positions=positions, layers=layers)

    def _positions(self, plans: Sequence[Plan]) -> tuple[PositionRecipe, list[dict[str, Any]]]:
        """The position scheme with fewer heads, and its arrays in each layer."""
        count, every = self.num_heads, [layer.positions for layer in self.layers]

        def fewer(build: Any, arrays: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
            found = [
                prune_term(build, x, count, plan.kept, self.depths[0])
                for x, plan in zip(arrays, plans, strict=True)
            ]
            new = [x for x in found if x is not None]
            return new if len(new) == len(found) else None

        terms = [bias for x in every if (bias := self.positions.bias(x, count)) is not None]
        if not terms:
            return self.positions, every
        if (new := fewer(self.positions.bias, every)) is not None:
            return self.positions, new
        # What follows from the number of heads becomes an object with its arrays.
        fixed = Given.of(terms[0])
        new = fewer(lambda x, _: fixed.build(x), [dict(Given.of(term).arrays) for term in terms])
        if new is None:
            raise ValueError(f"cannot tell which arrays of {terms[0]!r} belong to which head")
        return GivenBias(fixed.bare()), new


class Model(NamedTuple):
    """A model of one flavour, as the functions of this file use it.

    Attributes:
        name: The name of its class where it is an attention itself, else None.
        attention: `attention(path, name)` is the attention at a path; `name` is the argument that
            has the path, for messages.
        replaced: The model with other attentions, by path.
    """

    name: str | None
    attention: Callable[[str, str], Attention]
    replaced: Callable[[dict[str, Attention]], Any]

    def changed(
        self,
        given: Any,
        name: str,
        change: Callable[[Attention, Mapping[int | None, Any]], Attention | None],
    ) -> Any:
        """The model with `change(attention, given for it)`, None where nothing changes."""
        if not isinstance(given, Mapping):
            given = {"": given}
        elif self.name is not None:  # a capture names it by its class
            given = {"" if path == self.name else path: x for path, x in given.items()}
        found: dict[str, dict[int | None, Any]] = {}
        for path, x in given.items():
            layer = re.search(r"\[(\d+)\]$", path)  # of those scanned
            base = path if layer is None else path[: layer.start()]
            found.setdefault(base, {})[None if layer is None else int(layer[1])] = x
        new = {path: change(self.attention(path, name), own) for path, own in found.items()}
        return self.replaced({path: x for path, x in new.items() if x is not None})


def prune_heads(model: Model, heads: Mapping[str, Sequence[int]] | Sequence[int]) -> Any:
    """A smaller model without some heads; its output is as if they put out 0.

    Projections, score and positions keep the other heads' parameters. Key/value heads that no
    query head uses any more are removed too; where groups are left with unequal numbers of query
    heads, every query head gets a key/value head of its own.

    Args:
        heads: For each attention by path, as `capture` names them, the heads to remove; for a
            single attention the heads alone. Scanned layers must lose equally many; a path without
            a number is for all of them.

    Raises:
        ValueError: If a path leads to no `MultiHeadAttention`, there is no such head, an attention
            would have no head left, or scanned layers would not have one shape.
        NotImplementedError: If projections have other arrays than a kernel and a bias.

    References:
        Michel, Levy, Neubig 2019, "Are Sixteen Heads Really Better than One?", arXiv:1905.10650.
        Voita et al. 2019, "Analyzing Multi-Head Self-Attention", arXiv:1905.09418.
    """

    def prune(attention: Attention, given: Mapping[int | None, Any]) -> Attention:
        pruned = attention.of_layers(given, "heads", ())
        sizes = (attention.num_heads, attention.num_kv_heads)
        plans = make_plans(*sizes, pruned, attention.path)
        return attention.smaller(plans, lambda arrays, i: prune_projections(arrays, plans[i]))

    return model.changed(heads, "heads", prune)


def merge_similar_heads(model: Model, similarity: Any, *, threshold: float = 0.98) -> Any:
    """A smaller model in which heads with similar weights are one head.

    The first of a group replaces all of it; its value and output kernels become the matrices of
    that rank which are closest to the sum of the group's. Where the weights are equal and the sum
    has no higher rank, the output is the same. Every query head of a merged attention has a
    key/value head of its own.

    Args:
        similarity: For each attention by path `[*B, N, N]`, or a `Capture` made with
            `similarity=True`; for a single attention the array alone.
        threshold: Heads are similar from this cosine on.

    Raises:
        ValueError: As `prune_heads`; if the threshold is out of range or a capture has no
            similarity.
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must lie in (0, 1], got {threshold}")
    if isinstance(similarity, Mapping):
        similarity = {path: getattr(x, "similarity", x) for path, x in similarity.items()}
        if any(x is None for x in similarity.values()):
            raise ValueError("similarity: the capture has none; capture(..., similarity=True)")

    def merge(attention: Attention, given: Mapping[int | None, Any]) -> Attention | None:
        count, kv = attention.num_heads, attention.num_kv_heads
        groups = []
        for similar in attention.of_layers(given, "similarity", np.eye(count)):
            shape = np.shape(similar)
            if shape[-2:] != (count, count):
                raise ValueError(
                    f"similarity has shape {list(shape)} but must be [*B, N, N] with N = {count}"
                )
            groups.append(clusters(similar, threshold))
        pruned = [[n for group in each for n in group[1:]] for each in groups]
        if not any(pruned):
            return None
        plans = make_plans(count, kv, pruned, attention.path, apart=True)
        return attention.smaller(
            plans, lambda arrays, i: merge_projections(arrays, groups[i], plans[i])
        )

    return model.changed(similarity, "similarity", merge)


def layers_of(tree: Any, path: str, kernel: Any) -> list[Any]:
    """The tree itself, or that of each layer where `kernel` has an axis of scanned layers."""
    if kernel.ndim > 4:
        raise NotImplementedError(f"{path!r} lies in a scan within a scan")
    if kernel.ndim < 4:
        return [tree]
    return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(kernel.shape[0])]


def together(trees: Sequence[Any], *, scanned: bool) -> Any:
    """The inverse of `layers_of`."""
    return jax.tree.map(lambda *each: jnp.stack(each), *trees) if scanned else trees[0]
