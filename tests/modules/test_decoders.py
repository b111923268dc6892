"""What decoders take: several ends, ids of the vocabulary, traced numbers, any batch axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.modules.flavours import Made

KEY = jax.random.key(0)
PROMPTS = jnp.array([[1, 3, 4], [0, 4, 4], [2, 2, 1]])
SOURCE = jnp.array([[3, 4, 5, 6], [3, 4, 0, 0]])
LENGTH = 6
SLOW = pytest.mark.thorough
DECODERS = {
    "greedy_decode": ((), {}),
    "sample_decode": ((KEY,), {"temperature": 0.8}),
    "beam_decode": ((), {"num_beams": 3}),
}


def _language(flavour, **options):
    """A language model of 5 tokens with strong, varied preferences."""

    def make(library, **more):
        sizes = (1, 2, 8, 16, 5)
        return library.TransformerLM(*sizes, tie_output=False, **options, **more)

    def prefer(twin):
        twin.output.kernel[...] *= 3.0

    return Made(flavour, make, prefer, seed=5)


def _translation(flavour):
    def make(library, **more):
        return library.Transformer(1, 2, 8, 16, 11, 7, tie_output=False, **more)

    def prefer(twin):
        twin.output.kernel[...] *= 5.0

    return Made(flavour, make, prefer, seed=5)


def _cut(tokens, ends, pad):
    """The tokens up to and with the first end, padding after it."""
    tokens = np.asarray(tokens)
    ended = np.cumsum(np.isin(tokens, ends), axis=-1)
    before = np.concatenate([np.zeros_like(ended[..., :1]), ended[..., :-1]], -1)
    return np.where(before > 0, pad, tokens)


@pytest.mark.parametrize("name", ["greedy_decode", "sample_decode"])
def test_any_of_several_ids_ends_a_sentence(name, flavour):
    """As many ids as examples: none of them is one example's own."""
    made, (given, options) = _language(flavour), DECODERS[name]
    options = {"max_length": LENGTH, "pad": -7, **options}
    free = made.decode(name, PROMPTS, *given, **options)
    shown = [int(x) for x in np.unique(free)][-3:]
    assert len(shown) == 3, "a model that says two things shows too little"
    for eos in (shown, tuple(shown), np.array(shown), jnp.array(shown), set(shown)):
        found = made.decode(name, PROMPTS, *given, eos=eos, **options)
        np.testing.assert_array_equal(found, _cut(free, shown, -7))
    one = made.decode(name, PROMPTS, *given, eos=shown[:1], **options)
    np.testing.assert_array_equal(one, _cut(free, shown[:1], -7))
    np.testing.assert_array_equal(one, made.decode(name, PROMPTS, *given, eos=shown[0], **options))
    np.testing.assert_array_equal(free, made.decode(name, PROMPTS, *given, eos=[], **options))


def test_a_wide_beam_with_several_ends_finds_the_best_of_all_sentences(flavour):
    made, length, ends = _language(flavour), 3, [0, 2, 3]
    tokens, scores = made.decode(
        "beam_decode", PROMPTS, eos=ends, max_length=length, num_beams=25, pad=-1
    )
    grid = np.meshgrid(*[np.arange(5)] * length, indexing="ij")
    every = np.stack(grid, -1).reshape(-1, length)
    run = jax.jit(lambda rows: made(rows))
    for prompt, found, score in zip(np.asarray(PROMPTS), tokens, scores, strict=True):
        rows = np.concatenate([np.tile(prompt, (len(every), 1)), every[:, :-1]], 1)
        log_p = np.asarray(jax.nn.log_softmax(run(rows)[:, len(prompt) - 1 :], axis=-1))
        log_p = np.take_along_axis(log_p, every[..., None], -1)[..., 0]
        shown = _cut(every, ends, -1)
        count = (shown >= 0).sum(1)
        rank = (log_p * (shown >= 0)).sum(1) / ((5 + count) / 6) ** 0.6
        np.testing.assert_array_equal(found[0], shown[np.argmax(rank)])
        np.testing.assert_allclose(score[0], rank.max(), rtol=1e-4)
        # As many sentences as there are beams, each of them once.
        best = np.sort(np.unique(np.round(rank, 4)))[::-1][:5]
        np.testing.assert_allclose(score[:5], best, rtol=1e-3, atol=1e-3)


