"""What other parts of the library ask a mask is its interface: a new pattern is one class."""

import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax._core.pytrees import pytree, static
from attention_jax._core.term import Sides
from attention_jax.attend import make_request
from attention_jax.kernels.vendor import Plain, translate
from attention_jax.masks.mask import Band, Interval, Mask, SequenceLengths

RNG = np.random.default_rng(0)
QUERY, KEY = (jnp.asarray(RNG.normal(size=(2, 9, 2, 4)), jnp.float32) for _ in range(2))


@pytree
class Recent(Mask):
    """The last `size` keys."""

    size: int = static()

    def interval(self):
        return Interval(self.size - 1, 0)

    def band(self, lengths):
        return Band(self.size - 1, 0)

    def allowed(self, view):
        distance = view.query_positions - view.key_positions
        return (distance >= 0) & (distance < self.size)


@pytree
class Past(Recent):
    """All keys up to the query's."""

    def interval(self):
        return Interval(None, 0)

    def band(self, lengths):
        return Band(None, 0)

    def allowed(self, view):
        return view.query_positions >= view.key_positions


@pytree
class Even(Mask):
    """Keys at even indices."""

    def prepare(self, lengths):
        return Sides(key=np.arange(lengths.S) % 2 == 0)

    def by_side(self, lengths):
        return self.prepare(lengths)

    def allowed(self, view):
        return view.sides.key


@pytree
class Short(Mask):
    """Padding, of lengths that the mask holds."""

    def sequence_lengths(self):
        return SequenceLengths(jnp.array([3, 5]), None)


def test_vendors_kernels_ask_for_bands_and_lengths():
    layout = (QUERY, KEY, KEY)
    plain = translate(make_request(*layout, mask=Recent(4) & Short()))
    assert isinstance(plain, Plain)
    assert (plain.left, plain.right) == (3, 0)
    assert plain.padding.key_lengths.tolist() == [3, 5]
    assert "not expressible" in translate(make_request(*layout, mask=Even()))


def test_subquadratic_attention_asks_for_bands_and_sides():
    linear = aj.subquadratic.linear_attention
    even = aj.masks.from_array((np.arange(9) % 2 == 0)[None])
    found = linear(QUERY, KEY, KEY, mask=Past(0) & Even())
    expected = linear(QUERY, KEY, KEY, mask=aj.masks.causal() & even)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="supports only masks of causal order and padding"):
        linear(QUERY, KEY, KEY, mask=Recent(2))


def test_rolling_caches_ask_for_intervals_and_indices():
    cache = aj.cache.KVCache.init(2, 4, 2, 4, rolling=True)
    for t in range(9):
        cache = cache.append(KEY[:, t : t + 1], KEY[:, t : t + 1])
    at = {"query_positions": jnp.array([8]), "key_positions": cache.positions()}

    def last(mask):
        return aj.attend(QUERY[:, 8:], cache.key, cache.value, mask=cache.mask() & mask, **at)

    full = aj.attend(QUERY, KEY, KEY, mask=Recent(3))[:, 8:]
    np.testing.assert_allclose(last(Recent(3)), full, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"length 4 .* 5 tokens are visible"):
        last(Recent(5))
    with pytest.raises(ValueError, match="depends on the array index of a key"):
        last(Recent(3) & Even())
