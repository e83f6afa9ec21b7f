"""The native norm, rotary embedding, gated activation, attention and argmax, each by the float rule, on every path."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import byref

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import probe
from accelpatch.kernels.check import parity
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.cpu.native_library import ACTIVATIONS, Attention, check, native, pointer

reason = libraries.why_not("cpu", probe("cpu"))
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no native library: {reason}")
NAN = float("nan")
WIDTHS = [1, 3, 16, 31, 64, 100, 576, 1536]


@pytest.fixture(params=native_library.ISAS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param not in native_library.isas():
        pytest.skip(f"this machine has no {request.param}")
    native_library.use_isa(request.param)
    yield
    native_library.use_isa(None)


def agrees(found: Tensor, exact: Tensor, plain: Tensor) -> None:
    comparison = parity.compare(found, exact, parity.torch_error(plain, exact))
    assert comparison.ok, comparison.reason


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


@pytest.mark.parametrize("k", WIDTHS)
def test_rmsnorm(k: int) -> None:
    x, residual, weight = randn(5, k) * 3, randn(5, k + 1)[:, :k].contiguous(), randn(k)
    x[2] = 0
    x[3, 0] = NAN
    y, total = torch.full((5, k), NAN), torch.full((5, k), NAN)
    check(native().ap_rmsnorm(pointer(x), None, pointer(weight), 1e-5, 5, k, pointer(y), None, 2), "a norm")
    agrees(y, norm(x.double(), weight.double()), norm(x, weight))
    check(
        native().ap_rmsnorm(pointer(x), pointer(residual), pointer(weight), 1e-5, 5, k, pointer(y), pointer(total), 2),
        "a norm",
    )
    assert torch.equal(total.nan_to_num(7), (x + residual).nan_to_num(7))
    agrees(y, norm((x + residual).double(), weight.double()), norm(x + residual, weight))


@pytest.mark.parametrize("d", [2, 16, 22, 64, 128])
def test_rope(d: int) -> None:
    x, angle = randn(4, 3, d), randn(4, d // 2) * 100
    cos, sin = angle.cos(), angle.sin()

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        c, s = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    found = x.clone()
    check(native().ap_rope_(pointer(found), pointer(cos), pointer(sin), 4, 3, d), "a rotation")
    agrees(found, rotated(x.double()), rotated(x))


TORCH = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e4], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated(activation: str, scale: float) -> None:
    gate, up = randn(1001) * scale, randn(1002)[:1001].contiguous()
    gate[5], up[6], gate[7] = NAN, NAN, float("inf")
    gate[8], y = -float("inf"), torch.full((1001,), NAN)
    check(native().ap_gated(pointer(gate), pointer(up), ACTIVATIONS[activation], 1001, pointer(y), 2), "a product")
    plain, act = TORCH[activation](gate) * up, TORCH[activation]
    agrees(y, act(gate.double()) * up.double(), plain)


def attention(
    q: Tensor, keys: Tensor, values: Tensor, slots: list[int], starts: list[int], window: int, cap: float,
    sinks: Tensor,
) -> Tensor:  # fmt: skip
    out, group = torch.empty_like(q), q.shape[1] // keys.shape[1]
    for b, (slot, start) in enumerate(zip(slots, starts, strict=True)):
        first = max(start, slot - window + 1) if window else start
        k, v = (c[b, :, first : slot + 1].repeat_interleave(group, 0) for c in (keys, values))
        scores = torch.einsum("hd,hld->hl", q[b], k) * q.shape[2] ** -0.5
        scores = cap * torch.tanh(scores / cap) if cap else scores
        parts = torch.cat((scores, sinks.to(q.dtype)[:, None]), -1).softmax(-1)  # of sinks of -Inf: as without them
        out[b] = torch.einsum("hl,hld->hd", parts[:, :-1], v)
    return out


@pytest.mark.parametrize("cap", [0.0, 5.0], ids=["no-softcap", "softcap"])
@pytest.mark.parametrize("window", [0, 1, 70], ids=["all", "window1", "window70"])
@pytest.mark.parametrize("heads, kv_heads, d", [(9, 3, 64), (4, 4, 16), (6, 1, 22), (8, 2, 128)], ids=str)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["no-sinks", "sinks"])
def test_attention(heads: int, kv_heads: int, d: int, window: int, cap: float, with_sinks: bool) -> None:
    sinks = torch.linspace(-4, 9, heads) if with_sinks else torch.full((heads,), -float("inf"))
    slots, starts = [0, 63, 64, 200], [0, 0, 5, 130]
    q, keys, values = (
        randn(4, heads, d) * 2,
        randn(4, kv_heads, 201, d),
        randn(4, kv_heads, 202, d)[:, :, :201].contiguous(),
    )
    for b, slot in enumerate(slots):  # what lies outside must never be read
        keys[b, :, slot + 1 :] = values[b, :, slot + 1 :] = NAN
        keys[b, :, : starts[b]] = values[b, :, : starts[b]] = NAN
    out, at = torch.full_like(q, NAN), (torch.tensor(slots), torch.tensor(starts))
    call = Attention(
        pointer(q), pointer(keys), pointer(values), pointer(out), pointer(at[0]), pointer(at[1]),
        4, heads, kv_heads, d, keys.stride(0), keys.stride(1), window, d**-0.5, cap,
        pointer(sinks) if with_sinks else None,
    )  # fmt: skip
    check(native().ap_attention_run(byref(call), 2), "attention")
    exact = attention(q.double(), keys.double(), values.double(), slots, starts, window, cap, sinks)
    agrees(out, exact, attention(q, keys, values, slots, starts, window, cap, sinks))


def test_argmax() -> None:
    x = randn(1000)
    assert native().ap_argmax(pointer(x), 1000) == int(x.argmax())
    x[70] = x[500] = 9
    assert native().ap_argmax(pointer(x), 1000) == 70
    x[900] = NAN
    assert native().ap_argmax(pointer(x), 1000) == int(x.argmax()) == 900
