"""Cases of flash_attention for parity checks: odd sizes, grouped heads, windows, padding, packed sequences, biases."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accelpatch.kernels.spec import Case


@dataclass(frozen=True)
class Call:
    """Sizes and kinds of a call. hidden: "", "left", "right" (padding), "packed" or "none" (one query sees nothing).
    bias: "", "bool", "float"."""

    b: int = 1
    heads: int = 2
    kv_heads: int = 1
    length: int = 7
    keys: int = 7
    size: int = 64
    causal: bool = True
    window: int = 0
    softcap: float = 0.0
    hidden: str = ""
    bias: str = ""
    sinks: bool = False


CALLS = {
    "one-key": Call(2, 2, 2, 1, 1, 16),
    "grouped": Call(2, 4, 2, 7, 7, 64),
    "no-queries": Call(length=0, keys=5),
    "step": Call(2, 4, 1, 3, 33, 80, window=9),
    "continued": Call(length=19, keys=70, size=96),
    "all": Call(length=33, keys=65, causal=False, size=40),
    "window": Call(length=70, keys=70, window=20, size=32),
    "left": Call(3, 2, 2, 37, 37, 32, hidden="left"),
    "right": Call(3, 2, 1, 37, 37, 32, causal=False, hidden="right"),
    "packed": Call(2, 2, 2, 129, 129, 64, hidden="packed", window=50),
    "sees-nothing": Call(2, 2, 1, 17, 40, 64, hidden="none", sinks=True),
    "softcap-and-sinks": Call(2, 4, 2, 21, 21, 128, softcap=3.0, sinks=True),
    "bool": Call(2, 2, 1, 20, 50, 32, causal=False, bias="bool"),
    "step-far": Call(1, 8, 2, 3, 930, 48, window=100, hidden="none"),
    "float": Call(2, 2, 2, 20, 20, 64, bias="float", window=6),
}


def ranges_of(call: Call, generator: torch.Generator) -> Tensor | None:
    """ranges[B, L, 2] of the kind `hidden`."""
    if not call.hidden:
        return None
    row = torch.arange(call.length).expand(call.b, -1) + call.keys - call.length
    high = row + 1 if call.causal else torch.full_like(row, call.keys)
    low = torch.zeros_like(row)
    # of each row of the batch another one, the first without any
    padding = torch.arange(call.b)[:, None] * (call.length // 4)
    if call.hidden == "left":
        low = low + padding
    elif call.hidden == "right":
        high = torch.minimum(high, call.keys - padding)
    elif call.hidden == "packed":
        starts = torch.randperm(call.length, generator=generator)[: max(1, call.length // 20)].sort().values
        low = torch.where(row[..., None] >= starts, starts, 0).amax(-1)
    else:
        low, high = low + 3, torch.where(row % 5 == 0, low, high)
    return torch.stack((low, high), -1).to(torch.int32)


def made(call: Call, generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
    """Random arguments of a call."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    q = random(call.b, call.heads, call.length, call.size)
    k, v = (random(call.b, call.kv_heads, call.keys, call.size) for _ in range(2))
    ranges, bias = ranges_of(call, generator), None
    if call.bias == "bool":
        bias = (torch.rand(call.b, 1, call.length, call.keys, generator=generator) > 0.3).to(device)
        bias[:, :, :1] = False  # the first query sees nothing
    elif call.bias == "float":
        bias = random(1, call.heads, call.length, call.keys)
    sinks = random(call.heads) if call.sinks else None
    scaling = call.size**-0.5
    return (q, k, v, None if ranges is None else ranges.to(device), bias, sinks, call.causal, call.window,
            call.softcap, scaling)  # fmt: skip


def cases() -> list[Case]:
    """One Case for each of CALLS."""

    def case(name: str, call: Call) -> Case:
        return Case(name, lambda generator, dtype, device: made(call, generator, dtype, device))

    return [case(name, call) for name, call in CALLS.items()]
