"""A caller's functions behave as if traced at each call, and nothing of them outlives the call."""

import dataclasses
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attention_jax as aj
from tests.engine.user_code import State, check_reads_and_lets_go

SLOW = pytest.param("blockwise", marks=pytest.mark.thorough)
IMPLEMENTATIONS = ["dense", SLOW, "flash"]
RNG = np.random.default_rng(0)
Q, K, V = (RNG.normal(size=(2, n, h, 4)).astype(np.float32) for n, h in ((5, 4), (7, 2), (7, 2)))
ZEROS, EYE = np.zeros((4, 1, 4), np.float32), np.eye(4, dtype=np.float32)[:, None]


def options(implementation):
    block = {} if implementation == "dense" else {"block_size": (3, 4)}
    return {"implementation": implementation, **block}


@dataclasses.dataclass
class Band:
    """A callable without a hash, as a dataclass is."""

    n: int = 1

    def __call__(self, q, k):
        return (k <= q) & (q - k < self.n)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Near(aj.masks.Mask):
    """A caller's own mask class."""

    state: State = dataclasses.field(metadata={"static": True})

    def allowed(self, view):
        return self.state.see(view.query_positions, view.key_positions)


def visible(mask, implementation=None):
    out = aj.attend(ZEROS, ZEROS, EYE, mask=mask, implementation=implementation)
    return (np.asarray(out) > 0).sum(-1).ravel().tolist()


def forms():
    """Masks that read a state, by the form of their function."""
    state, band = State(), Band()
    return {
        "method": (state, aj.masks.custom(state.see)),
        "lambda": (state, aj.masks.custom(lambda q, k: state.see(q, k))),
        "partial": (state, aj.masks.custom(functools.partial(State.see, state))),
        "Partial": (state, aj.masks.custom(jax.tree_util.Partial(state.see))),
        "jit": (state, aj.masks.custom(lambda q, k: jax.jit(lambda q, k: state.see(q, k))(q, k))),
        "wraps": (state, aj.masks.custom(functools.wraps(jnp.less)(lambda q, k: state.see(q, k)))),
        "instance": (band, aj.masks.custom(band)),
        "and": (band, aj.masks.custom(band) & aj.masks.causal()),
        "not not": (state, ~~aj.masks.custom(state.see)),
        "or": (state, aj.masks.custom(state.see) | aj.masks.window(0, 0)),
    }


@pytest.mark.parametrize(
    ("form", "implementation"),
    [(form, None) for form in forms()]
    + [(form, name) for name in ("dense", "blockwise", "flash") for form in ("method", "and")],
)
def test_a_mask_reads_its_state_at_each_call(form, implementation):
    state, mask = forms()[form]
    assert visible(mask, implementation) == [1, 1, 1, 1]
    state.n = 3
    assert visible(mask, implementation) == [1, 2, 3, 3]
    state.n = 2
    assert visible(mask, implementation) == [1, 2, 2, 2]


@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
def test_a_single_query_too(implementation):
    state = State()

    def seen():
        mask = aj.masks.custom(state.see)
        at = {"query_positions": np.array([3])}
        out = aj.attend(ZEROS[:1], ZEROS, EYE, mask=mask, implementation=implementation, **at)
        return int((np.asarray(out) > 0).sum())

    assert seen() == 1
    state.n = 3
    assert seen() == 3


