"""The window of 16 exponents that leaves the fewest values of a row outside; for compact_tiles.py."""

from __future__ import annotations

import torch
from torch import Tensor

WINDOW = 16  # number of exponents with a 4-bit code
TRIED = 6  # windows tried per row, from its largest exponent down


def outside_of(low: Tensor, exponents: Tensor) -> Tensor:
    """Which exponents[rows, K] lie outside of the window that begins at low[rows, 1]."""
    return (exponents < low) | (exponents > low + (WINDOW - 1))


def windows(exponents: Tensor, empty: Tensor, most: int) -> Tensor:
    """The first exponent [rows, 1] of the window with the fewest outliers, of those tried. most: outliers allowed."""
    top = exponents.amax(1, keepdim=True).to(torch.int16)
    best, fewest = _best(exponents, [top - down for down in range(TRIED)])
    if bool((fewest.masked_fill(empty, 0) > most).any()):  # a few exponents may be far above all others
        tops = exponents.to(torch.int16).topk(min(most + 1, exponents.shape[1]), dim=1).values.split(1, dim=1)
        other, left = _best(exponents, list(tops))
        best = torch.where(left < fewest, other, best)
    return best


def _best(exponents: Tensor, tops: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Of candidate windows, given by their largest exponents, the one with the fewest outliers; and their number."""
    tried = [(top - (WINDOW - 1)).clamp(min=1).to(torch.uint8) for top in tops]
    best, fewest = tried[0], outside_of(tried[0], exponents).sum(1, keepdim=True)
    for low in tried[1:]:
        count = outside_of(low, exponents).sum(1, keepdim=True)
        best, fewest = torch.where(count < fewest, low, best), torch.minimum(count, fewest)
    return best, fewest
