"""Weights as text: one byte each, on a square-root scale relative to the largest in the row.

    q = round(255 √(w / m)),  m = max_s w;      w ≈ m (q / 255)²

The error is at most m / 255, and smaller for small weights: uniform weights over 512 keys keep two
digits.
"""

import base64

import numpy as np


def pack(weights: np.ndarray) -> tuple[str, str]:
    """Base64 of the bytes `[N, T, S]` and of the row maxima, little-endian float32 `[N, T]`."""
    greatest = np.clip(weights.max(-1), 0, 1).astype("<f4")
    share = np.clip(weights / np.where(greatest > 0, greatest, 1)[..., None], 0, 1)
    levels = np.rint(255 * np.sqrt(share)).astype(np.uint8)
    return _text(levels.tobytes()), _text(greatest.tobytes())


def unpack(levels: str, greatest: str, shape: tuple[int, int, int]) -> np.ndarray:
    """The inverse of `pack`, up to its error, as the page computes it; float32 `[N, T, S]`."""
    q = np.frombuffer(base64.b64decode(levels), np.uint8).reshape(shape)
    m = np.frombuffer(base64.b64decode(greatest), "<f4").reshape(shape[:2])
    return m[..., None] * np.square(q.astype(np.float32) / 255)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
