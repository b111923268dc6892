"""`attention_fn` inside Flax's own modules: what Flax passes is honoured or refused."""

import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax import linen as our_linen
from attention_jax import nnx as our_nnx

pytestmark = pytest.mark.thorough

B, T, D, N = 2, 5, 8, 2
X = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, D)), jnp.float32)
CAUSAL = nn.make_causal_mask(X[..., 0])
FLAVOURS = {"nnx": our_nnx.attention_fn, "linen": our_linen.attention_fn}


# What both flavours share is looked at in one of them.
once = pytest.mark.parametrize("attention_fn", [our_linen.attention_fn], ids=["linen"])


@pytest.fixture(params=FLAVOURS)
def attention_fn(request):
    return FLAVOURS[request.param]


class Layer:
    """A Flax module of either flavour, called alike; with and without our attention it has the
    same parameters."""

    def __init__(self, make, **options):
        self.flavour = next(name for name, f in FLAVOURS.items() if f is make)
        if self.flavour == "nnx":
            options = {"num_kv_heads": None, "decode": False, **options}
            make = lambda: nnx.MultiHeadAttention(N, D, rngs=nnx.Rngs(0), **options)  # noqa: E731
            self.module = nnx.jit(make)()
        else:
            self.module = nn.MultiHeadDotProductAttention(num_heads=N, **options)
            flag = {} if "deterministic" in options else {"deterministic": True}
            self.variables = jax.jit(lambda key: self.module.init(key, X, **flag))(
                jax.random.key(0)
            )

    def __call__(self, x=X, *, key=None, **options):
        """The output, compiled as a whole."""
        if self.flavour == "nnx":

            def run(module, x):
                rngs = None if key is None else nnx.Rngs(dropout=key)
                return module(x, rngs=rngs, **options)

            return nnx.jit(run)(self.module, x)
        rngs = {} if key is None else {"dropout": jax.random.key(key)}
        return jax.jit(lambda v, x: self.module.apply(v, x, rngs=rngs, **options))(
            self.variables, x
        )

    def sown(self, x=X, **options):
        """The output and the weights that the module sows."""
        if self.flavour == "nnx":
            run = nnx.capture(nnx.Intermediate)(lambda m, x: m(x, sow_weights=True, **options))
            out, sown = run(self.module, x)
            return out, jax.tree.leaves(sown)[0]
        out, sown = self.module.apply(
            self.variables, x, sow_weights=True, mutable=["intermediates"], **options
        )
        return out, sown["intermediates"]["attention_weights"][0]


def close(found, expected, **tolerance):
    np.testing.assert_allclose(found, expected, **{"rtol": 1e-5, "atol": 1e-5, **tolerance})


def test_flax_s_module_gives_flax_s_numbers_with_flax_s_masks(attention_fn):
    ours, theirs = Layer(attention_fn, attention_fn=attention_fn()), Layer(attention_fn)
    close(ours(), theirs())
    expected = theirs(mask=CAUSAL.astype(bool))
    for mask in (CAUSAL, CAUSAL.astype(jnp.int32), CAUSAL.astype(bool)):
        close(ours(mask=mask), expected)
    # Eager, and with a mask that is traced: the numbers in it are not known.
    fn, x = attention_fn(), jax.random.normal(jax.random.key(0), (B, T, N, 4))
    close(jax.jit(lambda m: fn(x, x, x, mask=m))(CAUSAL), fn(x, x, x, mask=CAUSAL.astype(bool)))
    slope, wanted = (
        jax.jit(jax.grad(lambda x, f=f: jnp.sum(f(x, x, x, mask=CAUSAL) ** 2)))(x)
        for f in (fn, nn.dot_product_attention)
    )
    close(slope, wanted, rtol=1e-4, atol=1e-4)


