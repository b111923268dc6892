"""A wrong setting is an error at construction, in either flavour."""

import jax.numpy as jnp
import pytest

from attention_jax import nnx as modules

WRONG = {
    "dtype": ("small", TypeError, ["dtype", "floating", "'small'"]),
    "param_dtype": (jnp.int32, TypeError, ["param_dtype", "floating", "int32"]),
    "precision": ("exact", ValueError, ["precision", "'exact'"]),
    "kernel_init": (3, TypeError, ["kernel_init", "3"]),
    "bias_init": (None, TypeError, ["bias_init", "None"]),
    "out_kernel_init": ("zeros", TypeError, ["out_kernel_init", "'zeros'"]),
    "block_size": (0, ValueError, ["block_size", "0"]),
    "use_bias": ("no", TypeError, ["use_bias", "'no'"]),
    "normalize_qk": (2, TypeError, ["normalize_qk", "2"]),
    "deterministic": ("no", TypeError, ["deterministic", "'no'"]),
    "dropout_rate": (None, TypeError, ["dropout_rate", "NoneType"]),
    "scan_layers": (1, TypeError, ["scan_layers"]),
    "embedding_init": (1, TypeError, ["embedding_init", "1"]),
    "self_loops": ("no", TypeError, ["self_loops", "'no'"]),
}
SIZES = {
    "MultiHeadAttention": (2, 4),
    "AdditiveAttention": (3, 3, 3),
    "AttentionPooling": (3, 3),
    "GraphAttention": (3, 3),
    "MeanAttention": (3,),
    "FeedForward": (3, 3),
    "TransformerEncoderLayer": (2, 4, 3),
    "TransformerDecoder": (1, 2, 4, 3),
    "TransformerLM": (1, 2, 4, 3, 5),
    "Transformer": (1, 2, 4, 3, 5, 5),
}
BASIC = ("dtype", "param_dtype", "kernel_init")
KERNEL = (*BASIC, "precision", "block_size")
LAYER = (*KERNEL, "bias_init", "out_kernel_init", "use_bias", "normalize_qk", "deterministic")
TAKES = {
    "MultiHeadAttention": LAYER,
    "AdditiveAttention": (*KERNEL, "deterministic", "dropout_rate"),
    "AttentionPooling": (*KERNEL, "bias_init", "use_bias"),
    "GraphAttention": (*KERNEL, "self_loops"),
    "MeanAttention": (*KERNEL, "bias_init"),
    "FeedForward": (*BASIC, "precision", "out_kernel_init"),
    "TransformerEncoderLayer": LAYER,
    "TransformerDecoder": (*LAYER, "scan_layers"),
    "TransformerLM": (*LAYER, "embedding_init"),
    "Transformer": (*LAYER, "embedding_init", "scan_layers"),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_wrong_setting_is_an_error_at_construction(flavour, name):
    for option in TAKES[name]:
        value, error, words = WRONG[option]
        with pytest.raises(error) as raised:
            flavour.module(name, *SIZES[name], **{option: value})
        assert all(word in str(raised.value) for word in words), raised.value
    if "block_size" in TAKES[name]:
        with pytest.raises(NotImplementedError, match="block_size is for 'blockwise' and 'flash'"):
            flavour.module(name, *SIZES[name], implementation="dense", block_size=8)


def test_a_wrong_setting_of_a_recipe_is_an_error_too():
    for make, word in (
        (lambda: modules.additive(activation="tanh"), "activation"),
        (lambda: modules.entropy_scale("low"), "target"),
        (lambda: modules.scaled_dot("large"), "scale"),
    ):
        with pytest.raises(TypeError, match=word):
            make()
