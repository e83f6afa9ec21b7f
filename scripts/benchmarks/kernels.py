"""Kernels that are timed: the weights of a 7B model, the float rule for every implementation, the clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from accelpatch.bench.timing import Timing, measure, measure_replays
from accelpatch.device import probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.check import parity

HIDDEN, MIDDLE = 4096, 11008
LAYER = (("qkv", 3 * HIDDEN, HIDDEN), ("o", HIDDEN, HIDDEN), ("gate_up", 2 * MIDDLE, HIDDEN), ("down", HIDDEN, MIDDLE))
HEADS = (("head", 32000, HIDDEN), ("head", 128256, HIDDEN))
BEYOND = 400e6  # bytes of weights in rotation: far more than the L2 cache holds


def rotation(n: int, k: int, bits: float) -> int:
    """Weights [n, k] of so many bits a value that lie beyond the cache together."""
    return max(2, int(BEYOND / (n * k * bits / 8)) + 1)


def timed(work: Callable[[], object], device: torch.device, repeats: int = 12, on_cpu: int = 5) -> Timing:
    """By graph replays on a GPU, else by so many calls."""
    if device.type == "cuda":
        return measure_replays(work, repeats)
    return measure(work, device=device, repeats=on_cpu)


def implementations(op: str, args: tuple[Any, ...], device: torch.device) -> list[str]:
    """Those that can run a call, the one that would be chosen first."""
    call, here = dispatch.kernel(op).spec(*args), probe(device)
    return [name for name in dispatch.order(op, call, here) if dispatch.why_not(op, name, call, here) is None]


def check(
    op: str, calls: Iterable[tuple[str, tuple[Any, ...]]], device: torch.device, only: Sequence[str] = ()
) -> None:
    """Hold every implementation that can run (of `only`) to the float rule; ends the program where one is over it."""
    bad, count, kernel = list[str](), 0, dispatch.kernel(op)
    for name, args in calls:
        for by in (one for one in kernel.implementations if not only or one in only):
            if dispatch.why_not(op, by, kernel.spec(*args), probe(device)) is not None:
                continue
            with dispatch.forced(by):
                made = kernel.op(*args)
            found = parity.check(op, args, (made,))[0]
            part = found.error / found.bound if found.bound else 0.0
            print(f"{op} by {by}, {name}: {part:.0%} of the float rule's bound", flush=True)
            bad, count = bad + [f"{op} by {by}, {name}: {found.reason}"] * (not found.ok), count + 1
    if bad:
        raise SystemExit("over the float rule, so nothing is timed:\n" + "\n".join(bad))
    print(f"{op}: {count} checks of parity passed", flush=True)
