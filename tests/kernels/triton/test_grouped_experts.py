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
@pytest.mark.parametrize("tokens", [1, 9], ids=["few", "many"])
@pytest.mark.parametrize("tiled", [False, True], ids=["words", "tiles"])
def test_the_least_power_of_two_of_e2m1(tiled: bool, tokens: int) -> None:
    """2^-127, a subnormal, and its successors."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 128, generator=generator).to(DEVICE, torch.float32) * 2.0**60
    ids = torch.zeros(tokens, 1, dtype=torch.int64, device=DEVICE)
    up, down = (
        of_random(generator, torch.float32, DEVICE, 4, 1, n, k, 32, False, True, "e2m1")
        for n, k in ((256, 128), (128, 128))
    )
    assert down.scale is not None
    least = (torch.arange(down.scale.numel(), device=DEVICE) % 3).to(torch.uint8).view(down.scale.shape)
    stacks = up, down._replace(scale=least.view(down.scale.dtype))
    if tiled:
        stacks = in_tiles(*stacks, 128)
    assert_parity(experts.OP, (x, ids, torch.ones_like(ids).float(), *stacks[0], *stacks[1], "relu", 0.0, 0.0, None),
                  "triton")  # fmt: skip


@here
def test_a_tile_that_a_block_has_no_room_for_is_left_out() -> None:
    from accelpatch.kernels.triton.grouped_experts import AMD_TILES, CODE_TILES, TILES, tiles_of

    small = KNOWN["sm_86"]
    assert [tiles_of(one, True) for one in (KNOWN["sm_90"], small)] == [CODE_TILES, CODE_TILES[:-1]]
    assert tiles_of(small, False) == TILES
    assert tiles_of(KNOWN["gfx942"], True) == AMD_TILES
