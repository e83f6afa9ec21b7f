"""LayerNorm with int8 outputs, of models that are int8 from end to end.

    q[..., K] = rint((x - mean(x)) / sqrt(var(x) + eps) * weight + bias), saturated at -128 and 127     x[..., K] float

weight[K] and bias[K] are float32 and hold the scale of the output: those of the float norm divided by it. Everything is
computed in float32 (float64 for x in float64) and rounded once, to nearest even. A row with NaN or infinity is zeros:
int8 has no NaN, and the residual stream, which stays float, keeps them. Source: Xiao et al. 2022, arXiv:2211.10438.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import FLOATS, require, say
from accelpatch.kernels.operation import operation
from accelpatch.kernels.spec import Case, Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

OP = "layernorm_q"
LONGEST = 32768  # elements of a row that one Triton program holds


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """As the docstring says."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(wide.dtype) + bias.to(wide.dtype)
    whole = wide.isfinite().all(-1, keepdim=True)
    return torch.where(whole, y, 0.0).round().clamp(-128, 127).to(torch.int8).contiguous()


def spec(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError for arguments that do not fit together."""
    require(x.dim() >= 1 and x.dtype in FLOATS and x.shape[-1] >= 1, OP, f"x is float [..., K], not {say(x)}")
    for name, one in (("weight", weight), ("bias", bias)):
        require(one.shape == x.shape[-1:] and one.dtype in FLOATS, OP, f"{name} is [{x.shape[-1]}], not {say(one)}")
        require(one.device == x.device, OP, f"x lies on {x.device}, {name} on {one.device}: move the module")
    require(eps > 0, OP, f"eps is {eps}, and it is positive")
    return of_shape(x.shape[-1], x.dtype, m=x.shape[:-1].numel())


def of_shape(k: int, dtype: torch.dtype, *, m: int = 1) -> Spec:
    """The Spec of rows of this size, for planning. dtype: of x."""
    return Spec(OP, {"M": m, "K": k}, dtype)


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_triton` cannot run a spec; None where it can."""
    if spec.sizes["K"] > LONGEST:
        return f"the Triton kernel holds rows of up to {LONGEST} elements"
    return launch.why_not(device, spec.dtype)


def by_triton(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The implementation `triton`: a program a row."""
    from accelpatch.kernels.triton.layernorm_q import layernorm_q as run

    return run(x, weight, bias, eps)


@operation(OP)
def layernorm_q(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """q[..., K] int8, contiguous, of x[..., K] float, weight[K] and bias[K]. Raises KernelError for others."""
    q: Tensor = dispatch.run(OP, spec, x.device, (x, weight, bias, eps))
    return q


@layernorm_q.register_fake
def _fake(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    spec(x, weight, bias, eps)
    return x.new_empty(x.shape, dtype=torch.int8)


def cases() -> list[Case]:
    """Cases for parity checks: odd sizes, no rows, values that saturate."""

    def case(m: int, k: int, gain: float) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
            x = (3 * torch.randn(m, k, generator=generator) + 1).to(device, dtype)
            weight, bias = (gain * torch.randn(k, generator=generator).to(device) for _ in range(2))
            return x, weight, bias, 1e-5

        return Case(f"m{m}-k{k}-gain{gain:g}", make)

    return [case(*sizes) for sizes in ((1, 64, 30.0), (7, 130, 30.0), (0, 66, 1.0), (129, 1537, 90.0))]


IMPLEMENTATIONS = {
    "triton": Implementation(by_triton, triton_why_not),
    "torch": Implementation(reference, dispatch.anywhere),
}
KERNELS = {OP: Kernel(layernorm_q, reference, spec, IMPLEMENTATIONS, cases)}
