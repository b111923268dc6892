"""Pruning heads of a trained translation model, and the loss in quality."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from attention_jax.diagnostics import head_importance
from attention_jax.nnx import prune_heads
from experiments.core.compiling import call
from experiments.data.tasks import joined
from experiments.data.text_batches import TextBatches
from experiments.data.tokens import PAD
from experiments.models import seq2seq
from experiments.translation import quality

Head = tuple[str, int]  # path of the attention, index
PARTS = ("self", "cross")
_MEASURED = 2  # batches of held-out sentences that importance is measured on


def importance(trained: seq2seq.Model, data: TextBatches) -> dict[str, list[float]]:
    """Return the importance of each head by gradient, an attention's values of length 1."""
    batch = joined(data.valid[:_MEASURED])
    found = head_importance(
        trained,
        batch["source"],
        batch["target_in"],
        source_mask=batch["source"] != PAD,
        deterministic=True,
        loss=lambda logits: seq2seq.cross_entropy(logits, batch["target_out"])[0],
        normalize=True,
    )
    return {path: [float(x) for x in worth] for path, worth in found.items()}


def removable(worth: Mapping[str, Sequence[float]], part: str, order: Sequence[Head]) -> list[Head]:
    """Return the heads of ``order`` that may go: of each attention all but the last of them."""
    left = {path: len(heads) for path, heads in worth.items() if f"{part}_attention" in path}
    gone = []
    for path, head in order:
        if left.get(path, 1) > 1:
            left[path] -= 1
            gone.append((path, head))
    return gone


def orders(
    worth: Mapping[str, Sequence[float]], part: str, *, draws: int, seed: int
) -> Iterator[tuple[str, int, list[Head]]]:
    """Yield ways to go through the heads of a part: by importance, least first, and at random."""
    heads = [(path, head) for path, values in worth.items() for head in range(len(values))]
    ranked = sorted(heads, key=lambda head: worth[head[0]][head[1]])
    yield "importance", 0, removable(worth, part, ranked)
    for draw in range(draws):
        rng = np.random.default_rng([seed, draw, PARTS.index(part)])
        drawn = [heads[i] for i in rng.permutation(len(heads))]
        yield "random", draw, removable(worth, part, drawn)


def silenced(trained: seq2seq.Model, heads: Sequence[Head]) -> seq2seq.Model:
    """Return a copy whose ``heads`` output 0: equivalent to pruning, with unchanged shapes.

    One compiled function serves all such copies; a pruned model needs its own.
    """
    copy = nnx.clone(trained)
    for path, gone in by_attention(heads).items():
        kernel = _at(copy, path).out.kernel
        kernel.set_value(kernel[...].at[np.asarray(gone)].set(0))
    return copy


def by_attention(heads: Sequence[Head]) -> dict[str, list[int]]:
    """Return the heads of each attention."""
    found: dict[str, list[int]] = {}
    for path, head in heads:
        found.setdefault(path, []).append(head)
    return found


def _at(trained: Any, path: str) -> Any:
    def step(module: Any, name: str) -> Any:
        return module[int(name)] if name.isdigit() else getattr(module, name)

    return functools.reduce(step, path.split("/"), trained)


def curves(
    trained: seq2seq.Model,
    data: TextBatches,
    worth: Mapping[str, Sequence[float]],
    *,
    points: int,
    draws: int,
) -> list[dict[str, Any]]:
    """Return the quality with no head gone, and with ever more of each part, in each order."""
    whole = quality(trained, data)
    found = []
    for part in PARTS:
        for order, draw, heads in orders(worth, part, draws=draws, seed=data.seed):
            counts = np.unique(np.linspace(0, len(heads), points + 1).round().astype(int))
            for count in counts.tolist():
                left = quality(silenced(trained, heads[:count]), data) if count else whole
                point = {"part": part, "order": order, "draw": draw, "removed": count}
                found.append({**point, "heads": heads[:count], **left})
    return found


def pruned(
    trained: seq2seq.Model, data: TextBatches, worth: Mapping[str, Sequence[float]], part: str
) -> dict[str, Any]:
    """Prune half of a part's heads: return the savings, and whether outputs agree."""
    _, _, heads = next(orders(worth, part, draws=0, seed=data.seed))
    heads = heads[: max(1, len(heads) // 2)]
    small = prune_heads(trained, by_attention(heads))
    batch = data.valid[0]
    one, other = (_logits(m, batch) for m in (small, silenced(trained, heads)))
    return {
        "part": part,
        "removed": len(heads),
        "parameters": seq2seq.parameters(small),
        "difference": float(np.abs(one - other).max()),
    }


def _logits(trained: seq2seq.Model, batch: seq2seq.Arrays) -> np.ndarray:
    return np.asarray(call(_compute, trained, batch["source"], batch["target_in"]))


def _compute(trained: seq2seq.Model, source: Any, target: Any) -> Any:
    return trained(source, target, source_mask=source != PAD, deterministic=True)
