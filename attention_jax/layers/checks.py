"""Checks of settings at construction, so that errors are raised before the first call."""

from typing import Any

from attention_jax._core.checks import check_dtype, check_flag, check_precision, check_rate
from attention_jax.layers.arguments import as_mask, check_activation, check_implementation
from attention_jax.masks.block_map import block_pair
from attention_jax.plan import check_names

_FLAGS = (
    *("deterministic", "decode", "use_bias", "normalize_qk", "broadcast_dropout", "fused_qkv"),
    *("self_loops", "scan_layers", "tie_output", "share_embedding", "keep_rngs"),
    *("force_fp32_for_softmax", "share_projections", "convolution"),
)
_RATES = ("dropout_rate", "attention_dropout_rate")
_WITH_BLOCKS = ("blockwise", "flash")


def check_settings(**given: Any) -> None:
    """Checks settings by name; others are ignored.

    Args:
        **given: dtypes, initialisers, flags, rates, the precision, the mask, the activation, the
            implementation and its block size, as a module takes them.

    Raises:
        TypeError: If one is of the wrong kind.
        ValueError: If one is out of range, or an unknown name.
        NotImplementedError: If a block size is given for implementations without blocks.
    """
    for name, value in given.items():
        if name in ("dtype", "param_dtype"):
            if value is not None or name == "param_dtype":
                check_dtype(name, value)
        elif name.endswith("_init"):
            _check_init(name, value)
        elif name in _FLAGS:
            check_flag(name, value)
        elif name in _RATES:
            check_rate(name, value)
        elif name == "precision":
            check_precision(value)
        elif name == "mask":
            as_mask(value)
        elif name == "activation":
            check_activation(value)
    _check_kernel(given.get("implementation"), given.get("block_size"))


def _check_init(name: str, value: Any) -> None:
    # Those of one layer alone are None where they follow another.
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be an initialiser (key, shape, dtype), got {value!r}")
    if value is None and name in ("kernel_init", "bias_init"):
        raise TypeError(f"{name} must be an initialiser (key, shape, dtype), got None")


def _check_kernel(implementation: Any, block_size: Any) -> None:
    check_implementation(implementation)
    if block_size is None:
        return
    block_pair(block_size)
    if implementation is not None and not set(check_names(implementation)) & set(_WITH_BLOCKS):
        raise NotImplementedError(
            f"block_size is for {' and '.join(map(repr, _WITH_BLOCKS))}, not for implementation "
            f"{implementation!r}"
        )
