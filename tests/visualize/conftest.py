import numpy as np
import pytest


@pytest.fixture
def maps():
    """Causal weights `[..., N, T, S]`, sharper from head to head, float32."""

    def make(*shape: int, seed: int = 0) -> np.ndarray:
        logits = np.random.default_rng(seed).normal(size=shape)
        logits *= np.linspace(0.5, 5, shape[-3])[:, None, None]
        *_, T, S = shape
        logits[..., np.arange(S) > np.arange(T)[:, None]] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)

    return make
