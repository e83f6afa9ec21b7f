"""Which of several formats each layer gets, so that together they lose least within a number of bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from accelpatch.errors import KernelError


@dataclass(frozen=True)
class Option:
    """A format that layers could have. bits: of all their weights and scales. loss: what they lose by it."""

    name: str
    bits: int
    loss: float


def allocate(layers: Sequence[Sequence[Option]], most: float) -> list[Option]:
    """An option of each layer, with no more than `most` bits together and about the least sum of losses.

    From the smallest ones on, the change that gains most for each bit is made as long as one fits: the best choice but
    for less than the bits of one change (a multiple-choice knapsack; Sinha and Zoltners 1979). Raises KernelError where
    even the smallest options are too many bits.
    """
    chosen = [min(options, key=lambda one: (one.bits, one.loss)) for options in layers]
    bits = sum(one.bits for one in chosen)
    if bits > most:
        raise KernelError(f"the smallest formats have {bits} bits, and {most:.0f} is the most")
    while True:
        changes = [
            ((now.loss - one.loss) / (one.bits - now.bits) if one.bits > now.bits else float("inf"), place, one)
            for place, (now, options) in enumerate(zip(chosen, layers, strict=True))
            for one in options
            if one.loss < now.loss and bits + one.bits - now.bits <= most
        ]
        if not changes:
            return chosen
        _, place, best = max(changes, key=lambda change: (change[0], -change[1]))
        bits += best.bits - chosen[place].bits
        chosen[place] = best
