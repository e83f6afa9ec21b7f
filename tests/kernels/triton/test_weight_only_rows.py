"""Products of many rows by Triton: the float rule on poisoned outputs, every block, cut, group, kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.device import KNOWN
from accelpatch.kernels import dispatch
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.row_major import Plain
from accelpatch.kernels.ops.linear import float_linear, tiled_int4_linear
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear
from tests.support.gemv_reference import wrong
from tests.support.interpreted import DEVICE, HERE, INTERPRETED, _anywhere, here, interpret, needs_triton  # noqa: F401
from tests.support.parity import assert_parity, bits, name, poisoned
from tests.support.weight_only_operands import int4_args, int8_args, operands

pytestmark = needs_triton
marks = [pytest.mark.gpu, here]
# the interpreter cuts bfloat16 off where GPUs round
DTYPES = (torch.float16, torch.float32) if INTERPRETED else (torch.bfloat16, torch.float16, torch.float32)
ROWS = (1, 9, 16, 17, 33, 65, 130, 600)
SHAPES = ((100, 256), (65, 1152), (16, 2048))  # [N, K]
GROUPS = (32, 64, 128, 256, None)


@pytest.mark.skipif(HERE, reason="the tests below run as they are")
def test_through_the_interpreter() -> None:
    interpret(__file__)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("n, k", SHAPES, ids=str)
@pytest.mark.parametrize("m", ROWS)
class TestRows:
    pytestmark = marks

    def test_int8(self, m: int, n: int, k: int, dtype: torch.dtype) -> None:
        assert_parity("int8_linear", int8_args(m, n, k, dtype, bias=bool(m % 2)), "triton")

    def test_int4(self, m: int, n: int, k: int, dtype: torch.dtype) -> None:
        assert_parity("tiled_int4_linear", int4_args(m, n, k, dtype, bias=bool(m % 2)), "triton")


@pytest.mark.parametrize("kind", ["none", "minimum", "zero_point"])
@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("m", [20, 600])
class TestGroups:
    pytestmark = marks

    def test_int4(self, m: int, group: int | None, kind: str) -> None:
        k = 480 if group in (32, None) else 1280  # a last step of the tiles that is not full
        assert_parity("tiled_int4_linear", int4_args(m, 33, k, DTYPES[0], group, kind), "triton")


@pytest.mark.parametrize("room", [1 << 28, 5 * 16 * 160 * 2], ids=["at-once", "in-slices"])
@pytest.mark.parametrize("part", ["both", "gate", "up"])
@pytest.mark.parametrize("m", [20, 70, 600])
class TestPaired:
    """A gate and its up whose rows lie side by side, in 96 rows and in slices of 80 and 16."""

    pytestmark = marks

    def test_int4(self, m: int, part: str, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
        from accelpatch.kernels.triton import dequantize

        monkeypatch.setattr(dequantize, "SLICE", room)
        x, *tiles, bias = int4_args(m, 96, 160, DTYPES[0], 32)
        both = Tiles(*tiles).pair()
        held = both if part == "both" else both.replace(n=48, part=part)
        assert_parity("tiled_int4_linear", (x, *held, bias[: held.n]), "triton")


@pytest.mark.parametrize("groups", [1, 2, 10])
@pytest.mark.parametrize("m", [3, 20, 600])
class TestInt8Groups:
    pytestmark = marks

    def test_int8(self, m: int, groups: int) -> None:
        assert_parity("int8_linear", int8_args(m, 33, 130, DTYPES[0], groups), "triton")


@pytest.mark.parametrize("op", ["int8_linear", "tiled_int4_linear"])
class TestSpecials:
    pytestmark = marks

    @pytest.mark.parametrize("m", [20, 600])
    def test_nan_and_infinity_stay_in_their_row(self, op: str, m: int) -> None:
        args = (int8_args if op == "int8_linear" else int4_args)(m, 33, 1024, DTYPES[0])
        args[0][2, 17], args[0][3, 5] = float("nan"), float("inf")
        with dispatch.forced("triton"):
            y: Any = dispatch.kernel(op).op(*args)
        assert bool(y[2].isnan().all())
        assert not bool(y[3].isfinite().any())
        assert bool(y[[0, 1, *range(4, m)]].isfinite().all())

    def test_the_same_bits_each_time(self, op: str) -> None:
        args = (int8_args if op == "int8_linear" else int4_args)(20, 100, 2048, DTYPES[0])
        with dispatch.forced("triton"):
            first, *others = (dispatch.kernel(op).op(*args) for _ in range(5))
        assert all(torch.equal(bits(first), bits(other)) for other in others)


def test_where_floats_take_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float_linear.launch, "why_not", lambda device, *dtypes: None)
    x, w = torch.zeros(65, 256, dtype=torch.bfloat16), torch.zeros(2048, 256, dtype=torch.bfloat16)

    def fits(x: Tensor, w: Tensor, arch: str = "sm_90") -> bool:
        made = float_linear.spec(x, w)
        made = replace(made, options=dict(float_linear.facts(x, w)))
        return dispatch.choose("float_linear", made, KNOWN.get(arch) or replace(KNOWN["sm_90"], arch=arch)) == "triton"

    for arch, takes in (("sm_90", True), ("sm_90a", True), ("sm_100", False), ("gfx942", False)):
        assert [fits(x[:m], w, arch) for m in (8, 9, 64, 65)] == [False, takes, takes, False]
    assert not fits(x[:9].float(), w.float())
    assert not fits(x[:9], w[:2047])
    assert not fits(x[:9, :192], w[:, :192].contiguous())
    assert not fits(x[:9, :128], w[:, :128])  # rows with gaps


class TestWays:
    """What reaches the kernels, and with which bias."""

    pytestmark = marks

    def test_a_product_and_its_gate(self, monkeypatch: pytest.MonkeyPatch) -> None:
        order = dispatch.order
        monkeypatch.setattr(dispatch, "order", lambda op, *of: ["triton"] if op == "float_linear" else order(op, *of))
        x, w, bias = operands(20, 66, 256, DTYPES[0])
        w = w.to(x.dtype)
        product = FusedLinear(Plain(w), bias)
        gated, due = product.large_m(x, "silu"), float_linear.by_triton(x, w, bias, gate=True)
        # numpy's exp, which the interpreter takes, has other last bits for other memory layouts on some CPUs
        apart = 0 if DEVICE.type == "cuda" else 1
        assert (bits(gated).int() - bits(due).int()).abs().max() <= apart
        assert torch.equal(bits(float_linear.float_linear(x, w, bias)), bits(float_linear.by_triton(x, w, bias)))

    @pytest.mark.parametrize("n, k", [(66, 256), (66, 2048)], ids=str)
    @pytest.mark.parametrize("kind", ["float", "gate", "int8", "int4"])
    def test_a_bias_with_gaps(self, kind: str, n: int, k: int) -> None:
        gap = torch.randn(2 * n, generator=torch.Generator().manual_seed(3)).to(DEVICE, DTYPES[0])[::2]
        if kind in ("float", "gate"):
            x, w, _ = operands(20, n, k, DTYPES[0])
            found = [float_linear.by_triton(x, w.to(x.dtype), bias, kind == "gate") for bias in (gap, gap.contiguous())]
        else:
            op, make = ("int8_linear", int8_args) if kind == "int8" else ("tiled_int4_linear", int4_args)
            args = make(20, n, k, DTYPES[0])[:-1]
            with dispatch.forced("triton"):
                found = [dispatch.kernel(op).op(*args, bias) for bias in (gap, gap.contiguous())]
        assert torch.equal(bits(found[0]), bits(found[1]))


@pytest.mark.parametrize("gate", [False, True], ids=["", "gate"])
@pytest.mark.parametrize("n, k", [*SHAPES[:1], (66, 1152), (16, 2048), (2 * 4230, 128)], ids=str)
@pytest.mark.parametrize("m", [9, 16, 17, 33, 64])
class TestFloats:
    """Each block, with K cut and whole, its last program partly past the end."""

    pytestmark = marks

    def test_rule(self, m: int, n: int, k: int, gate: bool) -> None:
        x, w, beside = operands(m, n, k, DTYPES[0])
        wide, w, beside = x.new_zeros(m, k + 8), w.to(x.dtype), beside if m % 2 else None
        wide[:, :k] = x

        with poisoned():
            found = [float_linear.by_triton(given, w, beside, gate) for given in (x, wide[:, :k])]
        assert torch.equal(bits(found[0]), bits(found[1]))
        assert wrong(found[0], w, x, {"bias": beside, "activation": "silu_gate" if gate else "none"}) == ""


@here
@pytest.mark.parametrize("part", ["all", "both", "gate", "up"])
@pytest.mark.parametrize("kind", ["none", "minimum", "zero_point"])
def test_rows_of_a_weight(kind: str, part: str) -> None:
    from accelpatch.kernels.triton.weight_only import rows_of

    tiles = Tiles(*int4_args(1, 96, 256, torch.float32, 64, kind)[1:-1])
    if part != "all":
        tiles = tiles.pair()
        tiles = tiles if part == "both" else tiles.replace(n=48, part=part)
    due, _ = tiled_int4_linear.dense(torch.float32, *tiles.arguments(), None)
    for start, stop in ((0, tiles.n), (0, 16), (32, 48), (5, 7), (16, tiles.n), (20, tiles.n - 3)):
        if part == "all" and start % 16:
            continue  # blocks of rows begin at tiles
        found = rows_of(tiles)(start, stop, torch.float32)
        torch.testing.assert_close(found, due[start:stop], rtol=1e-6, atol=1e-6)


@here
def test_rows_of_int8() -> None:
    from accelpatch.kernels.triton.weight_only import int8_rows_of

    _, q, scale, _ = int8_args(1, 65, 128, torch.float32, groups=4)
    due = (q.float().unflatten(1, (4, -1)) * scale[:, :, None]).flatten(1)
    for start, stop in ((0, 65), (16, 65), (32, 48)):
        torch.testing.assert_close(int8_rows_of(q, scale)(start, stop, torch.float32), due[start:stop])


@here
@pytest.mark.parametrize("part", ["gate", "up"])
def test_a_half_of_paired_tiles_for_many_rows(part: str) -> None:
    x, *weight, _ = int4_args(600, 96, 256, torch.float16)
    tiles = Tiles(*weight).pair().replace(n=48, part=part)
    bias = torch.randn(48, generator=torch.Generator().manual_seed(3)).to(DEVICE, torch.float16)
    due = tiled_int4_linear.reference(x.float(), *tiles.arguments(), bias.float())
    found = tiled_int4_linear.by_triton(x, *tiles.arguments(), bias)
    torch.testing.assert_close(found.float(), due, rtol=5e-3, atol=5e-3)
