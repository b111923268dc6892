"""The recurrent encoder–decoder: padding, alignment in time, both ways to attend, the study."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.__main__ import main
from experiments.data.tokens import BOS, EOS, PAD
from experiments.models.seq2seq import Size, build, translate

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("as_users_run")]

SIZE = Size(layers=2, heads=1, features=8, mlp_features=16)
RNG = np.random.default_rng(0)
SOURCE = RNG.integers(4, 11, (2, 6)).astype(np.int32)
TARGET = RNG.integers(4, 12, (2, 5)).astype(np.int32)


def model(mechanism, location="global", heads=1):
    size = Size(2, heads, 8, 16)
    return build(
        mechanism, size, 11, 12, seed=0, score_in="cross", kind="gru", location=location
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mechanism", "location"), [("none", "global"), ("additive", "global"), ("general", "local-p")]
)
def test_padding_changes_nothing_and_nobody_looks_ahead(mechanism, location):
    net = model(mechanism, location)
    graph, state = nnx.split(net)

    @jax.jit
    def run(state, source, target):
        net = nnx.merge(graph, state)
        real = source != PAD
        weights = net.cross_attention_weights(source, target, source_mask=real)
        return net(source, target, source_mask=real, deterministic=True), weights

    logits, weights = run(state, SOURCE, TARGET)
    assert logits.shape == (2, 5, 12)
    assert weights.shape == (1, 2, 1, 5, 6)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
    padded = np.pad(SOURCE, ((0, 0), (0, 3)), constant_values=PAD)
    again, wide = run(state, padded, TARGET)
    np.testing.assert_allclose(again, logits, rtol=1e-4, atol=1e-5)
    assert (wide[..., 6:] == 0).all()
    later = TARGET.copy()
    later[:, 3] = 4 + (later[:, 3] - 3) % 8
    changed = run(state, SOURCE, later)[0]
    np.testing.assert_array_equal(changed[:, :3], logits[:, :3])
    assert not np.allclose(changed[:, 3], logits[:, 3])


@pytest.mark.parametrize("mechanism", ["scaled_dot", "concat"])
def test_every_parameter_learns(mechanism):
    net = model(mechanism, heads=2)

    def loss(net):
        logits = net(SOURCE, TARGET, source_mask=SOURCE != PAD, deterministic=True)
        return jnp.sum(jnp.sin(logits))

    gradients = nnx.grad(loss)(net)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert jnp.any(leaf != 0), path


def test_a_translation_is_the_likeliest_token_of_each_step():
    net = model("additive")
    said = translate(net, SOURCE, longest=4)
    given = np.concatenate([np.full((2, 1), BOS, np.int32), said[:, :-1]], axis=1)
    logits = net(SOURCE, given, source_mask=SOURCE != PAD, deterministic=True)
    for row, steps in zip(said, np.argmax(logits, -1), strict=True):
        ended = False
        for token, likeliest in zip(row, steps, strict=True):
            assert token == (PAD if ended else likeliest)
            ended = ended or token == EOS


def test_the_study_takes_it(tmp_path, capsys):
    tiny = "--preset quick --steps 3 --train-size 40 --test-size 7 --batch-size 8 --features 8"
    arguments = f"compare {tiny} --model gru --location local-p --scores dot"
    folder = tmp_path / "run"
    assert main([*arguments.split(), "--out", str(folder)]) == 0
    document = json.loads((folder / "results.json").read_text())
    assert document["settings"]["heads"] == 1
    assert document["models"][0]["test"]["attention"]
    assert "near a predicted position" in (folder / "report.html").read_text()
    assert main(["compare", "--location", "local-p"]) == 2
    assert "--location local-p needs --model gru" in capsys.readouterr().err
    assert main(["compare", "--model", "gru", "--score-in", "all"]) == 2
