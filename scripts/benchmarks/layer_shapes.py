"""The weights that kernels are timed on: their shapes in a 7B model, and how many of one lie beyond the cache."""

from __future__ import annotations

HIDDEN, MIDDLE = 4096, 11008
LAYER = (("qkv", 3 * HIDDEN, HIDDEN), ("o", HIDDEN, HIDDEN), ("gate_up", 2 * MIDDLE, HIDDEN), ("down", HIDDEN, MIDDLE))
HEADS = (("head", 32000, HIDDEN), ("head", 128256, HIDDEN))
BEYOND = 400e6  # bytes of weights in rotation: far more than the L2 cache holds


def rotation(n: int, k: int, bits: float) -> int:
    """Weights [n, k] of so many bits a value that lie beyond the cache together."""
    return max(2, int(BEYOND / (n * k * bits / 8)) + 1)
