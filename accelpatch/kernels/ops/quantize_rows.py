"""Activations as int8, for products of integers: one scale a row from its largest magnitude, or one that is given.

    dynamic   scale[m] = max_k |x[m, k]| / 127;  q = rint(x * (127 / max))         x[..., K] float, q[..., K] int8
    static    scale[m] = the given one;          q = rint(x * (1 / scale)), saturated at -127 and 127

In float32, whatever x is, and to nearest even: every implementation gives the same bits, so that a product's integers
do not depend on which one ran, nor on the number of rows. A row whose largest magnitude is below 2^-119, whose inverse
is no float32, is zeros with scale 0; one with NaN or infinity has scale NaN and zeros, so that all its products are
NaN. Source: Xiao et al. 2022, arXiv:2211.10438 (per token and per tensor).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.dispatch import FLOATS, require
from accelpatch.kernels.operation import operation
from accelpatch.kernels.spec import Case, Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

LARGEST = 127  # -128 is not used: q and -q both exist
LEAST = 2.0**-119
LONGEST = 32768  # elements of a row that one Triton program holds
OP = "quantize_rows"


@dataclass(frozen=True, eq=False)
class Int8Rows:
    """Activations as int8: q[M, K] and scale[M, 1] float32. dtype: of what they were made from, and of products."""

    q: Tensor
    scale: Tensor
    dtype: torch.dtype


def reference(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As the docstring says."""
    values = x.to(torch.float32)
    if scale is None:
        most = values.abs().amax(-1, keepdim=True)
        finite, small = most.isfinite(), most < LEAST
        largest = torch.full_like(most, LARGEST)  # divided as a number, it is torch's product with an inverse
        times = torch.where(finite & ~small, largest / most, 0.0)
        held = torch.where(finite, torch.where(small, 0.0, most / largest), torch.nan)
        q = torch.where(finite, values, 0.0) * times
    else:
        finite = values.isfinite().all(-1, keepdim=True)
        one = scale.to(torch.float32)
        held = torch.where(finite, one, torch.nan)
        q = torch.where(finite, values, 0.0) * (1 / one)
    return q.round().clamp(-LARGEST, LARGEST).to(torch.int8), held


def spec(x: Tensor, scale: Tensor | None = None) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    require(x.dim() >= 1 and x.dtype in FLOATS, OP, f"x is float [..., K], not {x.dtype} {list(x.shape)}")
    require(x.shape[-1] >= 1, OP, "x has no features: K = 0")
    if scale is not None:
        fits = scale.numel() == 1 and scale.dtype in FLOATS
        require(fits, OP, f"scale is one float, not {scale.dtype} {list(scale.shape)}")
        require(scale.device == x.device, OP, f"x lies on {x.device}, scale on {scale.device}: move the module")
    return of_shape(x.shape[-1], x.dtype, m=x.shape[:-1].numel())


def of_shape(k: int, dtype: torch.dtype, *, m: int = 1) -> Spec:
    """The Spec of rows of this size, for planning."""
    return Spec(OP, {"M": m, "K": k}, dtype)


def by_torch(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The implementation `torch`: the reference, whose scales come with the strides of contiguous ones."""
    q, held = reference(x, scale)
    return q.contiguous(), held.clone(memory_format=torch.contiguous_format)


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_triton` cannot run a spec; None where it can."""
    if spec.sizes["K"] > LONGEST:
        return f"the Triton kernel holds rows of up to {LONGEST} elements"
    return launch.why_not(device, spec.dtype)


def by_triton(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The implementation `triton`: a program a row."""
    from accelpatch.kernels.triton.quantize_rows import quantize_rows as run

    return run(x, scale)


@operation(OP)
def quantize_rows(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(q[..., K] int8, scale[..., 1] float32), contiguous, of x[..., K] float.

    scale: a single static one; None: one a row, by its largest magnitude. Raises KernelError for arguments that do not
    fit.
    """
    q, held = dispatch.run(OP, spec, x.device, (x, scale))
    return q, held


@quantize_rows.register_fake
def _fake(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    spec(x, scale)
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def cases() -> list[Case]:
    """Cases for parity checks: odd sizes, no rows, static scales."""

    def case(m: int, k: int, static: bool) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Tensor | None, ...]:
            x = torch.randn(m, k, generator=generator).to(device, dtype)
            return x, torch.tensor([0.02], device=device) if static else None

        return Case(f"m{m}-k{k}-{'static' if static else 'dynamic'}", make)

    return [case(m, k, static) for m, k in ((1, 64), (7, 130), (0, 66), (129, 1537)) for static in (False, True)]


IMPLEMENTATIONS = {
    "triton": Implementation(by_triton, triton_why_not),
    "torch": Implementation(by_torch, dispatch.anywhere),
}
KERNELS = {OP: Kernel(quantize_rows, reference, spec, IMPLEMENTATIONS, cases)}
