"""Cosines and sines of the rotary position embedding: angle[b, l, d] = position_ids[b, l] * inv_freq[d mod D/2].

cos, sin[B, L, D] = cos(angle), sin(angle) times `attention_scaling`; both halves of D are equal. Angles are in radians,
in float32 whatever the model's dtype. Source: Su et al. 2021, arXiv:2104.09864, in the layout of transformers' Llama.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import FLOATS, require
from accelpatch.kernels.operation import operation
from accelpatch.kernels.spec import Case, Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch


def reference(
    position_ids: Tensor, inv_freq: Tensor, attention_scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As an outer product; in float64 where dtype is float64, else in float32."""
    wide = torch.promote_types(dtype, torch.float32)
    angle = torch.einsum("...,d->...d", position_ids.to(wide), inv_freq.to(wide)).repeat_interleave(2, dim=-1)
    halves = torch.cat((angle[..., 0::2], angle[..., 1::2]), dim=-1)
    return (halves.cos() * attention_scaling).to(dtype), (halves.sin() * attention_scaling).to(dtype)


def spec(position_ids: Tensor, inv_freq: Tensor, attention_scaling: float, dtype: torch.dtype) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    op = "rotary_cos_sin"
    integer = not position_ids.is_floating_point() and position_ids.dtype != torch.bool
    require(integer, op, f"position_ids are integers, not {position_ids.dtype}")
    fits = inv_freq.dim() == 1 and inv_freq.dtype in FLOATS
    require(fits, op, f"inv_freq is float [D / 2], not {inv_freq.dtype} {list(inv_freq.shape)}")
    require(dtype in FLOATS, op, f"dtype is a float dtype, not {dtype}")
    where = (position_ids.device, inv_freq.device)
    require(where[0] == where[1], op, f"position_ids lie on {where[0]}, inv_freq on {where[1]}: move the module")
    return Spec(op, {"M": position_ids.numel(), "K": 2 * inv_freq.shape[0]}, dtype)


def _torch(
    position_ids: Tensor, inv_freq: Tensor, attention_scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    # the order of operations is that of LlamaRotaryEmbedding: equal to the bit
    angle = (position_ids.unsqueeze(-1).float() * inv_freq.float()).contiguous()
    both = torch.cat((angle, angle), dim=-1)
    return (both.cos() * attention_scaling).to(dtype), (both.sin() * attention_scaling).to(dtype)


def _triton_why_not(spec: Spec, device: Device) -> str | None:
    return launch.why_not(device, spec.dtype)


def _triton(*args: Any) -> tuple[Tensor, Tensor]:
    from accelpatch.kernels.triton.rope import rotary_cos_sin as run

    return run(*args)


@operation("rotary_cos_sin")
def rotary_cos_sin(
    position_ids: Tensor, inv_freq: Tensor, attention_scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(cos, sin)[B, L, D] in `dtype`, contiguous.

    position_ids[B, L] integers (any leading dimensions); inv_freq[D / 2] float, radians per position. Raises
    KernelError for arguments that do not fit together.
    """
    args = (position_ids, inv_freq, attention_scaling, dtype)
    cos, sin = dispatch.run("rotary_cos_sin", spec, position_ids.device, args)
    return cos, sin


@rotary_cos_sin.register_fake
def _fake(
    position_ids: Tensor, inv_freq: Tensor, attention_scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    spec(position_ids, inv_freq, attention_scaling, dtype)
    shape = (*position_ids.shape, 2 * inv_freq.shape[0])
    return inv_freq.new_empty(shape, dtype=dtype), inv_freq.new_empty(shape, dtype=dtype)


def cases() -> list[Case]:
    """Cases for parity checks: odd sizes, positions up to 131,071."""

    def case(batch: int, length: int, dim: int, start: int, scaling: float) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
            position_ids = (start + torch.arange(length)).expand(batch, length).to(device)
            inv_freq = (10000.0 ** -(torch.arange(0, dim, 2) / dim)).to(device)
            return position_ids, inv_freq, scaling, dtype

        return Case(f"b{batch}-l{length}-d{dim}-from{start}", make)

    return [
        case(1, 1, 64, 0, 1.0),
        case(2, 7, 10, 5, 1.0),
        case(1, 0, 64, 0, 1.0),
        case(3, 129, 128, 0, 1.25),
        case(1, 2, 64, 131070, 1.0),
    ]


KERNELS = {
    "rotary_cos_sin": Kernel(
        rotary_cos_sin,
        reference,
        spec,
        {"triton": Implementation(_triton, _triton_why_not), "torch": Implementation(_torch, dispatch.anywhere)},
        cases,
    )
}
