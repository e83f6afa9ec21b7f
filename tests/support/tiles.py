"""Lets the modules of a CPU hold 4-bit weights in the GPU's tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.row_major import Int4Rows
from accelpatch.kernels.ops.linear import by_layout


def with_tiles(
    monkeypatch: pytest.MonkeyPatch, tiles: Callable[[Any, Any], Any] = lambda rows, dtype: Tiles.of(rows)
) -> None:
    """tiles: what `by_layout.laid_out` takes for a canonical 4-bit weight and the dtype of x, or None."""
    row = replace(by_layout.LINEARS[Int4Rows], tiles=tiles)
    monkeypatch.setattr(by_layout, "LINEARS", {**by_layout.LINEARS, Int4Rows: row})
