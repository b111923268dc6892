"""The adapters: what they refuse and why, values where they can be had, lowering everywhere."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention_jax as aj
from attention_jax.attend import make_request
from attention_jax.kernels import cudnn, splash
from attention_jax.plan import KERNELS
from attention_jax.testing import reference_attention

pytestmark = pytest.mark.thorough

masks, scores = aj.masks, aj.scores


def arrays(T=128, S=128, N=2, K=1, H=128, V=128, batch=(1,), dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = ((*batch, T, N, H), (*batch, S, K, H), (*batch, S, K, V))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize("name", ["cudnn", "splash"])
def test_elsewhere_it_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=f"'{name}': it runs on .*'cpu'"):
        aj.attend(*arrays(4, 4, H=8, V=8), implementation=name)
    plan = aj.explain(*arrays(4, 4, H=8, V=8))
    assert name in plan.reasons
    assert f"not '{name}'" in str(plan)
    assert aj.explain(*arrays(4, 4, H=8, V=8), implementation=(name, "flash")).reasons.keys() == {
        name
    }


def test_every_other_kernel_has_its_reason():
    for length, chosen in ((8, "dense"), (512, "flash")):
        plan = aj.explain(*arrays(length, length, H=8, V=8))
        assert plan.implementation == chosen
        assert plan.reasons.keys() == set(KERNELS) - {chosen}


HALF = np.float16
REFUSED = [
    ({"bias": np.zeros((128, 128), np.float32)}, "bias"),
    ({"dropout_rate": 0.1, "dropout_key": jax.random.key(0)}, "dropout"),
    ({"statistics": True}, "statistics"),
    ({"query_positions": np.arange(128)}, "query_positions"),
    ({"precision": "highest"}, "precision"),
    ({"block_size": 64}, "block_size"),
    ({"score": scores.cosine()}, "cosine"),
    ({"score": scores.scaled_dot(jnp.ones(2))}, "constant scale"),
    ({"mask": masks.custom(lambda t, s: s <= t)}, "custom"),
    ({"mask": ~masks.causal()}, "~causal"),
    ({"mask": masks.from_array(np.ones((128, 128), bool))}, "from_array"),
]
CUDNN = [
    ({"score": scores.soft_cap(scores.scaled_dot(), 3.0)}, "soft cap"),
    ({"mask": masks.segments(np.zeros(128, int))}, "segment"),
    ({"mask": masks.window(3, 1)}, "beyond the query"),
    ({"mask": masks.window(3, None)}, "beyond the query"),
    ({"mask": masks.causal() & masks.window(3, 0) & masks.padding(np.array([5]))}, "lengths may"),
]
SPLASH = [
    ({"mask": masks.padding(np.array([5]))}, "lengths"),
    ({"mask": masks.segments(np.zeros(128, int), padding_id=0)}, "padding_id"),
    ({"mask": masks.segments(np.zeros(128, int), np.ones(128, int))}, "separate segment ids"),
]


@pytest.mark.parametrize(("platform", "vendor"), [("gpu", "cudnn"), ("tpu", "splash")])
def test_where_the_vendor_cannot_flash_does(monkeypatch, platform, vendor):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(jax, "devices", lambda *_: [type("", (), {"compute_capability": "9.0"})])
    for length in (8, 512):
        x = jax.ShapeDtypeStruct((length, 2, 64), jnp.float16)
        plan = aj.explain(x, x, x, score=aj.scores.cosine())
        assert plan.implementation == "flash"
        assert "cosine" in plan.reasons[vendor] or "float16" in plan.reasons[vendor]


@pytest.mark.parametrize(("request_", "reason"), REFUSED + CUDNN)
def test_cudnn_says_what_it_cannot_do(request_, reason):
    assert reason in cudnn.cannot(make_request(*arrays(dtype=HALF), **request_), deepest=128)


@pytest.mark.parametrize(("request_", "reason"), REFUSED + SPLASH)
def test_splash_says_what_it_cannot_do(request_, reason):
    assert reason in splash.cannot(make_request(*arrays(), **request_))


def test_shapes_and_dtypes_that_do_not_fit():
    assert "float16" in cudnn.cannot(make_request(*arrays()), deepest=128)
    assert "V = H" in cudnn.cannot(make_request(*arrays(V=64, dtype=HALF)), deepest=128)
    assert "multiple of 8" in cudnn.cannot(make_request(*arrays(H=12, V=12, dtype=HALF)), deepest=1)
    assert "bfloat16" in splash.cannot(make_request(*arrays(dtype=HALF)))
    assert "T must be a multiple of 128, got 100" in splash.cannot(make_request(*arrays(T=100)))
    # rows that see nothing are undefined there: 28 first ones, 28 last ones
    late = make_request(*arrays(S=100, dtype=HALF), mask=masks.causal(align="end"))
    assert "28 first queries" in cudnn.cannot(late, deepest=128)
    gone = make_request(*arrays(S=100, dtype=HALF), mask=masks.causal() & masks.window(0, 0))
    assert "28 last queries" in cudnn.cannot(gone, deepest=128)


def splash_(query, key, value, **options):
    request = make_request(query, key, value, **options)
    assert splash.cannot(request) is None
    return splash.run(request, interpret=True).out


IDS = np.repeat([3, 1, 2], [50, 70, 136])[None]
EXPRESSIBLE = {
    "plain": {},
    "causal, soft cap": {
        "mask": masks.causal(),
        "score": scores.soft_cap(scores.scaled_dot(0.2), 2.0),
    },
    "window": {"mask": masks.window(40, 3), "score": scores.dot()},
    "segments": {"mask": masks.segments(IDS) & masks.causal()},
}


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_splash_has_our_values_and_gradients(name):
    options = EXPRESSIBLE[name]
    query, key, value = arrays(256, 256)
    query = query * 0.3

    def loss(f, query, key, value):
        return jnp.sum(jnp.sin(f(query, key, value, **options)))

    ours = partial(aj.attend, implementation="dense")
    got, expected = (
        jax.jit(jax.value_and_grad(partial(loss, f), (0, 1, 2)))(query, key, value)
        for f in (splash_, ours)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, expected)


def test_splash_does_not_see_nan_in_what_is_masked():
    query, key, value = arrays(256, 256)
    key, value = key.at[0, 60, 0, 3].set(jnp.nan), value.at[0, 130, 0, 5].set(jnp.inf)
    options = {"mask": masks.segments(IDS) & masks.causal()}
    out = splash_(query, key, value, **options)
    ours = aj.attend(query, key, value, implementation="flash", **options)
    np.testing.assert_array_equal(np.isnan(out), ~np.isfinite(ours))
    assert np.isnan(out).any()
    seen = np.isfinite(ours)
    np.testing.assert_allclose(out[seen], ours[seen], rtol=1e-4, atol=1e-5)
    gradient = jax.grad(lambda v: jnp.sum(splash_(query, key, v, **options)[0, :50]))(value)
    assert np.isfinite(gradient).all()


def test_splash_lowers_for_a_tpu():
    def f(query, key, value):
        return splash.run(make_request(query, key, value, mask=masks.causal())).out

    exported = jax.export.export(jax.jit(f), platforms=["tpu"])(*arrays(256, 256))
    assert "tpu_custom_call" in exported.mlir_module()


class FakeCudnn:
    """`jax.nn.dot_product_attention` without the GPU: the same arguments, XLA's computation."""

    def __init__(self, monkeypatch):
        self.calls = []
        self.whole = jax.nn.dot_product_attention
        monkeypatch.setattr(jax.nn, "dot_product_attention", self)

    def __call__(self, *qkv, implementation, **options):
        assert implementation == "cudnn"
        self.calls.append(options)
        return self.whole(*qkv, implementation="xla", **options)


