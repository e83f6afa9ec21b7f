"""Runs an operation by the first implementation in its order (choice.py) that has no reason against the call.

Each implementation states its own limits, so that a plan can print them and an error can list them all. All take the
operation's canonical tensors; another weight layout is an additional optional tensor, which the module keeps.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch

from accelpatch.device import Device, probe
from accelpatch.errors import CompileError, KernelError
from accelpatch.kernels import added, choice, regions, uncompiled
from accelpatch.kernels import measured as tuned
from accelpatch.kernels.arguments import FLOATS
from accelpatch.kernels.spec import Described, Implementation, Kernel, Result, Spec, in_precision
from accelpatch.kernels.table import TABLE as TABLE

_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled  # on any device; much cheaper than for one

#: (operation, implementation) -> how often Python ran it in this process; replays of a captured graph are not counted
calls: Counter[tuple[str, str]] = Counter()

#: (name, value) pairs that a choice depends on besides shapes, dtypes and devices; they become options of the Spec
Facts = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class _Watch:
    """What a thread is within. name, precision: of `forced`. observer: of `observed`."""

    name: str | None = None
    precision: torch.dtype | None = None
    observer: Callable[[str, Sequence[Any], Result], None] | None = None


class _Local(threading.local):
    watch: _Watch | None = None


_local = _Local()


def kernel(op: str) -> Kernel:
    """The Kernel of an operation. Raises KernelError for a name that is not in TABLE."""
    if op not in TABLE:
        raise KernelError(f"there is no operation {op!r}; the operations are {', '.join(TABLE)}")
    kernels: Mapping[str, Kernel] = import_module(f"accelpatch.kernels.ops.{TABLE[op]}").KERNELS
    return kernels[op]


def implementations_of(op: str) -> Mapping[str, Implementation]:
    """The implementations of an operation by name, ours and those that a user added."""
    own = kernel(op).implementations
    return {**own, **{name: one.implementation for name, one in more.items()}} if (more := added.of(op)) else own


def why_not(op: str, name: str, spec: Spec, device: Device) -> str | None:
    """Why the named implementation cannot run `spec` on `device`; None where it can."""
    implementations = implementations_of(op)
    if name not in implementations:
        return f"there is no implementation {name!r} of {op} (there are: {', '.join(implementations)}, reference)"
    return uncompiled.reason(name, spec, device) or implementations[name].why_not(spec, device)


def order(op: str, spec: Spec, device: Device) -> Sequence[str]:
    """The implementations to try for `spec`: a user's, those measured on this machine, those of choice.TABLE."""
    entry, listed = kernel(op), choice.row(op, spec, device).order
    measured = () if entry.measured is None else (name for name in entry.measured(spec, device) if name in listed)
    faster = tuned.preferred(spec, device) if entry.registered else ()
    return tuple(dict.fromkeys((*added.first(op, spec), *faster, *measured, *listed)))


def choose(op: str, spec: Spec, device: Device) -> str:
    """Name of the first implementation, in the order of preference, that can run `spec`.

    Pure: allocates and compiles nothing, and `device` need not be present. Raises KernelError with every reason.
    """
    reasons = []
    for name in order(op, spec, device):
        reason = why_not(op, name, spec, device)
        if reason is None:
            return name
        reasons.append(f"  {name}: {reason}")
    sizes = ", ".join(f"{key} = {value}" for key, value in spec.sizes.items())
    raise KernelError(
        f"no implementation of {op} runs {spec.dtype} with {sizes} on {device.name}:\n"
        + "\n".join(reasons)
        + "\nkeep this site in the recipe (replace: keep), or use another dtype"
    )


@contextmanager
def forced(name: str, precision: torch.dtype | None = None) -> Iterator[None]:
    """Context manager: every operation in this thread runs the implementation `name`.

    "reference" runs the plain torch reference; with `precision` (a float dtype) it computes in that and rounds the
    output to its usual dtype. Raises KernelError, with the reason, for an operation that the implementation cannot run.
    """
    if precision is not None and (name != "reference" or precision not in FLOATS):
        raise KernelError(f"precision is a float dtype and for 'reference' alone, not {precision} for {name!r}")
    with _watching(name=name, precision=precision):
        yield


@contextmanager
def observed(observer: Callable[[str, Sequence[Any], Result], None]) -> Iterator[None]:
    """Context manager: `observer(op, args, result)` is called after every registered operation in this thread."""
    with _watching(observer=observer):
        yield


@contextmanager
def _watching(**changes: Any) -> Iterator[None]:
    before = _local.watch
    _local.watch = replace(before or _Watch(), **changes)
    try:
        yield
    finally:
        _local.watch = before


def watched() -> bool:
    """Whether this thread is within `forced` or `observed`, as during verification."""
    return _local.watch is not None


