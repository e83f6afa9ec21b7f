"""The native products and packs, on every path that this machine has: float rule, views, NaN, threads, neighbours."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from accelpatch.device import probe
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.cpu import linear, native_library
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.ops.linear import packed_linear
from accelpatch.quant import int4, int8
from tests.support.packs import FORMATS, canonical, operands, packed, size_for
from tests.support.parity import DTYPES, assert_parity, name, strided

CPU = torch.device("cpu")
reason = libraries.why_not("cpu", probe("cpu"))
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no native library: {reason}")


def paths() -> list[str]:
    return ["none"] if reason is not None else list(native_library.isas())


@pytest.fixture(params=paths())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    native_library.use_isa(request.param)
    assert native_library.isa() == request.param
    yield request.param
    native_library.use_isa(None)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


SIZES = [
    (1, 1, 2),
    (1, 16, 64),
    (2, 17, 100),
    (3, 576, 576),
    (5, 31, 1536),
    (7, 33, 130),
    (8, 48, 96),
    (9, 15, 64),
    (1, 5, 11008),
    (129, 40, 192),
]


@pytest.mark.parametrize("size", SIZES, ids=name)
@pytest.mark.parametrize("format_", FORMATS)
def test_float_rule(isa: str, format_: str, size: tuple[int, int, int]) -> None:
    for dtype in DTYPES:
        op, args = operands(format_, *size_for(format_, *size), dtype)
        assert_parity(op, args, "cpu")


@pytest.mark.parametrize("format_", FORMATS)
def test_no_rows(isa: str, format_: str) -> None:
    op, args = operands(format_, *size_for(format_, 0, 7, 64))
    assert assert_parity(op, args, "cpu")[0].shape == (0, 7)


@pytest.mark.parametrize("format_", FORMATS)
def test_strided_offset_view(isa: str, format_: str) -> None:
    op, (x, *rest) = operands(format_, *size_for(format_, 7, 33, 192))
    assert_parity(op, (strided(x), *rest), "cpu")
    assert_parity(op, (x.view(7, 1, -1).expand(7, 2, -1), *rest), "cpu")


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("magnitude", [1e-42, 1e-30, 1e-6, 1e6, 1e30], ids=str)
def test_any_magnitude(isa: str, format_: str, magnitude: float) -> None:
    op, (x, *rest) = operands(format_, *size_for(format_, 3, 40, 320))
    rest[-1].zero_()  # the bias would hide it
    assert_parity(op, (x * magnitude, *rest), "cpu")


@pytest.mark.parametrize("format_", FORMATS)
def test_outliers(isa: str, format_: str) -> None:
    op, (x, *rest) = operands(format_, *size_for(format_, 5, 40, 640))
    x[:, ::97] *= 1000
    x[:, 64:128] = 0
    assert_parity(op, (x, *rest), "cpu")


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("format_", FORMATS)
def test_nan_and_infinity(isa: str, format_: str, special: float) -> None:
    op, (x, *rest) = operands(format_, *size_for(format_, 6, 40, 192))
    x[1, 3] = x[4, -1] = special
    [y] = assert_parity(op, (x, *rest), "cpu")
    assert y[[0, 2, 3, 5]].isfinite().all()


@pytest.mark.parametrize("format_", FORMATS)
def test_pack_is_invertible(format_: str) -> None:
    for size in SIZES:
        _, q, scale, offset, _ = canonical(format_, *size_for(format_, *size))
        made = packed(format_, q, scale, offset)
        back = made.unpack()
        assert torch.equal(back[0], q)
        assert torch.equal(back[1], scale.float())
        assert (back[2] is None) == (offset is None)
        assert offset is None or torch.equal(back[2], offset.float())
        assert made.half_scales == ("half" in format_ and scale.shape[1] > 1)


def run(format_: str, m: int = 8) -> Tensor:
    op, args = operands(format_, m, 96, 192)
    with torch.inference_mode():
        y = dispatch.kernel(op).op(*args)
    assert isinstance(y, Tensor)
    return y


@pytest.mark.parametrize("format_", FORMATS)
def test_threads_change_no_bit(isa: str, format_: str, threads: None) -> None:
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(run(format_))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("format_", FORMATS)
def test_neighbours_change_no_bit(isa: str, format_: str) -> None:
    op, (x, *rest) = operands(format_, 8, 96, 192)
    call = dispatch.kernel(op).op
    whole = call(x, *rest)
    for m in (1, 2, 3, 5, 7):
        assert torch.equal(call(x[:m], *rest), whole[:m])
    assert torch.equal(call(x[5:6], *rest), whole[5:6])


def test_two_callers_at_once(threads: None) -> None:
    torch.set_num_threads(2)
    due, wrong = run("int8"), []

    def many() -> None:
        wrong.extend(1 for _ in range(300) if not torch.equal(run("int8"), due))

    callers = [threading.Thread(target=many) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=120)
        assert not caller.is_alive()
    assert wrong == []


def test_fork(threads: None) -> None:
    torch.set_num_threads(2)
    due = run("int4-group32")
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(run("int4-group32"), due) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(run("int4-group32"), due)


def test_foreign_pack_is_refused() -> None:
    op, (x, data, *rest) = operands("int8", 2, 16, 64)
    with pytest.raises(KernelError, match="bytes"):
        dispatch.kernel(op).op(x, data[:-1], *rest)


@pytest.mark.parametrize("k", [64, 102, 192, 200, 513, 1088])
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.usefixtures("isa")
def test_panels_multiply_the_rows_that_gather_gives(format_: str, k: int) -> None:
    for n in (37, 64, 9):
        x, q, scale, offset, bias = canonical(format_, *size_for(format_, 37, n, k))
        made = replace(packed(format_, q, scale, offset), bias=bias)
        weight = linear.gather(made, torch.arange(n)).double()
        for m in (0, 1, 11, 12, 37):
            rows = torch.cat([x, x], dim=1)[:m, : x.shape[1]]  # with gaps between them
            due = rows.double() @ weight.t() + bias.double()
            torch.testing.assert_close(linear.by_panels(rows, made).double(), due, rtol=1e-5, atol=2e-5)
    with pytest.raises(KernelError):
        linear.by_panels(x[:, 1:], made)


@pytest.mark.parametrize("k", [64, 102, 192, 200, 513, 1088])
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.usefixtures("isa")
def test_the_gradient_of_the_input_multiplies_the_rows_that_gather_gives(format_: str, k: int) -> None:
    """Of a row of y alone it is that row of the weight, to the bit."""
    for n in (37, 130, 9):
        _, *weight, _ = canonical(format_, *size_for(format_, 1, n, k))
        made = packed(format_, *weight)
        rows = linear.gather(made, torch.arange(n))
        assert torch.equal(linear.input_gradient(torch.eye(n), made), rows)
        for m in (0, 1, 11, 29):
            dy = torch.randn(m, n + 3, generator=torch.Generator().manual_seed(m))[:, :n]  # with gaps between them
            due = dy.double() @ rows.double()
            torch.testing.assert_close(linear.input_gradient(dy, made).double(), due, rtol=1e-5, atol=5e-5)


def test_gather_is_what_torch_dequantises() -> None:
    _, q, scale, offset, _ = canonical("int4-minimum64", 1, 37, 192)
    made = Pack.pack(q, scale, offset, bits=4)
    rows = linear.gather(made, torch.tensor([36, 0, 17]))
    eye = torch.eye(192)
    due = dispatch.kernel("int4_linear").reference(eye, q, scale, offset).t()[[36, 0, 17]]
    assert torch.equal(rows, due)
    with pytest.raises(KernelError):
        linear.gather(made, torch.tensor([37]))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_both_products_of_many_rows_give_the_same_numbers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    w, x, bias = (torch.randn(size, generator=generator) for size in ((70, 128), (20, 128), (70,)))
    weight = int8.quantize(w, group_size=64) if kind == "int8" else int4.quantize(w, group_size=64)
    pack = Pack.of(weight)
    results = []
    for rows in (1 << 40, 1):
        monkeypatch.setitem(linear.PANELS, native_library.isa(), rows)
        monkeypatch.setattr(linear, "CACHED_PANELS", rows)
        results.append(packed_linear.packed_linear(x, *pack.arguments(), bias))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    assert not torch.equal(*results)  # they are two products


@pytest.mark.parametrize("m", [1, 63, 64, 65, 130])
def test_rows_in_chunks_give_the_same_bits(m: int) -> None:
    generator = torch.Generator().manual_seed(m)
    w, x = (torch.randn(size, generator=generator) for size in ((70, 128), (m, 2, 128)))
    pack = Pack.of(int8.quantize(w, group_size=64))
    assert torch.equal(linear.linear(x, pack, linear.CHUNK), linear.linear(x, pack))


def test_a_weight_that_no_cache_holds_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """VNNI takes any number of its rows in chunks; a smaller weight's meet panels from some number on."""
    calls: list[tuple[str, int]] = []
    monkeypatch.setattr(linear, "isa", lambda: "avx512")
    monkeypatch.setattr(linear, "linear", lambda x, pack, chunk=0: calls.append(("linear", chunk)))
    monkeypatch.setattr(linear, "by_panels", lambda x, pack: calls.append(("panels", 0)))
    pack = Pack.of(int8.quantize(torch.randn(70, 128), group_size=64))
    for most in (linear.CACHED, 70 * 128 - 1):
        monkeypatch.setattr(linear, "CACHED", most)
        for rows in (31, 32, 600):
            linear.product(torch.empty(rows, 128), pack)
    assert calls == [("linear", 0), ("panels", 0), ("panels", 0), *[("linear", linear.CHUNK)] * 3]
