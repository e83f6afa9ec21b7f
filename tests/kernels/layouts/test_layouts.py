"""Weight layouts: what each offers, and that one more is a class and a row of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.device import probe
from accelpatch.errors import KernelError
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.layouts.compact_tiles import CompactTiles
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.layouts.gguf_blocks import GgufBlocks
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.layout import WeightArguments
from accelpatch.kernels.layouts.pack_tensors import in_one_block
from accelpatch.kernels.layouts.row_major import Plain
from accelpatch.kernels.layouts.w8a8_pack import W8A8Pack
from accelpatch.kernels.operation import Operation
from accelpatch.kernels.ops.linear import by_layout
from accelpatch.kernels.ops.linear.block_linear import random_blocks
from accelpatch.kernels.ops.linear.by_layout import LINEARS, LinearOf
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear
from accelpatch.quant import fp8, int4, int8

N, K, DTYPE = 32, 256, torch.bfloat16


def made(name: str, seed: int = 0) -> Any:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) / 16
    if name == "plain":
        return Plain(weight)
    if name == "int8":
        return int8.quantize(weight)
    if name == "int4":
        return Tiles.of(int4.quantize(weight, group_size=128))
    if name == "gguf":
        generator = torch.Generator().manual_seed(seed)
        return GgufBlocks(random_blocks(generator, N, K, "Q6_K"), "Q6_K")
    if name == "fp8":
        return fp8.quantize(weight)
    if name == "cpu-float32":
        return Pack.dense(weight)
    if name == "cpu-int8":
        return Pack.of(int8.quantize(weight, group_size=128))
    if name == "cpu-w8a8":
        return W8A8Pack.pack(*int8.quantize(weight), 0.02)
    if name == "cpu-int4":
        return Pack.of(int4.quantize(weight, group_size=64))
    return CompactTiles.pack(weight.bfloat16())


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


NAMES = ("plain", "int8", "fp8", "gguf", "int4", "compact")
NO_LIBRARY = native_library.why_not(probe("cpu"))
needs_library = pytest.mark.skipif(NO_LIBRARY is not None, reason=f"no native library: {NO_LIBRARY}")
PACKS = [pytest.param(name, marks=needs_library) for name in ("cpu-float32", "cpu-int8", "cpu-int4", "cpu-w8a8")]
TILED = ("int4", "compact", *PACKS[1:])


def tensors(weight: Any) -> list[Tensor]:
    return [one for one in weight.arguments() if isinstance(one, Tensor)]


@pytest.mark.parametrize("name", [*NAMES, *PACKS])
def test_pack_and_unpack(name: str) -> None:
    weight = made(name)
    assert (weight.n, weight.k, weight.part) == (N, K, "all")
    assert weight.nbytes == sum(one.nbytes for one in tensors(weight))
    rows = weight.canonical()
    if name in ("cpu-float32", "compact"):
        again = (Pack.dense if name == "cpu-float32" else CompactTiles.pack)(rows.w)
    else:
        again = weight if rows is weight else type(weight).of(rows)
    assert rows.with_tensors(rows.tensors()).tensors().keys() == rows.tensors().keys()
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(tensors(weight), tensors(again), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_concatenated_rows_are_one_weight(name: str) -> None:
    first, second = made(name), made(name, 1)
    if name == "compact":
        first, second = CompactTiles.alike([first, second])
    assert first.format == second.format
    assert first.why_not_concat([first, second]) is None
    before = [one.clone() for one in tensors(second)]
    both = type(first).concat([first, second])
    assert (both.n, both.k) == (2 * N, K)
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(2)).to(first.w.dtype if name == "plain" else DTYPE)
    run = LINEARS[type(first)].operation
    parts = [run(x, *one.arguments(), None) for one in (first, second)]
    assert torch.equal(run(x, *both.arguments(), None), torch.cat(parts, 1))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(tensors(second), before, strict=True))
    assert second.w.untyped_storage().data_ptr() == both.w.untyped_storage().data_ptr(), "the parts are views"


@pytest.mark.parametrize("name", PACKS)
def test_concatenated_packs_are_one_weight(name: str) -> None:
    """Not views of it: a native step holds their addresses."""
    parts = [replace(made(name, seed), bias=torch.randn(N)) for seed in (0, 1)]
    both = type(parts[0]).concat(parts)
    assert (both.n, both.format) == (2 * N, parts[0].format)
    assert both.data.data_ptr() % 64 == 0
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(2))
    run = LINEARS[type(both)].operation
    assert torch.equal(
        run(x, *both.arguments(), both.bias), torch.cat([run(x, *p.arguments(), p.bias) for p in parts], 1)
    )
    block = in_one_block([*parts, both])
    starts = [pack.data.data_ptr() - block[0].data.data_ptr() for pack in block]
    sizes = [-(-pack.data.nbytes // 64) * 64 for pack in block]
    assert starts == [0, sizes[0], sizes[0] + sizes[1]]
    assert all(torch.equal(one.data, old.data) for one, old in zip(block, [*parts, both], strict=True))


@needs_library
def test_a_pack_runs_in_a_fused_layer() -> None:
    weight, bias, x = made("cpu-int8"), torch.randn(N), torch.randn(3, K)
    assert torch.equal(FusedLinear(weight, bias)(x), LINEARS[Pack].operation(x, *weight.arguments(), bias))


def split_parts(name: str) -> tuple[list[Any], Any]:
    parts = [made(name, seed) for seed in range(3)]
    if name == "compact":
        parts = CompactTiles.alike(parts)
    if name.startswith("cpu"):
        parts = [replace(part, bias=torch.randn(N)) for part in parts]
    return parts, type(parts[0]).concat(parts)


@pytest.mark.parametrize("name", [*NAMES, *PACKS])
def test_split_is_the_inverse_of_concat(name: str) -> None:
    parts, whole = split_parts(name)
    found = whole.split([N] * 3)
    for one, due in zip(found, parts, strict=True):
        assert (type(one), one.n, one.k, one.format) == (type(due), N, K, due.format)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(tensors(one), tensors(due), strict=True))
    if name.startswith("cpu"):
        assert all(torch.equal(one.bias, due.bias) for one, due in zip(found, parts, strict=True))
    assert found[1].w.untyped_storage().data_ptr() == whole.w.untyped_storage().data_ptr(), "views"
    uneven = whole.split([16, 48, 32])
    assert [one.n for one in uneven] == [16, 48, 32]
    again = type(whole).concat(uneven)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(tensors(again), tensors(whole), strict=True))


@needs_library
def test_parts_of_a_pack_that_are_not_aligned_are_copied() -> None:
    """Three groups with float16 scales: a block of 16 rows has 32 bytes more than a multiple of 64."""
    q = torch.randint(-127, 128, (32, 96), dtype=torch.int8)
    whole = Pack.pack(q, (torch.rand(32, 3) / 100).half(), bits=8)
    assert whole.data.numel() // 2 % 64 == 32
    for one, rows in zip(whole.split([16, 16]), q.chunk(2), strict=True):
        assert one.data.data_ptr() % 64 == 0
        assert torch.equal(one.unpack()[0], rows)


@pytest.mark.parametrize("name", [*NAMES, *PACKS])
def test_parts_that_do_not_make_up_the_weight_are_refused(name: str) -> None:
    weight = made(name)
    for rows in ([16], [16, 32], [32, 0], []):
        assert "do not make up 32" in str(weight.why_not_split(rows))
        with pytest.raises(KernelError, match="do not make up 32"):
            weight.split(rows)
    assert weight.why_not_split([16, 16]) is None


@pytest.mark.parametrize("name", TILED)
def test_tiles_are_not_cut(name: str) -> None:
    with pytest.raises(KernelError, match="not multiples of 16"):
        made(name).split([8, 24])


@pytest.mark.parametrize("name", ["int4", "compact"])
def test_interleaved_tiles_are_not_split(name: str) -> None:
    with pytest.raises(KernelError, match="interleaved"):
        made(name).pair().split([16, 16])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gguf"])
def test_launch_arguments(name: str) -> None:
    weight = made(name)
    launch = weight.launch()
    assert (launch.n, launch.k, launch.prefetchable) == (N, K, True)
    assert launch.w is weight.w


def test_weights_of_other_formats_differ() -> None:
    names = [*NAMES, *([] if NO_LIBRARY else ["cpu-float32", "cpu-int8", "cpu-int4", "cpu-w8a8"])]
    assert len({made(name).format for name in names}) == len(names)
    assert Tiles.of(int4.quantize(torch.randn(N, K), group_size=64)).format != made("int4").format


def test_a_copy_for_one_launch_is_not_prefetchable() -> None:
    assert not Plain(torch.zeros(K, N).t()).launch().prefetchable


def test_tiles_that_are_not_full_are_not_concatenated() -> None:
    half = made("compact").replace(n=N - 1)
    assert "multiple of 16" in str(CompactTiles.why_not_concat([half, half]))


@dataclass(frozen=True)
class Halved:
    """A layout of this test alone: w[N, K] holds half of the weight."""

    w: Tensor
    order = None
    orders = False

    n = property(lambda self: self.w.shape[0])
    k = property(lambda self: self.w.shape[1])
    nbytes = property(lambda self: self.w.nbytes)
    format = property(lambda self: (Halved, self.k, self.w.dtype))
    part, tiled, whole_rows = "all", False, False

    def arguments(self) -> tuple[Any, ...]:
        return (self.w,)

    def launch(self) -> WeightArguments:
        raise AssertionError("it has no kernel")

    def canonical(self) -> Plain:
        return Plain(self.w * 2)

    def why_not_fused(self, dtype: torch.dtype) -> str | None:
        return None

    @classmethod
    def concat(cls, parts: Sequence[Halved]) -> Halved:
        return cls(torch.cat([one.w for one in parts]))


def test_a_layout_of_ones_own_is_a_class_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(x, w * 2, bias)

    monkeypatch.setitem(by_layout.LINEARS, Halved, LinearOf(Operation("halved_linear", linear)))  # type: ignore[arg-type]
    w, bias, x = torch.randn(N, K), torch.randn(N), torch.randn(5, K)
    layer = FusedLinear(Halved(w / 2), bias)
    expected = torch.nn.functional.linear(x, w, bias)
    assert torch.allclose(layer(x), expected, rtol=1e-5, atol=1e-5)
    gate, up = expected.chunk(2, -1)
    assert torch.allclose(layer(x, gate="silu"), torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-4)
    assert (layer.n, layer.k, layer.weight.w.shape) == (N, K, (N, K))
