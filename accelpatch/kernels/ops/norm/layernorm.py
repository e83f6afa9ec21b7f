"""LayerNorm with the residual addition before it, and with its rows in 8 bits after it.

    add_layernorm    s = x + residual;  y = (s - mean(s)) / sqrt(var(s) + eps) * weight + bias;  gives (y, s)
    layernorm_rows   the same, and q, scale = quantize_rows(y, form);  gives (q, scale, y or s)

x, residual[..., K], weight[K], bias[K] or none, of one dtype. s is rounded to it; the norm is computed in float32 and
rounded once, as torch's is, and y is rounded before it is quantised: the codes are those of the single operations one
after the other. A layer whose norms follow the sums (BERT) adds y to what comes next, one whose norms precede
attention and MLP (ViT) adds s. Source: Ba et al. 2016, arXiv:1607.06450.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import FLOATS, require
from accelpatch.kernels.layouts.row_major import FP8, form_name
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.activation import quantize_rows as rows
from accelpatch.kernels.spec import Case, Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

ADD, ROWS = "add_layernorm", "layernorm_rows"
LONGEST = 32768  # elements of a row that one Triton program holds
Three = tuple[Tensor, Tensor, Tensor]


def layernorm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """torch's LayerNorm of x[..., K]."""
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """In float64 where x is float64, else in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    centred = x.to(wide) - x.to(wide).mean(-1, keepdim=True)
    y = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.to(wide)
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


def add_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum, then `reference`."""
    total = x + residual
    return reference(total, weight, bias, eps), total


def rows_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, scale: Tensor | None,
    form: torch.dtype, normed: bool,
) -> Three:  # fmt: skip
    """The references of the single operations."""
    total = x if residual is None else x + residual
    y = reference(total, weight, bias, eps)
    return *rows.reference(y, scale, form), y if normed else total


