"""Marks operations, layers and modules in torch's profile while they run, by names that are looked up afterwards."""

from __future__ import annotations

import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.profiler import record_function

from accelpatch.errors import AccelpatchError
from accelpatch.kernels import regions
from accelpatch.kernels.regions import Recorder
from accelpatch.kernels.spec import Spec
from accelpatch.modules.replacement import OWN_HOOK
from accelpatch.profiling.work import Work, work
from accelpatch.runtime.generation.patched_model import RUNTIME

PROGRAM = "captured program"
OUTSIDE = "outside of the layers"
LAYER = re.compile(r"layer (\d+)")
SIZES = ("N", "K", "E", "I")


@dataclass(frozen=True)
class Region:
    """part: "layer 3", "head", or "" outside of any. operation: of dispatch.TABLE with its sizes, and a number from the
    second of a part on; a module's name, or "". work: None where it is none of dispatch.TABLE."""

    part: str
    operation: str
    work: Work | None = None

    @property
    def name(self) -> str:
        """As it is written in a trace."""
        return ": ".join(filter(None, (self.part, self.operation)))

    @property
    def layer(self) -> int | None:
        """The place of the layer, or None."""
        found = LAYER.match(self.part)
        return int(found[1]) if found else None


class _Local(threading.local):
    def __init__(self) -> None:
        self.parts: list[str] = []
        self.open: list[str] = []
        self.times: list[dict[str, int]] = [{}]  # of each part: operation -> how often it ran, for names that differ
        self.thread = threading.get_native_id()


class RegionRecorder(Recorder):
    """The regions of a run by their names.

    context: tokens in the cache in the middle of what is recorded. by_profiler: mark them in torch's profile of the
    CPU; else `noted` has them as (thread, begin, end, name), which costs less: torch then need not record the CPU.
    """

    def __init__(self, context: int, by_profiler: bool = True):
        self.context, self.by_profiler = context, by_profiler
        self.regions: dict[str, Region] = {}
        self._inside: dict[str, set[str]] = defaultdict(set)  # operation -> those that ran within it
        self._known: dict[Any, Region] = {}
        self.local = _Local()
        self.noted: list[tuple[int, int, int, str]] = []

    def operation(self, op: str, spec: Callable[..., Spec], args: Sequence[Any]) -> AbstractContextManager[None]:
        """As of regions.Recorder."""
        part = self.local.parts[-1] if self.local.parts else ""
        times = self.local.times[-1] if part else {}
        key = (part, op, *(one.shape if isinstance(one, Tensor) else id(one) for one in args[:3]))
        region = self._known.get(key) or self._known.setdefault(key, self._region(part, op, spec, args))
        times[region.operation] = number = times.get(region.operation, 0) + 1
        if number > 1:
            again = (key, number)
            region = self._known.get(again) or self._known.setdefault(
                again, replace(region, operation=f"{region.operation}, {number}")
            )
        return self._within(region)

    def _region(self, part: str, op: str, spec: Callable[..., Spec], args: Sequence[Any]) -> Region:
        made = work(op, spec, args, self.context)
        sizes = " x ".join(str(made.sizes[name]) for name in SIZES if name in made.sizes)
        rows = made.sizes.get("M", made.sizes.get("B", 1))
        said = " ".join(filter(None, (op, made.what, sizes, f"of {rows} rows" if rows > 1 else "")))
        return Region(part, said, made)

    def part(self, name: str) -> AbstractContextManager[None]:
        """As of regions.Recorder. Within a layer it is one of its modules."""
        parts = self.local.parts
        inside = bool(parts) and LAYER.match(parts[-1]) is not None and not LAYER.match(name)
        region = Region(parts[-1], name) if inside else Region(name, "")
        return self._within(region, region.part)

    def program(self) -> AbstractContextManager[None]:
        """As of regions.Recorder."""
        return self._within(Region("", PROGRAM))

    def note_inside(self, outer: str, inner: str) -> None:
        """Note that an operation ran within another."""
        self._inside[outer].add(inner)

    @property
    def composed(self) -> frozenset[str]:
        """Names of operations whose work is that of others inside of them: most of what they read is theirs."""
        return frozenset(name for name, inner in self._inside.items() if 2 * self._read(inner) > self._read([name]))

    def _read(self, names: Iterable[str]) -> int:
        return sum(one.bytes for name in names if (one := self.regions[name].work) is not None)

    def events(self, offset: int) -> list[dict[str, Any]]:
        """What was noted in its own clock, as events of a trace, and forget it. offset: nanoseconds of the trace's time
        less those of time.time_ns()."""
        noted, self.noted = self.noted, []
        return [
            {
                "ph": "X", "cat": "user_annotation", "name": name, "pid": os.getpid(), "tid": thread,
                "ts": (begin + offset) / 1e3, "dur": (end - begin) / 1e3,
            }
            for thread, begin, end, name in noted
        ]  # fmt: skip

    def _within(self, region: Region, part: str | None = None) -> AbstractContextManager[None]:
        self.regions.setdefault(region.name, region)
        return _Open(self, region, part)