WRONG_IDS = [
    (2.5, TypeError),
    (True, TypeError),
    ("a", TypeError),
    (np.float32(2), TypeError),
    (jnp.array([1.0, 2.0]), TypeError),
    (np.array([True, False, True]), TypeError),
    ([1, 2.5], TypeError),
    ([1, None], TypeError),
    (99, ValueError),
    (-1, ValueError),
    ([1, 99], ValueError),
    (np.array([1, -2]), ValueError),
    (2**40, ValueError),
    ([[1, 2, 3]], ValueError),
]


@pytest.mark.parametrize("name", DECODERS)
def test_what_is_no_id_is_refused_by_name(name, flavour):
    given, options = DECODERS[name]
    language, translation = _language(flavour), _translation(flavour)
    plain = {"max_length": 2, **options}
    for wrong, error in WRONG_IDS:
        with pytest.raises(error, match="eos"):
            language.decode(name, PROMPTS, *given, eos=wrong, **plain)
        with pytest.raises(error, match="eos"):
            translation.decode(name, SOURCE, *given, bos=1, eos=wrong, **plain)
        with pytest.raises(error, match="bos"):
            translation.decode(name, SOURCE, *given, bos=wrong, eos=2, **plain)
    for wrong, error in ((2.5, TypeError), (True, TypeError), ([1, 2], ValueError)):
        with pytest.raises(error, match="pad"):
            language.decode(name, PROMPTS, *given, eos=1, pad=wrong, **plain)
    for wrong in (PROMPTS.astype(jnp.float32), PROMPTS > 2):
        with pytest.raises(TypeError, match="source"):
            language.decode(name, wrong, *given, eos=1, **plain)
    for wrong in (PROMPTS.at[1, 1].set(5), PROMPTS.at[0, 2].set(-3)):
        with pytest.raises(ValueError, match=r"source holds id (5|-3), .* has 5"):
            language.decode(name, wrong, *given, eos=1, **plain)
    for size in ("max_length", *(["num_beams"] if name == "beam_decode" else [])):
        with pytest.raises(TypeError, match=f"{size} .*cannot be traced"):
            jax.jit(
                lambda n, size=size: language.decode(
                    name, PROMPTS, *given, eos=1, **{**plain, size: n}
                )
            )(3)


