"""Activations in 8 bits, for products of such: one scale a row from its largest magnitude, or one that is given.

    dynamic   scale[m] = max_k |x[m, k]| / L;  q = round(x * (L / max))       x[..., K] float, q[..., K] of a form
    static    scale[m] = the given one;        q = round(x * (1 / scale)), saturated at -L and L

    form            L     round to the nearest
    int8            127   integer
    float8_e4m3fn   448   number of OCP's e4m3
    float8_e4m3fnuz 240   number of e4m3 with the exponent one lower, 0x80 for NaN and no -0 (gfx942)

In float32, whatever x is, and ties to even: every implementation gives the same bits, so that a product's codes do not
depend on which one ran, nor on the number of rows. A row whose largest magnitude is below 2^-119, L over which is no
float32, is zeros with scale 0; one with NaN or infinity has scale NaN and zeros, so that all its products are NaN.
Source: Xiao et al. 2022, arXiv:2211.10438 (per token and per tensor); OCP 8-bit floating point, E4M3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import FLOATS, require
from accelpatch.kernels.layouts.row_major import FP8, form_name
from accelpatch.kernels.operation import operation
from accelpatch.kernels.spec import Case, Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

#: form -> its largest magnitude; of int8 -128 is not used: q and -q both exist
LARGEST: Mapping[torch.dtype, int] = MappingProxyType({torch.int8: 127, FP8[0]: 448, FP8[1]: 240})
LEAST = 2.0**-119
LONGEST = 32768  # elements of a row that one Triton program holds
OP = "quantize_rows"


@dataclass(frozen=True, eq=False)
class QuantizedRows:
    """Activations in 8 bits: q[M, K] and scale[M, 1] float32. dtype: of what they were made from, and of products."""

    q: Tensor
    scale: Tensor
    dtype: torch.dtype


def reference(x: Tensor, scale: Tensor | None = None, form: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """As the docstring says."""
    values, bound = x.to(torch.float32), LARGEST[form]
    if scale is None:
        absmax = values.abs().amax(-1, keepdim=True)
        finite, small = absmax.isfinite(), absmax < LEAST
        # torch computes number / tensor as number * (1 / tensor), which rounds twice.
        largest = torch.full_like(absmax, bound)
        valid, inverse = finite & ~small, largest / absmax
        scales = torch.where(finite, torch.where(small, 0.0, absmax / largest), torch.nan)
    else:
        finite = valid = values.isfinite().all(-1, keepdim=True)
        static = scale.to(torch.float32)
        scales, inverse = torch.where(finite, static, torch.nan), 1 / static
    q = torch.where(valid, values * inverse, 0.0)
    q = q.round() if form == torch.int8 else q
    return q.clamp(-bound, bound).to(form), scales  # the conversion to e4m3 does not saturate by itself


def spec(x: Tensor, scale: Tensor | None = None, form: torch.dtype = torch.int8) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    require(x.dim() >= 1 and x.dtype in FLOATS, OP, f"x is float [..., K], not {x.dtype} {list(x.shape)}")
    require(x.shape[-1] >= 1, OP, "x has no features: K = 0")
    require(form in LARGEST, OP, f"form is one of {', '.join(map(str, LARGEST))}, not {form}")
    if scale is not None:
        fits = scale.numel() == 1 and scale.dtype in FLOATS
        require(fits, OP, f"scale is one float, not {scale.dtype} {list(scale.shape)}")
        require(scale.device == x.device, OP, f"x lies on {x.device}, scale on {scale.device}: move the module")
    return of_shape(x.shape[-1], x.dtype, m=x.shape[:-1].numel(), form=form)


def of_shape(k: int, dtype: torch.dtype, *, m: int = 1, form: torch.dtype = torch.int8) -> Spec:
    """The Spec of rows of this size, for planning."""
    return Spec(OP, {"M": m, "K": k}, dtype, options={"form": form_name(form)})


def form_why_not(spec: Spec, device: Device) -> str | None:
    """Why a device cannot take the form of a spec, by the table of archs; None where it can."""
    form = str(spec.options.get("form", "int8"))
    return None if form == "int8" else device.why_not_fp8(form)


def by_torch(x: Tensor, scale: Tensor | None = None, form: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """The implementation `torch`: the reference, with contiguous results."""
    q, scales = reference(x, scale, form)
    return q.contiguous(), scales.clone(memory_format=torch.contiguous_format)


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_triton` cannot run a spec; None where it can."""
    if spec.sizes["K"] > LONGEST:
        return f"the Triton kernel holds rows of up to {LONGEST} elements"
    return launch.why_not(device, spec.dtype) or form_why_not(spec, device)


def by_triton(x: Tensor, scale: Tensor | None = None, form: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """The implementation `triton`: a program a row."""
    from accelpatch.kernels.triton.quantize_rows import quantize_rows as run

    return run(x, scale, form)


@operation(OP)
def quantize_rows(x: Tensor, scale: Tensor | None = None, form: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """(q[..., K] of the form, scale[..., 1] float32), contiguous, of x[..., K] float.

    scale: a single static one; None: one a row, by its largest magnitude. form: a key of `LARGEST`. Raises KernelError
    for arguments that do not fit.
    """
    q, scales = dispatch.run(OP, spec, x.device, (x, scale, form))
    return q, scales


@quantize_rows.register_fake
def _fake(x: Tensor, scale: Tensor | None = None, form: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    spec(x, scale, form)
    return x.new_empty(x.shape, dtype=form), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def cases() -> list[Case]:
    """Cases for parity checks: odd sizes, no rows, static scales, every form."""

    def case(m: int, k: int, static: bool, form: torch.dtype) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
            x = torch.randn(m, k, generator=generator).to(device, dtype)
            return x, torch.tensor([0.02], device=device) if static else None, form

        name = "" if form == torch.int8 else f"-{form_name(form)}"
        return Case(f"m{m}-k{k}-{'static' if static else 'dynamic'}{name}", make)

    sizes = ((1, 64), (7, 130), (0, 66), (129, 1537))
    integers = [case(m, k, static, torch.int8) for m, k in sizes for static in (False, True)]
    return integers + [case(m, k, m == 7, form) for m, k in sizes for form in FP8]


IMPLEMENTATIONS = {
    "triton": Implementation(by_triton, triton_why_not),
    "torch": Implementation(by_torch, dispatch.anywhere),
}
KERNELS = {OP: Kernel(quantize_rows, reference, spec, IMPLEMENTATIONS, cases)}
