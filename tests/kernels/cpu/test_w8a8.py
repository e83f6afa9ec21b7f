"""int8 weights times int8 activations on every native path: the same integers as the references, at any row count."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.device import probe
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.cpu import linear, native_library
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.layouts.pack_tensors import in_one_block
from accelpatch.kernels.layouts.w8a8_pack import LONGEST, W8A8Pack
from accelpatch.kernels.ops.activation import quantize_rows
from accelpatch.kernels.ops.linear import gemm_w8a8, w8a8_linear
from accelpatch.kernels.ops.linear.w8a8_packed import w8a8_packed
from tests.support.parity import DTYPES, assert_parity, name, poisoned, strided

reason = libraries.why_not("cpu", probe("cpu"))
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no native library: {reason}")
ROWS = (0, 1, 2, 3, 5, 7, 8, 11, 12, 13, 33, 64, 100, 129)
STATIC = torch.tensor([0.02])


@pytest.fixture(params=native_library.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in native_library.isas():
        pytest.skip(f"this machine has no {request.param}")
    native_library.use_isa(request.param)
    yield request.param
    native_library.use_isa(None)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def weights(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q with -128 among its values, scale, bias."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randint(-128, 128, (n, k), generator=g, dtype=torch.int8)
    return q, (torch.rand(n, 1, generator=g) + 0.5) / 127, torch.randn(n, generator=g)


def rows(m: int, k: int, seed: int = 1) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed))


def expected(x: Tensor, q: Tensor, scale: Tensor, static: Tensor | None, bias: Tensor | None) -> Tensor:
    """The references of the two operations, in the float32 operations that the form defines."""
    xq, xs = quantize_rows.reference(x, static)
    held = xs.expand(x.shape[0], 1).reshape(-1)
    return gemm_w8a8.by_torch(xq, q, 1.0, held, scale.view(-1), bias, 1.0, None, "none", None, x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_same_bits_on_200_random_shapes(isa: str, dtype: torch.dtype) -> None:
    rng = random.Random(5)
    for round_ in range(200 if dtype == torch.float32 else 40):
        m, n, k = rng.choice(ROWS), rng.randint(1, 100), rng.randint(1, 300)
        q, scale, bias = weights(n, k, round_)
        static, beside = rng.choice((None, STATIC)), rng.choice((None, bias))
        x = rows(m, k, round_).to(dtype)
        with poisoned():
            y = w8a8_packed(x, *W8A8Pack.pack(q, scale, static).arguments(), beside)
        assert y.dtype == dtype
        assert torch.equal(y, expected(x, q, scale, static, beside)), (m, n, k)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 63, 64, 65, 127, 577])
def test_integers_themselves(isa: str, k: int) -> None:
    """With scales of 1 the output is the sum of products, which float32 holds."""
    g = torch.Generator().manual_seed(k)
    for m, n in ((1, 1), (2, 16), (5, 17), (12, 32), (13, 33), (25, 49)):
        q, x = (torch.randint(-127, 128, (size, k), generator=g, dtype=torch.int8) for size in (n, m))
        y = w8a8_packed(x.float(), *W8A8Pack.pack(q, torch.ones(n, 1), 1.0).arguments(), None)
        assert torch.equal(y.long(), x.long() @ q.long().t())


@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
def test_largest_sums_at_the_longest_k(isa: str, sign: int) -> None:
    """-128 * 127 * K fits an int32; what is summed on the way, of unsigned bytes, does not."""
    q = torch.full((17, LONGEST), -128, dtype=torch.int8)
    q[1] = 127
    x = torch.full((2, LONGEST), 127.0 * sign)
    y = w8a8_packed(x, *W8A8Pack.pack(q, torch.ones(17, 1), 1.0).arguments(), None)
    due = torch.full((2, 17), -128.0 * 127 * LONGEST * sign)
    due[:, 1] = 127.0 * 127 * LONGEST * sign
    assert torch.equal(y, due)


@pytest.mark.parametrize("size", [(1, 576, 576), (3, 33, 130), (129, 40, 192), (1040, 17, 66)], ids=name)
@pytest.mark.parametrize("static", [None, STATIC], ids=["dynamic", "static"])
def test_float_rule(isa: str, static: Tensor | None, size: tuple[int, int, int]) -> None:
    m, n, k = size
    q, scale, bias = weights(n, k)
    for dtype in DTYPES:
        args = (rows(m, k).to(dtype), *W8A8Pack.pack(q, scale, static).arguments(), bias.to(dtype))
        for implementation in ("cpu", "torch"):
            assert_parity("w8a8_packed", args, implementation)


def test_saturation_of_a_static_scale(isa: str) -> None:
    q, scale, _ = weights(16, 40)
    x = rows(3, 40) * 1e30
    x[1] *= 1e-30
    assert torch.equal(
        w8a8_packed(x, *W8A8Pack.pack(q, scale, STATIC).arguments(), None), expected(x, q, scale, STATIC, None)
    )


@pytest.mark.parametrize("size", [1.0, 2.0**-118, 2.0**-119, 2.0**-120, 2.0**-140, 0.0])
def test_tiny_rows(isa: str, size: float) -> None:
    q, scale, bias = weights(20, 70)
    x = rows(4, 70)
    x[1] = x[1] / x[1].abs().max() * size
    y = w8a8_packed(x, *W8A8Pack.pack(q, scale).arguments(), bias)
    assert torch.equal(y, expected(x, q, scale, None, bias))
    plain = w8a8_packed(x, *W8A8Pack.pack(q, scale).arguments(), None)
    assert bool((plain[1] == 0).all()) == (size < 2.0**-119)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("static", [None, STATIC], ids=["dynamic", "static"])
def test_special_values_spoil_their_rows_alone(isa: str, static: Tensor | None, value: float) -> None:
    q, scale, bias = weights(33, 67)
    x = rows(15, 67)
    x[2, 66], x[13, 0] = value, value
    y = w8a8_packed(x, *W8A8Pack.pack(q, scale, static).arguments(), bias)
    kept = [at for at in range(15) if at not in (2, 13)]
    assert y[[2, 13]].isnan().all()
    assert torch.equal(y[kept], expected(x[kept], q, scale, static, bias))


def test_views(isa: str) -> None:
    q, scale, bias = weights(33, 67)
    args = (*W8A8Pack.pack(q, scale).arguments(), bias)
    x = rows(14, 67)
    due = w8a8_packed(x, *args)
    wide = torch.full((15, 80), float("nan"))
    wide[1:, 5:72] = x
    assert torch.equal(w8a8_packed(wide[1:, 5:72], *args), due)
    assert torch.equal(w8a8_packed(strided(x), *args), due)
    assert torch.equal(w8a8_packed(x.t().contiguous().t(), *args), due)
    assert torch.equal(w8a8_packed(x.view(2, 7, 67), *args), due.view(2, 7, 33))
    assert torch.equal(w8a8_packed(x[3], *args), due[3])


def test_threads_and_neighbours_change_no_bit(isa: str, threads: None) -> None:
    q, scale, bias = weights(70, 300)
    args = (*W8A8Pack.pack(q, scale).arguments(), bias)
    x = rows(130, 300)
    torch.set_num_threads(1)
    whole = w8a8_packed(x, *args)
    for count in (2, 5):
        torch.set_num_threads(count)
        assert torch.equal(w8a8_packed(x, *args), whole)
    for m in (1, 2, 3, 4, 6, 8, 12, 13, 96, 97):
        assert torch.equal(w8a8_packed(x[:m], *args), whole[:m])
        assert torch.equal(w8a8_packed(x[-m:], *args), whole[-m:])


@pytest.mark.parametrize("static", [None, 0.02], ids=["dynamic", "static"])
def test_pack_is_invertible(static: float | None) -> None:
    for n, k in ((1, 1), (16, 64), (37, 101), (48, 577)):
        q, scale, _ = weights(n, k)
        made = W8A8Pack.pack(q, scale, static)
        back, scales, offset = made.unpack()
        assert torch.equal(back, q)
        assert torch.equal(scales, scale)
        assert offset is None
        assert (made.static_scale is None) == (static is None)
        assert static is None or torch.equal(made.static_scale, torch.tensor([static]))
        assert torch.equal(made.data, Pack.pack(q, scale, bits=8).data)


def test_moved_split_and_concatenated_packs_keep_the_static_scale() -> None:
    q, scale, bias = weights(48, 70)
    whole = W8A8Pack.pack(q, scale, STATIC, bias=bias)
    parts = whole.split([16, 32])
    [*moved] = in_one_block(parts)
    again = W8A8Pack.concat(moved)
    x = rows(3, 70)
    due = w8a8_packed(x, *whole.arguments(), whole.bias)
    for one in (again, *in_one_block([whole])):
        assert isinstance(one, W8A8Pack)
        assert torch.equal(w8a8_packed(x, *one.arguments(), one.bias), due)
    split = [w8a8_packed(x, *one.arguments(), one.bias) for one in moved]
    assert torch.equal(torch.cat(split, 1), due)
    with pytest.raises(KernelError, match="static scales"):
        W8A8Pack.concat([parts[0], replace(parts[1], input_scale=None)])


@pytest.mark.parametrize("static", [0.0, -0.1, 1e-40, float("inf"), float("nan")])
def test_what_is_no_static_scale(static: float) -> None:
    q, scale, _ = weights(16, 64)
    with pytest.raises(KernelError, match="static scale"):
        W8A8Pack.pack(q, scale, static)


def test_what_has_no_pack() -> None:
    q, scale, _ = weights(16, 64)
    with pytest.raises(KernelError, match="one scale a row"):
        W8A8Pack.pack(q, scale.expand(16, 2))
    assert "overflow" in str(W8A8Pack.why_not_w8a8(16, LONGEST + 1))
    assert W8A8Pack.why_not_w8a8(16, LONGEST) is None


def test_what_does_not_fit_is_refused() -> None:
    q, scale, _ = weights(16, 64)
    pack = W8A8Pack.pack(q, scale)
    x = rows(2, 64)
    calls: tuple[tuple[Any, ...], ...] = (
        (x[:, :-1], *pack.arguments()),
        (x, pack.data[:-1], *pack.arguments()[1:]),
        (x, *pack.arguments(), torch.zeros(15)),
    )
    for args in calls:
        with pytest.raises(KernelError):
            w8a8_packed(*args)
    with pytest.raises(KernelError):
        linear.by_panels(x, pack)


def test_float64_runs_in_torch() -> None:
    q, scale, bias = weights(33, 67)
    x = rows(5, 67).double()
    ran = dispatch.calls["w8a8_packed", "torch"]
    y = w8a8_packed(x, *W8A8Pack.pack(q, scale, STATIC).arguments(), bias)
    assert dispatch.calls["w8a8_packed", "torch"] == ran + 1
    torch.testing.assert_close(y, w8a8_linear.reference(x, q, scale, STATIC, bias.double()), rtol=1e-6, atol=1e-6)


def test_scales_are_quotients(isa: str) -> None:
    """127 / max, rounded once: torch's own 127 / tensor is a product with the inverse, and one in four differs."""
    most = torch.linspace(0.1, 9.7, 997)
    x = torch.zeros(997, 64)
    x[:, 0] = most
    x[:, 1:] = torch.rand(997, 63, generator=torch.Generator().manual_seed(0)) * most[:, None]
    times = (127 / most.double()).float()[:, None]
    q = (x * times).round()
    eye = torch.eye(64, dtype=torch.int8)
    y = w8a8_packed(x, *W8A8Pack.pack(eye, torch.ones(64, 1)).arguments(), None)
    assert torch.equal(y, q * (most.double() / 127).float()[:, None])
    assert torch.equal(quantize_rows.reference(x)[0].float(), q)
