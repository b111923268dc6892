"""Split over devices by annotation, the numbers and the gradients are those of one device."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import attention_jax as aj
from tests.engine.tools import close, normals

pytestmark = pytest.mark.devices(8)

DROP = {"dropout_rate": 0.1, "dropout_key": jax.random.key(4)}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def inputs(rng):
    """`[B 4, T 6, N 8, H 3]` queries, four key heads, seven keys."""
    return normals(rng, (4, 6, 8, 3), (4, 7, 4, 3), (4, 7, 4, 2))


def with_gradients(f):
    def run(q, k, v):
        out, pull = jax.vjp(f, q, k, v)
        return out, pull(jnp.cos(out))

    return run


@pytest.mark.parametrize(
    "spec",
    [P("data"), P(None, None, "model"), P("data", None, "model")],
    ids=["batch", "heads", "both"],
)
@pytest.mark.parametrize("request_", [{}, DROP], ids=["plain", "dropout"])
def test_a26_batch_and_heads_by_annotation(attend, rng, mesh, spec, request_):
    arrays = inputs(rng)
    f = with_gradients(partial(attend, mask=aj.masks.causal(), **request_))
    expected = jax.jit(f)(*arrays)
    sharding = NamedSharding(mesh, spec)
    placed = [jax.device_put(x, sharding) for x in arrays]
    for got, one in zip(
        jax.tree.leaves(jax.jit(f)(*placed)), jax.tree.leaves(expected), strict=True
    ):
        close(got, one, atol=5e-6)


@pytest.mark.parametrize(
    "spec", [P("data", None, "model"), P(None, "data")], ids=["both", "length"]
)
def test_a26_explicit_axes(path, rng, spec):
    """Axes that are part of an array's type, while parameters, mask and bias are on all devices."""
    arrays = inputs(rng)
    weight, bias = normals(rng, (8, 3, 3), (1, 8, 6, 7))
    mask = aj.masks.causal() | aj.masks.padding(jnp.array([3, 7, 1, 0]))

    def f(q, k, v, weight, bias):
        out, stats = aj.attend_with_stats(
            q, k, v, score=aj.scores.general(weight), mask=mask, bias=bias, **DROP, **path
        )
        return out, stats.lse, stats.max_logit

    @jax.jit
    def run(*arrays):
        out, pull = jax.vjp(f, *arrays, weight, bias)
        return out, pull(jax.tree.map(jnp.cos, out))

    explicit = (jax.sharding.AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=explicit)
    sharding = NamedSharding(mesh, spec)
    divided = arrays if spec[0] else arrays[:1]  # two devices hold six queries, not seven keys
    placed = [jax.device_put(x, sharding) for x in divided]
    got = run(*placed, *arrays[len(placed) :])
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(run(*arrays)), strict=True):
        close(x, y, atol=5e-6)


def test_a26_shard_map_over_batch_and_heads(attend, rng, mesh):
    arrays = inputs(rng)
    spec = P("data", None, "model")
    f = with_gradients(partial(attend, mask=aj.masks.causal()))
    split = jax.shard_map(f, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    for got, one in zip(
        jax.tree.leaves(jax.jit(split)(*arrays)), jax.tree.leaves(jax.jit(f)(*arrays)), strict=True
    ):
        close(got, one, atol=5e-6)


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
def test_a26_shards_of_the_queries_with_their_own_positions(attend, rng, mesh, check):
    """The key is whole on every device; its gradient is the sum of all shards'."""
    q, k, v = normals(rng, (8, 2, 3), (7, 2, 3), (7, 2, 2))

    def piece(q, k, v):
        at = jax.lax.axis_index("model") * q.shape[0] + jnp.arange(q.shape[0], dtype=jnp.int32)
        return attend(q, k, v, mask=aj.masks.causal(), query_positions=at)

    rows = P("model")
    split = jax.shard_map(
        piece, mesh=mesh, in_specs=(rows, P(), P()), out_specs=rows, check_vma=check
    )
    whole = with_gradients(partial(attend, mask=aj.masks.causal()))
    for got, one in zip(
        jax.tree.leaves(jax.jit(with_gradients(split))(q, k, v)),
        jax.tree.leaves(jax.jit(whole)(q, k, v)),
        strict=True,
    ):
        close(got, one, atol=5e-6)


def test_a26_a_gradient_taken_inside_a_shard(attend, rng, mesh):
    """Sharded queries, a replicated key: its gradient is each shard's, then summed."""
    q, k, v = normals(rng, (8, 2, 3), (7, 2, 3), (7, 2, 2))

    def loss(q, k, v):
        return jnp.sum(jnp.sin(attend(q, k, v)))

    def piece(q, k, v):
        return jax.grad(loss, argnums=(1, 2))(
            q, *(jax.lax.pcast(x, "model", to="varying") for x in (k, v))
        )

    def summed(q, k, v):
        return jax.tree.map(lambda x: jax.lax.psum(x, "model"), piece(q, k, v))

    split = jax.shard_map(summed, mesh=mesh, in_specs=(P("model"), P(), P()), out_specs=P())
    whole = jax.grad(loss, argnums=(1, 2))(q, k, v)
    for got, one in zip(jax.jit(split)(q, k, v), whole, strict=True):
        close(got, one, atol=1e-5)


def test_a26_the_sequence_split_by_annotation(attend, rng, mesh):
    q, k, v = normals(rng, (2, 8, 2, 3), (2, 12, 2, 3), (2, 12, 2, 3))
    f = with_gradients(partial(attend, mask=aj.masks.causal(align="end")))
    expected = jax.jit(f)(q, k, v)
    placed = [jax.device_put(x, NamedSharding(mesh, P(None, "model"))) for x in (q, k, v)]
    for got, one in zip(
        jax.tree.leaves(jax.jit(f)(*placed)), jax.tree.leaves(expected), strict=True
    ):
        close(got, one, atol=5e-6)


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize(
    "spec",
    [P("data"), P(None, None, "model"), P("data", None, "model")],
    ids=["batch", "heads", "both"],
)
def test_a26_no_whole_key_is_gathered(attend, rng, mesh, spec, gradient):
    sharding = NamedSharding(mesh, spec)
    arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in inputs(rng)]
    f = partial(attend, mask=aj.masks.causal())
    f = jax.jit(with_gradients(f) if gradient else f, out_shardings=sharding)
    assert "all-gather" not in f.lower(*arrays).compile().as_text()
