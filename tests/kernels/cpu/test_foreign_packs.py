"""The weights of others' checkpoints as the native kernels read them, on every path that this machine has.

Zero points, tables, groups of 16, superblocks of GGUF and columns in an order of their own: the float rule, bits that
come back, and what is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import byref
from dataclasses import replace

import pytest
import torch

from accelpatch.device import probe
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.cpu import linear, native_library
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.ops.linear import packed_linear
from tests.support.packs import FOREIGN, GROUPS, canonical, operands, packed, size_for, superblocks
from tests.support.parity import DTYPES, assert_parity, name, strided

reason = libraries.why_not("cpu", probe("cpu"))
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no native library: {reason}")
SIZES = [(0, 7, 64), (1, 5, 1536), (2, 17, 208), (7, 33, 144), (129, 40, 320)]


@pytest.fixture(params=native_library.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in native_library.isas():
        pytest.skip(f"this machine has no {request.param}")
    native_library.use_isa(request.param)
    yield request.param
    native_library.use_isa(None)


@pytest.mark.parametrize("size", SIZES, ids=name)
@pytest.mark.parametrize("format_", FOREIGN)
def test_float_rule(isa: str, format_: str, size: tuple[int, int, int]) -> None:
    for dtype in DTYPES if size[0] < 129 else DTYPES[:1]:
        op, args = operands(format_, *size_for(format_, *size), dtype)
        assert assert_parity(op, args, "cpu")[0].shape == (size[0], args[3])


@pytest.mark.parametrize("format_", FOREIGN)
def test_views_and_any_magnitude(isa: str, format_: str) -> None:
    op, (x, *rest) = operands(format_, *size_for(format_, 3, 33, 192))
    assert_parity(op, (strided(x), *rest), "cpu")
    rest[-1].zero_()  # the bias would hide it
    for magnitude in (1e-42, 1e-30, 1e30):
        assert_parity(op, (x * magnitude, *rest), "cpu")


@pytest.mark.parametrize("format_", FOREIGN)
def test_nan_and_infinity(isa: str, format_: str) -> None:
    op, (x, *rest) = operands(format_, *size_for(format_, 6, 17, 192))
    x[1, 3], x[3, 5], x[4, -1] = float("nan"), -float("inf"), float("inf")
    [y] = assert_parity(op, (x, *rest), "cpu")
    assert y[[0, 2, 5]].isfinite().all()


@pytest.mark.parametrize("format_", FOREIGN)
def test_neighbours_change_no_bit(isa: str, format_: str) -> None:
    op, (x, *rest) = operands(format_, *size_for(format_, 8, 96, 192))
    call = dispatch.kernel(op).op
    whole = call(x, *rest)
    for m in (1, 2, 7):
        assert torch.equal(call(x[:m], *rest), whole[:m])


@pytest.mark.parametrize("k", [64, 208, 1088])
@pytest.mark.parametrize("format_", FOREIGN)
def test_panels_and_rows_are_what_torch_dequantises(isa: str, format_: str, k: int) -> None:
    x, q, scale, offset, bias = canonical(format_, *size_for(format_, 13, 37, k))
    made = replace(packed(format_, q, scale, offset), bias=bias)
    weight, _ = packed_linear.dense(torch.float32, *made.arguments(), None)
    ids = torch.tensor([36, 0, 17])
    assert torch.equal(linear.gather(made, ids), weight[ids])
    for m in (1, 13):
        rows = torch.cat([x, x], dim=1)[:m, : x.shape[1]]  # with gaps between them
        due = rows.double() @ weight.double().t() + bias.double()
        torch.testing.assert_close(linear.by_panels(rows, made).double(), due, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("k", [256, 1024, 4096])
def test_many_rows_of_a_long_weight_keep_the_float_rule(isa: str, k: int) -> None:
    for format_ in ("int8-group16", "int4-zero32", "Q4_K"):
        op, args = operands(format_, 129, 40, k)
        assert_parity(op, args, "cpu")


@pytest.mark.parametrize("format_", FOREIGN)
def test_pack_is_invertible(format_: str) -> None:
    for size in ((1, 1, 64), *SIZES):
        _, q, scale, offset, _ = canonical(format_, *size_for(format_, *size))
        made = packed(format_, q, scale, offset)
        if format_ in GROUPS:
            assert torch.equal(made.unpack(), q)
            continue
        back = made.unpack()
        assert torch.equal(back[0], q)
        assert torch.equal(back[1], scale.float())
        assert (back[2] is None) == (offset is None)
        if offset is not None:
            assert torch.equal(back[2], offset if "zero" in format_ else offset.float())
            assert back[2].dtype == (torch.int8 if "zero" in format_ else torch.float32)


@pytest.mark.parametrize(
    "why, words",
    [
        (Pack.why_not(16, 192, 24, "none"), "multiple of 16"),
        (Pack.why_not(16, 192, 64, "zero_point", 8), "8 bits have no zero point"),
        (Pack.why_not(16, 192, 64, "minimum", 8), "8 bits have no minimum"),
        (Pack.why_not(16, 24, 24, "none", 4, "nf4"), "multiple of 16"),
        (Pack.why_not(16, 192, 64, "minimum", 4, "nf4"), "no offset"),
        (Pack.why_not(16, 192, 64, "none", 8, "fp4"), "4 bits"),
        (Pack.why_not(16, 192, 64, "none", 4, "nf5"), "nf4, fp4, e2m1"),
        (Pack.why_not_blocks(16, 192, "Q4_K"), "multiple of Q4_K's 256"),
        (Pack.why_not_blocks(16, 256, "Q5_K"), "Q4_K and Q6_K"),
        (Pack.why_not_blocks(1 << 40, 256, "Q6_K"), "rows or columns"),
    ],
    ids=["group-24", "8-zero", "8-minimum", "nf4-24", "nf4-minimum", "fp4-8", "nf5", "k-192", "Q5_K", "many-rows"],
)
def test_what_has_no_pack(why: str | None, words: str) -> None:
    assert words in str(why)


def test_values_that_do_not_fit_are_refused() -> None:
    _, q, scale, zero, _ = canonical("int4-zero32", 1, 7, 64)
    assert zero is not None
    for one in (17, -1):
        with pytest.raises(KernelError, match="0 to 16"):
            Pack.pack(q, scale, torch.full_like(zero, one), bits=4)
    for order in (torch.arange(63), torch.zeros(64, dtype=torch.int64), torch.arange(64.0), torch.arange(1, 65)):
        with pytest.raises(KernelError, match="permutation of 0 to 63"):
            Pack.pack(q, scale, zero, bits=4, order=order)
    blocks = superblocks("Q6_K", 3, 256, torch.Generator().manual_seed(0))
    for wrong in (blocks[:, 1:], blocks.to(torch.int8)):
        with pytest.raises(KernelError, match=r"uint8 \[N, 210\]"):
            Pack.of_blocks(wrong, 256, "Q6_K")


@pytest.mark.parametrize(
    "field, value",
    [
        ("kind", 8),
        ("kind", -1),
        ("offset", 3),
        ("offset", -1),
        ("half_scales", 3),  # 2 says that a table has scales in e4m3
        ("group", 24),
        ("k", 0),
        ("n", 1 << 40),
    ],
    ids=lambda value: str(value),
)
@pytest.mark.parametrize("format_", ["int8-group32", "int4-zero32", "nf4-half64", "Q4_K", "Q6_K"])
def test_structures_that_do_not_fit_are_refused(format_: str, field: str, value: int) -> None:
    made = packed(format_, *canonical(format_, *size_for(format_, 1, 32, 256))[1:4])
    struct, x, y = made.struct(), torch.randn(1, 256), torch.full((1, 32), 5.0)
    setattr(struct, field, value)
    assert native_library.native().ap_pack_bytes(byref(struct)) == -1
    for call in ("ap_linear_run", "ap_panels_run"):
        more = (0, 1) if call == "ap_linear_run" else (1,)
        assert getattr(native_library.native(), call)(byref(struct), x.data_ptr(), 1, 256, y.data_ptr(), 32, *more) == 1
    assert (y == 5).all()


def test_a_table_that_is_missing_and_an_order_out_of_range_are_refused() -> None:
    made = packed("fp4-order64", *canonical("fp4-order64", 1, 32, 256)[1:4])
    assert made.order is not None
    outside = replace(made, order=made.order + 1)
    assert made.offset == "none"
    with pytest.raises(KernelError, match="do not fit"):
        linear.linear(torch.randn(1, 256), outside)
    with pytest.raises(KernelError, match="do not fit"):
        linear.gather(replace(made, codes=""), torch.tensor([0]))


@pytest.mark.parametrize(
    "format_, bytes_a_weight",
    [("int4-zero-half32", 0.5 + 3 / 32), ("nf4-half64", 0.5 + 2 / 64), ("Q4_K", 144 / 256), ("Q6_K", 210 / 256)],
)
def test_no_bytes_are_added(format_: str, bytes_a_weight: float) -> None:
    made = packed(format_, *canonical(format_, 1, 64, 512)[1:4])
    assert made.nbytes == 64 * 512 * bytes_a_weight
