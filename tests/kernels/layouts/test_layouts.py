"""Weight layouts: what each offers, and that one more is a class and a row of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from accelpatch.kernels.layouts.compact_tiles import CompactTiles
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.layout import WeightArguments
from accelpatch.kernels.layouts.row_major import Fp8Rows, Int8Rows, Plain
from accelpatch.kernels.operation import Operation
from accelpatch.kernels.ops import by_layout
from accelpatch.kernels.ops.by_layout import LINEARS, LinearOf
from accelpatch.kernels.ops.fused_linear import FusedLinear
from accelpatch.quant import fp8, int4, int8

N, K, DTYPE = 32, 256, torch.bfloat16


def made(name: str, seed: int = 0) -> Any:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)) / 16
    if name == "plain":
        return Plain.pack(weight)
    if name == "int8":
        q, scale, _ = int8.quantize(weight)
        return Int8Rows.pack(q, scale)
    if name == "int4":
        q, scale, offset = int4.quantize(weight, group_size=128)
        return Tiles.pack(q, scale.half(), offset.half() if offset is not None else None)
    if name == "fp8":
        q, scale, _ = fp8.quantize(weight)
        return Fp8Rows.pack(q, scale)
    return CompactTiles.pack(weight.bfloat16())


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


NAMES = ("plain", "int8", "fp8", "int4", "compact")


def tensors(weight: Any) -> list[Tensor]:
    return [one for one in weight.arguments() if isinstance(one, Tensor)]


@pytest.mark.parametrize("name", NAMES)
def test_pack_and_unpack(name: str) -> None:
    weight = made(name)
    assert (weight.n, weight.k, weight.part) == (N, K, "all")
    assert weight.nbytes == sum(one.nbytes for one in tensors(weight))
    packed = weight.unpack()
    again = type(weight).pack(*(packed if isinstance(packed, tuple) else (packed,)))
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


@pytest.mark.parametrize("name", NAMES)
def test_launch_arguments(name: str) -> None:
    weight = made(name)
    launch = weight.launch()
    assert (launch.n, launch.k, launch.prefetchable) == (N, K, True)
    assert launch.w is weight.w


def test_weights_of_other_formats_differ() -> None:
    formats = [made(name).format for name in NAMES]
    assert len(set(formats)) == len(NAMES)
    q, scale, offset = int4.quantize(torch.randn(N, K), group_size=64)
    assert Tiles.pack(q, scale.half(), offset).format != made("int4").format


def test_a_copy_for_one_launch_is_not_prefetchable() -> None:
    assert not Plain(torch.zeros(K, N).t()).launch().prefetchable


def test_tiles_that_are_not_full_are_not_concatenated() -> None:
    half = made("compact")._replace(n=N - 1)
    assert "multiple of 16" in str(CompactTiles.why_not_concat([half, half]))


class Halved(NamedTuple):
    """A layout of this test alone: w[N, K] holds half of the weight."""

    w: Tensor

    n = property(lambda self: self.w.shape[0])
    k = property(lambda self: self.w.shape[1])
    nbytes = property(lambda self: self.w.nbytes)
    format = property(lambda self: (Halved, self.k, self.w.dtype))
    part, tiled = "all", False

    def arguments(self) -> tuple[Any, ...]:
        return (self.w,)

    def launch(self) -> WeightArguments:
        raise AssertionError("it has no kernel")

    def unpack(self) -> Tensor:
        return self.w * 2

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
    assert (layer.n, layer.k, layer.raw.shape) == (N, K, (N, K))
