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

import difflib
import pathlib

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
from .dataset import Split as Split
from .dates import load_dates
from .files import load_files
from .grammar import load_grammar
from .hub import load_hub
from .tokens import BOS as BOS
from .tokens import EOS as EOS
from .tokens import PAD as PAD
from .tokens import UNK as UNK
from .tokens import Tokenizer as Tokenizer
from .tokens import load_tokenizer as load_tokenizer
from .tokens import train_tokenizers as train_tokenizers

NAMES = ("grammar", "dates")
_KNOWN = (
    "grammar, dates, FILE.tsv or FILE.tsv.gz, SOURCE.txt,TARGET.txt, hf:NAME[:CONFIG][@REVISION]"
)


def load(
    spec: str = "grammar",
    *,
    seed: int = 0,
    train_size: int | None = None,
    valid_size: int | None = None,
    test_size: int | None = None,
    languages: str | None = None,
) -> Dataset:
    """Parallel text by name.

    Args:
        spec: ``grammar``, ``dates``, a ``.tsv`` or ``.tsv.gz``, two plain files
            ``SOURCE,TARGET``, or ``hf:NAME[:CONFIG][@REVISION]``.
        seed: Decides which training pairs are made or chosen. Valid and test are the same for all
            seeds.
        train_size: How many training pairs: so many are made, or at most so many kept; None is
            what the data set has or makes on its own.
        valid_size: The same for valid.
        test_size: The same for test.
        languages: ``SOURCE-TARGET`` codes, as in ``en-de``: the columns of a data set of the Hub,
            or the names of the languages of files.

    Returns:
        The data set.

    Raises:
        DataError: Anything the user can put right, in one line.
    """
    sizes: dict[Split, int | None] = {"train": train_size, "valid": valid_size, "test": test_size}
    for split, size in sizes.items():
        if size is not None and size < 1:
            raise DataError(f"{split}_size must be at least 1, not {size}")
    pair = None
    if languages is not None:
        source, dash, target = languages.partition("-")
        if not (dash and source and target):
            raise DataError(f"languages {languages!r} must be SOURCE-TARGET, as in en-de")
        pair = source, target
    if spec in NAMES:
        if pair not in (None, ("en", "de" if spec == "grammar" else "zh")):
            raise DataError(f"{spec} has no languages to choose, so not {languages}")
        make = load_grammar if spec == "grammar" else load_dates
        return make(seed=seed, sizes=sizes)
    if spec.startswith("hf:"):
        return load_hub(spec, seed=seed, sizes=sizes, languages=pair)
    path = pathlib.Path(spec).expanduser()
    if spec.endswith((".tsv", ".tsv.gz")) or "," in spec:
        return load_files(spec, seed=seed, sizes=sizes, languages=pair)
    if path.is_file():
        raise DataError(
            f"{spec}: one plain file is only one side; give both as SOURCE,TARGET (en.txt,de.txt), "
            "or a .tsv with a tab in each row"
        )
    if path.is_dir():
        raise DataError(f"{spec} is a folder; known data: {_KNOWN}")
    if path.suffix or len(path.parts) > 1:
        raise DataError(f"{spec}: no such file; known data: {_KNOWN}")
    close = difflib.get_close_matches(spec, NAMES, 1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise DataError(f"{spec}: unknown data{hint}; known: {_KNOWN}")