def entries(state):
    """Calls that take functions of the state."""
    score, mask = aj.scores.custom(state.score), aj.masks.custom(state.see)
    w_query, w_key, v = (RNG.normal(size=s).astype(np.float32) for s in ((4, 3), (4, 3), (3,)))

    def additive():
        return aj.scores.additive(w_query, w_key, v, activation=state.activation)

    return {
        "stats": lambda: aj.attend_with_stats(Q, K, V, score=score)[1].lse,
        "weights": lambda: aj.attention_weights(Q, K, score=score),
        "weights, mask": lambda: aj.attention_weights(Q, K, mask=mask),
        "capped": lambda: aj.attend(Q, K, V, score=aj.scores.soft_cap(score, 5.0)),
        "sum": lambda: aj.attend(Q, K, V, score=score + aj.positions.alibi(4)),
        "bias": lambda: aj.attend(Q, K, V, bias=aj.scores.custom(state.score)),
        "additive": lambda: aj.attend(Q, K, V, score=additive()),
        "concat": lambda: aj.attend(
            Q, K, V, score=aj.scores.concat(np.ones((8, 3)), v, activation=state.activation)
        ),
        "score": lambda: score(Q, K),
        "subclass": lambda: aj.attend(Q, K, V, mask=Near(state)),
        "to_array": lambda: mask.to_array(4, 4),
        "density": lambda: np.asarray(mask.density(4, 4)),
        "linear": lambda: aj.subquadratic.linear_attention(Q, K, V, feature_map=state.features),
        "divergence": lambda: aj.distillation.attention_divergence(
            (Q, K), (Q, K), student_score=score
        ),
        "divergence, mask": lambda: aj.distillation.attention_divergence(
            (Q, K), (Q, K), student_mask=mask, kind="reverse_kl"
        ),
    }


@pytest.mark.parametrize("entry", list(entries(State())))
def test_every_function_reads_the_state_and_lets_it_go(entry):
    check_reads_and_lets_go(lambda state: entries(state)[entry])


