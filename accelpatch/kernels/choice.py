"""Which of the implementations that can run a call is taken: orders by operation, arch, dtype and rows, as measured."""

from __future__ import annotations

LEAST_EXPERTS = 8  # below so many, chosen pairs are few as well


def few(pairs: int, experts: int) -> bool:
    """Whether each chosen expert of each token is read for itself: fewer than would come together in one."""
    return pairs <= max(experts, LEAST_EXPERTS)
