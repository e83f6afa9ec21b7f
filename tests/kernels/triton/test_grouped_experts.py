"""Experts of many tokens by Triton, from 4-bit codes in tiles: every tile that may be chosen."""

from __future__ import annotations

import pytest
import torch

from accelpatch.device import KNOWN
from accelpatch.kernels.ops.experts import experts
from accelpatch.kernels.ops.experts.cases import in_tiles, of_random
from tests.support.interpreted import DEVICE, HERE, LOW, _anywhere, here, interpret, needs_triton  # noqa: F401
from tests.support.parity import assert_parity

pytestmark = needs_triton


@pytest.mark.skipif(HERE, reason="the tests below run as they are")
def test_through_the_interpreter() -> None:
    interpret(__file__)


@here
@pytest.mark.parametrize("group", [128, 32])
@pytest.mark.parametrize("tokens, chosen", [(8, 1), (44, 1), (70, 2)], ids=["16", "64", "256"])  # of a tile
def test_float_rule(tokens: int, chosen: int, group: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 128, generator=generator).to(DEVICE, LOW)
    ids = torch.stack([torch.randperm(2, generator=generator)[:chosen] for _ in range(tokens)]).to(DEVICE)
    weights = torch.rand(tokens, chosen, generator=generator).to(DEVICE, LOW)
    up, down = (
        of_random(generator, LOW, DEVICE, 4, 2, n, k, group, False, group == 32) for n, k in ((512, 128), (128, 256))
    )
    stacks = (part for one in in_tiles(up, down, 256) for part in one)
    args = (x, ids, weights, *stacks, "silu", 0.0, 0.0, x.flip(0))
    assert_parity(experts.OP, args, "triton")


@here
def test_a_tile_that_a_block_has_no_room_for_is_left_out() -> None:
    from accelpatch.kernels.triton.grouped_experts import AMD_TILES, CODE_TILES, TILES, tiles_of

    small = KNOWN["sm_86"]
    assert [tiles_of(one, True) for one in (KNOWN["sm_90"], small)] == [CODE_TILES, CODE_TILES[:-1]]
    assert tiles_of(small, False) == TILES
    assert tiles_of(KNOWN["gfx942"], True) == AMD_TILES
