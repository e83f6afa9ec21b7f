"""Binding of the device library's experts for few tokens: two launches from tensors; see experts.h."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from accelpatch.device import Device, probe
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.compiling.gpu_libraries import CODES
from accelpatch.kernels.hip import binding
from accelpatch.kernels.hip.binding import ACTIVATION, NORM, GemvArgs
from accelpatch.kernels.layouts.expert_stack import Stack
from accelpatch.kernels.layouts.int4_tiles import ONE_GROUP, places
from accelpatch.kernels.triton.launch import on_device

MOST_CHOSEN = 64  # experts of a token
MOST_SCORES = 1024  # experts that a kernel chooses from
MOST_NORMED = 16384  # values of x under a norm, all of which a block stages at once
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of weights and logits, numbered as in the C interface


class ExpertArgs(ctypes.Structure):
    """Mirror of ``ExpertArgs`` in experts.h."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("ids", "weights", "logits")]
        + [(name, ctypes.c_int64) for name in ("tokens", "chosen", "experts")]
        + [(name, ctypes.c_int32) for name in ("ids_are_64", "weight_type", "down", "normalise", "narrow")]
    )


class Routing(Protocol):
    """Which experts the tokens go to."""

    @property
    def chosen(self) -> int:
        """Experts of a token."""

    def ready(self) -> Routing:
        """The same in what the kernels read."""

    def arguments(self) -> dict[str, int]:
        """Fields of ExpertArgs. All tensors contiguous."""


class Given(NamedTuple):
    """ids[T, k] int64 or int32, and weights[T, k] of WEIGHTS."""

    ids: Tensor
    weights: Tensor

    @property
    def chosen(self) -> int:
        return self.ids.shape[1]

    def ready(self) -> Given:
        weights = self.weights if self.weights.dtype in WEIGHTS else self.weights.float()
        return Given(self.ids.contiguous(), weights.contiguous())

    def arguments(self) -> dict[str, int]:
        return {
            "ids": self.ids.data_ptr(), "weights": self.weights.data_ptr(),
            "ids_are_64": int(self.ids.dtype == torch.int64), "weight_type": WEIGHTS.index(self.weights.dtype),
        }  # fmt: skip


class Chosen(NamedTuple):
    """logits[T, E] of WEIGHTS, from which the kernels choose; see ops/experts/choose_experts.py."""

    logits: Tensor
    chosen: int
    normalise: bool
    narrow: bool

    def ready(self) -> Chosen:
        return self._replace(logits=self.logits.contiguous())

    def arguments(self) -> dict[str, int]:
        return {
            "logits": self.logits.data_ptr(), "weight_type": WEIGHTS.index(self.logits.dtype),
            "normalise": int(self.normalise), "narrow": int(self.narrow),
        }  # fmt: skip


class Norm(NamedTuple):
    """The RMSNorm of x: weight[H] in x's dtype, contiguous."""

    weight: Tensor
    eps: float
    plus_one: bool


class Launch(NamedTuple):
    """One launch: the function and variant of its library, its arguments, and its format argument, a group size."""

    function: str
    variant: str
    gemv: GemvArgs
    experts: ExpertArgs
    form: int


def function_of(group: int) -> str:
    """The function of the device library for groups of a size."""
    return {32: "experts_int4_32", 64: "experts_int4_64"}.get(group, "experts_int4")


def experts(
    x: Tensor, routing: Routing, up: Stack, down: Stack, residual: Tensor | None, norm: Norm | None = None
) -> Tensor:
    """y[T, H] of x[T, H] by Stacks in tiles, with silu; as the operation, of norm(x) where there is a norm.

    Raises KernelError for a refused launch.
    """
    y, h = x.new_empty(x.shape), x.new_empty((len(x), routing.chosen * up.n // 2))
    if not len(x) or not routing.chosen:
        return y.zero_() if residual is None else y.copy_(residual)
    x, routing = x.contiguous(), routing.ready()
    up, down = (
        Stack(*(None if part is None else part.contiguous() for part in one))  # type: ignore[arg-type]
        for one in (up, down)
    )
    residual_or_none = None if residual is None else residual.contiguous()
    normed = None if norm is None else norm._replace(weight=norm.weight.contiguous())
    with on_device(x):
        for one in launches(x, routing, up, down, h, y, residual_or_none, normed):
            entry = _entry(one.function, x.dtype, one.variant, probe(x.device))
            args = (ctypes.byref(one.gemv), ctypes.byref(one.experts), binding.DTYPES.index(x.dtype), one.form)
            binding.check(entry(*args, binding.stream_of(x)), f"accelpatch_{one.function}")
    return y


def launches(
    x: Tensor, routing: Routing, up: Stack, down: Stack, h: Tensor, y: Tensor, residual: Tensor | None,
    norm: Norm | None = None,
) -> Iterator[Launch]:  # fmt: skip
    """Gate and up into h[T, k I], and down into y; all tensors contiguous.

    Both may begin before the kernel before them has ended: the first waits for it before all else.
    """
    (tokens, width), chosen = x.shape, routing.chosen
    routing_arguments: dict[str, Any] = routing.arguments() | {"tokens": tokens, "chosen": chosen, "experts": len(up.w)}
    for stack, source, into, n, k in (
        (up, x, h, chosen * up.n, width), (down, h, y, width, h.shape[1])
    ):  # fmt: skip
        last = stack is down
        own = k // chosen if last else k
        group, offset = own // stack.groups, stack.codes or ("none" if stack.offset is None else "minimum")
        assert stack.scale is not None
        rest = residual if last else None
        gemv = GemvArgs(
            w=stack.w.data_ptr(), scale=stack.scale.data_ptr(), x=source.data_ptr(), y=into.data_ptr(),
            offset=None if stack.offset is None else stack.offset.data_ptr(),
            residual=None if rest is None else rest.data_ptr(),
            m=1, n=n, k=k, x_stride=source.shape[1], y_stride=into.shape[1], residual_stride=width,
            activation=ACTIVATION["none" if last else "silu_gate"], offset_kind=CODES[offset],
            scale_is_bf16=int(stack.scale.dtype in (torch.bfloat16, torch.int16)),
            group_shift=places(own, group)["group_shift"],
            **({} if last or norm is None else _of_norm(norm)),
        )  # fmt: skip
        form = ONE_GROUP if group == own else group
        yield Launch(function_of(form), offset, gemv, ExpertArgs(**routing_arguments, down=int(last)), form)


def _of_norm(norm: Norm) -> dict[str, Any]:
    kind = NORM["rms_plus_one" if norm.plus_one else "rms"]
    return {"norm": kind, "norm_weight": norm.weight.data_ptr(), "epsilon": norm.eps}


def declared(library: ctypes.CDLL, function: str) -> Any:
    """A function of the library, with its C types declared."""
    entry = getattr(library, f"accelpatch_{function}")
    entry.restype = ctypes.c_int
    entry.argtypes = [ctypes.POINTER(GemvArgs), ctypes.POINTER(ExpertArgs), ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    return entry


@cache
def _entry(function: str, dtype: torch.dtype, variant: str, device: Device) -> Any:
    return declared(libraries.library(binding.library_name(function, dtype, variant), device), function)
