"""Weights as text: a byte for each, on a square-root scale of its row's own.

    q = round(255 √(w / m)),  m = max_s w;      w ≈ m (q / 255)²

The error is at most m / 255, and less for small weights, which a linear scale would lose: a row
spread over 512 keys keeps two digits of each.
"""

import base64

import numpy as np


def pack(weights: np.ndarray) -> tuple[str, str]:
    """Base64 of the bytes `[N, T, S]` and of the rows' greatest, little-endian float32 `[N, T]`."""
    greatest = np.clip(weights.max(-1), 0, 1).astype("<f4")
    share = np.clip(weights / np.where(greatest > 0, greatest, 1)[..., None], 0, 1)
    levels = np.rint(255 * np.sqrt(share)).astype(np.uint8)
    return _text(levels.tobytes()), _text(greatest.tobytes())


def unpack(levels: str, greatest: str, shape: tuple[int, int, int]) -> np.ndarray:
    """What a page reads out of `pack(weights)`, float32 `[N, T, S]`."""
    q = np.frombuffer(base64.b64decode(levels), np.uint8).reshape(shape)
    m = np.frombuffer(base64.b64decode(greatest), "<f4").reshape(shape[:2])
    return m[..., None] * np.square(q.astype(np.float32) / 255)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
