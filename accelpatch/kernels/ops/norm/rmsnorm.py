"""RMSNorm over the last dimension, alone, with the residual addition before it, or with it after.

    rmsnorm       y = x / sqrt(mean(x^2) + eps) * weight          x[..., K], weight[K]
    add_rmsnorm   s = x + residual;  y = rmsnorm(s);  gives (y, s)
    rmsnorm_add   y = residual + rmsnorm(x)

Statistics are in float32. Families differ in where they round, and each is reproduced bit for bit: `plus_one` false
(Llama): x_hat is rounded to x's dtype, then multiplied by weight (y has the promoted dtype of both); `plus_one` true
(Gemma): x_hat is multiplied by 1 + weight in float32, then rounded to x's dtype. Source: Zhang and Sennrich 2019,
arXiv:1910.07467.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import FLOATS, require
from accelpatch.kernels.operation import operation
from accelpatch.kernels.spec import Case, Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

LONGEST = 32768  # elements of a row that one Triton program holds


def reference(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """In float64 where x is float64, else in float32.

    Uses the reciprocal square root, as every family's own module does, because its rounding is what kernels must match.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    values = x.to(wide)
    normed = values * (values.square().mean(-1, keepdim=True) + eps).rsqrt()
    if plus_one:
        return (normed * (weight.to(wide) + 1)).to(x.dtype)
    return normed.to(x.dtype) * weight


def add_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
    """The sum in the inputs' promoted dtype, then `reference`."""
    total = x + residual
    return reference(total, weight, eps, plus_one), total


def reference_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """`reference`, then the sum in the promoted dtype."""
    return residual + reference(x, weight, eps, plus_one)


def _check(op: str, x: Tensor, weight: Tensor, eps: float) -> None:
    require(x.dim() >= 1 and x.dtype in FLOATS, op, f"x is float [..., K], not {x.dtype} {list(x.shape)}")
    fits = weight.dim() == 1 and weight.shape[0] == x.shape[-1] and weight.dtype in FLOATS
    require(fits, op, f"weight is float [{x.shape[-1]}], not {weight.dtype} {list(weight.shape)}")
    require(x.shape[-1] >= 1, op, "x has no features: K = 0")
    require(x.device == weight.device, op, f"x lies on {x.device}, weight on {weight.device}: move the module")
    require(eps >= 0, op, f"eps is at least 0, not {eps}")


