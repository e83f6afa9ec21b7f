"""Attention of several texts over pages: the native kernel and Triton's beside plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch import device as devices
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.ops.attention import paged_attention
from accelpatch.kernels.ops.attention.paged_attention import by_cpu, by_torch, by_triton, paged_attention_, reference_
from accelpatch.kernels.paged_rows import PagedRows
from tests.support.interpreted import DEVICE, HERE, _anywhere, here, interpret, needs_triton

__all__ = ["_anywhere"]
NAN, SPACE = float("nan"), 400
native = pytest.mark.skipif(
    native_library.why_not(devices.probe("cpu")) is not None or DEVICE.type != "cpu", reason="needs a C++ compiler"
)


@dataclass(frozen=True)
class Call:
    """new, past: tokens of each text. trash: rows of padding behind the last text; ring: new tokens take the places of
    the oldest cached ones, a lone one excepted."""

    new: tuple[int, ...]
    past: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    trash: int = 0
    ring: bool = False


CALLS = {
    "steps": Call((1, 1, 1, 1), (0, 5, 63, 130)),
    "prompts": Call((7, 33, 1), (0, 0, 0)),
    "mixed": Call((1, 20, 1, 3), (70, 9, 2, 64), 6, 1, 24),
    "runs of a prompt": Call((70, 2, 1), (30, 63, 64), 6, 2),
    "a long text": Call((20, 3, 1), (250, 9, 2)),
    "window": Call((1, 12, 1), (40, 7, 3), window=9),
    "ring": Call((1, 30, 5), (8, 8, 8), window=9, ring=True),
    "softcap": Call((1, 4), (70, 3), 9, 3, 64, softcap=5.0),
    "sinks": Call((2, 1), (0, 66), sinks=True),
    "padding": Call((1, 1, 0, 0), (6, 2, 0, 0), trash=5),
    "one": Call((1,), (300,), 8, 8, 80),
}


def made(call: Call, dtype: torch.dtype = torch.float32, strided: bool = False) -> tuple[Any, ...]:
    """The operation's arguments; what no text may read is NaN."""
    generator = torch.Generator().manual_seed(2)
    tokens = sum(call.new) + call.trash
    width = (call.heads + 2 * call.kv_heads) * call.size
    joined = torch.randn(tokens, width, generator=generator).to(dtype)
    parts = joined.view(tokens, -1, call.size).split((call.heads, call.kv_heads, call.kv_heads), 1)
    q, k, v = parts if strided else tuple(one.contiguous() for one in parts)
    keys, values = (torch.full((SPACE, call.kv_heads, call.size), NAN, dtype=dtype) for _ in range(2))
    order = torch.randperm(SPACE, generator=generator).tolist()
    trash, index, write, ends = order.pop(), list[int](), list[int](), [0]
    for new, past in zip(call.new, call.past, strict=True):
        held = [order.pop() for _ in range(past)]
        places = held[:new] if call.ring and new > 1 else [order.pop() for _ in range(new)]
        if call.ring and new > past:
            places = [trash] * (new - past) + held
        for one in (keys, values):
            one[held] = torch.randn(past, call.kv_heads, call.size, generator=generator).to(dtype)
        index += held + ([0] * new if call.ring else places)
        write += places
        ends.append(len(index))
    write += [trash] * call.trash
    starts = torch.tensor([0, *call.new]).cumsum(0).int()
    found = torch.tensor(index if any(call.past) else [], dtype=torch.int64)
    lengths = torch.tensor(ends).int()
    rows = PagedRows(*(one.to(DEVICE) for one in (starts, lengths, found, torch.tensor(write))), max(call.new))
    sinks = torch.randn(call.heads, generator=generator).to(dtype) if call.sinks else None
    tensors = [one.to(DEVICE) for one in (q, k, v, keys, values)]
    return *tensors, rows, call.size**-0.5, call.window, call.softcap, None if sinks is None else sinks.to(DEVICE)


def copied(args: tuple[Any, ...], precision: torch.dtype | None = None) -> tuple[Any, ...]:
    def one(value: Any) -> Any:
        return value.clone().to(precision or value.dtype) if isinstance(value, Tensor) else value

    return tuple(map(one, args))


def check(run: Callable[..., Tensor], args: tuple[Any, ...], count: int) -> None:
    """The float rule, and the same cache afterwards."""
    mine, plain, exact = copied(args), copied(args), copied(args, torch.float64)
    y, usual, due = run(*mine)[:count], reference_(*plain)[:count], reference_(*exact)[:count]
    unit = torch.finfo(y.dtype).eps * due.abs()
    assert y.isfinite().all()
    assert ((y.double() - due).abs() <= 2 * (usual.double() - due).abs().max() + unit).all()
    for kind in (3, 4):
        torch.testing.assert_close(mine[kind], plain[kind], rtol=0, atol=0, equal_nan=True)


@native
@pytest.mark.parametrize("call", CALLS.values(), ids=str)
def test_native(call: Call) -> None:
    args = made(call)
    assert dispatch.choose(paged_attention.OP, paged_attention.spec(*args), devices.probe("cpu")) == "cpu"
    check(by_cpu, args, sum(call.new))


@native
def test_prompts_by_the_native_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    long, prompts = [], paged_attention._prompts
    monkeypatch.setattr(paged_attention, "_prompts", lambda *args: (long.extend(args[-1]), prompts(*args))[1])
    for name in ("prompts", "a long text"):
        by_cpu(*made(CALLS[name]))
    assert [(one.last - one.first, one.past) for one in long] == [(20, 250)]


@pytest.mark.parametrize("name", CALLS)
def test_torch(name: str) -> None:
    check(by_torch, made(CALLS[name]), sum(CALLS[name].new))


@here
@pytest.mark.parametrize("strided", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize("name", CALLS)
def test_triton(name: str, strided: bool) -> None:
    check(by_triton, made(CALLS[name], strided=strided), sum(CALLS[name].new))


@here
def test_triton_in_half_precision() -> None:
    check(by_triton, made(CALLS["mixed"], torch.float16), sum(CALLS["mixed"].new))


@pytest.mark.skipif(HERE, reason="runs itself")
@needs_triton
def test_through_the_interpreter() -> None:
    interpret(__file__)


def test_bad_arguments() -> None:
    q, k, v, *rest = made(CALLS["steps"])
    with pytest.raises(KernelError, match="k and v are"):
        paged_attention_(q, k[:2], v, *rest)
    with pytest.raises(KernelError, match="behind each other"):
        paged_attention_(q, k, v, rest[0].transpose(1, 2).contiguous().transpose(1, 2), *rest[1:])
    with pytest.raises(KernelError, match="multiple"):
        paged_attention_(q[:, :3], k, v, *rest)


@native
def test_an_index_outside_of_the_pages() -> None:
    *tensors, rows, scaling, window, softcap, sinks = made(CALLS["steps"])
    rows.index[1] = SPACE
    with pytest.raises(KernelError, match="do not fit"):
        by_cpu(*tensors, rows, scaling, window, softcap, sinks)
