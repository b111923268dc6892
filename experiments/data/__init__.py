"""Parallel text for the experiments.

    data = load("grammar", seed=0)            # a Dataset: train, valid, test are tuples of Pair
    source, target = train_tokenizers(data)   # .size .encode .decode .labels .save
    train = TrainBatches(encode(data.train, source, target), batch_size=64, seed=0)
    for batch in train.iterate(start_step=0):      # batch.source [B, S], .target_in [B, T],
        ...                                        # .target_out, .source_mask, .target_mask, .index
    for batch in eval_batches(encode(data.test, source, target), batch_size=64):
        ...                                        # every pair once; index -1 marks an empty row

A text is a string; where ``data.unit`` is "word" its tokens are joined by one blank. Score with
``experiments.metrics`` and ``tokenize=data.bleu_tokenize``, by length with ``data.lengths("test")``
and ``data.buckets``. What is wrong with the user's data raises :class:`DataError`, one line.
"""

from .batches import Batch as Batch
from .batches import Encoded as Encoded
from .batches import TrainBatches as TrainBatches
from .batches import batches as batches
from .batches import choose_shapes as choose_shapes
from .batches import encode as encode
from .batches import eval_batches as eval_batches
from .dataset import DataError as DataError
from .dataset import Dataset as Dataset
from .dataset import Pair as Pair
from .grammar import load_grammar
from .tokens import BOS as BOS
from .tokens import EOS as EOS
from .tokens import PAD as PAD
from .tokens import UNK as UNK
from .tokens import Tokenizer as Tokenizer
from .tokens import load_tokenizer as load_tokenizer
from .tokens import train_tokenizers as train_tokenizers


def load(
    spec: str,
    *,
    seed: int = 0,
    train_size: int | None = None,
    valid_size: int | None = None,
    test_size: int | None = None,
) -> Dataset:
    """Loads parallel text by name or path."""
    if spec == "grammar":
        return load_grammar(
            seed=seed, train_size=train_size, valid_size=valid_size, test_size=test_size
        )
    raise DataError(f"unknown data {spec!r}; known: grammar")
