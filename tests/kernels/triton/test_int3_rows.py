"""3-bit tiles written out by Triton for torch's GEMM: the float rule, poisoned outputs, groups, interleaved rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelpatch.kernels.layouts.int3_tiles import Int3Tiles
from accelpatch.quant import int3
from tests.support.interpreted import DEVICE, HERE, INTERPRETED, _anywhere, here, interpret, needs_triton  # noqa: F401
from tests.support.parity import assert_parity
from tests.support.weight_only_operands import operands

pytestmark = needs_triton
marks = [pytest.mark.gpu, here]
LOW = torch.float16 if INTERPRETED else torch.bfloat16


def int3_args(m: int, n: int, k: int, group: int | None, kind: str, part: str = "all") -> tuple[Any, ...]:
    """Arguments of the operation."""
    x, w, bias = operands(m, n, k, LOW)
    weight = int3.quantize(w, group_size=group or k, symmetric=kind == "none", zero_point=kind == "zero_point")
    tiles = Int3Tiles.of(weight)
    if part != "all":
        tiles = tiles.pair().replace(n=n if part == "both" else n // 2, part=part)
    return x, *tiles, bias[: tiles.n]


@pytest.mark.skipif(HERE, reason="the tests below run as they are")
def test_through_the_interpreter() -> None:
    interpret(__file__)


@pytest.mark.parametrize("m, n", [(9, 33), (130, 100)], ids=str)
@pytest.mark.parametrize("kind", ["none", "minimum", "zero_point"])
@pytest.mark.parametrize("group", [32, 64, 128, 256, None], ids=str)
class TestGroups:
    pytestmark = marks

    def test_int3(self, m: int, n: int, group: int | None, kind: str) -> None:
        k = 480 if group in (32, None) else 1280  # a last step of the tiles that is not full
        assert_parity("tiled_int3_linear", int3_args(m, n, k, group, kind), "triton")


@pytest.mark.parametrize("part", ["both", "gate", "up"])
class TestInterleaved:
    pytestmark = marks

    def test_int3(self, part: str) -> None:
        assert_parity("tiled_int3_linear", int3_args(20, 96, 320, 64, "minimum", part), "triton")


def test_rows_hold_what_tiles_were_made_of() -> None:
    """On whatever device is here, exactly; also of two weights one after the other, and cut again."""
    w = torch.randn(64, 256).to(DEVICE)
    rows = int3.quantize(w, group_size=64)
    first, second = (Int3Tiles.of(rows.at(slice(start, start + 32))) for start in (0, 32))
    both = Int3Tiles.concat([first, second])
    for made in (both, Int3Tiles.of(rows), both.pair(), *both.split([64])):
        for one, due in zip(made.canonical().tensors().values(), rows.tensors().values(), strict=True):
            assert one.equal(due)