def test_a_module_in_a_closure_that_an_optimiser_updates():
    module = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    score = aj.scores.custom(lambda q, k, t, s: module(q) @ k.T)

    def both():
        out = aj.attend(Q, K, V, score=score, implementation="flash")
        want = aj.attend(module(Q), K, V, score=aj.scores.dot(), implementation="dense")
        return out, want

    for _ in range(2):
        np.testing.assert_allclose(*both(), rtol=1e-5, atol=1e-6)
        module.kernel[...] = module.kernel[...] * 2


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_tracer_in_a_state_has_its_gradient(implementation):
    state = State()

    def see(q, k):
        return (k <= q + 1) & (k.astype(jnp.float32) < state.w * 9)

    def loss(w):
        state.w = w
        score, mask = aj.scores.custom(state.score), aj.masks.custom(see)
        out = aj.attend(Q, K, V, score=score, mask=mask, **options(implementation))
        return jnp.sum(jnp.sin(out))

    small, at = 1e-2, np.array([0.5, 0.7], np.float32)
    slopes = [(loss(w + small) - loss(w - small)) / (2 * small) for w in at]
    got = [jax.grad(loss)(w) for w in at]  # the second call finds nothing of the first
    np.testing.assert_allclose(got, slopes, rtol=2e-2)
    np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(loss)))(at), got, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.jacfwd(loss))(at[0]), got[0], rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_derivative_is_that_of_the_function_as_it_was_traced(implementation):
    state = State()

    @jax.jit
    def run(query):
        mask, score = aj.masks.custom(state.see), aj.scores.custom(state.score)
        return aj.attend(query, K, V, mask=mask, score=score, **options(implementation)).sum()

    first = run(Q)
    state.n, state.w = 4, 3.0  # for the next trace: this one is made
    value, gradient = jax.value_and_grad(run)(Q)
    state.n, state.w = 1, 1.0
    np.testing.assert_allclose(value, first, rtol=1e-6)
    want = jax.grad(lambda q: aj.attend(q, K, V, mask=aj.masks.custom(state.see)).sum())(Q)
    np.testing.assert_allclose(gradient, want, atol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nothing_outlives_derivatives_and_transformations(implementation):
    def run(state):
        def loss(query):
            mask, score = aj.masks.custom(state.see), aj.scores.custom(state.score)
            out, stats = aj.attend_with_stats(
                query, K, V, mask=mask, score=score, **options(implementation)
            )
            return jnp.sum(jnp.sin(out)) + jnp.sum(stats.max_logit)

        jax.grad(loss)(Q)
        jax.jit(jax.vmap(jax.grad(loss)))(Q[None])
        return weakref.ref(state)

    kept = run(State())
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_tracer_leaks(implementation):
    state = State()
    with jax.checking_leaks():
        out = aj.attend(
            ZEROS, ZEROS, EYE, mask=aj.masks.custom(state.see), **options(implementation)
        )
    np.testing.assert_array_equal(out[:, 0], np.eye(4))


def test_what_a_function_captures_may_be_of_any_kind():
    key, table = jax.random.key(0), jnp.arange(4, dtype=jnp.int8)

    def loss(w, key):
        def score(q, k, t, s):
            noise = jax.random.normal(key, (q.shape[0], 1))
            return q @ k.T * w["scale"] + noise + jnp.take(table, s % 4)[None].astype(jnp.float32)

        return jnp.sum(jnp.sin(aj.attend(Q, K, V, score=aj.scores.custom(score), **flash)))

    flash, w = options("flash"), {"scale": jnp.float32(0.5)}
    got = jax.jit(jax.grad(loss))(w, key)["scale"]
    flash = options("dense")
    np.testing.assert_allclose(got, jax.grad(loss)(w, key)["scale"], rtol=1e-4)


def test_equal_programs_with_other_arguments_and_constants():
    """What shares an executable computes the same of the same arguments."""

    def run(first, second, c):
        score = aj.scores.custom(lambda q, k, t, s: q @ k.T + jnp.asarray(c)[None, : k.shape[0]])
        key, value = (first, second) if c[0] == 0 else (second, first)
        return aj.attend(Q, key, value, score=score, implementation="flash")

    for c in (np.zeros(7, np.float32), np.arange(1, 8, dtype=np.float32)):
        key, value = (K, V) if c[0] == 0 else (V, K)
        want = aj.attend(Q, key, value, score=aj.scores.dot(), bias=c, implementation="dense")
        np.testing.assert_allclose(run(K, V, c), want, rtol=1e-5, atol=1e-6)


def test_a_function_that_prints_prints_at_each_call(capfd):
    for name in ("one", "two", "three"):

        def score(q, k, t, s, name=name):
            jax.debug.print(name + " {}", q.shape[0])
            return q @ k.T

        aj.attend(Q, K, V, score=aj.scores.custom(score), implementation="dense")
        jax.effects_barrier()
        assert name in capfd.readouterr().out


def test_explain_takes_a_function_without_a_hash():
    query, key, value = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (Q, K, V))
    at = jax.ShapeDtypeStruct((5,), np.int32)
    plan = aj.explain(query, key, value, mask=aj.masks.custom(Band()), query_positions=at)
    assert plan.implementation == "dense"


def compilations(call):
    """How many programs JAX compiles in a call."""
    found = []

    def listen(name, *_, **__):
        if name == "/jax/core/compile/backend_compile_duration":
            found.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        call()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return len(found)


def test_what_the_library_wrote_is_compiled_once():
    w_query, w_key, v = (RNG.normal(size=s).astype(np.float32) for s in ((4, 3), (4, 3), (3,)))

    def call():
        score = aj.scores.additive(w_query, w_key, v, activation=jax.nn.gelu)
        mask = aj.masks.causal() & aj.masks.padding(np.array([3, 7]))
        aj.attend(Q, K, V, score=score, mask=mask, implementation="flash")
        aj.attention_weights(Q, K, score=score, mask=mask)
        aj.subquadratic.linear_attention(Q, K, V, feature_map=jnp.exp)

    assert compilations(call) >= 3
    assert compilations(call) == 0


def test_equal_programs_of_a_caller_are_compiled_once():
    state = State()

    def call():
        # a new function in each call, with the same program
        mask, score = aj.masks.custom(state.see), aj.scores.custom(state.score)
        aj.attend(Q, K, V, mask=mask, score=score, implementation="flash")

    call()
    assert compilations(call) == 0
    state.n = 2
    assert compilations(call) == 1