@SLOW
def test_numbers_of_sampling_may_be_traced(flavour):
    made = _language(flavour)
    plain = {"max_length": LENGTH}

    @jax.jit
    def traced(temperature, top_k, top_p, eos, pad):
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        return made.decode("sample_decode", PROMPTS, KEY, eos=eos, pad=pad, **options, **plain)

    for temperature, top_k, top_p in ((1.0, 5, 1.0), (2, 2, 1.0), (1.7, 3, 0.6), (3.0, 9, 0.5)):
        expected = made.decode(
            "sample_decode", PROMPTS, KEY, eos=[3, 1], pad=2, temperature=temperature,
            top_k=top_k, top_p=top_p, **plain,
        )  # fmt: skip
        found = traced(temperature, top_k, top_p, [3, 1], 2)
        np.testing.assert_array_equal(found, expected)
        # Arrays whose values are known are numbers too.
        arrays = map(jnp.asarray, (temperature, top_k, top_p))
        names = dict(zip(("temperature", "top_k", "top_p"), arrays, strict=True))
        found = made.decode("sample_decode", PROMPTS, KEY, eos=[3, 1], pad=2, **names, **plain)
        np.testing.assert_array_equal(found, expected)
    greedy = made.decode("greedy_decode", PROMPTS, eos=[3, 1], pad=2, **plain)
    for temperature, top_k, top_p in (
        *((t, 5, 1.0) for t in (0.0, 0, 1e-3, 1e-30, 1e-38, -1.0)),
        *((5.0, 1, 1.0), (5.0, 0, 1.0), (5.0, 5, 1e-6), (5.0, 5, 0.0)),
    ):
        np.testing.assert_array_equal(traced(temperature, top_k, top_p, [3, 1], 2), greedy)
    # One for each example under vmap.
    several = jax.vmap(lambda t: traced(t, 5, 1.0, [3, 1], 2))(jnp.array([0.0, 1.0]))
    np.testing.assert_array_equal(several[0], greedy)
    np.testing.assert_array_equal(several[1], traced(1.0, 5, 1.0, [3, 1], 2))
    for wrong in ({"temperature": "hot"}, {"top_p": [0.5]}, {"top_k": 2.0}, {"top_k": True}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            made.decode("sample_decode", PROMPTS, KEY, **wrong, **plain)
    for name in ("temperature", "top_p", "top_k"):
        two = jnp.array([1, 1], jnp.int32 if name == "top_k" else jnp.float32)
        with pytest.raises(TypeError, match=name):
            jax.jit(
                lambda x, n=name: made.decode("sample_decode", PROMPTS, KEY, **{n: x}, **plain)
            )(two)


@SLOW
def test_numbers_of_a_beam_search_may_be_traced(flavour):
    made = _translation(flavour)
    plain = {"max_length": LENGTH, "num_beams": 2}

    @jax.jit
    def traced(alpha, bos, eos, pad):
        options = {"length_penalty": alpha, "bos": bos, "eos": eos, "pad": pad}
        return made.decode("beam_decode", SOURCE, **options, **plain)

    for alpha, eos in ((0.0, 2), (1, [2, 3]), (1.5, [3, 2])):
        expected = made.decode(
            "beam_decode", SOURCE, length_penalty=alpha, bos=1, eos=eos, pad=4, **plain
        )
        found = traced(alpha, 1, eos, 4)
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)
    assert bool(jnp.isnan(traced(-1.0, 1, 2, 4)[1]).all())
    greedy = jax.jit(
        lambda bos, eos: made.decode("greedy_decode", SOURCE, bos=bos, eos=eos, max_length=LENGTH)
    )
    expected = made.decode("greedy_decode", SOURCE, bos=[1, 3], eos=[2, 4], max_length=LENGTH)
    np.testing.assert_array_equal(greedy(jnp.array([1, 3]), [2, 4]), expected)
    for b, bos in enumerate((1, 3)):
        one = made.decode("greedy_decode", SOURCE[b], bos=bos, eos=[2, 4], max_length=LENGTH)
        np.testing.assert_array_equal(expected[b], one)


CASES = [
    ("beam_decode", "language"),
    *(pytest.param("beam_decode", kind, marks=SLOW) for kind in ("scanned", "translation")),
    *(pytest.param("greedy_decode", kind, marks=SLOW) for kind in ("scanned", "translation")),
    *(pytest.param("sample_decode", kind, marks=SLOW) for kind in ("scanned", "translation")),
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_batch_axes(name, kind, flavour):
    given, options = DECODERS[name]
    options = {"max_length": 4, "eos": [2, 3], **options}
    if kind == "translation":
        made, ids, options = _translation(flavour), SOURCE, {**options, "bos": 1}
    else:
        made, ids = _language(flavour, scan_layers=kind == "scanned"), PROMPTS
    if name == "sample_decode":
        ids = ids[:1]  # draws of several examples are those of the batch's shape

    def run(ids, mask):
        return made.decode(name, ids, *given, source_mask=mask, **options)

    def same(found, expected):
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5)
            assert x.dtype == y.dtype

    real = ids != 4
    batch = run(ids, real)
    same(run(ids[0], real[0]), jax.tree.map(lambda x: x[0], batch))
    same(run(ids[None], real[None]), jax.tree.map(lambda x: x[None], batch))
    same(jax.vmap(run)(ids, real), batch)