CUDNN_TAKES = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.causal() & masks.window(5, 0)},
    "lengths": {"mask": masks.padding(np.array([9, 0]), np.array([12, 16]))},
    "causal, lengths": {"mask": masks.causal() & masks.padding(np.array([7, 16]))},
}


@pytest.mark.parametrize("name", CUDNN_TAKES)
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_cudnn_is_asked_for_what_we_mean(name, monkeypatch):
    fake = FakeCudnn(monkeypatch)
    query, key, value = arrays(16, 16, H=8, V=8, batch=(2,), dtype=np.float16)
    request = make_request(query, key, value, score=scores.scaled_dot(0.3), **CUDNN_TAKES[name])
    assert cudnn.cannot(request, deepest=128) is None
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        out = cudnn.run(request).out
    assert fake.calls[0]["scale"] == 0.3
    mask = CUDNN_TAKES[name].get("mask")
    array = None if mask is None else np.asarray(mask.to_array(16, 16))
    if array is not None and array.ndim == 2:
        array = array[None, None]
    wide = (np.asarray(x, np.float64) for x in (query, key, value))
    exact = reference_attention(*wide, scale=0.3, mask=array).out
    np.testing.assert_allclose(out, exact, rtol=3e-3, atol=3e-3)


def test_cudnn_lowers_for_cuda(monkeypatch):
    import jax._src.cudnn.fused_attention_stablehlo as fused

    # Without a GPU there is no cuDNN to ask for its version.
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91100)
    monkeypatch.setattr(fused, "check_compute_capability", lambda capability: True)

    def f(query, key, value):
        return cudnn.run(make_request(query, key, value, mask=masks.causal())).out

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        exported = jax.export.export(
            jax.jit(f), platforms=["cuda"], disabled_checks=[
                jax.export.DisabledSafetyCheck.custom_call("__cudnn$fmhaSoftmax")
            ],
        )(*arrays(H=64, V=64, dtype=jnp.bfloat16))  # fmt: skip
    assert "__cudnn$fmhaSoftmax" in exported.mlir_module()
