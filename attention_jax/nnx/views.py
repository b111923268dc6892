"""What the decoder of a whole model looks at: for pictures, and for figures of merit."""

from typing import Any

import numpy as np
from flax import nnx
from jaxtyping import Float

from attention_jax._core.axes import Array
from attention_jax._modules.arguments import AnyMask, Source, Target, standing, token_mask
from attention_jax.nnx.stacks import TransformerDecoder
from attention_jax.softmax import Stats


class CrossAttentionViews(nnx.Module):
    """The weights and the statistics of an encoder–decoder's attention to its source."""

    decoder: TransformerDecoder

    def cross_attention_weights(
        self,
        source: Source,
        target: Target,
        source_mask: AnyMask = None,
        target_mask: AnyMask = None,
    ) -> Float[Array, "L *B N T S"]:
        """Where the decoder looks while it predicts the token after each target token.

        Args:
            source: As in the call; so are the others.
            target: As in the call.
            source_mask: As in the call.
            target_mask: As in the call.

        Returns:
            `[num_layers, *B, N, T, S]`, without dropout; N is 1 for the mean.
        """
        inputs, options = self._both(source, target, source_mask, target_mask)
        return self.decoder.with_weights(*inputs, **options)[1]

    def cross_attention_stats(
        self,
        source: Source,
        target: Target,
        source_mask: AnyMask = None,
        target_mask: AnyMask = None,
    ) -> Stats:
        """Entropy, lse and largest logit of the decoder's attention to the source.

        Nothing of size T·S is kept.

        Args:
            source: As in the call; so are the others.
            target: As in the call.
            source_mask: As in the call.
            target_mask: As in the call.

        Returns:
            Statistics `[num_layers, *B, N, T]`, without dropout; N is 1 for the mean.
        """
        inputs, options = self._both(source, target, source_mask, target_mask)
        return self.decoder.with_stats(*inputs, **options)[1]

    def _both(
        self, source: Any, target: Any, source_mask: AnyMask, target_mask: AnyMask
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        memory_mask = token_mask("source_mask", source_mask, np.shape(source))
        memory = self.encode(source, source_mask, deterministic=True)
        at = standing(None, target_mask, np.shape(target))
        flags = {"deterministic": True}
        inputs = self._inputs(target, memory, target_mask, memory_mask, flags, at)
        return inputs, {"query_positions": at, **flags}

    def encode(self, source: Any, source_mask: AnyMask, *, deterministic: bool) -> Array:
        """The encoder's states."""
        raise NotImplementedError(f"{type(self).__name__} has no encoder")

    def _inputs(self, *given: Any) -> tuple[Any, ...]:
        raise NotImplementedError(f"{type(self).__name__} has no decoder")
