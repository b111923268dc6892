"""Strict: no silent promotion, no warning, and every annotation checked; one device by default."""

import ast
import gc
import os
from importlib.metadata import version

# The tests compile far more than they run: XLA's optimisation would be most of their time. Each
# worker has a core, and gains nothing by dividing a program among threads.
FLAGS = [
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_llvm_disable_expensive_passes=true",
]
if version("jaxlib").startswith("0.10."):
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")  # later versions do not know it
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis  # noqa: E402  (XLA_FLAGS are read when jax is imported)
import jax  # noqa: E402
import jaxtyping._import_hook  # noqa: E402
import pytest  # noqa: E402

# Tracing makes and drops many objects; collecting cycles as often as Python does by itself takes a
# fifth of the tests' time.
gc.freeze()
gc.set_threshold(50_000, 10, 10)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_traceback_in_locations_limit", 0)  # nobody reads the compiled text's origins


class _Outermost(jaxtyping._import_hook.JaxtypingTransformer):
    """Leaves functions inside functions alone: a check made anew whenever one is defined, which is
    in every trace, takes a fifth of the tests' time and sees what the outer one has seen."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        inside = any(isinstance(parent, ast.FunctionDef) for parent in self._parents)
        return node if inside else super().visit_FunctionDef(node)


# Users pay nothing for the annotations; the tests check every call's shapes and dtypes.
jaxtyping._import_hook.JaxtypingTransformer = _Outermost
jaxtyping.install_import_hook("attention_jax", "beartype.beartype")

hypothesis.settings.register_profile(
    "tests",
    derandomize=True,
    deadline=None,
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--devices", type=int, default=1, help="number of CPU devices (default 1, as users have)"
    )


def pytest_configure(config: pytest.Config) -> None:
    jax.config.update("jax_num_cpu_devices", config.getoption("devices"))  # before any backend
    # beartype looks at one random item of a container, and Hypothesis objects to the random module
    # inside a strategy; what is drawn does not depend on it.
    config.addinivalue_line(
        "filterwarnings", "ignore:Do not use the `random` module inside strategies"
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("devices")
    if marker is not None and item.config.getoption("devices") < (needed := marker.args[0]):
        pytest.skip(f"needs {needed} devices: run with --devices {needed}")
