"""Times the implementations of each operation that a patched model calls, and stores those faster than the default."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from accelpatch.bench.timing import measure, measure_replays
from accelpatch.device import Device
from accelpatch.errors import CompileError, KernelError
from accelpatch.kernels import choice, dispatch, measured
from accelpatch.kernels.check import parity
from accelpatch.kernels.spec import Result, Spec

GAIN = 1.02  # the default stays unless another is faster by this factor, in two measurements
SECONDS, REPEATS = 0.1, (5, 50)  # of one implementation and call: about this long, between these numbers of runs
FAILURES = (CompileError, KernelError, RuntimeError, TypeError, ImportError)
APART = ("flash_attention",)  # operations that `tune attention` measures


@dataclass(frozen=True)
class Call:
    """One call of an operation that the model makes."""

    spec: Spec
    args: tuple[Any, ...]

    @property
    def rows(self) -> int:
        return self.spec.sizes.get(choice.rows_of(self.spec.op), 1)

    @property
    def key(self) -> tuple[str, int]:
        return measured.call_key(self.spec), self.rows


@dataclass
class Timed:
    """A measured call. seconds: name -> median. refused: name -> why it is not considered. default: what runs without
    measurements. chosen: what runs from now on."""

    op: str
    sizes: dict[str, int]
    rows: int
    default: str
    chosen: str
    seconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        """The default's time over that of what was chosen; 1 where the default stays."""
        return self.seconds[self.default] / self.seconds[self.chosen] if self.chosen in self.seconds else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self) | {"gain": self.gain}


@contextmanager
def recorded(calls: dict[tuple[str, int], Call]) -> Iterator[None]:
    """Context manager: adds each new call of a registered operation with several implementations to `calls`."""

    def observer(op: str, args: Sequence[Any], result: Result) -> None:
        entry = dispatch.kernel(op)
        if op in APART or len(dispatch.implementations_of(op)) < 2:
            return
        call = Call(entry.spec(*args), tuple(args))
        calls.setdefault(call.key, call)

    with dispatch.observed(observer):
        yield


def tune(
    calls: Sequence[Call], device: Device, *, budget: float, store: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Timed]:  # fmt: skip
    """Time each call's implementations and store where another than the default is faster.

    budget: seconds after which no further call is measured; the others keep their implementation. Raises CacheError.
    """
    end, found, faster, tried = time.monotonic() + budget, [], [], []
    for done, call in enumerate(calls):
        if time.monotonic() >= end:
            break
        one = timed(call, device)
        if one is not None:
            found.append(one)
            tried.append(call.key)
            if one.chosen != one.default:
                faster.append(measured.Faster(*call.key, one.chosen, one.gain))
        if progress is not None:
            progress("tune", done + 1, len(calls))
    if store and tried:
        measured.store(device, faster, tried)
        dispatch.forget()
    return found


def timed(call: Call, device: Device) -> Timed | None:
    """Time one call; None where there is no choice. An implementation that is wrong or fails does not count."""
    op, spec = call.spec.op, call.spec
    order = choice.row(op, spec, device).order
    able = {name: dispatch.why_not(op, name, spec, device) for name in dispatch.implementations_of(op)}
    default = next((name for name in order if name in able and able[name] is None), None)
    if default is None or sum(reason is None for reason in able.values()) < 2:
        return None
    made = Timed(op, dict(spec.sizes), call.rows, default, default)
    made.refused = {name: reason for name, reason in able.items() if reason is not None}
    for name in [default, *(name for name in able if name != default and able[name] is None)]:
        reason = _add(made, call, name)
        if reason:
            made.refused[name] = reason
    if default not in made.seconds:
        return None
    best = min(made.seconds, key=made.seconds.__getitem__)
    if best != default and made.seconds[default] >= GAIN * made.seconds[best]:
        again = {name: _seconds(call, name) for name in (default, best)}
        if again[default] >= GAIN * again[best]:
            made.seconds |= {name: max(made.seconds[name], again[name]) for name in (best,)}
            made.seconds[default] = min(made.seconds[default], again[default])
            made.chosen = best if made.seconds[default] >= GAIN * made.seconds[best] else default
    return made


def _add(made: Timed, call: Call, name: str) -> str | None:
    """Time one implementation; returns why it does not count."""
    try:
        if (reason := _wrong(call, name)) is not None:
            return reason
        made.seconds[name] = _seconds(call, name)
    except FAILURES as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None


def _wrong(call: Call, name: str) -> str | None:
    outputs = parity.as_tuple(dispatch.implementations_of(call.spec.op)[name].run(*call.args))
    found = parity.compare_all(parity.against_references(call.spec.op, call.args, outputs))
    bad = next((one for one in found if not one.ok), None)
    return None if bad is None else f"its output is wrong: {bad.reason or bad.error}"


def _seconds(call: Call, name: str) -> float:
    """The median time of a call."""
    run = dispatch.implementations_of(call.spec.op)[name].run
    place = next(one.device for one in call.args if isinstance(one, Tensor))
    with torch.no_grad():
        if place.type == "cuda":
            return measure_replays(lambda: run(*call.args)).median
        first = measure(lambda: run(*call.args), device=place, repeats=1).median
        repeats = max(REPEATS[0], min(REPEATS[1], int(SECONDS / first)))
        return measure(lambda: run(*call.args), device=place, repeats=repeats, warmup=2).median
