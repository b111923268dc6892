"""Head pruning for both flavours: removes heads, or merges similar ones."""

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
    """The arrays of one layer that depend on its heads.

    Attributes:
        projections: The arrays of query, key, value and out.
        score: The arrays of the score by name.
        positions: The arrays of the position scheme by name.
        mask: The layer's mask, or None.
    """

    projections: Arrays
    score: dict[str, Any]
    positions: dict[str, Any]
    mask: Mask | None


class Attention(NamedTuple):
    """An attention in a model, or the stack of scanned ones under one path.

    Attributes:
        path: Its path in the model.
        num_heads: N.
        num_kv_heads: K.
        score: The recipe of the score.
        positions: The recipe of the position scheme.
        layers: One, or one for each scanned layer.
        scanned: Whether its arrays have an axis of layers.
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
        """The given value of each layer.

        Args:
            given: Values by layer; the one for None applies to all layers.
            name: The argument, for messages.
            otherwise: The value of layers that are not in `given`.

        Raises:
            ValueError: If a layer does not exist, or there are no scanned layers.
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
                raise ValueError(f"the parameters of {term!r} cannot be sliced by head")
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
        # A scheme that depends on the number of heads becomes an object with its arrays.
        fixed = Given.of(terms[0])
        new = fewer(lambda x, _: fixed.build(x), [dict(Given.of(term).arrays) for term in terms])
        if new is None:
            raise ValueError(f"the arrays of {terms[0]!r} cannot be sliced by head")
        return GivenBias(fixed.bare()), new


class Model(NamedTuple):
    """The interface of a model of one flavour to the functions of this file.

    Attributes:
        name: The name of its class if it is an attention itself, else None.
        attention: `attention(path, name)` returns the attention at a path; `name` is the argument
            that contains the path, for messages.
        replaced: Returns the model with new attentions, by path.
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
        """The model with `change(attention, given)` applied; None if nothing changes."""
        if not isinstance(given, Mapping):
            given = {"": given}
        elif self.name is not None:  # its path in a capture is its class name
            given = {"" if path == self.name else path: x for path, x in given.items()}
        found: dict[str, dict[int | None, Any]] = {}
        for path, x in given.items():
            layer = re.search(r"\[(\d+)\]$", path)  # of scanned layers
            base = path if layer is None else path[: layer.start()]
            found.setdefault(base, {})[None if layer is None else int(layer[1])] = x
        new = {path: change(self.attention(path, name), own) for path, own in found.items()}
        return self.replaced({path: x for path, x in new.items() if x is not None})


def prune_heads(model: Model, heads: Mapping[str, Sequence[int]] | Sequence[int]) -> Any:
    """Removes heads; the result equals the model in which their outputs are 0.

    Projections, score and positions keep the other heads' parameters. Unused key/value heads are
    removed too; if the remaining groups differ in size, every query head gets a separate key/value
    head.

    Args:
        heads: The heads to remove, for each attention by its path in `capture`; for a single
            attention the heads only. Scanned layers must lose equally many; a path without an index
            applies to all of them.

    Raises:
        ValueError: If there is no `MultiHeadAttention` at a path, a head does not exist, an
            attention would have no heads, or scanned layers would differ in shape.
        NotImplementedError: If projections have arrays other than a kernel and a bias.

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
    """Merges heads with similar weights.

    The first head of a group replaces the group; its value and output kernels become the best
    approximation of the group's sum with one head's rank. If the weights are equal and the sum has
    no higher rank, the output is the same. Every query head of a merged attention has a separate
    key/value head.

    Args:
        similarity: For each attention by path `[*B, N, N]`, or a `Capture` made with
            `similarity=True`; for a single attention the array only.
        threshold: The minimal cosine of similar heads.

    Raises:
        ValueError: As in `prune_heads`; if the threshold is out of range or a capture has no
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
    """The tree of each layer if `kernel` has an axis of scanned layers, else the tree itself."""
    if kernel.ndim > 4:
        raise NotImplementedError(f"{path!r} is in a nested scan")
    if kernel.ndim < 4:
        return [tree]
    return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(kernel.shape[0])]


def together(trees: Sequence[Any], *, scanned: bool) -> Any:
    """The inverse of `layers_of`."""
    return jax.tree.map(lambda *each: jnp.stack(each), *trees) if scanned else trees[0]