@once
def test_options_hold_in_every_call(attention_fn):
    weight = jax.random.normal(jax.random.key(1), (N, 4, 4))
    bias = jnp.zeros((T, T)).at[:, 0].set(2.0)
    fn = attention_fn(
        score=aj.scores.general(weight),
        mask=aj.masks.window(2, 0),
        bias=bias,
        implementation="dense",
    )
    query, key, value = jax.random.normal(jax.random.key(2), (3, B, T, N, 4))
    padding = nn.make_attention_mask(jnp.ones((B, T)), jnp.ones((B, T)).at[:, -1].set(0.0))
    found = fn(query, key, value, mask=padding, bias=bias + 1)
    expected = aj.attend(
        query,
        key,
        value,
        score=aj.scores.general(weight),
        mask=aj.masks.window(2, 0) & aj.masks.from_array(padding != 0),
        bias=bias + bias + 1,
    )
    close(found, expected)
    assert not np.allclose(found, fn(query, key, value, mask=padding), atol=1e-2)
    blocks = attention_fn(implementation="blockwise", block_size=2)
    close(blocks(query, key, value), attention_fn()(query, key, value))
    close(attention_fn(score="dot")(query, key, value), attention_fn()(query * 2, key, value))
    with pytest.raises(NotImplementedError, match="block_size"):
        attention_fn(implementation="dense", block_size=2)(query, key, value)


@once
def test_mask_objects_and_bias_objects_may_be_given_in_the_call(attention_fn):
    ours = Layer(attention_fn, attention_fn=attention_fn())
    close(ours(mask=aj.masks.causal()), ours(mask=CAUSAL))
    query = jnp.ones((T, N, 4))
    fn, bias = attention_fn(), jnp.linspace(0.0, 1.0, T * T).reshape(T, T)
    value = jax.random.normal(jax.random.key(0), (T, N, 4))
    close(fn(query, query, value, aj.positions.array_bias(bias)), fn(query, query, value, bias))


@once
def test_a_query_that_sees_nothing_gets_the_output_s_bias_alone(attention_fn):
    ours = Layer(
        attention_fn, attention_fn=attention_fn(), out_bias_init=nn.initializers.constant(3.0)
    )
    mask = CAUSAL.at[:, :, 2].set(0.0)
    close(ours(mask=mask)[:, 2], 3.0)


@once
def test_a_number_that_is_neither_0_nor_1_is_refused_or_loud(attention_fn):
    fn, x = attention_fn(), jnp.ones((T, N, 4))
    for bad in (-jnp.inf, 0.5, 2.0, jnp.nan):
        mask = jnp.ones((T, T)).at[1, 2].set(bad)
        with pytest.raises(ValueError, match=r"0 or 1.*bias"):
            fn(x, x, x, mask=mask)
        assert np.isnan(jax.jit(lambda m: fn(x, x, x, mask=m))(mask)).all()
    with pytest.raises(TypeError, match="mask"):
        fn(x, x, x, mask=[[True]])
    with pytest.raises(ValueError, match=r"mask.*\[4, 5\]"):
        fn(x, x, x, mask=jnp.ones((4, 5)))
    # Numbers are a mask only where Flax hands them in: not among our own options.
    with pytest.raises(TypeError, match="bias"):
        attention_fn(mask=jnp.ones((T, T)))


def test_is_causal_and_a_mask_both_hold(attention_fn):
    fn = attention_fn()
    query, key, value = jax.random.normal(jax.random.key(0), (3, B, T, N, 4))
    hidden = jnp.ones((T, T)).at[1:, 0].set(0.0)
    found = fn(query, key, value, mask=hidden, is_causal=True)
    close(found, fn(query, key, value, mask=hidden * CAUSAL[0, 0]))
    assert not np.allclose(found, fn(query, key, value, mask=hidden), atol=1e-2)
    close(fn(query, key, value, is_causal=True), fn(query, key, value, mask=CAUSAL))
    if attention_fn is our_nnx.attention_fn:
        ours, theirs = Layer(attention_fn, attention_fn=fn), Layer(attention_fn)
        close(ours(is_causal=True), theirs(is_causal=True))