def spec(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    _check("rmsnorm", x, weight, eps)
    sizes = {"M": x.numel() // x.shape[-1], "K": x.shape[-1]}
    return Spec("rmsnorm", sizes, x.dtype, options={"plus_one": plus_one, "weight_dtype": weight.dtype})


def add_spec(x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool, op: str = "add_rmsnorm") -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    _check(op, x, weight, eps)
    require(residual.dtype in FLOATS, op, f"residual is float, not {residual.dtype}")
    require(x.shape == residual.shape, op, f"x is {list(x.shape)}, residual {list(residual.shape)}: make them equal")
    require(x.device == residual.device, op, f"x lies on {x.device}, residual on {residual.device}: move one")
    sizes = {"M": x.numel() // x.shape[-1], "K": x.shape[-1]}
    options = {"plus_one": plus_one, "weight_dtype": weight.dtype, "residual_dtype": residual.dtype}
    return Spec(op, sizes, x.dtype, options=options)


def spec_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Spec:
    """`add_spec` for rmsnorm_add."""
    return add_spec(x, residual, weight, eps, plus_one, op="rmsnorm_add")


def _torch(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    # the order of operations is that of LlamaRMSNorm and Gemma2RMSNorm: equal to the bit
    if x.dtype == weight.dtype == torch.float32 and not plus_one:
        return functional.rms_norm(x, weight.shape, weight, eps).contiguous()
    values = x.to(torch.float32)
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    if plus_one:
        values = values * (1.0 + weight.float())
        return values.to(x.dtype).contiguous()
    return (weight * values.to(x.dtype)).contiguous()


def _torch_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
    total = (x + residual).contiguous()
    return _torch(total, weight, eps, plus_one), total


def _add_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    return (residual + _torch(x, weight, eps, plus_one)).contiguous()


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why the Triton kernels cannot run a spec; None where they can."""
    if spec.sizes["K"] > LONGEST:
        return f"the Triton kernel holds rows of up to {LONGEST} elements"
    others = (spec.options[key] for key in ("weight_dtype", "residual_dtype") if key in spec.options)
    return launch.why_not(device, spec.dtype, *others)


def _triton(*args: Any) -> Tensor:
    from accelpatch.kernels.triton.rmsnorm import rmsnorm as run

    return run(*args)


def _triton_add(*args: Any) -> tuple[Tensor, Tensor]:
    from accelpatch.kernels.triton.rmsnorm import add_rmsnorm as run

    return run(*args)


def _add_triton(*args: Any) -> Tensor:
    from accelpatch.kernels.triton.rmsnorm import rmsnorm_add as run

    return run(*args)


@operation("rmsnorm")
def rmsnorm(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """y[..., K], contiguous: x[..., K] over its root mean square, times weight[K] (or 1 + weight).

    y has the promoted dtype of x and weight (x's own where plus_one). Raises KernelError for arguments that do not fit.
    """
    y: Tensor = dispatch.run("rmsnorm", spec, x.device, (x, weight, eps, plus_one))
    return y


@rmsnorm.register_fake
def _fake(x: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    spec(x, weight, eps, plus_one)
    dtype = x.dtype if plus_one else torch.promote_types(x.dtype, weight.dtype)
    return x.new_empty(x.shape, dtype=dtype)


rmsnorm.recompute(_torch)


@operation("add_rmsnorm")
def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
    """(y, s)[..., K], contiguous: s = x + residual in their promoted dtype, y = rmsnorm(s, weight, eps, plus_one).

    x and residual have one shape. Raises KernelError for arguments that do not fit.
    """
    args = (x, residual, weight, eps, plus_one)
    y, total = dispatch.run("add_rmsnorm", add_spec, x.device, args)
    return y, total


@add_rmsnorm.register_fake
def _add_fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool) -> tuple[Tensor, Tensor]:
    add_spec(x, residual, weight, eps, plus_one)
    total = torch.promote_types(x.dtype, residual.dtype)
    dtype = total if plus_one else torch.promote_types(total, weight.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=total)


add_rmsnorm.recompute(_torch_add)


@operation("rmsnorm_add")
def rmsnorm_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    """residual + rmsnorm(x, weight, eps, plus_one), [..., K], contiguous, in the promoted dtype of both.

    x and residual have one shape. Raises KernelError for arguments that do not fit.
    """
    args = (x, residual, weight, eps, plus_one)
    y: Tensor = dispatch.run("rmsnorm_add", spec_add, x.device, args)
    return y


@rmsnorm_add.register_fake
def _fake_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    spec_add(x, residual, weight, eps, plus_one)
    normed = x.dtype if plus_one else torch.promote_types(x.dtype, weight.dtype)
    return x.new_empty(x.shape, dtype=torch.promote_types(normed, residual.dtype))


rmsnorm_add.recompute(_add_torch)


_SIZES = (
    ((1, 1, 576), False),
    ((2, 7, 65), True),
    ((0, 64), False),
    ((129, 33), True),
    ((3, 1), False),
    ((7, 4096), False),
)


def cases(residual: bool = False) -> list[Case]:
    """Cases for parity checks: odd sizes."""

    def case(shape: tuple[int, ...], plus_one: bool) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
            x = torch.randn(*shape, generator=generator).to(device, dtype)
            more = (torch.randn(*shape, generator=generator).to(device, dtype),) if residual else ()
            weight = torch.randn(shape[-1], generator=generator).to(device, dtype)
            return (x, *more, weight, 1e-6, plus_one)

        return Case(f"x{'x'.join(map(str, shape))}{'-plus-one' if plus_one else ''}", make)

    return [case(*size) for size in _SIZES]


def _add_cases() -> list[Case]:
    return cases(residual=True)


KERNELS = {
    "rmsnorm": Kernel(
        rmsnorm,
        reference,
        spec,
        {"triton": Implementation(_triton, triton_why_not), "torch": Implementation(_torch, dispatch.anywhere)},
        cases,
    ),
    "add_rmsnorm": Kernel(
        add_rmsnorm,
        add_reference,
        add_spec,
        {
            "triton": Implementation(_triton_add, triton_why_not),
            "torch": Implementation(_torch_add, dispatch.anywhere),
        },
        _add_cases,
    ),
    "rmsnorm_add": Kernel(
        rmsnorm_add,
        reference_add,
        spec_add,
        {
            "triton": Implementation(_add_triton, triton_why_not),
            "torch": Implementation(_add_torch, dispatch.anywhere),
        },
        _add_cases,
    ),
}


def of_weight(op: str, weight: Tensor, plus_one: bool) -> Spec:
    """The Spec of `op`, rmsnorm or add_rmsnorm, for planning."""
    options = {"plus_one": plus_one, "weight_dtype": weight.dtype, "residual_dtype": weight.dtype}
    return Spec(op, {"M": 1, "K": weight.shape[0]}, weight.dtype, options=options)
