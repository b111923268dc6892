"""Distillation losses of a student: from a teacher's logits, attention maps or translations.

    none              loss = CE(references)
    logits            loss = ½ CE(references) + ½ τ² KL(teacher ‖ student), of softened predictions
    logits and maps   as logits, + mean over attentions and rows of KL(teacher's map ‖ student's)
    sequences         loss = CE(the teacher's greedy translations)

With k times as many layers in the teacher, layer l of the student is matched to layer k·l.

References:
    Hinton et al. 2015, arXiv 1503.02531, eq. 2 (logits).
    Jiao et al. 2020, "TinyBERT", arXiv 1909.10351 (maps and which layer learns from which).
    Kim and Rush 2016, arXiv 1606.07947, §3.2 (sequences; there by beam search).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from attention_jax.diagnostics import AttentionInputs, attention_inputs
from attention_jax.distillation import attention_divergence, logit_distillation
from experiments.core.compiling import call
from experiments.core.state import Loss
from experiments.data.batches import Batch, eval_batches
from experiments.data.text_batches import TextBatches
from experiments.data.tokens import BOS, PAD
from experiments.models import seq2seq
from experiments.translation import translations

WAYS = ("none", "logits", "logits and maps", "sequences")
_AT_ONCE = 64  # sentences that the teacher translates at once


def observed(
    student: seq2seq.Model, batch: seq2seq.Arrays
) -> tuple[Array, dict[str, AttentionInputs]]:
    """Return the logits, and the inputs of each attention by path."""
    inputs = batch["source"], batch["target_in"]
    flags = {"source_mask": batch["source"] != PAD, "deterministic": True}
    return attention_inputs(student, *inputs, **flags)


def shown(teacher: seq2seq.Model, batch: seq2seq.Arrays) -> dict[str, Any]:
    """Return the teacher's logits for a batch, and the queries and keys of its attentions."""
    return call(_shown, teacher, batch, fast_compile=False)


def _shown(teacher: seq2seq.Model, batch: seq2seq.Arrays) -> dict[str, Any]:
    logits, kept = observed(teacher, batch)
    return {"logits": logits, "maps": {path: (x.query, x.key) for path, x in kept.items()}}


@dataclasses.dataclass(frozen=True)
class Distillation:
    """The loss of a student given the teacher's outputs for a batch.

    Attributes:
        temperature: τ, of the predictions.
        maps_weight: the weight of the maps' divergence, where there are maps.
        deeper: the number of teacher layers for each student layer.
    """

    temperature: float
    maps_weight: float
    deeper: int

    def __call__(self, student: seq2seq.Model, batch: seq2seq.Arrays, key: Array) -> Array:
        """Return the loss, in nats a token."""
        del key
        logits, kept = observed(student, batch)
        real = jnp.asarray(batch["target_out"]) != PAD
        hard, _ = seq2seq.cross_entropy(logits, batch["target_out"])
        teacher = batch["teacher"]
        soft = logit_distillation(
            teacher["logits"], logits, temperature=self.temperature, where=real
        )
        total = (hard + soft) / 2
        if "maps" in teacher:
            rows = {"encoder": jnp.asarray(batch["source"]) != PAD, "decoder": real}
            apart = [
                self._apart(teacher["maps"], path, own, rows[path.split("/")[0]])
                for path, own in kept.items()
            ]
            total = total + self.maps_weight * sum(apart) / len(apart)
        return total

    def _apart(
        self, maps: Mapping[str, Any], path: str, own: AttentionInputs, real: Array
    ) -> Array:
        """Return how far one attention's map is from its teacher's, the mean over real rows."""
        side, layers, layer, name = path.split("/")
        its = maps["/".join([side, layers, str((int(layer) + 1) * self.deeper - 1), name])]
        apart = attention_divergence(
            its, (own.query, own.key), teacher_mask=own.mask, student_mask=own.mask
        )
        counts = jnp.broadcast_to(real[:, None], apart.shape)
        return jnp.sum(jnp.where(counts, apart, 0.0)) / jnp.maximum(jnp.sum(counts), 1)


def lesson(
    way: str,
    data: TextBatches,
    *,
    teacher: seq2seq.Model | None,
    said: Mapping[int, Sequence[int]],
    loss: Distillation,
) -> tuple[Loss, Callable[[int], Any]]:
    """Return the loss of one of `WAYS`, and the batch of each step.

    Args:
        way: one of `WAYS`.
        data: the corpus.
        teacher: the trained teacher, where the way needs its logits.
        said: its translations of the training sentences, if the way needs them.
        loss: the loss of the ways with logits.
    """
    if way == "none":
        return seq2seq.loss, lambda step: data.train[step].arrays
    if way == "sequences":
        return seq2seq.loss, lambda step: retold(data.train[step], said).arrays
    assert teacher is not None

    wanted = ("logits", "maps") if way == "logits and maps" else ("logits",)

    def with_teacher(step: int) -> dict[str, Any]:
        batch = data.train[step].arrays
        its = shown(teacher, batch)
        return {**batch, "teacher": {name: its[name] for name in wanted}}

    return loss, with_teacher


def all_translations(teacher: seq2seq.Model, data: TextBatches) -> dict[int, list[int]]:
    """Return the teacher's translations of all training sentences."""
    learn, shapes = data.train.data, data.train.shapes
    return translations(teacher, eval_batches(learn, batch_size=_AT_ONCE, shapes=shapes))


def retold(batch: Batch, said: Mapping[int, Sequence[int]]) -> Batch:
    """Return a batch with other translations: ``said`` by the sentences' places in their split."""
    target_in, target_out = np.full_like(batch.target_in, PAD), np.full_like(batch.target_out, PAD)
    for row, index in enumerate(batch.index.tolist()):
        ids = list(said[index])
        target_out[row, : len(ids)] = ids
        target_in[row, : len(ids)] = [BOS, *ids[:-1]][: len(ids)]
    return dataclasses.replace(
        batch, target_in=target_in, target_out=target_out, target_mask=target_out != PAD
    )
