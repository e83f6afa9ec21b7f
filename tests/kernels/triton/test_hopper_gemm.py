"""Products of int8 and int4 weights for Hopper's matrix unit: the float rule on poisoned outputs, every tile, cut,
group, kind and part of interleaved tiles. Through the interpreter codes become floats by Triton's own operations, on a
Hopper by instructions for two at a time; other GPUs have no such kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from accelpatch.device import KNOWN, probe
from accelpatch.errors import KernelError
from accelpatch.kernels import choice, dispatch
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.row_major import FP8
from accelpatch.kernels.ops.linear import fp8_linear, int8_linear, tiled_int4_linear
from accelpatch.kernels.triton import launch
from tests.support.interpreted import DEVICE, HERE, INTERPRETED, _anywhere, interpret, needs_triton  # noqa: F401
from tests.support.parity import assert_parity, bits, name
from tests.support.weight_only_operands import fp8_args, int4_args, int8_args

pytestmark = needs_triton
ABLE = INTERPRETED or (HERE and launch.no_wgmma(probe(DEVICE)) is None)
able = pytest.mark.skipif(not ABLE, reason="run by test_through_the_interpreter, in its process, and on a Hopper")
marks = [pytest.mark.gpu, able]
# the interpreter cuts bfloat16 off where GPUs round
DTYPES = (torch.float16,) if INTERPRETED else (torch.bfloat16, torch.float16)
NAME = "triton_wgmma"
ROWS = (1, 9, 17, 65, 130)
ARGS: dict[str, Any] = {"int8_linear": int8_args, "fp8_linear": fp8_args, "tiled_int4_linear": int4_args}
SHAPES = ((100, 256), (65, 1152))  # [N, K]


@pytest.mark.skipif(HERE, reason="the tests below run as they are")
def test_through_the_interpreter() -> None:
    interpret(__file__)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("n, k", SHAPES, ids=str)
@pytest.mark.parametrize("m", ROWS)
class TestRows:
    pytestmark = marks

    def test_int8(self, m: int, n: int, k: int, dtype: torch.dtype) -> None:
        assert_parity("int8_linear", int8_args(m, n, k, dtype, bias=bool(m % 2)), NAME)

    def test_fp8(self, m: int, n: int, k: int, dtype: torch.dtype) -> None:
        for groups in (1, k // 128):
            assert_parity("fp8_linear", fp8_args(m, n, k, dtype, groups, bias=bool(m % 2)), NAME)

    def test_int4(self, m: int, n: int, k: int, dtype: torch.dtype) -> None:
        assert_parity("tiled_int4_linear", int4_args(m, n, k, dtype, bias=bool(m % 2)), NAME)


class TestForms:
    pytestmark = marks

    @pytest.mark.parametrize("kind", ["none", "minimum", "zero_point"])
    @pytest.mark.parametrize("group", [128, 256, None], ids=str)
    def test_groups_of_int4(self, group: int | None, kind: str) -> None:
        k = 480 if group is None else 1280  # a last step of the tiles that is not full
        assert_parity("tiled_int4_linear", int4_args(20, 33, k, DTYPES[0], group, kind), NAME)

    @pytest.mark.parametrize("groups", [1, 5, 10])
    def test_groups_of_int8(self, groups: int) -> None:
        assert_parity("int8_linear", int8_args(20, 33, 1280, DTYPES[0], groups), NAME)

    @pytest.mark.parametrize("part", ["both", "gate", "up"])
    @pytest.mark.parametrize("m", [20, 70])
    def test_interleaved_rows(self, m: int, part: str) -> None:
        """A gate and its up whose rows lie side by side: the columns of y are in the order of the weight's rows."""
        x, *tiles, bias = int4_args(m, 96, 256, DTYPES[0])
        both = Tiles(*tiles).pair()
        held = both if part == "both" else both.replace(n=48, part=part)
        assert_parity("tiled_int4_linear", (x, *held, bias[: held.n]), NAME)

    @pytest.mark.parametrize("k", [128, 1152, 2048])
    @pytest.mark.parametrize("pair", [1, 2])
    @pytest.mark.parametrize("tma", [False, True])
    def test_one_or_two_steps_between_barriers(
        self, pair: int, tma: bool, k: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where a split, or all of K, ends with one step alone."""
        from accelpatch.kernels.triton import hopper_gemm

        tile = hopper_gemm.Tile(16, 64, 4, 3, 2, pair, tma)
        monkeypatch.setattr(hopper_gemm, "TILES", {4: (tile,), 8: (tile,)})
        assert_parity("tiled_int4_linear", int4_args(9, 33, k, DTYPES[0]), NAME)
        assert_parity("int8_linear", int8_args(9, 33, k, DTYPES[0], k // 128), NAME)


@pytest.mark.parametrize("op", ARGS)
class TestSpecials:
    pytestmark = marks

    def test_nan_and_infinity_stay_in_their_row(self, op: str) -> None:
        args = ARGS[op](20, 33, 1024, DTYPES[0])
        args[0][2, 17], args[0][3, 5] = float("nan"), float("inf")
        with dispatch.forced(NAME):
            y: Any = dispatch.kernel(op).op(*args)
        assert bool(y[2].isnan().all())
        assert not bool(y[3].isfinite().any())
        assert bool(y[[0, 1, *range(4, 20)]].isfinite().all())

    def test_nan_and_infinity_are_those_of_the_reference(self, op: str) -> None:
        """Also of an offset, of codes whose float is zero and of infinities that cancel."""
        for kind in ("none", "minimum", "zero_point"):
            of = None if op == "tiled_int4_linear" else ARGS[op](9, 33, 1280, torch.float32)
            x, *rest = of or int4_args(9, 33, 1280, DTYPES[0], 128, kind)
            x = x.to(DTYPES[0])
            x[1, 100], x[2, 7], x[2, 900], x[3, 3] = (float(one) for one in ("inf", "inf", "-inf", "nan"))
            with dispatch.forced(NAME):
                y: Any = dispatch.kernel(op).op(x, *rest)
            wanted: Any = dispatch.kernel(op).reference(x.float(), *rest)
            for same in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(same(y), same(wanted)), (kind, same)
            assert not bool(y[1:4].isfinite().any())

    def test_a_row_depends_on_no_other_and_on_no_run(self, op: str) -> None:
        args = ARGS[op](20, 100, 2048, DTYPES[0])
        with dispatch.forced(NAME):
            first, again = (dispatch.kernel(op).op(*args) for _ in range(2))
            args[0][:7] = 3
            other: Any = dispatch.kernel(op).op(*args)
        assert torch.equal(bits(first), bits(again))
        assert torch.equal(bits(first[7:]), bits(other[7:]))

    def test_strides_and_leading_dimensions(self, op: str) -> None:
        x, *rest = ARGS[op](18, 33, 512, DTYPES[0])
        wide = torch.zeros(2, 9, 515, dtype=x.dtype, device=DEVICE)
        wide[..., 3:] = x.view(2, 9, 512)
        assert_parity(op, (wide[..., 3:], *rest), NAME)


def test_what_it_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each limit is a reason, and forcing it where it cannot run is an error."""
    monkeypatch.undo()
    monkeypatch.setattr(launch, "_installed", lambda: True)
    hopper, half = KNOWN["sm_90"], torch.bfloat16

    def of_int4(
        device: Any = hopper, dtype: torch.dtype = half, group: int = 128, kind: str = "none", m: int = 9
    ) -> Any:
        spec = tiled_int4_linear.of_shape(256, 1024, dtype, group, kind, m=m)
        return dispatch.why_not("tiled_int4_linear", NAME, spec, device)

    assert of_int4() is None
    assert "gfx942 has not" in of_int4(KNOWN["gfx942"])
    assert "16 bits, not torch.float32" in of_int4(dtype=torch.float32)
    assert of_int4(group=64) == "groups of 64 are smaller than 128"
    assert of_int4(group=64, kind="nf4") == "it has no values of nf4"
    assert of_int4(m=0) == "x has no rows"

    def of_int8(k: int, group: int) -> Any:
        x, q = torch.zeros(9, k, dtype=half), torch.zeros(8, k, dtype=torch.int8)
        spec = int8_linear.spec(x, q, torch.ones(8, k // group))
        return dispatch.why_not("int8_linear", NAME, spec, hopper)

    assert [of_int8(k, group) for k, group in ((384, 384), (1024, 128), (1024, 512))] == [None] * 3
    assert of_int8(96, 96) == "K = 96 is no multiple of 128"
    assert "384 are not 128 times a power of two" in of_int8(768, 384)
    assert dispatch.why_not("fp8_linear", NAME, fp8_linear.of_shape(8, 256, half, blocks=True, m=9), hopper) is None
    for k, form, reason in ((300, 0, "K = 300 is no multiple of 128"), (256, 1, "it reads e4m3fn alone")):
        spec = fp8_linear.of_shape(8, k, half, FP8[form], m=9)
        assert dispatch.why_not("fp8_linear", NAME, spec, hopper) == reason
    args = torch.zeros(9, 256, dtype=half), torch.zeros(8, 256, dtype=torch.int8), torch.ones(8, 1), None
    with dispatch.forced(NAME), pytest.raises(KernelError, match="cannot run here"):
        int8_linear.int8_linear(*args)


def test_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(launch, "_installed", lambda: True)
    for op, (least, most) in (("int8_linear", choice.INT8_WGMMA), ("tiled_int4_linear", choice.INT4_WGMMA)):
        for rows, taken in ((least - 1, False), (least, True), (most, True), (most + 1, False)):
            spec = tiled_int4_linear.of_shape(256, 1024, torch.bfloat16, 128, "none", m=rows)
            first = dispatch.order(op, replace(spec, op=op), KNOWN["sm_90"])[0]
            assert (first == NAME) == taken, (op, rows)
