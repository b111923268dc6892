"""Strict: eight devices, no silent promotion, no warning, and every annotation checked."""

import gc
import os
from importlib.metadata import version

# The tests compile far more than they run: XLA's optimisation would be most of their time.
FLAGS = ["--xla_force_host_platform_device_count=8", "--xla_backend_optimization_level=0"]
if version("jaxlib").startswith("0.10."):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")  # later versions do not know it
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis  # noqa: E402  (XLA_FLAGS are read when jax is imported)
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

# Tracing makes and drops many objects; collecting cycles as often as Python does by itself takes a
# fifth of the tests' time.
gc.freeze()
gc.set_threshold(100_000, 20, 20)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Users pay nothing for the annotations; the tests check every call's shapes and dtypes.
jaxtyping.install_import_hook("attention_jax", "beartype.beartype")

# Tests have small planes, on which the fast form of the additive score would not be taken.
from attention_jax.scores import plane  # noqa: E402  (behind the hook)

plane._SMALLEST_PLANE = 0

hypothesis.settings.register_profile(
    "tests",
    derandomize=True,
    deadline=None,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    # beartype looks at one random item of a container, and Hypothesis objects to the random module
    # inside a strategy; what is drawn does not depend on it.
    config.addinivalue_line(
        "filterwarnings", "ignore:Do not use the `random` module inside strategies"
    )
