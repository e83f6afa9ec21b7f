"""Capacities of static caches: what one has at first, after it is full, and within a recipe's max_length."""

from __future__ import annotations

import pytest

from accelpatch.runtime.graphs.kv_cache import capacity_for, grown


@pytest.mark.parametrize(
    "length, longest, due",
    [(1, None, 256), (257, None, 512), (8192, None, 8192), (8193, None, 8704), (32769, None, 33280), (300, 310, 320),
     (8193, 8200, 8256)],
    ids=str,
)  # fmt: skip
def test_first_capacity(length: int, longest: int | None, due: int) -> None:
    assert capacity_for(length, longest) == due


@pytest.mark.parametrize(
    "capacity, longest, due",
    [(256, None, 512), (8192, None, 10240), (8704, None, 10752), (8192, 8200, 8256), (8704, 9000, 9024),
     (8192, 9000, 9024), (256, 300, 320)],
    ids=str,
)  # fmt: skip
def test_next_capacity(capacity: int, longest: int | None, due: int) -> None:
    assert grown(capacity, longest) == due
