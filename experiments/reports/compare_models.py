"""What the compared models are, besides the attention that is compared."""

from collections.abc import Mapping
from typing import Any


def besides(settings: Mapping[str, Any]) -> str:
    """Return what there is in all of the models, in words."""
    if settings["model"] == "gru":
        near = " near a predicted position (local-p)" if settings["location"] == "local-p" else ""
        return (
            "Encoder and decoder are recurrent (GRU). Additive attention comes before the "
            f"decoder's step, as Bahdanau's, every other one after it, as Luong's{near}."
        )
    if settings["vary"] == "cross":
        return (
            "Self-attention is the scaled dot product in all of them: only the decoder's way of "
            "looking at the source differs."
        )
    return (
        "Self-attention has the model's own score too (the scaled dot product where there is no "
        "attention to the source)."
    )
