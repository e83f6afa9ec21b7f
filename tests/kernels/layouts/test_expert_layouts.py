"""Layouts of experts' weights: each with its inverse, bit for bit, and what does not fit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from accelpatch.kernels.codebooks import E8M0
from accelpatch.kernels.layouts import expert_tiles, int4_tiles, tiling
from accelpatch.kernels.layouts.expert_pack import ExpertPack
from accelpatch.kernels.layouts.expert_stack import Stack, from_words, to_words
from accelpatch.quant import int4, int8
from accelpatch.quant.formats import dequantize


@pytest.mark.parametrize("k", [2, 64, 128, 130, 768, 2880])
def test_words_come_back(k: int) -> None:
    q = torch.randint(-128, 128, (3, 5, k // 2), dtype=torch.int8, generator=torch.Generator().manual_seed(k))
    words = to_words(q)
    assert list(words.shape) == [3, 5, 16 * -(-k // 128)]
    assert words.dtype == torch.int32
    assert torch.equal(from_words(words, k), q)


def test_a_nibble_of_neighbouring_words_holds_neighbouring_values() -> None:
    u = torch.arange(256).view(2, 128) % 16
    words = to_words(int4.pack(u).view(1, 2, 64))
    for column in (0, 1, 15, 16, 63, 127):
        nibble, word = divmod(column, 16)
        assert torch.equal((words[0, :, word] >> 4 * nibble) & 15, u[:, column].int())


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "minimum"])
def test_packs_of_4_bits_come_back(symmetric: bool) -> None:
    w = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(1))
    held = int4.quantize(w.view(-1, 64), group_size=32, symmetric=symmetric)
    q, scale, offset = (None if one is None else one.view(4, 32, -1) for one in (held.w, held.scale, held.offset))
    assert q is not None
    assert scale is not None
    pack = ExpertPack.pack(q, scale, offset, bits=4)
    for one, other in zip(pack.canonical(), (q, scale, offset, None), strict=True):
        assert (one is None) == (other is None)
        assert other is None or torch.equal(one.float(), other.float())
    own = dequantize(type(held)(q[2], scale[2], None if offset is None else offset[2]))
    assert torch.equal(dequantize(pack.of(2).canonical()), own)


def test_packs_of_int8_come_back() -> None:
    held = int8.quantize(torch.randn(96, 64, generator=torch.Generator().manual_seed(2)))
    q, scale = held.w.view(2, 48, 64), held.scale.view(2, 48, 1)
    pack = ExpertPack.pack(q, scale, bits=8)
    assert torch.equal(pack.canonical()[0], q)
    assert torch.equal(pack.canonical()[1], scale)
    assert pack.nbytes >= q.nbytes + scale.nbytes


@pytest.mark.parametrize(
    "n, k, group, bits, reason",
    [
        (24, 64, 32, 4, "whole blocks of 16"),
        (16, 32, 32, 4, None),
        (32, 72, 24, 4, "not a multiple of 16"),
        (32, 96, 96, 8, None),
    ],
    ids=["rows", "one block", "groups", "int8"],
)
def test_what_does_not_fit(n: int, k: int, group: int, bits: int, reason: str | None) -> None:
    found = ExpertPack.why_not(n, k, group, "minimum" if bits == 4 else "none", bits)
    assert (found is None) == (reason is None)
    assert reason is None or reason in str(found)


def test_bits_of_a_stack() -> None:
    assert [Stack(torch.empty(0, dtype=dtype)).bits for dtype in (torch.int32, torch.int8, torch.bfloat16)] == [
        4,
        8,
        16,
    ]


@pytest.mark.parametrize("interleaved", [True, False], ids=["gate and up", "down"])
@pytest.mark.parametrize("group", [32, 64, 128, 256, 384])
def test_tiles_come_back(group: int, interleaved: bool) -> None:
    generator, k = torch.Generator().manual_seed(group), 768
    q = torch.randint(-128, 128, (3, 48, k // 2), dtype=torch.int8, generator=generator)
    if group == 384:  # no power of two: whole rows
        group = k
    scale, offset = (torch.rand(3, 48, k // group, generator=generator).half() for _ in range(2))
    stack = Stack.of_tiles(q, scale, offset, interleaved=interleaved)
    assert (stack.tiled, stack.bits, stack.n, stack.groups) == (True, 4, 48, k // group)
    assert [list(stack.w.shape), list(stack.offset.shape)] == [*expert_tiles.shapes(3, 48, k, k // group)]  # type: ignore[union-attr]
    for one, due in zip(stack.canonical(k, interleaved=interleaved)[:3], (q, scale, offset), strict=True):
        assert torch.equal(one, due)  # type: ignore[arg-type]
    for one, due in zip(stack.expert(2).canonical(k, interleaved=interleaved)[:3], (q, scale, offset), strict=True):
        assert torch.equal(one, due[2:3])  # type: ignore[arg-type]


@pytest.mark.parametrize("interleaved", [True, False], ids=["gate and up", "down"])
@pytest.mark.parametrize("layout", ["words", "tiles", "pack"])
def test_codes_of_e2m1_come_back(layout: str, interleaved: bool) -> None:
    """With every power of two; the dtype of the scales says what the codes are."""
    q = torch.randint(-128, 128, (3, 48, 128), dtype=torch.int8, generator=torch.Generator().manual_seed(8))
    scale = (torch.arange(3 * 48 * 8) % 255).to(torch.uint8).view(3, 48, 8).view(E8M0)
    kinds: dict[str, Any] = {"words": Stack.of_codes, "pack": partial(ExpertPack.pack, bits=4)}
    made = kinds.get(layout, partial(Stack.of_tiles, interleaved=interleaved))(q, scale)
    assert made.codes == "e2m1"
    held, factor, offset, _ = made.canonical(256, interleaved=interleaved)
    assert torch.equal(held, q)
    assert factor.dtype == E8M0
    assert torch.equal(factor.view(torch.uint8), scale.view(torch.uint8))
    assert offset is None
    assert layout == "pack" or made.expert(1).codes == "e2m1"


@pytest.mark.parametrize("interleaved", [True, False], ids=["gate and up", "down"])
def test_an_expert_lies_as_the_tiles_of_a_linear_layer(interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randint(-128, 128, (2, 64, 128), dtype=torch.int8, generator=generator)
    scale, offset = (torch.rand(2, 64, 4, generator=generator).half() for _ in range(2))
    stack = Stack.of_tiles(q, scale, offset, interleaved=interleaved)
    alone = int4_tiles.Tiles.pack(q[1], scale[1], offset[1])
    if interleaved:
        alone = alone.pair()
    assert torch.equal(stack.w[1], alone.w)
    for one, due in ((stack.scale, alone.scale), (stack.offset, alone.offset)):
        assert torch.equal(one[1], due)  # type: ignore[index, arg-type]


def test_activations_in_the_order_of_a_tiles_nibbles() -> None:
    """The 8 nibbles of a row's word go with 8 neighbouring values."""
    u = torch.randint(0, 16, (16, 256), generator=torch.Generator().manual_seed(5))
    words = (tiling.tile_int4(int4.pack(u)).view(torch.int32) ^ -2004318072).view(2, 16, 16)  # step, row, word
    nibbles = torch.stack([(words >> 4 * nibble) & 15 for nibble in range(8)], dim=3)  # step, row, word, nibble
    assert torch.equal(nibbles.transpose(0, 1).flatten(1), expert_tiles.in_tile_order(u).int())


@pytest.mark.parametrize(
    "n, k, group, reason",
    [(24, 128, 32, "16 rows"), (32, 192, 64, "128 columns"), (32, 384, 96, "groups are 32"), (32, 384, 384, None)],
    ids=["rows", "columns", "groups", "whole rows"],
)
def test_what_has_no_tiles(n: int, k: int, group: int, reason: str | None) -> None:
    found = expert_tiles.unfit(n, k, group, torch.float16)
    assert (found is None) == (reason is None)
    assert reason is None or reason in str(found)
