"""Chooses the implementation of an operation: the first in a literal table whose `why_not` has no reason against it.

Each implementation states its own limits, so that a plan can print them and an error can list them all. Implementations
take the operation's canonical tensors. One that needs another weight layout takes it as an additional optional tensor,
made from the canonical ones and held by the module.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from accelpatch.device import Device, probe
from accelpatch.errors import KernelError

#: operation -> (file in ops/, implementations in order of preference)
TABLE: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "gemv": ("gemv", ("hip", "torch")),
    "int8_linear": ("int8_linear", ("hip", "triton", "torch")),
    "int4_linear": ("int4_linear", ("torch",)),
    "tiled_int4_linear": ("tiled_int4_linear", ("hip", "triton", "torch")),
    "compact_linear": ("compact_linear", ("hip", "torch")),
    "fp8_linear": ("fp8_linear", ("hip", "torch")),
    "int8_embedding": ("int8_embedding", ("torch",)),
    "packed_linear": ("packed_linear", ("cpu", "torch")),
    "packed_embedding": ("packed_linear", ("cpu", "torch")),
    "rmsnorm": ("rmsnorm", ("triton", "torch")),
    "add_rmsnorm": ("rmsnorm", ("triton", "torch")),
    "rmsnorm_add": ("rmsnorm", ("triton", "torch")),
    "rotary_cos_sin": ("rope", ("triton", "torch")),
    "gated_activation": ("gated_activation", ("triton", "torch")),
}
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

#: (operation, implementation) -> how often it ran in this process; tests read it to know that a kernel really ran
calls: Counter[tuple[str, str]] = Counter()

Result = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Spec:
    """What an implementation must know about a call in advance.

    op: a key of TABLE. sizes: M, N, K etc. as ints. dtype: of the output (and of x, if there is one). scale_dtype: of a
    quantised weight's scale. group_size: values along K that share a scale (K itself: per channel). offset: "none",
    "zero_point" (integer) or "minimum" (float).
    """

    op: str
    sizes: Mapping[str, int]
    dtype: torch.dtype
    scale_dtype: torch.dtype | None = None
    group_size: int | None = None
    offset: str = "none"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Implementation:
    """run: takes the operation's arguments. why_not: why it cannot run a spec on a device, or None."""

    run: Callable[..., Result]
    why_not: Callable[[Spec, Device], str | None]


@dataclass(frozen=True)
class Case:
    """One parity check: `make(generator, dtype, device)` returns the operation's arguments."""

    id: str
    make: Callable[[torch.Generator, torch.dtype, torch.device], tuple[Any, ...]]


@dataclass(frozen=True)
class Kernel:
    """Everything that a kernel file provides for one operation.

    blocks: for y = x @ w^T + bias: (arguments after x) -> blocks of w[n, K] and bias[n] in float64, from the first row
    to the last, equal to the reference's. Checking many calls with one weight then dequantises it once, and never as a
    whole.
    """

    op: Callable[..., Result]
    reference: Callable[..., Result]
    spec: Callable[..., Spec]
    implementations: Mapping[str, Implementation]
    cases: Callable[[], Iterable[Case]]
    blocks: Callable[..., Iterable[tuple[torch.Tensor, torch.Tensor | None]]] | None = None


@dataclass(frozen=True)
class _Forced:
    name: str
    precision: torch.dtype | None


class _Local(threading.local):
    forced: _Forced | None = None
    observer: Callable[[str, Sequence[Any], Result], None] | None = None


_local = _Local()


def kernel(op: str) -> Kernel:
    """The Kernel of an operation. Raises KernelError for a name that is not in TABLE."""
    if op not in TABLE:
        raise KernelError(f"there is no operation {op!r}; the operations are {', '.join(TABLE)}")
    file, _ = TABLE[op]
    kernels: Mapping[str, Kernel] = import_module(f"accelpatch.kernels.ops.{file}").KERNELS
    return kernels[op]


def why_not(op: str, name: str, spec: Spec, device: Device) -> str | None:
    """Why the named implementation cannot run `spec` on `device`; None where it can."""
    implementations = kernel(op).implementations
    if name not in implementations:
        return f"there is no implementation {name!r} of {op} (there are: {', '.join(implementations)}, reference)"
    return implementations[name].why_not(spec, device)