def run(op: str, spec: Callable[..., Spec], device: torch.device, args: Sequence[Any], facts: Facts = ()) -> Any:
    """Run the chosen (or forced) implementation of `op`, with autocast disabled; returns its Result. Where the chosen
    one turns out not to compile, the next one runs, from then on.

    spec: makes the Spec from `args`, or raises for arguments that do not fit; called once per set of shapes. facts: how
    tensors lie in memory, where an implementation depends on it.
    """
    try:
        if _any_autocast() and torch.is_autocast_enabled(device.type):
            with torch.autocast(device.type, enabled=False):
                return _run(op, spec, device, args, facts)
        return _run(op, spec, device, args, facts)
    except CompileError as error:
        if _local.watch is not None and _local.watch.name not in (None, "operations"):
            raise  # it is forced
        key, _ = _chosen(op, spec, device, args, facts)
        calls[key] -= 1
        uncompiled.remember(key[1], _with_facts(spec(*args), facts), probe(device), str(error))
        forget()
    return run(op, spec, device, args, facts)


def _run(op: str, spec: Callable[..., Spec], device: torch.device, args: Sequence[Any], facts: Facts) -> Result:
    if _local.watch is not None:
        return _run_watched(op, spec, device, args, facts, _local.watch)
    key, implementation = _chosen(op, spec, device, args, facts)
    calls[key] += 1
    if regions.recorder is not None:
        return regions.run(regions.recorder, op, spec, args, implementation.run)
    return implementation.run(*args)


def _run_watched(
    op: str, spec: Callable[..., Spec], device: torch.device, args: Sequence[Any], facts: Facts, watch: _Watch
) -> Result:
    entry = kernel(op)
    if watch.name is None:
        name = _chosen(op, spec, device, args, facts)[0][1]
    else:
        name = _forced(entry, watch.name, _with_facts(spec(*args), facts), device)
    calls[op, name] += 1
    if name == "reference":
        return _reference(op, args, watch.precision)
    result = implementations_of(op)[name].run(*args)
    if name in added.of(op):
        added.check_result(op, name, _as_tuple(result), _outputs(op, args))
    if watch.observer is not None and entry.registered:  # of any other the arguments are no longer what they were
        watch.observer(op, args, result)
    return result


def _forced(entry: Kernel, name: str, spec: Spec, device: torch.device) -> str:
    """The implementation to run under `forced(name)`. Raises KernelError where it cannot run."""
    if entry.composed and name not in entry.implementations:
        return "operations"  # which are forced themselves
    if name == "operations" and name not in entry.implementations:
        return choose(spec.op, spec, probe(device))  # one of those that a composed one runs
    reason = None if name == "reference" else why_not(spec.op, name, spec, probe(device))
    if reason is not None:
        raise KernelError(f"{spec.op}: the forced implementation {name!r} cannot run here: {reason}")
    return name


def _with_facts(spec: Spec, facts: Facts) -> Spec:
    return replace(spec, options={**spec.options, **dict(facts)}) if facts else spec


#: (operation, facts, shapes, dtypes, devices and plain values of its arguments) -> what was chosen for them
_selected: dict[tuple[Any, ...], tuple[tuple[str, str], Implementation]] = {}
MAX_SELECTED = 4096  # the table is then cleared: a program with ever new shapes must not fill the memory


def _chosen(
    op: str, spec: Callable[..., Spec], device: torch.device, args: Sequence[Any], facts: Facts
) -> tuple[tuple[str, str], Implementation]:
    key = (op, facts, *[(a.shape, a.dtype, a.device) if isinstance(a, torch.Tensor) else
                        a.facts if isinstance(a, Described) else a for a in args])  # fmt: skip
    found = _selected.get(key)
    if found is None:
        name = choose(op, _with_facts(spec(*args), facts), probe(device))
        found = (op, name), implementations_of(op)[name]
        if len(_selected) >= MAX_SELECTED:
            _selected.clear()
        _selected[key] = found
    return found


def forget() -> None:
    """Choose anew for every call: what a choice depends on has changed."""
    _selected.clear()


def _reference(op: str, args: Sequence[Any], precision: torch.dtype | None) -> Result:
    """The reference computed in `precision`, its outputs rounded to their usual dtypes."""
    entry = kernel(op)
    if precision is None:
        return entry.reference(*args)
    if not entry.registered:
        reason = "it writes into its arguments or takes others than tensors, so that it runs in their precision alone"
        raise KernelError(f"{op}: the reference cannot run in {precision}: {reason}")
    dtypes, result = output_dtypes(op, args), entry.reference(*in_precision(args, precision))
    outputs = tuple(tensor.to(dtype) for tensor, dtype in zip(_as_tuple(result), dtypes, strict=True))
    return outputs if isinstance(result, tuple) else outputs[0]


def _as_tuple(result: Result) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else () if result is None else (result,)


def output_dtypes(op: str, args: Sequence[Any]) -> tuple[torch.dtype, ...]:
    """The output dtypes of `op` for these arguments, from its fake kernel, without computing anything."""
    return tuple(tensor.dtype for tensor in _outputs(op, args))


def _outputs(op: str, args: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    """The outputs of `op` on the meta device."""
    return _as_tuple(kernel(op).op(*(value.to("meta") if isinstance(value, torch.Tensor) else value for value in args)))


def anywhere(spec: Spec, device: Device) -> str | None:
    """The `why_not` of implementations in plain torch, which run every spec on every device."""
    return None