def test_weights_are_sown_where_flax_sows_them(attention_fn):
    mask = CAUSAL.at[:, :, 3].set(0.0)
    ours = Layer(attention_fn, attention_fn=attention_fn(), dropout_rate=0.5, deterministic=False)
    theirs = Layer(attention_fn)
    linen = ours.flavour == "linen"
    rng = {"dropout_rng": jax.random.key(1)} if linen else {"rngs": nnx.Rngs(dropout=1)}
    _, weights = ours.sown(mask=mask, **rng)
    _, expected = theirs.sown(mask=mask)
    assert weights.shape == (B, N, T, T)
    close(np.delete(weights, 3, axis=2), np.delete(expected, 3, axis=2))
    np.testing.assert_array_equal(weights[:, :, 3], 0)
    x = jnp.ones((T, N, 4))
    with pytest.raises(TypeError, match="module"):
        attention_fn()(x, x, x, module=object())


def test_dropout_is_flax_s_to_rule(attention_fn):
    options = {"attention_fn": attention_fn(), "dropout_rate": 0.5}
    layer = Layer(attention_fn, **options)
    plain = Layer(attention_fn)()
    close(layer(deterministic=True, key=3), plain)
    first = layer(deterministic=False, key=1)
    np.testing.assert_array_equal(layer(deterministic=False, key=1), first)
    assert not np.array_equal(layer(deterministic=False, key=2), first)
    assert not np.allclose(first, plain)


@once
def test_dropout_is_shared_over_batch_and_heads_as_flax_has_it_by_default(attention_fn):
    fn, S = attention_fn(), 64
    query, key = jnp.zeros((B, 16, N, 4)), jnp.zeros((B, S, N, 4))
    value = jnp.broadcast_to(jnp.eye(S)[:, None], (B, S, N, S))
    told = {"dropout_rng": jax.random.key(0), "dropout_rate": 0.5}
    kept = np.asarray(fn(query, key, value, **told)) != 0
    np.testing.assert_array_equal(kept, np.broadcast_to(kept[:1, :, :1], kept.shape))
    own = np.asarray(fn(query, key, value, broadcast_dropout=False, **told))
    assert {round(float(w), 5) for w in np.unique(own)} == {0.0, 2 / S}
    for axis in range(4):
        assert not np.array_equal(np.take(own, 0, axis), np.take(own, 1, axis)), axis
    assert abs((own != 0).mean() - 0.5) < 4 * 0.5 / np.sqrt(own.size)
    np.testing.assert_array_equal(fn(query, key, value, deterministic=True, **told) != 0, True)
    with pytest.raises(ValueError, match="dropout_rng"):
        fn(query, key, value, dropout_rate=0.5)
    with pytest.raises(ValueError, match="dropout_rate"):
        fn(query, key, value, dropout_rate=1.5, dropout_rng=jax.random.key(0))
    old_style = jax.random.PRNGKey(0)
    np.testing.assert_array_equal(
        np.asarray(fn(query, key, value, dropout_rng=old_style, dropout_rate=0.5)) != 0, kept
    )


@once
def test_dtype_and_precision_reach_the_engine(attention_fn):
    fn = attention_fn()
    query, key, value = jax.random.normal(jax.random.key(0), (3, T, N, 4))
    low = fn(query, key, value, dtype=jnp.bfloat16)
    assert low.dtype == jnp.bfloat16
    close(low.astype(jnp.float32), fn(query, key, value), rtol=3e-2, atol=3e-2)
    assert fn(query.astype(jnp.float16), key, value).dtype == jnp.float32
    text = str(jax.make_jaxpr(functools.partial(fn, precision="highest"))(query, key, value))
    assert "HIGHEST" in text
    pair = ("highest", "highest")
    assert "HIGHEST" in str(
        jax.make_jaxpr(functools.partial(fn, precision=pair))(query, key, value)
    )
    with pytest.raises(NotImplementedError, match="precision"):
        fn(query, key, value, precision=("highest", "default"))


def test_grouped_heads_of_flax_nnx():
    def make(fn):
        return nnx.MultiHeadAttention(4, D, num_kv_heads=2, decode=False, rngs=nnx.Rngs(0), **fn)

    close(make({"attention_fn": our_nnx.attention_fn()})(X), make({})(X))


