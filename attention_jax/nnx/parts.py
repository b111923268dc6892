"""What a model passes on to its layers."""

import difflib
from typing import Any

from flax import nnx

from attention_jax.layers.body import setting_names
from attention_jax.layers.transformer_layer import TransformerSettings
from attention_jax.nnx.randomness import check_rngs


def check_options(owner: nnx.Module, rngs: Any, options: dict[str, Any], *more: str) -> None:
    """Checks what a module hands on to its layers, so that an error names the module itself.

    Args:
        owner: The module.
        rngs: Its streams.
        options: What it was given besides its own arguments.
        *more: What it takes besides the settings of a layer.

    Raises:
        TypeError: If one is not known, or `rngs` is something else.
    """
    name = type(owner).__name__
    check_rngs(name, rngs)
    known = {*setting_names(TransformerSettings), *more} - {"norm", "score", "mask"}
    for option in options:
        if option not in known | set(more):
            close = difflib.get_close_matches(option, known, 1)
            hint = f": did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{name} got an unexpected argument {option!r}{hint}")
