"""The two products of attention: their derivatives, and how a CPU is asked for them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax._core.numerics import matmul
from attention_jax._core.products import pair_products, weighted_sum

ROWS = 512  # from here on the small factors are turned
PRODUCTS = {
    "pairs": (pair_products, lambda x, y: matmul(x, y.T), (ROWS, 3), (ROWS, 3)),
    "weighted": (weighted_sum, matmul, (ROWS, ROWS), (ROWS, 3)),
}


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("which", PRODUCTS)
def test_derivatives_are_those_of_the_plain_product(which):
    ours, plain, *shapes = PRODUCTS[which]
    points = [normal(seed, *shape) for seed, shape in enumerate(shapes)]
    moves = [normal(seed, *shape) for seed, shape in enumerate(shapes, 2)]

    def everything(product, points, moves):
        def loss(x, y):
            return jnp.sum(jnp.sin(product(x, y)))

        gradient = jax.grad(loss, (0, 1))
        return (
            jax.jvp(product, points, moves),
            jax.jvp(lambda y: product(points[0], y), points[1:], moves[1:]),
            jax.jvp(gradient, points, moves),  # a Hessian-vector product
            jax.grad(lambda y: loss(points[0], y))(points[1]),
        )

    for got, wanted in zip(
        jax.tree.leaves(jax.jit(lambda *x: everything(ours, *x))(points, moves)),
        jax.tree.leaves(jax.jit(lambda *x: everything(plain, *x))(points, moves)),
        strict=True,
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-3)


def test_no_gradient_turns_a_plane():
    if jax.default_backend() != "cpu":
        pytest.skip("only a CPU's products are slow with the large factor transposed")
    query, key, value = normal(0, 3, 1024, 1, 8)

    def loss(query, key, value):
        return aj.attend(query, key, value, implementation="flash", block_size=ROWS).sum()

    text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(query, key, value).compile().as_text()
    products = re.findall(r" dot\(.*lhs_contracting_dims=\{(\d)\}, rhs_contracting_dims", text)
    assert len(products) == 7  # two forward, five backward
    assert "0" not in products
