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
MOST_SCORES = 1024  # experts that a kernel can choose from
MOST_NORMED = 16384  # H where there is a norm, for which a block stages the whole of x at once
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of weights and logits, numbered as in the C interface


class ExpertArgs(ctypes.Structure):
    """Mirror of ``ExpertArgs`` in experts.h."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("ids", "weights", "logits")]
        + [(name, ctypes.c_int64) for name in ("tokens", "chosen", "experts")]
        + [(name, ctypes.c_int32) for name in ("ids_are_64", "weight_type", "down", "normalise", "narrow")]
    )


class Routing(Protocol):
    """The experts of each token, or what the kernels choose them from."""

    @property
    def chosen(self) -> int:
        """Experts of a token."""

    def prepared(self) -> Routing:
        """The same with contiguous tensors, of dtypes that the kernels read."""

    def arguments(self) -> dict[str, int]:
        """The fields of ExpertArgs that describe it. Precondition: it is `prepared`."""


class ChosenExperts(NamedTuple):
    """The experts of each token, already chosen: ids[T, k] int64 or int32, and weights[T, k]."""

    ids: Tensor
    weights: Tensor

    @property
    def chosen(self) -> int:
        return self.ids.shape[1]

    def prepared(self) -> ChosenExperts:
        weights = self.weights if self.weights.dtype in WEIGHTS else self.weights.float()
        return ChosenExperts(self.ids.contiguous(), weights.contiguous())

    def arguments(self) -> dict[str, int]:
        return {
            "ids": self.ids.data_ptr(), "weights": self.weights.data_ptr(),
            "ids_are_64": int(self.ids.dtype == torch.int64), "weight_type": WEIGHTS.index(self.weights.dtype),
        }  # fmt: skip


class RouterLogits(NamedTuple):
    """logits[T, E] of a dtype in WEIGHTS, from which the kernels choose `chosen` experts a token.

    normalise, narrow: as in ops/experts/choose_experts.py.
    """

    logits: Tensor
    chosen: int
    normalise: bool
    narrow: bool

    def prepared(self) -> RouterLogits:
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
    """One launch: the function and variant of its library, and its arguments. group_size: ONE_GROUP for one a row."""

    function: str
    variant: str
    gemv: GemvArgs
    experts: ExpertArgs
    group_size: int


def function_of(group_size: int) -> str:
    """The function of the device library for a group size."""
    return {32: "experts_int4_32", 64: "experts_int4_64"}.get(group_size, "experts_int4")


def experts(
    x: Tensor, routing: Routing, up: Stack, down: Stack, residual: Tensor | None, norm: Norm | None = None
) -> Tensor:
    """y[T, H] of x[T, H], as the operation `experts` (ops/experts) with silu; of norm(x) where there is a norm.

    up: gate and up, whose rows are interleaved. Both stacks have 4-bit codes in tiles (layouts/expert_tiles.py). Raises
    KernelError for a refused launch.
    """
    y, h = x.new_empty(x.shape), x.new_empty((len(x), routing.chosen * up.n // 2))
    if not len(x) or not routing.chosen:
        return y.zero_() if residual is None else y.copy_(residual)
    x, routing = x.contiguous(), routing.prepared()
    up, down = (
        Stack(*(None if part is None else part.contiguous() for part in one))  # type: ignore[arg-type]
        for one in (up, down)
    )
    residual = None if residual is None else residual.contiguous()
    norm = None if norm is None else norm._replace(weight=norm.weight.contiguous())
    with on_device(x):
        for launch in launches(x, routing, up, down, h, y, residual, norm):
            entry = _entry(launch.function, x.dtype, launch.variant, probe(x.device))
            dtype, stream = binding.DTYPES.index(x.dtype), binding.stream_of(x)
            status = entry(ctypes.byref(launch.gemv), ctypes.byref(launch.experts), dtype, launch.group_size, stream)
            binding.check(status, f"accelpatch_{launch.function}")
    return y


def launches(
    x: Tensor, routing: Routing, up: Stack, down: Stack, h: Tensor, y: Tensor, residual: Tensor | None,
    norm: Norm | None = None,
) -> Iterator[Launch]:  # fmt: skip
    """The launch of gate and up, from x[T, H] into h[T, k I], and that of down, from h into y[T, H].

    All tensors are contiguous, and routing is `prepared`. Both use programmatic dependent launch: each may start before
    the kernel before it has ended, and gate and up wait for that end before they read the routing.
    """
    (tokens, width), chosen = x.shape, routing.chosen
    routing_arguments: dict[str, Any] = routing.arguments() | {"tokens": tokens, "chosen": chosen, "experts": len(up.w)}
    for stack, source, into, n, k in (
        (up, x, h, chosen * up.n, width), (down, h, y, width, h.shape[1])
    ):  # fmt: skip
        is_down = stack is down
        expert_k = k // chosen if is_down else k
        group_size = expert_k // stack.groups
        kind = stack.codes or ("none" if stack.offset is None else "minimum")
        assert stack.scale is not None
        added = residual if is_down else None
        gemv = GemvArgs(
            w=stack.w.data_ptr(), scale=stack.scale.data_ptr(), x=source.data_ptr(), y=into.data_ptr(),
            offset=None if stack.offset is None else stack.offset.data_ptr(),
            residual=None if added is None else added.data_ptr(),
            m=1, n=n, k=k, x_stride=source.shape[1], y_stride=into.shape[1], residual_stride=width,
            activation=ACTIVATION["none" if is_down else "silu_gate"], offset_kind=CODES[kind],
            scale_is_bf16=int(stack.scale.dtype in (torch.bfloat16, torch.int16)),
            group_shift=places(expert_k, group_size)["group_shift"],
            **({} if is_down or norm is None else _of_norm(norm)),
        )  # fmt: skip
        size = ONE_GROUP if group_size == expert_k else group_size
        yield Launch(function_of(size), kind, gemv, ExpertArgs(**routing_arguments, down=int(is_down)), size)


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
