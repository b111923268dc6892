"""Soft targets, hidden states and value relations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.distillation import (
    attention_divergence,
    hidden_state_transfer,
    logit_distillation,
    value_relation,
)

pytestmark = pytest.mark.thorough

RNG = np.random.default_rng(1)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def softmax(x):
    powers = np.exp(x.astype(np.float64))
    return powers / powers.sum(-1, keepdims=True)


@pytest.mark.parametrize(("temperature", "steepest"), [(1, 0.1786), (4, 0.2472), (10.0, 0.2353)])
def test_the_temperature_does_not_change_the_size_of_the_gradient(temperature, steepest):
    teacher, student = np.float32([[2, 0, -1]]), np.float32([[1, 0, -1]])

    def loss(teacher, student):
        return logit_distillation(teacher, student, temperature=temperature)

    its, own = jax.jit(jax.grad(loss, (0, 1)))(teacher, student)
    np.testing.assert_allclose(np.abs(own).max(), steepest, atol=1e-4)
    assert (its == 0).all()


def test_sum_over_classes_and_mean_over_the_other_axes():
    teacher, student = normal(2, 5, 17), normal(2, 5, 17)
    p, q = softmax(teacher / 2), softmax(student / 2)
    rows = 4 * (p * np.log(p / q)).sum(-1)
    got = jax.jit(lambda *xs: logit_distillation(*xs, temperature=2.0))(teacher, student)
    np.testing.assert_allclose(got, rows.mean(), rtol=1e-5)
    counts = RNG.random((2, 5)) < 0.5
    teacher[~counts] = np.nan

    @jax.jit
    def run(teacher, student, counts):
        loss = jax.value_and_grad(logit_distillation, 1)
        return loss(teacher, student, temperature=2.0, where=counts)

    got, gradient = run(teacher, student, counts)
    np.testing.assert_allclose(got, rows[counts].mean(), rtol=1e-5)
    wanted = np.where(counts[..., None], 2 * (q - p) / counts.sum(), 0)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-7)
    assert run(teacher, student, np.zeros((2, 5), bool))[0] == 0
    asked = jax.grad(lambda x: logit_distillation(x, student, teacher_gradient=True))
    assert np.abs(asked(student + 1.5 * normal(17)[None, None])).max() > 0


def test_excluded_classes():
    impossible = np.float32([1, 2, -np.inf, 0])
    both, one = np.float32([3, 0, -np.inf, 1]), np.float32([3, -np.inf, 0, 1])
    value, gradient = jax.value_and_grad(logit_distillation, 1)(impossible, both)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    value, gradient = jax.value_and_grad(logit_distillation, 1)(impossible, one)
    assert value == np.inf
    assert np.isfinite(gradient).all()


def test_hidden_states_with_a_learned_projection():
    teacher, student, projection = normal(2, 5, 6), normal(2, 5, 4), normal(4, 6)
    counts = np.arange(5) < np.array([[5], [3]])

    def loss(teacher, student, projection, where=None, kind="mse"):
        return hidden_state_transfer(teacher, student, projection, where=where, kind=kind)

    square = ((student @ projection - teacher) ** 2).mean(-1)
    np.testing.assert_allclose(loss(teacher, student, projection), square.mean(), rtol=1e-5)
    spoiled = np.where(counts[..., None], student, np.nan)
    value, gradients = jax.value_and_grad(loss, (0, 1, 2))(teacher, spoiled, projection, counts)
    np.testing.assert_allclose(value, square[counts].mean(), rtol=1e-5)
    assert (gradients[0] == 0).all()
    assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in gradients[1:])
    turned = 2 * student
    np.testing.assert_allclose(loss(turned, student, None, kind="cosine"), 0, atol=1e-6)
    with pytest.raises(ValueError, match=r"4 features.*6: give a projection \[4, 6\]"):
        hidden_state_transfer(teacher, student)
    with pytest.raises(ValueError, match=r"projection has shape \[6, 4\]"):
        hidden_state_transfer(teacher, student, projection.T)


def test_value_relations():
    teacher, student = normal(2, 7, 4, 6), normal(2, 7, 2, 4)
    mask = aj.masks.padding(jnp.array([7, 4]))
    both = {"teacher_mask": mask, "student_mask": mask}
    heads = value_relation(teacher, student, **both)
    plain = attention_divergence((teacher, teacher), (student, student), **both)
    np.testing.assert_array_equal(heads, plain)
    cut = value_relation(teacher, student, relation_heads=8, **both)
    assert cut.shape == (2, 8, 7)
    own, its = student.reshape(2, 7, 8, 1), teacher.reshape(2, 7, 8, 3)
    np.testing.assert_array_equal(cut, attention_divergence((its, its), (own, own), **both))
    with pytest.raises(ValueError, match="width 8"):
        value_relation(teacher, student, relation_heads=3)


def test_errors_name_the_argument():
    x = normal(2, 3)
    with pytest.raises(ValueError, match="temperature must be positive"):
        logit_distillation(x, x, temperature=0.0)
    with pytest.raises(ValueError, match=r"teacher_logits \[2, 3\] and student_logits \[2, 2\]"):
        logit_distillation(x, x[:, 1:])
    with pytest.raises(TypeError, match="where must be boolean"):
        logit_distillation(x, x, where=np.ones(2, np.float32))
    with pytest.raises(ValueError, match="kind"):
        hidden_state_transfer(x, x, kind="l1")
