"""Batches: fixed shapes, every pair, and the same sequence after a resumption."""

import numpy as np
import pytest

from experiments.data.batches import TrainBatches, choose_shapes, encode, eval_batches
from experiments.data.grammar import Pair
from experiments.data.text import TextSpec, load
from experiments.data.tokens import BOS, EOS, PAD, WordTokenizer, train_tokenizers
from experiments.errors import UsageError


@pytest.fixture(scope="module")
def data():
    return load(TextSpec(train_size=301, test_size=70))


@pytest.fixture(scope="module")
def tokenizers(data):
    return train_tokenizers(data, size=0)


@pytest.fixture(scope="module")
def encoded(data, tokenizers):
    return encode(data.train, *tokenizers)


def same(left, right):
    return all(
        np.array_equal(getattr(left, f), getattr(right, f)) for f in left.__dataclass_fields__
    )


def test_a_batch_by_hand():
    letters = WordTokenizer(("a", "b", "c"))
    pairs = [Pair("a b", "c"), Pair("a", "c b a")]
    (batch,) = eval_batches(encode(pairs, letters, letters), batch_size=3, shapes=[(4, 5)])
    assert batch.source.tolist() == [[4, 5, EOS, PAD], [4, EOS, PAD, PAD], [PAD] * 4]
    assert batch.target_in.tolist() == [[BOS, 6, 0, 0, 0], [BOS, 6, 5, 4, 0], [PAD] * 5]
    assert batch.target_out.tolist() == [[6, EOS, 0, 0, 0], [6, 5, 4, EOS, 0], [PAD] * 5]
    assert batch.source_mask.sum(1).tolist() == [3, 2, 0]
    assert batch.target_mask.sum(1).tolist() == [2, 4, 0]
    assert batch.index.tolist() == [0, 1, -1]
    assert batch.shape == (4, 5)
    assert batch.source.dtype == batch.target_in.dtype == np.int32


def test_an_epoch_holds_every_pair_in_a_few_shapes(encoded):
    train = TrainBatches(encoded, batch_size=16, seed=3, max_shapes=3)
    epoch = [train[i] for i in range(train.per_epoch)]
    assert train.per_epoch == 19  # 301 = 18 * 16 + 13
    assert {batch.shape for batch in epoch} <= set(train.shapes)
    assert len(train.shapes) <= 3
    assert all(batch.source.shape[0] == 16 for batch in epoch)
    index = np.concatenate([batch.index for batch in epoch])
    assert set(index.tolist()) == set(range(301))
    assert len(index) == 304


def test_rows_are_the_pairs_they_name(data, tokenizers, encoded):
    batch = TrainBatches(encoded, batch_size=16, seed=3)[7]
    for row, index in enumerate(batch.index):
        pair = data.train[index]
        assert tokenizers[0].decode(batch.source[row]) == pair.source
        assert tokenizers[1].decode(batch.target_in[row]) == pair.target
        assert tokenizers[1].decode(batch.target_out[row]) == pair.target
        assert batch.source_mask[row].sum() == len(pair.source.split(" ")) + 1


@pytest.mark.parametrize("start", [1, 18, 19, 40])
def test_resumption_goes_on_with_the_same_batches(encoded, start):
    whole = TrainBatches(encoded, batch_size=16, seed=5)
    expected = [whole[step] for step in range(60)]
    resumed = TrainBatches(encoded, batch_size=16, seed=5)
    for step in range(start, 60):
        assert same(expected[step], resumed[step])


def test_order_depends_on_seed_and_epoch(encoded):
    train, again, other = (TrainBatches(encoded, batch_size=16, seed=s) for s in (1, 1, 2))
    assert all(same(train[i], again[i]) for i in range(25))
    assert not all(same(train[i], other[i]) for i in range(3))
    assert not all(same(train[i], train[i + train.per_epoch]) for i in range(3))


def test_evaluation_sees_every_pair_once(data, tokenizers):
    test = encode(data.test, *tokenizers)
    found = eval_batches(test, batch_size=16, max_shapes=2)
    index = np.concatenate([batch.index for batch in found])
    assert sorted(index[index >= 0].tolist()) == list(range(70))
    assert len({batch.shape for batch in found}) <= 2
    for batch in found:
        empty = batch.index < 0
        assert not batch.source_mask[empty].any()
        assert batch.source_mask[~empty].any(1).all()


def test_fewer_pairs_than_a_batch():
    letters = WordTokenizer(("a",))
    train = TrainBatches(encode([Pair("a", "a")], letters, letters), batch_size=5, seed=0)
    assert train.per_epoch == 1
    assert train[3].index.tolist() == [0] * 5


def test_shapes_waste_the_least_padding():
    lengths = np.array([[3, 4]] * 60 + [[9, 10]] * 30 + [[30, 31]] * 10)
    assert choose_shapes(lengths, 1) == ((32, 32),)
    # cuts lie at sixteenths: 9/16 of the pairs are short, 14/16 at most middling
    assert choose_shapes(lengths, 3) == ((4, 4), (12, 12), (32, 32))
    area = [
        sum(min(s + t for s, t in shapes if s >= a and t >= b) for a, b in lengths)
        for shapes in (choose_shapes(lengths, n) for n in (1, 2, 3))
    ]
    assert area[0] > area[1] > area[2]
    assert choose_shapes(np.array([[5, 5]]), 4) == ((8, 8),)


def test_too_long_pairs_are_left_out_or_cut():
    letters = WordTokenizer(("a",))
    pairs = [Pair("a a a a", "a"), Pair("a", "a")]
    kept = encode(pairs, letters, letters, max_length=3)
    assert (kept.left_out, kept.index) == (1, (1,))
    cut = encode(pairs, letters, letters, max_length=3, truncate=True)
    assert (cut.left_out, cut.index) == (0, (0, 1))
    assert cut.source[0].tolist() == [4, 4, EOS]
    with pytest.raises(UsageError, match=r"^x: all 2 pairs are longer than 1 tokens; train "):
        encode(pairs, letters, letters, max_length=1, name="x")


def test_mistakes(encoded):
    with pytest.raises(ValueError, match="batch_size must be at least 1, not 0"):
        TrainBatches(encoded, batch_size=0, seed=0)
    with pytest.raises(ValueError, match="max_shapes must be 1 to 4, not 5"):
        TrainBatches(encoded, batch_size=4, seed=0, max_shapes=5)
    with pytest.raises(ValueError, match=r"fit none of the shapes \(\(4, 4\),\)"):
        eval_batches(encoded, batch_size=4, shapes=[(4, 4)])
