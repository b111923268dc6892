"""Under `jax_debug_nans` and `jax_debug_infs`: nothing makes a number that it then hides.

-inf where the log-sum-exp of an empty row is asked for is an output, and the only one.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import attention_jax as aj
from attention_jax import distillation, masks, positions, scores, sharding, subquadratic
from attention_jax import linen as al
from attention_jax import nnx as an
from attention_jax.kernels import tiling
from attention_jax.softmax import masked_softmax
from tests.finite import made_of_finite

B, T, N, H = 2, 6, 2, 4
thorough = pytest.mark.thorough


@pytest.fixture(autouse=True)
def _flags():
    with jax.debug_nans(True), jax.debug_infs(True):
        yield


def arrays(count: int, *shape: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape or (B, T, N, H)).astype(np.float32) for _ in range(count)]


def total(tree: Any) -> Any:
    leaves = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in leaves)


def gradient(function: Any, args: tuple[Any, ...]) -> Any:
    return jax.grad(lambda *args: total(function(*args)), tuple(range(len(args))))


def in_all_orders(function: Any, *args: Any) -> None:
    """The value, both modes of the derivative, and the gradient of the gradient."""
    first = gradient(function, args)
    function(*args)
    first(*args)
    jax.jvp(function, args, args)
    gradient(first, args)(*args)
    jax.jit(first)(*args)


# Rows without a visible key: behind the query length, before the first key, everywhere.
PADDED = masks.padding(np.array([4, 6]), np.array([5, 6]))
MASKS = {
    "padding": PADDED,
    "not causal": ~masks.causal(),
    "nothing": masks.from_array(np.zeros((1, 1, T, T), bool)),
}
SCORES: dict[str, Any] = {
    "additive": scores.additive(*arrays(2, H, 5), np.ones(5, np.float32)),
    "additive far": scores.additive(*arrays(2, H, 5), np.full(5, 1e3, np.float32)),
    "cosine": scores.cosine(2.0),
    "capped": scores.soft_cap(scores.temperature(scores.scaled_dot(), np.float32(0.5)), 5.0),
    "general": scores.general(np.eye(H, dtype=np.float32)),
}
BIASES: dict[str, Any] = {
    "alibi": positions.alibi(N),
    "relative": positions.relative_bias(np.ones((N, 8), np.float32), max_distance=8),
    "least": np.full((T, T), np.finfo(np.float32).min),
}


@pytest.mark.parametrize("implementation", ["dense", "blockwise", "flash"])
@pytest.mark.parametrize("mask", MASKS)
def test_empty_rows(mask, implementation):
    size = None if implementation == "dense" else 4
    how = {"implementation": implementation, "block_size": size}
    in_all_orders(partial(aj.attend, mask=MASKS[mask], **how), *arrays(3))


@thorough
@pytest.mark.parametrize("implementation", ["blockwise", "flash"])
def test_vectorised_heads(implementation, monkeypatch):
    monkeypatch.setattr(tiling, "on_one_cpu", lambda: False)
    mask = masks.padding(np.array([0, 6]), np.array([5, 6]))
    function = partial(aj.attend, mask=mask, implementation=implementation, block_size=4)
    in_all_orders(function, *arrays(3, B, T + 1, N, H))


@thorough
def test_a_single_query():
    query, key, value = arrays(3)
    function = partial(aj.attend, mask=masks.padding(np.array([0, 4])))
    in_all_orders(function, query[:, :1], key, value)


@thorough
@pytest.mark.parametrize("score", SCORES)
def test_a_score(score):
    function = partial(aj.attend, mask=PADDED, implementation="flash")
    arguments = (*arrays(3), SCORES[score])
    first = gradient(lambda q, k, v, score: function(q, k, v, score=score), arguments)
    first(*arguments)


MASKING = np.where(np.arange(T) % 2 == 0, 0, -np.inf).astype(np.float32) * np.ones(
    (N, T, 1), np.float32
)
MASKING[:, 2] = -np.inf  # an empty row


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("implementation", ["dense", "blockwise", "flash"])
def test_a_bias_that_masks(implementation, size):
    if implementation == "dense" and size is not None:
        size = None
    how = {"implementation": implementation, "block_size": size}
    bias = MASKING
    with jax.debug_infs(False), jax.debug_nans(False):  # a program that is cached without the flags
        wanted = gradient(partial(aj.attend, bias=bias, **how), tuple(arrays(3)))(*arrays(3))
    function = partial(aj.attend, bias=bias, **how)
    in_all_orders(function, *arrays(3))
    got = gradient(function, tuple(arrays(3)))(*arrays(3))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, wanted)
    of_bias = jax.grad(lambda b: total(aj.attend(*arrays(3), bias=b, **how)))(bias)
    assert not np.any(np.where(np.isinf(bias), of_bias, 0))
    assert np.any(of_bias)


@thorough
def test_a_bias_that_masks_elsewhere():
    query, key, value = arrays(3)
    masking = scores.dot() + MASKING
    in_all_orders(partial(aj.attend, score=masking, implementation="flash"), query, key, value)

    def statistics(*arrays):
        return aj.attend_with_stats(*arrays, score=masking, implementation="flash")[1].entropy

    with jax.debug_infs(False):  # lse and max_logit of an empty row are -inf
        gradient(statistics, (query, key, value))(query, key, value)
    divergence = partial(distillation.attention_divergence, teacher_score=masking)
    gradient(lambda q, k: divergence((q, k), (q, k)), (query, key))(query, key)


@thorough
@pytest.mark.parametrize("far", [1.0, 100.0])
@pytest.mark.parametrize("implementation", ["dense", "blockwise", "flash"])
def test_the_rational_form_of_the_additive_score(implementation, far):
    # planes of 64 × 64 pairs, and numbers within and beyond the range of the exponentials
    score = scores.additive(*arrays(2, H, 5), np.ones(5, np.float32))
    mask = masks.padding(np.array([0, 60]), np.array([64, 50]))
    function = partial(aj.attend, mask=mask, implementation=implementation)
    query, key, value = arrays(3, B, 64, 1, H)
    arguments = (far * query, key, value, score)
    first = gradient(lambda q, k, v, score: function(q, k, v, score=score), arguments)
    first(*arguments)


@thorough
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("implementation", ["dense", "blockwise", "flash"])
def test_a_bias(bias, implementation):
    function = partial(aj.attend, mask=PADDED, implementation=implementation)
    arguments = (*arrays(3), BIASES[bias])
    gradient(lambda q, k, v, bias: function(q, k, v, bias=bias), arguments)(*arguments)


@thorough
def test_dropout():
    key = jax.random.key(0)
    function = partial(aj.attend, mask=PADDED, dropout_rate=0.5, dropout_key=key)
    gradient(function, arrays(3))(*arrays(3))


@thorough
def test_statistics_and_weights():
    query, key, value = arrays(3)

    def entropy(*args):
        return aj.attend_with_stats(*args, mask=masks.causal())[1]

    in_all_orders(entropy, query, key, value)
    in_all_orders(partial(aj.attention_weights, mask=PADDED), query, key)
    with pytest.raises(FloatingPointError, match="inf"):  # it is asked for
        aj.attend_with_stats(query, key, value, mask=PADDED)
    in_all_orders(partial(masked_softmax, mask=np.tri(T, T, -1, bool)), arrays(1, T, T)[0])


@thorough
def test_other_attention():
    query, key, value = arrays(3)
    (table,) = arrays(1, 5, H)
    shaw = partial(aj.shaw_attention, mask=PADDED & masks.causal())
    in_all_orders(shaw, query, key, value, table, table)
    grid = partial(aj.axial_attention, shape=(2, 3), axis=1, mask=PADDED)
    in_all_orders(grid, query, key, value)


@thorough
@pytest.mark.devices(2)
def test_divided_keys():
    mesh = jax.make_mesh((2,), ("seq",), axis_types=(jax.sharding.AxisType.Auto,))
    split = partial(sharding.attend_split, mesh=mesh, keys="seq", mask=~masks.causal())
    gradient(split, tuple(arrays(3)))(*arrays(3))


FAMILIES: dict[str, Any] = {
    "linear": subquadratic.linear_attention,
    "recurrent": partial(subquadratic.linear_attention, form="recurrent"),
    "parallel": partial(subquadratic.linear_attention, form="parallel"),
    "relu": partial(subquadratic.linear_attention, feature_map=subquadratic.relu_features()),
    "favor": partial(
        subquadratic.linear_attention,
        feature_map=subquadratic.favor_features(jax.random.key(0), H, 8),
    ),
    "memory": partial(subquadratic.memory_compressed_attention, stride=3),
    "routed": partial(subquadratic.routed_attention, block_size=2, num_blocks=2),
    "lsh": lambda query, key, value, mask: subquadratic.lsh_attention(
        query, value, jax.random.key(1), num_buckets=2, num_rounds=2, mask=mask
    ),
}
UNORDERED: dict[str, Any] = {
    "nystrom": partial(subquadratic.nystrom_attention, num_landmarks=3),
    "low rank": partial(subquadratic.low_rank_attention, key_projection=arrays(1, 3, T)[0]),
}


@thorough
@pytest.mark.parametrize("name", [*FAMILIES, *UNORDERED])
def test_subquadratic(name):
    mask = masks.padding(np.array([0, 4]), np.array([5, 3]))
    if name in FAMILIES:
        mask = mask & masks.causal()
    in_all_orders(partial({**FAMILIES, **UNORDERED}[name], mask=mask), *arrays(3))


@thorough
@pytest.mark.parametrize("kind", ["kl", "reverse_kl", "js", "cross_entropy"])
def test_distillation(kind):
    mask = PADDED & masks.causal()

    def maps(*args, **options):
        both = {"teacher_mask": mask, "student_mask": mask, "teacher_gradient": True}
        return distillation.attention_divergence(args[:2], args[2:], kind=kind, **both, **options)

    in_all_orders(maps, *arrays(4))
    head_map = np.eye(N, dtype=np.float32)
    in_all_orders(partial(maps, block_size=4, head_map=head_map), *arrays(4))
    teacher = np.array([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]], np.float32)
    in_all_orders(lambda x: distillation.divergence(teacher, x, kind=kind), teacher[:, ::1])


@thorough
def test_losses():
    logits = np.array([[1.0, -np.inf, 0.0], [2.0, 1.0, 0.0]], np.float32)
    soft = partial(distillation.logit_distillation, logits, where=np.array([True, False]))
    in_all_orders(soft, np.ones((2, 3), np.float32))
    states = partial(distillation.hidden_state_transfer, np.ones((2, 3), np.float32), kind="cosine")
    in_all_orders(states, np.zeros((2, 3), np.float32))
    below = np.tri(T, T, -1, bool)
    labels = np.tri(T, T, -1, dtype=np.float32)[None]
    diagnostics = aj.diagnostics
    in_all_orders(
        lambda x: diagnostics.guided_alignment(masked_softmax(x, below), labels),
        *arrays(1, 1, N, T, T),
    )
    diagnostics.diagonal_labels(np.array([4, 6]), np.array([0, 6]), T, T)
    empty = np.array([[[0.0, -np.inf]]], np.float32)  # a row and an empty one
    stats = aj.Stats(empty, np.array([[[1.0, 0.0]]], np.float32), empty)
    diagnostics.entropy_regularizer(stats, least=2.0, most=3.0)
    observer = optax.chain(diagnostics.monitor(["layer"]), optax.sgd(0.1))
    gradients = {"layer": {"query": jnp.array([3.0, 4.0])}}
    observer.update(gradients, observer.init(gradients), stats={"layer": stats})


REAL = np.arange(T) < np.array([[4], [6]])
PAIRS = REAL[:, None, None, :] & REAL[:, None, :, None]
D = N * H


def trained(module: nnx.Module, *args: Any, **options: Any) -> None:
    nnx.grad(lambda module, *args: total(module(*args, **options)))(module, *args)


@thorough
def test_modules():
    (x,) = arrays(1, B, T, D)
    rngs = nnx.Rngs(0)
    for options in (
        {"score": "additive"},
        {"positions": an.relative_bias()},
        {"positions": an.shaw()},
        {"score": an.entropy_scale(1.0), "dropout_rate": 0.5, "deterministic": False},
    ):
        trained(an.MultiHeadAttention(N, D, rngs=rngs, **options), x, mask=PAIRS)
    trained(an.TransformerDecoderLayer(N, D, 16, rngs=rngs), x, x, memory_mask=~PAIRS)
    trained(an.AttentionPooling(D, 4, rngs=rngs), x, mask=np.zeros((B, 1, 1, T), bool))
    trained(an.MeanAttention(D, rngs=rngs), x, x, mask=PAIRS)
    layer = al.MultiHeadAttention(num_heads=N, score=al.entropy_scale(1.0))
    variables = layer.init(jax.random.key(0), x)
    options = {"mask": PAIRS, "deterministic": False, "mutable": ["adapted"]}
    gradient(lambda v: layer.apply({**variables, "params": v}, x, **options)[0], (0,))(
        variables["params"]
    )
    theirs = nn.MultiHeadDotProductAttention(num_heads=N, attention_fn=al.attention_fn())
    variables = theirs.init(jax.random.key(0), x)
    gradient(lambda v: theirs.apply(v, x, mask=PAIRS), (0,))(variables)


@thorough
def test_decoding():
    tokens = jnp.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    model = an.TransformerLM(1, N, D, 16, 11, rngs=nnx.Rngs(0))
    an.beam_decode(model, tokens, eos=2, max_length=3, num_beams=3)
    an.sample_decode(model, tokens, jax.random.key(0), max_length=3, top_k=4, top_p=0.5)
    attention = an.MultiHeadAttention(N, D, rngs=nnx.Rngs(0))
    cache = attention.new_cache(B, T)
    for x in arrays(2, B, 1, D):
        _, cache = attention.with_cache(x, cache)


@thorough
def test_diagnostics():
    (x,) = arrays(1, B, T, D)
    model = an.MultiHeadAttention(N, D, rngs=nnx.Rngs(0))
    found = aj.diagnostics.capture(
        model, x, mask=PAIRS, real=REAL, weights=True, rollout=True, loss=total
    )
    aj.diagnostics.diagnose(found)
    aj.diagnostics.head_importance(model, x, loss=total, mask=PAIRS)


@thorough
@pytest.mark.parametrize("implementation", ["dense", "blockwise", "flash"])
def test_no_operation_makes_one(implementation):
    size = None if implementation == "dense" else 4
    for options in (
        {"mask": PADDED},
        {"bias": np.where(np.tri(T, T, -1, bool), 0, -np.inf).astype(np.float32)},
    ):
        function = partial(aj.attend, implementation=implementation, block_size=size, **options)
        with jax.debug_nans(False), jax.debug_infs(False):
            assert made_of_finite(gradient(function, arrays(3)), *arrays(3)) == []


def test_the_interpreter_finds_one():
    def hides(x):
        return jax.lax.scan(lambda c, y: (c, jnp.where(y > 0, jnp.log(y), 0)), 0.0, x)[1]

    with jax.debug_nans(False), jax.debug_infs(False):
        assert made_of_finite(hides, np.array([0.0, 1.0], np.float32)) == ["log makes an infinity"]