def test_every_name_that_flax_may_pass_has_its_parameter():
    for theirs, ours in (
        (nn.dot_product_attention, our_linen.attention_fn()),
        (nnx.dot_product_attention, our_nnx.attention_fn()),
    ):
        names = list(inspect.signature(theirs).parameters)
        assert list(inspect.signature(ours).parameters)[: len(names)] == names


@pytest.mark.parametrize(
    "name", ["einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"]
)
def test_an_einsum_to_replace_is_refused(name):
    x = jnp.ones((T, N, 4))
    with pytest.raises(NotImplementedError, match=name):
        our_linen.attention_fn()(x, x, x, **{name: jnp.einsum})
    if name != "einsum_dot_general":
        layer = nn.MultiHeadDotProductAttention(
            num_heads=N,
            attention_fn=our_linen.attention_fn(),
            **{f"{name}_cls": lambda: jnp.einsum},
        )
        with pytest.raises(NotImplementedError, match=name):
            layer.init(jax.random.key(0), X)


def test_what_promotes_dtypes_is_called():
    x = jnp.ones((T, N, 4))
    seen = []

    def promote(arrays, *, dtype):
        seen.append(dtype)
        return tuple(x.astype(jnp.float16) for x in arrays)

    out = our_nnx.attention_fn()(x, x, x, dtype=jnp.float32, promote_dtype=promote)
    assert (out.dtype, seen) == (jnp.float16, [jnp.float32])


@once
def test_equal_options_make_equal_functions(attention_fn):
    bias = jnp.ones((T, T))
    first, second = (attention_fn(mask=aj.masks.causal(), bias=bias) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != attention_fn(mask=aj.masks.causal(), bias=bias + 1)
    assert repr(attention_fn(score=aj.scores.dot(), block_size=8)) == (
        "attention_fn(score=dot(), block_size=(8, 8))"
    )
    with pytest.raises(ValueError, match=r"additive\(hidden_features=8\).*parameters"):
        attention_fn(score=our_nnx.additive(8))
    with pytest.raises(TypeError, match="score"):
        attention_fn(score=3)


OPTIONS = {
    "plain": {"mask": aj.masks.causal(align="end")},
    "placed": {
        "mask": aj.masks.window(2, 0),
        "score": aj.scores.custom(
            lambda q, k, t, s: q @ k.T - 0.3 * jnp.abs(t[:, None] - s[None]).astype(q.dtype)
        ),
    },
    "counted": {"score": aj.scores.log_length(aj.scores.scaled_dot(), 0.7)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_flax_s_cached_decode_equals_the_full_pass(attention_fn, name):
    """Case A22: also with `is_causal` left on, which Flax's own attention gets wrong."""
    fn = attention_fn(**OPTIONS[name])
    full = Layer(attention_fn, attention_fn=fn)(mask=CAUSAL)
    length, alike = T + 3, range(T)
    if name == "counted":  # in the full pass a query before the last one counts later keys too
        alike = [T - 1]
    if attention_fn is our_nnx.attention_fn:
        layer = Layer(attention_fn, attention_fn=fn, decode=True).module
        for is_causal in (False, True):
            layer.init_cache((B, length, D))
            step = nnx.jit(lambda layer, x, c=is_causal: layer(x, is_causal=c))
            for t in range(T):
                out = step(layer, X[:, t : t + 1])
                if t in alike:
                    close(out[:, 0], full[:, t])
        return
    layer = nn.MultiHeadDotProductAttention(num_heads=N, attention_fn=fn, decode=True)
    variables = layer.init(jax.random.key(0), jnp.ones((B, length, D)))
    step = jax.jit(lambda variables, x: layer.apply(variables, x, mutable=["cache"]))
    for t in range(T):
        out, changed = step(variables, X[:, t : t + 1])
        variables = {**variables, **changed}
        if t in alike:
            close(out[:, 0], full[:, t])