def add_spec(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    require(x.dim() >= 1 and x.dtype in FLOATS, ADD, f"x is float [..., K], not {x.dtype} {list(x.shape)}")
    require(x.shape[-1] >= 1, ADD, "x has no features: K = 0")
    require(eps >= 0, ADD, f"eps is at least 0, not {eps}")
    for name, one, shape in (("residual", residual, x.shape), ("weight", weight, x.shape[-1:]),
                             ("bias", bias, x.shape[-1:])):  # fmt: skip
        if one is None:
            continue
        require(one.shape == shape, ADD, f"{name} is {list(shape)}, not {list(one.shape)}")
        require(one.dtype == x.dtype, ADD, f"x is {x.dtype}, {name} {one.dtype}: make them one dtype")
        require(one.device == x.device, ADD, f"x lies on {x.device}, {name} on {one.device}: move one")
    return Spec(ADD, {"M": x.numel() // x.shape[-1], "K": x.shape[-1]}, x.dtype)


def rows_spec(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, scale: Tensor | None,
    form: torch.dtype, normed: bool,
) -> Spec:  # fmt: skip
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    made = add_spec(x, residual, weight, bias, eps)
    return Spec(ROWS, made.sizes, made.dtype, options=rows.spec(x, scale, form).options)


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why the Triton kernel cannot run a spec; None where it can."""
    if spec.sizes["K"] > LONGEST:
        return f"the Triton kernel holds rows of up to {LONGEST} elements"
    return launch.why_not(device, spec.dtype)


def rows_why_not(spec: Spec, device: Device) -> str | None:
    """The same with rows in 8 bits."""
    return triton_why_not(spec, device) or rows.form_why_not(spec, device)


def add_by_triton(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The implementation `triton`: one launch."""
    from accelpatch.kernels.triton.layernorm import add_layernorm as run

    return run(x, residual, weight, bias, eps)


def rows_by_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, scale: Tensor | None,
    form: torch.dtype, normed: bool,
) -> Three:  # fmt: skip
    """The implementation `triton`: one launch."""
    from accelpatch.kernels.triton.layernorm import layernorm_rows as run

    return run(x, residual, weight, bias, eps, scale, form, normed)


def add_by_operations(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The implementation `operations`: torch's sum, then its LayerNorm."""
    total = (x + residual).contiguous()
    return layernorm(total, weight, bias, eps), total


def rows_by_operations(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, scale: Tensor | None,
    form: torch.dtype, normed: bool,
) -> Three:  # fmt: skip
    """The implementation `operations`: sum, LayerNorm, rows."""
    total = x if residual is None else (x + residual).contiguous()
    y = layernorm(total, weight, bias, eps)
    return *rows.quantize_rows.function(y, scale, form), y if normed else total


@operation(ADD)
def add_layernorm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(y, s)[..., K], contiguous: s = x + residual, y its LayerNorm with weight[K] and bias[K]. Raises KernelError for
    arguments that do not fit."""
    y, total = dispatch.run(ADD, add_spec, x.device, (x, residual, weight, bias, eps))
    return y, total


@add_layernorm.register_fake
def _add_fake(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    add_spec(x, residual, weight, bias, eps)
    return x.new_empty(x.shape), x.new_empty(x.shape)


add_layernorm.recompute(add_by_operations)


@operation(ROWS)
def layernorm_rows(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, scale: Tensor | None,
    form: torch.dtype, normed: bool,
) -> Three:  # fmt: skip
    """(q[..., K] of the form, scale[..., 1] float32, y or s[..., K]): s = x + residual, y its LayerNorm, q y's rows.

    scale: a static one, one float; None: one a row. form: a key of `quantize_rows.LARGEST`. normed: give y, else s,
    which without a residual is x itself. Raises KernelError for arguments that do not fit.
    """
    q, scales, kept = dispatch.run(ROWS, rows_spec, x.device, (x, residual, weight, bias, eps, scale, form, normed))
    return q, scales, kept


@layernorm_rows.register_fake
def _rows_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, scale: Tensor | None,
    form: torch.dtype, normed: bool,
) -> Three:  # fmt: skip
    rows_spec(x, residual, weight, bias, eps, scale, form, normed)
    q, scales = x.new_empty(x.shape, dtype=form), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return q, scales, x.new_empty(x.shape)


def _arguments(
    m: int, k: int, generator: torch.Generator, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, residual, weight and bias; rows with means far from 0."""
    x, residual = (torch.randn(m, k, generator=generator) + 3 for _ in range(2))
    weight, bias = (torch.randn(k, generator=generator) for _ in range(2))
    return x.to(device, dtype), residual.to(device, dtype), weight.to(device, dtype), bias.to(device, dtype)


SIZES = ((1, 64), (7, 130), (0, 66), (129, 1537))


def add_cases() -> list[Case]:
    """Cases for parity checks: with a bias and without."""

    def case(m: int, k: int, biased: bool) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
            x, residual, weight, bias = _arguments(m, k, generator, dtype, device)
            return x, residual, weight, bias if biased else None, 1e-5

        return Case(f"m{m}-k{k}-{'bias' if biased else 'plain'}", make)

    return [case(m, k, at % 2 == 0) for at, (m, k) in enumerate(SIZES)]


def rows_cases() -> list[Case]:
    """Cases for parity checks: with a residual and without, both kinds of scales, both outputs, every form."""

    def case(m: int, k: int, added: bool, static: bool, form: torch.dtype) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
            x, residual, weight, bias = _arguments(m, k, generator, dtype, device)
            scale = torch.tensor([0.02], device=device) if static else None
            return x, residual if added else None, weight, bias, 1e-5, scale, form, not static

        kind = f"{'added' if added else 'alone'}-{'static' if static else 'dynamic'}"
        return Case(f"m{m}-k{k}-{kind}-{form_name(form)}", make)

    integers = [case(m, k, at < 3, at % 3 == 0, torch.int8) for at, (m, k) in enumerate(SIZES)]
    return integers + [case(m, k, m == 7, False, form) for m, k in SIZES[:2] for form in FP8]


KERNELS = {
    ADD: Kernel(
        add_layernorm, add_reference, add_spec,
        {
            "triton": Implementation(add_by_triton, triton_why_not),
            "operations": Implementation(add_by_operations, dispatch.anywhere),
        },
        add_cases, composed=True,
    ),
    ROWS: Kernel(
        layernorm_rows, rows_reference, rows_spec,
        {
            "triton": Implementation(rows_by_triton, rows_why_not),
            "operations": Implementation(rows_by_operations, dispatch.anywhere),
        },
        rows_cases, composed=True,
    ),
}  # fmt: skip
