"""Statistics inside a loss, the monitor and its files, and attention losses."""

import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import attention_jax as aj
from attention_jax.diagnostics import (
    JsonLines,
    TensorBoard,
    attention_stats,
    diagnose,
    diagonal_labels,
    entropy_regularizer,
    guided_alignment,
    history,
    monitor,
    read_history,
)
from attention_jax.nnx import TransformerEncoder

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 9, 16)).astype(np.float32)
PATHS = ["layers/0/self_attention", "layers/1/self_attention"]


@pytest.fixture(scope="module")
def trained():
    """A model trained to minimise its entropy, at a high learning rate."""
    model = TransformerEncoder(2, 2, 16, 16, rngs=nnx.Rngs(0))
    tracker = monitor(PATHS, capacity=8, every=2)
    optimizer = nnx.Optimizer(model, optax.chain(tracker, optax.adam(0.2)), wrt=nnx.Param)

    def loss(model, x):
        _, stats = attention_stats(model, x)
        return sum(jnp.mean(s.entropy) for s in stats.values()), stats

    @nnx.jit
    def step(model, optimizer, x):
        (value, stats), gradient = nnx.value_and_grad(loss, has_aux=True)(model, x)
        with jax.numpy_dtype_promotion("standard"):
            optimizer.update(model, gradient, stats=stats, loss=value)
        return value, stats, gradient

    first = step(model, optimizer, X)
    for _ in range(24):
        step(model, optimizer, X)
    return model, optimizer, first, step


def test_statistics_match_those_of_the_layers():
    model = TransformerEncoder(1, 2, 16, 16, rngs=nnx.Rngs(0))

    @nnx.jit
    def both(model, x):
        layer = model.layers[0].self_attention
        return attention_stats(model, x), (model(x), layer.with_stats(x)[1])

    (out, stats), (plain, wanted) = both(model, X)
    np.testing.assert_allclose(out, plain, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), stats[PATHS[0]], wanted)
    assert not jax.tree.leaves(nnx.state(model, nnx.Intermediate))


def test_the_monitor_keeps_the_last_rows_and_changes_no_gradient(trained):
    _, optimizer, (value, stats, gradient), _ = trained
    rows = history(optimizer.opt_state)
    assert [row["step"] for row in rows] == [10, 12, 14, 16, 18, 20, 22, 24]
    tracker = monitor(stats, capacity=3)
    state = tracker.init(None)
    update = jax.jit(lambda g, s, **extra: tracker.update(g, s, None, **extra))
    passed, state = update(gradient, state, stats=stats, loss=value)
    jax.tree.map(np.testing.assert_array_equal, passed, gradient)
    (row,) = history(state)
    assert row["step"] == 0
    np.testing.assert_allclose(row["loss"], value)
    for path in PATHS:
        s, fields = stats[path], row["attention"][path]
        layer = gradient["layers"][int(path.split("/")[1])]["self_attention"]
        norm = np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(layer)))
        np.testing.assert_allclose(fields["entropy"], s.entropy.mean(), rtol=1e-5)
        np.testing.assert_allclose(fields["least_entropy"], s.entropy.mean((0, 2)).min(), rtol=1e-5)
        np.testing.assert_allclose(fields["max_logit"], s.max_logit.max(), rtol=1e-5)
        np.testing.assert_allclose(
            fields["largest_weight"], jnp.exp(s.max_logit - s.lse).mean(), rtol=1e-5
        )
        np.testing.assert_allclose(fields["gradient_norm"], norm, rtol=1e-5)
        assert fields["bad"] == 0
    with pytest.raises(ValueError, match=r"stats has no 'x'"):
        monitor(["x"]).update(gradient, monitor(["x"]).init(None), stats=stats)
    with pytest.raises(ValueError, match="holds 0 states of a monitor"):
        history(optax.adam(1.0).init({"w": jnp.ones(1)}))