def choose(op: str, spec: Spec, device: Device) -> str:
    """Name of the first implementation that can run `spec`.

    Pure: allocates and compiles nothing, and `device` need not be present. Raises KernelError with every reason.
    """
    reasons = []
    entry = kernel(op)
    for name in TABLE[op][1]:
        reason = entry.implementations[name].why_not(spec, device)
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
    before, _local.forced = _local.forced, _Forced(name, precision)
    try:
        yield
    finally:
        _local.forced = before


@contextmanager
def observed(observer: Callable[[str, Sequence[Any], Result], None]) -> Iterator[None]:
    """Context manager: `observer(op, args, result)` is called after every operation in this thread."""
    before, _local.observer = _local.observer, observer
    try:
        yield
    finally:
        _local.observer = before


def watched() -> bool:
    """Whether this thread is within `forced` or `observed`, as during verification."""
    return _local.forced is not None or _local.observer is not None


def run(op: str, spec: Callable[..., Spec], device: torch.device, args: Sequence[Any]) -> Result:
    """Run the chosen (or forced) implementation of `op`, with autocast disabled.

    spec: makes the Spec from `args`, or raises for arguments that do not fit; called once per set of shapes.
    """
    if torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            return _run(op, spec, device, args)
    return _run(op, spec, device, args)


def _run(op: str, spec: Callable[..., Spec], device: torch.device, args: Sequence[Any]) -> Result:
    force = _local.forced
    if force is not None and force.name == "reference":
        spec(*args)
        calls[op, "reference"] += 1
        return _reference(op, args, force.precision)
    name, implementation = _chosen(op, spec, device, args) if force is None else _forced(op, spec(*args), device, force)
    calls[op, name] += 1
    result = implementation(*args)
    if _local.observer is not None:
        _local.observer(op, args, result)
    return result


def _forced(op: str, spec: Spec, device: torch.device, force: _Forced) -> tuple[str, Callable[..., Result]]:
    reason = why_not(op, force.name, spec, probe(device))
    if reason is not None:
        raise KernelError(f"{op}: the forced implementation {force.name!r} cannot run here: {reason}")
    return force.name, kernel(op).implementations[force.name].run


#: (operation, shapes, dtypes, devices and plain values of its arguments) -> what was chosen for them
_selected: dict[tuple[Any, ...], tuple[str, Kernel]] = {}
MAX_SELECTED = 4096  # the table is then cleared: a program with ever new shapes must not fill the memory


def _chosen(
    op: str, spec: Callable[..., Spec], device: torch.device, args: Sequence[Any]
) -> tuple[str, Callable[..., Result]]:
    facts = (op, *[(a.shape, a.dtype, a.device) if isinstance(a, torch.Tensor) else a for a in args])
    found = _selected.get(facts)
    if found is None:
        found = choose(op, spec(*args), probe(device)), kernel(op)
        if len(_selected) >= MAX_SELECTED:
            _selected.clear()
        _selected[facts] = found
    name, entry = found
    return name, entry.implementations[name].run


def _reference(op: str, args: Sequence[Any], precision: torch.dtype | None) -> Result:
    """The reference computed in `precision`, its outputs rounded to their usual dtypes."""
    reference = kernel(op).reference
    if precision is None:
        return reference(*args)
    dtypes, result = output_dtypes(op, args), reference(*in_precision(args, precision))
    if isinstance(result, torch.Tensor):
        return result.to(dtypes[0])
    return tuple(tensor.to(dtype) for tensor, dtype in zip(result, dtypes, strict=True))


def in_precision(args: Sequence[Any], precision: torch.dtype) -> tuple[Any, ...]:
    """The arguments with float tensors and float dtypes converted to `precision`; integers stay."""

    def convert(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return precision
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.to(precision)
        return value

    return tuple(convert(value) for value in args)


def output_dtypes(op: str, args: Sequence[Any]) -> tuple[torch.dtype, ...]:
    """The output dtypes of `op` for these arguments, from its fake kernel, without computing anything."""
    meta = tuple(value.to("meta") if isinstance(value, torch.Tensor) else value for value in args)
    result = kernel(op).op(*meta)
    return tuple(tensor.dtype for tensor in ((result,) if isinstance(result, torch.Tensor) else result))


def anywhere(spec: Spec, device: Device) -> str | None:
    """The `why_not` of implementations in plain torch, which run every spec on every device."""
    return None


def require(holds: bool, op: str, message: str) -> None:
    """Raise KernelError(message) unless `holds`."""
    if not holds:
        raise KernelError(f"{op}: {message}")
