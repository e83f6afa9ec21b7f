"""What an operation is made of: the Spec of a call, its implementations, its parity cases, and all of them together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from accelpatch.device import Device

Result = torch.Tensor | tuple[torch.Tensor, ...] | None


class Described:
    """Base of arguments that hold tensors, such as a fused linear layer.

    A choice is remembered for their `facts`: the object itself would keep its tensors alive.
    """

    @property
    def facts(self) -> Hashable:
        """All that a choice may depend on, without tensors."""
        raise NotImplementedError


@dataclass(frozen=True)
class Spec:
    """What an implementation must know about a call in advance.

    op: a key of TABLE. sizes: M, N, K etc. as ints. dtype: of the output (and of x, if there is one). scale_dtype: of a
    quantised weight's scale. group_size: values along K that share a scale (K itself: per channel). offset: "none",
    "zero_point" (integer) or "minimum" (float). options: what else a choice needs; a plan, which has no tensors, leaves
    out how they lie in memory, and what is left out fits.
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


Blocks = Iterator[tuple[slice, Callable[[], tuple[torch.Tensor, torch.Tensor | None]]]]


@dataclass(frozen=True)
class Kernel:
    """Everything that a kernel file provides for one operation.

    op: torch's custom operation; or a plain function, where arguments are written into or are no tensors (`registered`
    is then False).

    composed: its implementation `operations` runs other operations of the table, to which `forced` is passed on.

    blocks: for y = x @ w^T + bias: (arguments after x) -> blocks of rows, from the first row to the last: which, and a
    function that makes their w[n, K] and bias[n] in float64, equal to the reference's. Checking many calls with one
    weight then dequantises it once, never as a whole, and may leave blocks out.

    measured: names that were measured on this machine for a spec and a device, the fastest first; they go before the
    others of choice.TABLE.
    """

    op: Callable[..., Any]
    reference: Callable[..., Result]
    spec: Callable[..., Spec]
    implementations: Mapping[str, Implementation]
    cases: Callable[[], Iterable[Case]] = tuple
    blocks: Callable[..., Blocks] | None = None
    composed: bool = False
    measured: Callable[[Spec, Device], Sequence[str]] | None = None

    @property
    def registered(self) -> bool:
        """Whether `op` is torch's custom operation, with a fake kernel."""
        return hasattr(self.op, "custom")


def in_precision(args: Sequence[Any], precision: torch.dtype) -> tuple[Any, ...]:
    """The arguments with float tensors and float dtypes converted to `precision`; integers and 8-bit floats stay."""

    def convert(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return precision if _is_float(value) else value
        if isinstance(value, torch.Tensor) and _is_float(value.dtype):
            return value.to(precision)
        return value

    return tuple(convert(value) for value in args)


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1
