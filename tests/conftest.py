"""Strict: eight devices, no silent promotion, no warning, and every annotation checked."""

import ast
import gc
import os
from importlib.metadata import version

# The tests compile far more than they run: XLA's optimisation would be most of their time. Each
# worker has a core, and gains nothing by dividing a program among threads.
FLAGS = [
    "--xla_force_host_platform_device_count=8",
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


# By the start of their names: tests that take long for what they add to others here. The README's
# command leaves them out; `-m thorough` runs them, and so does CI.
THOROUGH = (
    "cases/test_sharding.py::test_a26_batch_and_heads_by_annotation[blockwise",
    "cases/test_sharding.py::test_a26_explicit_axes[blockwise",
    "cases/test_sharding.py::test_a26_explicit_axes[flash",
    "cases/test_sharding.py::test_a26_shard_map_over_batch_and_heads[blockwise",
    "cases/test_sharding.py::test_a26_shards_of_the_queries_with_their_own_positions[blockwise",
    "cases/test_sharding.py::test_a26_the_sequence_split_by_annotation[blockwise",
    "cases/test_transforms.py::test_a25_the_gradient_of_vmap_where",
    "diagnostics/test_harvest.py::test_a_scan",
    "diagnostics/test_harvest.py::test_conditions",
    "distillation",
    "experiments/test_bench.py::test_it_measures",
    "experiments/test_bench.py::test_of_a_wrong_kernel",
    "experiments/test_compare.py::test_after_a_kill",
    "experiments/test_cost.py::test_the_study",
    "experiments/test_distill.py::test_a_student",
    "experiments/test_distill.py::test_the_study",
    "experiments/test_long.py::test_the_study",
    "experiments/test_positions.py::test_the_study",
    "experiments/test_prune.py::test_the_study",
    "experiments/test_recurrent.py",
    "experiments/test_scaling.py::test_ctrl_c",
    "experiments/test_scaling.py::test_the_study",
    "experiments/test_stability.py::test_the_study",
    "kernels/test_row.py",
    "kernels/test_vendor.py",
    "kernels/test_walk.py::test_second_derivatives",
    "linen/test_attention_fn.py",
    "linen/test_decode.py",
    "linen/test_flavours.py",
    "linen/test_language.py",
    "linen/test_transforms.py",
    "masks/test_sparse.py::test_every_kernel_agrees_with_the_reference[bigbird",
    "nnx/test_decode.py",
    "nnx/test_language.py",
    "nnx/test_padding.py",
    "nnx/test_pruning.py",
    "nnx/test_transforms.py",
    "positions/test_biases.py",
    "scores/test_plane.py::test_exact_also_for_large",
    "test_attend.py::test_a_huge_finite_key_that_is_hidden_changes_no_bit_whatever_the_score[blockwise",
    "test_attend.py::test_what_a_function_closes_over_has_its_gradient[blockwise",
    "test_conformance.py::test_our_implementations[blockwise, 3]",
    "test_conformance.py::test_our_implementations[flash, (4",
    "test_house_docs.py::test_the_code_of_a_page_runs_and_prints_what_the_page_shows[docs/api/dist",
    "test_house_docs.py::test_the_code_of_a_page_runs_and_prints_what_the_page_shows[docs/api/shard",
    "test_house_docs.py::test_the_code_of_a_page_runs_and_prints_what_the_page_shows[docs/choosing",
    "test_house_docs.py::test_the_code_of_a_page_runs_and_prints_what_the_page_shows[docs/examples",
    "test_house_docs.py::test_the_code_of_a_page_runs_and_prints_what_the_page_shows[docs/patterns",
    "test_house_docs.py::test_the_code_of_a_page_runs_and_prints_what_the_page_shows[docs/positions",
    "test_house_docs.py::test_the_code_of_a_page_runs_and_prints_what_the_page_shows[docs/subquad",
    "test_house_docs.py::test_the_code_of_a_page_runs_and_prints_what_the_page_shows[docs/visualize",
    "test_house_doctests.py::test_the_examples_of_a_file[attention_jax/diagnostics",
    "test_house_doctests.py::test_the_examples_of_a_file[attention_jax/distillation",
    "test_house_doctests.py::test_the_examples_of_a_file[attention_jax/linen",
    "test_house_doctests.py::test_the_examples_of_a_file[attention_jax/nnx",
    "test_house_doctests.py::test_the_examples_of_a_file[attention_jax/sharding",
    "test_house_doctests.py::test_the_examples_of_a_file[attention_jax/subquadratic",
    "test_sharding.py",
    "testing/test_strategies.py::test_a_drawn_problem",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.removeprefix("tests/").startswith(THOROUGH):
            item.add_marker("thorough")
