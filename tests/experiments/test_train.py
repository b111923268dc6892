"""Training: what is stopped goes on to the same numbers, what diverges is said."""

import errno
import os
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention_jax.nnx import MultiHeadAttention, entropy_scale
from experiments.core.optim import Recipe
from experiments.core.progress import Progress
from experiments.core.train import Task, train

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


def run(folder, *, batch_at=batch, loss=loss, every=7, model=None, **recipe):
    recipe = {"steps": STEPS, "warmup": 5, "observe_every": 4, "checkpoint_every": every, **recipe}
    model = model or nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    with Progress(STEPS) as progress:
        return train(
            Task("linear", model, loss, batch_at, 3, observed),
            Recipe(**recipe),
            checkpoints=folder / "c",
            curves=folder / "curves.jsonl",
            progress=progress,
        )


def observed(model):
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    return {"weight": float(leaves[-1].ravel()[0])}


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


def damaged_in(place):
    """Ways to damage a checkpoint, by what they do."""
    files = sorted(f for f in place.rglob("*") if f.is_file())
    largest = max(files, key=lambda f: f.stat().st_size)
    content = largest.read_bytes()
    middle = len(content) // 2
    flipped = bytes(b ^ 0xFF for b in content[middle : middle + 64])
    yield "truncated", lambda: largest.write_bytes(content[:middle])
    yield (
        "flipped",
        lambda: largest.write_bytes(content[:middle] + flipped + content[middle + len(flipped) :]),
    )
    yield "empty", lambda: largest.write_bytes(b"")
    for file in files:
        yield f"without {file.name}", file.unlink
    record = place / "checkpoint.json"
    text = record.read_text()
    yield "no record", lambda: record.write_text("[]")
    yield (
        "another record",
        lambda: record.write_text(text.replace('"bytes": ', '"bytes": 1', 1)),
    )

    lines = place.parents[1] / "curves.jsonl"
    of_step = lines.read_text().splitlines(keepends=True)
    of_step[10] = of_step[10].replace("1", "2")
    yield "other lines", lambda: lines.write_text("".join(of_step))


@pytest.fixture
def stopped(tmp_path, as_users_run):
    """The checkpoints of a training that failed at step 19: those of steps 7 and 14."""
    folder = tmp_path / "stopped"
    with pytest.raises(RuntimeError):
        run(folder, batch_at=fails_at(19))
    assert sorted(p.name for p in (folder / "c").iterdir()) == ["14", "7"]
    return folder


@pytest.mark.parametrize("number", range(6))
def test_a_damaged_checkpoint_is_named_and_an_older_one_taken(
    number, whole, stopped, tmp_path, capsys
):
    count = len(list(damaged_in(stopped / "c" / "14")))
    for which in range(number, count, 6):
        folder = tmp_path / str(which)
        shutil.copytree(stopped, folder)
        name, damage = list(damaged_in(folder / "c" / "14"))[which]
        damage()
        done = []

        def counting(now, done=done):
            done.append(now)
            return batch(now)

        assert_same(whole, run(folder, batch_at=counting))
        assert done[0] == 7, name
        said = " ".join(capsys.readouterr().out.split())
        assert "/14 is damaged (" in said
        assert "trying the one of step 7" in said


def test_without_a_whole_checkpoint_training_starts_again(whole, stopped, tmp_path, capsys):
    shutil.copytree(stopped, tmp_path / "c")
    for step in ("7", "14"):
        (tmp_path / "c" / "c" / step / "checkpoint.json").write_text("")
    assert_same(whole, run(tmp_path / "c"))
    said = " ".join(capsys.readouterr().out.split())
    assert "trying the one of step 7" in said
    assert "/7 is damaged (no whole checkpoint.json): starting from step 0" in said


def test_without_its_lines_training_starts_again(whole, stopped, tmp_path, capsys):
    shutil.copytree(stopped, tmp_path / "c")
    (tmp_path / "c" / "curves.jsonl").unlink()
    assert_same(whole, run(tmp_path / "c"))
    said = " ".join(capsys.readouterr().out.split())
    assert "(curves.jsonl has changed): starting from step 0" in said


def test_a_checkpoint_that_was_being_written_is_no_checkpoint(whole, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "c")
    (tmp_path / "c" / "c" / "14").rename(tmp_path / "c" / "c" / "14.part")
    assert_same(whole, run(tmp_path / "c"))


def test_a_disk_that_is_full_in_a_checkpoint_loses_none(whole, stopped, tmp_path, monkeypatch):
    shutil.copytree(stopped, tmp_path / "c")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            run(tmp_path / "c", every=2)
    assert sorted(p.name for p in (tmp_path / "c" / "c").iterdir()) == ["14", "7"]
    assert_same(whole, run(tmp_path / "c"))


def test_the_fresh_model_stays_as_it_was(tmp_path):
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    start = np.array(kernel(model))
    assert (kernel(run(tmp_path / "c", model=model).model) != start).any()
    np.testing.assert_array_equal(kernel(model), start)


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


