"""Training: what is stopped goes on to the same numbers, what diverges is said."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.progress import Progress
from experiments.train import Recipe, train

pytestmark = pytest.mark.usefixtures("as_users_run")

STEPS = 20


def batch(step):
    rng = np.random.default_rng(step)
    inputs = rng.normal(size=(8, 4)).astype(np.float32)
    return inputs, inputs.sum(1, keepdims=True)


def loss(model, batch, key):
    # The key counts, as it does with dropout.
    noise = 0.01 * jax.random.normal(key, batch[1].shape)
    return jnp.mean((model(batch[0]) - batch[1] + noise) ** 2)


def run(folder, *, batch_at=batch, loss=loss, every=7):
    recipe = Recipe(steps=STEPS, warmup=5, observe_every=4, checkpoint_every=every)
    with Progress(STEPS) as progress:
        return train(
            nnx.Linear(4, 1, rngs=nnx.Rngs(0)),
            loss,
            batch_at,
            recipe,
            seed=3,
            observe=lambda model: {"weight": float(model.kernel[0, 0])},
            checkpoints=folder,
            progress=progress,
            name="linear",
        )


def kernel(model):
    return np.asarray(model.kernel[...])


def fails_at(step):
    def batch_at(now):
        if now == step:
            raise RuntimeError("the power is gone")
        return batch(now)

    return batch_at


@pytest.fixture
def whole(tmp_path, as_users_run):
    return run(tmp_path / "whole")


def assert_same(one, other):
    (model, history), (again, history_again) = one, other
    assert history.loss == history_again.loss
    assert history.gradient_norm == history_again.gradient_norm
    assert history.observed == history_again.observed
    np.testing.assert_array_equal(kernel(model), kernel(again))


@pytest.mark.parametrize("step", [3, 7, 13, 19])
def test_after_a_crash_it_goes_on_to_the_same_numbers(step, whole, tmp_path):
    with pytest.raises(RuntimeError):
        run(tmp_path / "c", batch_at=fails_at(step))
    done = []

    def counting(now):
        done.append(now)
        return batch(now)

    assert_same(whole, run(tmp_path / "c", batch_at=counting))
    assert done[0] == step // 7 * 7  # from the last checkpoint, not from the start


def test_ctrl_c_saves_the_state_of_the_moment(whole, tmp_path):
    def stopped(now):
        if now == 9:
            os.kill(os.getpid(), signal.SIGINT)
        return batch(now)

    # Where the tests run in the background, a shell has SIGINT ignored; training restores that too.
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "c", batch_at=stopped, every=1000)
    assert signal.getsignal(signal.SIGINT) is before
    done = []

    def counting(now):
        done.append(now)
        return batch(now)

    assert_same(whole, run(tmp_path / "c", batch_at=counting, every=1000))
    assert done[0] == 10


def test_what_is_finished_is_not_trained_again(tmp_path):
    first = run(tmp_path / "c")
    assert_same(first, run(tmp_path / "c", batch_at=lambda _: pytest.fail("trained again")))


def test_a_loss_that_is_not_finite_is_said_and_changes_nothing(whole, tmp_path, capsys):
    def poisoned(now):
        inputs, targets = batch(now)
        return (inputs, targets * np.float32("nan")) if now == 6 else (inputs, targets)

    model, history = run(tmp_path / "c", batch_at=poisoned)
    assert history.diverged_at == 7
    assert history.step == 7
    assert np.isnan(history.loss[-1])
    assert history.loss[:6] == whole[1].loss[:6]
    assert np.isfinite(kernel(model)).all()
    assert "not finite at step 7" in capsys.readouterr().out
    again, history_again = run(tmp_path / "c", batch_at=lambda _: pytest.fail("went on"))
    assert history_again.diverged_at == 7
    np.testing.assert_array_equal(kernel(model), kernel(again))


def test_the_history_tells_what_the_step_costs(whole):
    _, history = whole
    assert list(history.temporaries) == ["8×4 8×1"]
    assert all(size > 0 for size in history.temporaries.values())
    assert history.step_milliseconds() > 0
    assert [seen["step"] for seen in history.observed] == [0, 4, 8, 12, 16, 20]


def test_the_learning_rate_rises_from_nothing_and_ends_at_nothing():
    optimizer = Recipe(steps=40, learning_rate=0.1, warmup=10).optimizer()
    weight = jnp.zeros(3)
    state, moved = optimizer.init(weight), []
    for _ in range(41):
        change, state = optimizer.update(jnp.ones(3), state, weight)
        moved.append(float(-change[0]))
    # With a constant gradient Adam's step is the learning rate itself.
    assert moved[0] == 0
    assert moved[10] == pytest.approx(0.1, rel=1e-3)
    assert moved[40] == pytest.approx(0, abs=1e-6)
    assert moved == sorted(moved[:11]) + sorted(moved[11:], reverse=True)
