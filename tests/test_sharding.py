"""Sequences sharded among devices: values and gradients of one device, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.sharding import attend_split, merge, placement

pytestmark = pytest.mark.devices(8)

causal, window = aj.masks.causal(), aj.masks.window


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "seq"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def arrays(T=8, S=12):
    rng = np.random.default_rng(0)
    shapes = ((2, T, 4, 3), (2, S, 2, 3), (2, S, 2, 5))
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def agree(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("axes", "mask"),
    [
        ({"keys": "seq"}, causal & window(3, 0)),
        ({"queries": "seq", "batch": "data"}, causal),
        ({"queries": "data", "keys": "seq"}, None),
        ({"heads": "data", "keys": "seq"}, window(1, 2)),
    ],
    ids=["keys", "queries", "both", "heads and keys"],
)
def test_values_and_gradients_equal_those_of_one_device(mesh, axes, mask):
    def loss(f, q, k, v, **options):
        return jnp.sum(jnp.sin(f(q, k, v, mask=mask, **options)))

    whole = jax.jit(jax.value_and_grad(lambda *a: loss(aj.attend, *a), (0, 1, 2)))
    split = jax.jit(
        jax.value_and_grad(lambda *a: loss(attend_split, *a, mesh=mesh, **axes), (0, 1, 2))
    )
    agree(split(*arrays()), whole(*arrays()))


def test_rows_that_are_empty_on_some_or_all_devices(mesh):
    q, k, v = arrays(T=8, S=4)
    mask = causal & window(1, 0)  # queries 5, 6 and 7 have no key
    out = attend_split(q, k, v, mesh=mesh, keys="seq", mask=mask)
    agree(out, aj.attend(q, k, v, mask=mask))
    assert (out[:, 5:] == 0).all()


def test_parameters_of_a_score_get_gradients(mesh):
    q, k, v = arrays()
    weight = jnp.eye(3) + 0.1

    def loss(f, weight, **options):
        return jnp.sum(f(q, k, v, score=aj.scores.general(weight), **options) ** 2)

    one = jax.grad(lambda w: loss(aj.attend, w))(weight)
    agree(jax.grad(lambda w: loss(attend_split, w, mesh=mesh, keys="seq"))(weight), one)


def test_parts_merge_into_the_whole():
    q, k, v = arrays(T=5)
    parts = [aj.attend_with_stats(q, k[:, i::3], v[:, i::3]) for i in range(3)]
    out, lse = merge(jnp.stack([o for o, _ in parts]), jnp.stack([s.lse for _, s in parts]))
    whole, stats = aj.attend_with_stats(q, k, v)
    agree((out, lse), (whole, stats.lse))
    empty = merge(jnp.zeros((2, 4, 1, 3)), jnp.full((2, 1, 4), -jnp.inf))
    assert (empty[0] == 0).all()
    assert (empty[1] == -jnp.inf).all()


def test_the_axes_of_a_placement(mesh):
    spec = placement(mesh, batch="data", heads="seq").spec
    assert tuple(spec) == ("data", None, "seq", None)
    assert placement(mesh, heads=("data", "seq"), batch_axes=0).spec[1] == ("data", "seq")


@pytest.mark.parametrize(
    ("axes", "error", "words"),
    [
        ({"keys": "row"}, ValueError, "keys names mesh axis 'row'"),
        ({"keys": "seq", "heads": "seq"}, ValueError, "given for heads and for keys"),
        ({"heads": "seq"}, ValueError, "K = 2 is not a multiple of 4"),
        ({"mask": aj.masks.padding(np.array([3, 4]))}, TypeError, "must be a mask of positions"),
        ({"mask": np.ones((8, 12), bool)}, TypeError, "must be a mask of positions"),
        (
            {"heads": "data", "score": aj.scores.general(jnp.eye(3))},
            ValueError,
            "cannot be sharded with the heads",
        ),
    ],
)
def test_sharding_mistakes(mesh, axes, error, words):
    with pytest.raises(error, match=words):
        attend_split(*arrays(), mesh=mesh, **axes)
    with pytest.raises(ValueError, match="batch_axes is 0"):
        placement(mesh, batch="data", batch_axes=0)
    with pytest.raises(ValueError, match=r"it must be \[parts, \*B, N, T\]"):
        merge(jnp.zeros((2, 4, 1, 3)), jnp.zeros((2, 4, 1)))