def test_a_collapse_in_training_is_written_and_diagnosed(trained, tmp_path):
    model, optimizer, _, step = trained
    log = JsonLines(tmp_path / "run" / "attention.jsonl")
    assert log.write(optimizer.opt_state) == 8
    assert log.write(optimizer.opt_state) == 0
    rows = read_history(log.path)
    assert rows == history(optimizer.opt_state)
    # rows that the ring buffer has overwritten
    early = {
        "step": 0,
        "attention": {p: {"entropy": 1.9, "max_logit": 2.0, "bad": 0.0} for p in PATHS},
    }
    # the loss is the entropy itself here, so it is left out
    found = diagnose(history=[early, *({k: row[k] for k in ("step", "attention")} for row in rows)])
    assert "entropy_collapse" in found.names, str(found)
    model.layers[1].self_attention.key.kernel[0, 0, 0] = jnp.nan
    for _ in range(2):
        step(model, optimizer, X)
    again = JsonLines(log.path)  # continues an existing file
    assert again.write(optimizer.opt_state) == 1
    broken = read_history(log.path)[-1]
    assert broken["attention"][PATHS[1]]["entropy"] is None
    assert broken["loss"] is None
    assert broken["attention"][PATHS[1]]["bad"] > 0
    found = diagnose(history=read_history(log.path))
    assert "not_finite" in found.names
    assert next(f for f in found if f.name == "not_finite").numbers["step"] == 26


def test_tensorboard_receives_the_same_rows(trained, tmp_path, monkeypatch):
    scalars = []

    class SummaryWriter:
        def __init__(self, directory):
            assert directory == str(tmp_path)

        def add_scalar(self, name, value, step):
            scalars.append((name, value, step))

        def flush(self):
            pass

    monkeypatch.setitem(
        sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=SummaryWriter)
    )
    rows = history(trained[1].opt_state)
    writer = TensorBoard(tmp_path)
    assert writer.write(trained[1].opt_state) == len(rows)
    assert writer.write(trained[1].opt_state) == 0
    value = rows[0]["attention"][PATHS[0]]["entropy"]
    assert (f"{PATHS[0]}/entropy", value, rows[0]["step"]) in scalars
    assert ("loss", rows[0]["loss"], rows[0]["step"]) in scalars
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match=r"attention_jax\[tensorboard\]"):
        TensorBoard(tmp_path)


def test_entropy_outside_of_its_bounds_is_penalised():
    entropy = np.float32([[0.2, 1.0, 3.0, 0.0]])
    lse = np.float32([[0, 0, 0, -np.inf]])
    stats = aj.Stats(lse, entropy, lse)
    both = (0.3**2 + 1.0**2) / 3
    np.testing.assert_allclose(entropy_regularizer(stats, least=0.5, most=2.0), both, rtol=1e-6)
    np.testing.assert_allclose(
        entropy_regularizer({"a": stats, "b": stats}, least=0.5), 0.03, rtol=1e-5
    )
    x = RNG.normal(size=(6, 1, 4)).astype(np.float32)
    mask = np.tril(np.ones((6, 6), bool), -1)

    def loss(x):
        return entropy_regularizer(aj.attend_with_stats(x, x, x, mask=mask)[1], least=2.0)

    value, gradient = jax.value_and_grad(loss)(x)
    assert value > loss(x / 3)
    assert np.isfinite(gradient).all()
    with pytest.raises(ValueError, match=r"least 2\.0 must not be above most 1\.0"):
        entropy_regularizer(stats, least=2.0, most=1.0)


def test_guided_alignment_from_gold_and_from_the_diagonal():
    weights = RNG.dirichlet(np.ones(5), (2, 3, 4)).astype(np.float32)
    gold = RNG.random((2, 4, 5)) < 0.4
    gold[0, 1] = False
    gold[0, 0], gold[1, 3] = True, True
    share = gold / np.maximum(gold.sum(-1, keepdims=True), 1)
    wanted = -(share[:, None] * np.log(weights)).sum(-1).sum() / (3 * gold.any(-1).sum())
    np.testing.assert_allclose(guided_alignment(weights, gold), wanted, rtol=1e-5)
    weights[0, 0, 0] = [1, 0, 0, 0, 0]
    value, gradient = jax.value_and_grad(guided_alignment)(weights, gold)
    assert value == np.inf
    assert np.isfinite(gradient).all()
    labels = np.asarray(diagonal_labels(np.array([4, 2]), np.array([5, 3]), 4, 5, width=0.1))
    np.testing.assert_allclose(labels.sum(-1), [[1, 1, 1, 1], [1, 1, 0, 0]], atol=1e-6)
    assert labels[0].argmax(-1).tolist() == [0, 1, 3, 4]
    assert (labels[1, :, 3:] == 0).all()
    assert labels[1, 1].argmax() == 2
    with pytest.raises(ValueError, match=r"labels \[2, 5, 4\]"):
        guided_alignment(weights, gold.swapaxes(1, 2))
    with pytest.raises(TypeError, match="key_lengths must be integers"):
        diagonal_labels(np.array([4]), np.array([5.0]), 4, 5)