class _Open(AbstractContextManager[None]):
    """A region while it is open. part: what it is the part of a model for the regions inside; None: no part."""

    __slots__ = ("_begin", "_mark", "_part", "_region", "_to")

    def __init__(self, to: RegionRecorder, region: Region, part: str | None):
        self._to, self._region, self._part = to, region, part
        self._mark = record_function(region.name) if to.by_profiler else None
        self._begin = 0

    def __enter__(self) -> None:
        local = self._to.local
        if self._part is not None:
            local.times.append(local.times[-1] if self._part in local.parts else {})
            local.parts.append(self._part)
        if self._region.work is not None:
            for outer in local.open:
                self._to.note_inside(outer, self._region.name)
            local.open.append(self._region.name)
        self._begin = time.time_ns()
        if self._mark is not None:
            self._mark.__enter__()

    def __exit__(self, *_: object) -> None:
        to, local = self._to, self._to.local
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
        else:
            to.noted.append((local.thread, self._begin, time.time_ns(), self._region.name))
        if self._region.work is not None:
            local.open.pop()
        if self._part is not None:
            local.parts.pop()
            local.times.pop()


@contextmanager
def recording(model: nn.Module, context: int, by_profiler: bool = True) -> Iterator[RegionRecorder]:
    """Context manager: what the model runs is marked in torch's profile, and in the RegionRecorder that it yields.

    Modules are marked by hooks that the runtime knows as its own, so that a patched model goes on with its fast paths.
    """
    if regions.recorder is not None:
        raise AccelpatchError("another profile is being recorded in this process: wait for its end")
    made = RegionRecorder(context, by_profiler)
    whole = [(model, "model")] if RUNTIME not in vars(model) else []  # a patched one would leave its fast loop for it
    hooks = [hook for module, name in [*whole, *_marked(model)] for hook in _hooks(made, module, name)]
    regions.recorder = made
    try:
        yield made
    finally:
        regions.recorder = None
        for hook in hooks:
            hook.remove()


def _marked(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Layers, the modules just inside of them, and modules with weights outside of layers; each with its name."""
    stacks = [one for one in model.modules() if isinstance(one, nn.ModuleList) and len(one) > 0]
    inner = {id(within) for one in stacks for within in one.modules() if within is not one}
    stacks = [one for one in stacks if id(one) not in inner]
    largest = max(map(len, stacks), default=0)
    layers = next((one for one in reversed(stacks) if len(one) == largest), nn.ModuleList())
    found = [(layer, f"layer {place}") for place, layer in enumerate(layers)]
    found += [(child, name) for layer in layers for name, child in layer.named_children()]
    outside = [
        one for one in model.named_modules()
        if id(one[1]) not in inner and one[1] is not model and not list(one[1].children())
    ]  # fmt: skip
    return found + [(module, name.rpartition(".")[2]) for name, module in outside]


def _hooks(to: RegionRecorder, module: nn.Module, name: str) -> list[Any]:
    opened: list[AbstractContextManager[None]] = []

    def before(*_: Any) -> None:
        region = to.part(name)
        region.__enter__()
        opened.append(region)

    def after(*_: Any) -> None:
        if opened:
            opened.pop().__exit__(None, None, None)

    for hook in (before, after):
        setattr(hook, OWN_HOOK, True)
    return [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]