def test_models_of_one_structure_share_no_step_of_another_recipe_or_loss(tmp_path):
    def double(model, batch, key):
        return 2 * loss(model, batch, key)

    given = {
        "plain": {},
        "rate": {"learning_rate": 0.3},
        "loss": {"loss": double},
        "decay": {"weight_decay": 10.0},
        "frozen": {"groups": (("kernel", 0.0),)},
        "clip": {"clip": 1e-9},
        "schedule": {"schedule": "constant"},
    }
    ends = {n: run(tmp_path / n, **more) for n, more in given.items()}
    losses = {n: history.loss for n, (_, history) in ends.items()}
    assert len({tuple(v) for v in losses.values()}) == len(given)
    assert losses["loss"][0] == pytest.approx(2 * losses["plain"][0])
    start = kernel(nnx.Linear(4, 1, rngs=nnx.Rngs(0)))
    np.testing.assert_array_equal(kernel(ends["frozen"].model), start)
    again = run(tmp_path / "again", learning_rate=0.3)
    assert_same(ends["rate"], again)


class Adapting(nnx.Module):
    """A model whose state moves with its batches: its own count, and the library's scale."""

    def __init__(self, rngs):
        score = entropy_scale(target=0.3)
        self.attention = MultiHeadAttention(2, 4, score=score, dropout_rate=0.1, rngs=rngs)
        self.count = nnx.BatchStat(jnp.float32(0))
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x, **told):
        self.count.set_value(self.count[...] + 1)
        return self.out(self.attention(x[None], **told)[0])


def adapting(folder, **more):
    def loss(model, batch, key):
        out = model(batch[0], deterministic=False, rngs=nnx.Rngs(dropout=key))
        return jnp.mean((out - batch[1]) ** 2)

    return run(folder, model=Adapting(nnx.Rngs(0)), loss=loss, **more)


def variables(model):
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngState)))]


def test_the_state_of_a_model_moves_and_is_part_of_a_checkpoint(tmp_path):
    whole = adapting(tmp_path / "whole")
    assert whole.model.count[...] == STEPS
    fresh = Adapting(nnx.Rngs(0)).attention.score.log_scale[...]
    assert np.abs(np.asarray(whole.model.attention.score.log_scale[...] - fresh)).min() > 0.01
    with pytest.raises(RuntimeError):
        adapting(tmp_path / "c", batch_at=fails_at(16))
    resumed = adapting(tmp_path / "c")
    for one, other in zip(variables(whole.model), variables(resumed.model), strict=True):
        np.testing.assert_array_equal(one, other)
    assert whole.history.loss == resumed.history.loss


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_lower_precision_keeps_float32_parameters_and_learns(precision, whole, tmp_path):
    model, history = run(tmp_path / "c", precision=precision)
    assert kernel(model).dtype == np.float32
    assert history.loss != whole.history.loss
    np.testing.assert_allclose(history.loss, whole.history.loss, rtol=0.1)


def test_a_float16_loss_that_overflows_leaves_out_the_step_and_halves_its_scale(tmp_path):
    def large(model, batch, key):
        return 1e3 * loss(model, batch, key)

    more = {"precision": "float16", "learning_rate": 0.03, "loss": large}
    _, history = run(tmp_path / "c", **more)
    assert history.diverged_at is None
    assert not np.isfinite(history.gradient_norm[0])
    assert np.isfinite(history.gradient_norm[-5:]).all()
    assert history.loss[-1] < history.loss[0]


def test_metrics_that_are_fetched_together_are_the_same(whole, tmp_path):
    assert_same(whole, run(tmp_path / "c", fetch_every=6))

    def poisoned(now):
        inputs, targets = batch(now)
        return (inputs, targets * np.float32("nan")) if now == 6 else (inputs, targets)

    one, other = (run(tmp_path / f"p{n}", batch_at=poisoned, fetch_every=n) for n in (1, 6))
    assert one.history.diverged_at == other.history.diverged_at == 7
    assert other.history.loss[:6] == one.history.loss[:6]
    np.testing.assert_array_equal(kernel(one.model), kernel(other.model))


def test_the_learning_rate_rises_from_nothing_and_ends_at_nothing():
    moved = rates(Recipe(steps=40, learning_rate=0.1, warmup=10))
    assert moved[0] == 0
    assert moved[10] == pytest.approx(0.1, rel=1e-3)
    assert moved[40] == pytest.approx(0, abs=1e-6)
    assert moved == sorted(moved[:11]) + sorted(moved[11:], reverse=True)


def test_the_inverse_square_root_falls_from_the_end_of_the_warm_up():
    told = {"learning_rate": 0.1, "warmup": 10, "schedule": "inverse-sqrt"}
    moved = rates(Recipe(steps=40, **told))
    assert moved[:11] == sorted(moved[:11])
    assert moved[10] == pytest.approx(0.1, rel=1e-3)
    assert moved[40] == pytest.approx(0.05, rel=1e-3)
    # A rate is part of the state: another one needs no other step.
    assert (
        Recipe(steps=40, **told).compiled_part()
        == Recipe(steps=40, **{**told, "learning_rate": 1.0}).compiled_part()
    )


def rates(recipe):
    """The learning rate of each step: with a constant gradient it is Adam's step."""
    optimizer, weight = recipe.optimizer(), jnp.zeros(3)
    state, moved = optimizer.init(weight), []
    for _ in range(41):
        change, state = optimizer.update(jnp.ones(3), state, weight)
        moved.append(float(-change[0]))
    return moved
