"""The public surface, written out: a name is added or removed here, on purpose, or not at all."""

import ast
import importlib
import inspect
import types
from pathlib import Path

import pytest

SURFACE = {
    "attention_jax": [
        "Plan",
        "Stats",
        "attend",
        "attend_with_stats",
        "attention_weights",
        "axial_attention",
        "explain",
        "shaw_attention",
    ],
    "attention_jax.diagnostics": [
        "AttentionInputs",
        "AttentionRecord",
        "Capture",
        "Diagnosis",
        "Finding",
        "JsonLines",
        "MonitorState",
        "TensorBoard",
        "attention_inputs",
        "attention_stats",
        "capture",
        "diagnose",
        "diagonal_labels",
        "entropy_regularizer",
        "guided_alignment",
        "head_importance",
        "history",
        "mask_heads",
        "monitor",
        "read_history",
        "rollout",
    ],
    "attention_jax.distillation": [
        "attention_divergence",
        "divergence",
        "hidden_state_transfer",
        "logit_distillation",
        "value_relation",
    ],
    "attention_jax.cache": ["KVCache"],
    "attention_jax.heads": ["merge_heads", "split_heads"],
    "attention_jax.sharding": ["attend_split", "merge", "placement"],
    "attention_jax.masks": [
        "BlockMap",
        "Mask",
        "axial",
        "bigbird",
        "block_diagonal",
        "block_local",
        "causal",
        "custom",
        "dilated",
        "from_array",
        "global_tokens",
        "local",
        "longformer",
        "padding",
        "prefix",
        "random",
        "segments",
        "sparse_fixed",
        "sparse_strided",
        "strided",
        "summary_tokens",
        "window",
    ],
    "attention_jax.linen": [
        "AdditiveAttention",
        "AttentionPooling",
        "FeedForward",
        "GraphAttention",
        "LSHAttention",
        "LinearAttention",
        "LowRankAttention",
        "MeanAttention",
        "MemoryCompressedAttention",
        "MultiHeadAttention",
        "NystromAttention",
        "RoutedAttention",
        "Transformer",
        "TransformerDecoder",
        "TransformerDecoderLayer",
        "TransformerEncoder",
        "TransformerEncoderLayer",
        "TransformerLM",
        "additive",
        "alibi",
        "attention_fn",
        "beam_decode",
        "concat",
        "cosine",
        "dot",
        "entropy_scale",
        "from_nnx",
        "general",
        "greedy_decode",
        "learned_scale",
        "log_length",
        "merge_similar_heads",
        "prune_heads",
        "relative_bias",
        "rotary",
        "sample_decode",
        "scaled_dot",
        "shaw",
        "small_init",
        "to_nnx",
        "xavier_init",
    ],
    "attention_jax.nnx": [
        "AdditiveAttention",
        "AttentionPooling",
        "FeedForward",
        "GraphAttention",
        "LSHAttention",
        "LinearAttention",
        "LowRankAttention",
        "MeanAttention",
        "MemoryCompressedAttention",
        "MultiHeadAttention",
        "NystromAttention",
        "RoutedAttention",
        "Transformer",
        "TransformerDecoder",
        "TransformerDecoderLayer",
        "TransformerEncoder",
        "TransformerEncoderLayer",
        "TransformerLM",
        "additive",
        "alibi",
        "attention_fn",
        "beam_decode",
        "concat",
        "cosine",
        "dot",
        "entropy_scale",
        "general",
        "greedy_decode",
        "learned_scale",
        "log_length",
        "merge_similar_heads",
        "prune_heads",
        "relative_bias",
        "rotary",
        "sample_decode",
        "scaled_dot",
        "shaw",
        "small_init",
        "xavier_init",
    ],
    "attention_jax.positions": [
        "Bias",
        "alibi",
        "alibi_slopes",
        "array_bias",
        "learned",
        "linear_scaling",
        "ntk_scaling",
        "relative_bias",
        "rotary",
        "shaw",
        "sinusoidal",
        "transformer_xl",
        "yarn_scaling",
    ],
    "attention_jax.scores": [
        "Score",
        "additive",
        "additive_score",
        "clip",
        "concat",
        "concat_score",
        "cosine",
        "cosine_score",
        "custom",
        "dot",
        "dot_score",
        "general",
        "general_score",
        "log_length",
        "scaled_dot",
        "scaled_dot_score",
        "soft_cap",
        "temperature",
    ],
    "attention_jax.softmax": ["Stats", "log_sum_exp", "masked_softmax"],
    "attention_jax.subquadratic": [
        "FeatureMap",
        "LinearState",
        "cosine_features",
        "elu_features",
        "favor_features",
        "linear_attention",
        "linear_attention_step",
        "linear_attention_with_state",
        "low_rank_attention",
        "lsh_attention",
        "memory_compressed_attention",
        "nystrom_attention",
        "relu_features",
        "routed_attention",
    ],
    "attention_jax.testing": [
        "FEATURES",
        "Gradients",
        "Problem",
        "Reference",
        "RowScore",
        "Sizes",
        "check_attention",
        "random_problem",
        "reference_attention",
        "reference_gradients",
    ],
    "attention_jax.testing.strategies": [
        "SCORES",
        "biases",
        "dtypes",
        "masks",
        "pair_shapes",
        "problems",
        "sizes",
    ],
    "attention_jax.visualize": [
        "Explorer",
        "alignment",
        "block_map",
        "entropy_grid",
        "explorer",
        "head_map",
        "heads_grid",
    ],
}
# What `import attention_jax as aj` brings along as aj.<name>; the others are imported by name.
NAMESPACES = [
    "cache",
    "diagnostics",
    "distillation",
    "heads",
    "masks",
    "positions",
    "scores",
    "softmax",
    "subquadratic",
    "testing",
    "visualize",
]


def public_names(module: types.ModuleType) -> list[str]:
    """What the source defines or passes on as `from x import y as y`, bar the underscored."""
    source = inspect.getsourcefile(module)
    assert source is not None
    names: set[str] = set()
    for node in ast.parse(Path(source).read_text()).body:
        if isinstance(node, ast.ImportFrom):
            names |= {a.asname for a in node.names if a.asname is not None and a.asname == a.name}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    public = {name for name in names if not name.startswith("_")}
    return sorted(name for name in public if not inspect.ismodule(getattr(module, name)))


@pytest.mark.parametrize("name", SURFACE)
def test_a_module_offers_exactly_these_names(name):
    module = importlib.import_module(name)
    assert public_names(module) == SURFACE[name]
    assert sorted(getattr(module, "__all__", SURFACE[name])) == SURFACE[name]


def test_the_front_door_leads_to_these_modules():
    package = importlib.import_module("attention_jax")
    for name in NAMESPACES:
        assert inspect.ismodule(getattr(package, name))


@pytest.mark.parametrize("name", SURFACE)
def test_every_public_name_says_what_it_is(name):
    module = importlib.import_module(name)
    functions = {n: v for n in SURFACE[name] if callable(v := getattr(module, n))}
    for public, value in functions.items():
        doc = inspect.getdoc(value)
        assert doc, f"{name}.{public} has no docstring"
        assert not doc.startswith(f"{public}("), f"{name}.{public} has a dataclass's docstring"
