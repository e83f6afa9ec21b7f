"""RMSNorm whose output goes into a product of 8 bits: the norm, with a residual addition before it, and its rows so.

    s = x + residual;  q, scale = quantize_rows(rmsnorm(s), form);  gives (q, scale, s)       x[M, K], weight[K]

The norm's output is rounded to its usual dtype before it is quantised, so that the codes are those of the two
operations one after the other (rmsnorm.py, quantize_rows.py). Without a residual s is x.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.layouts.row_major import FP8, form_name
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.activation import quantize_rows as rows
from accelpatch.kernels.ops.norm import rmsnorm
from accelpatch.kernels.spec import Case, Implementation, Kernel, Spec

OP = "rmsnorm_rows"
Rows = tuple[Tensor, Tensor, Tensor]


def reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus_one: bool, scale: Tensor | None,
    form: torch.dtype = torch.int8,
) -> Rows:  # fmt: skip
    """The references of the two operations."""
    total = x if residual is None else x + residual
    return *rows.reference(rmsnorm.reference(total, weight, eps, plus_one), scale, form), total


def spec(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus_one: bool, scale: Tensor | None,
    form: torch.dtype = torch.int8,
) -> Spec:  # fmt: skip
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    options = rows.spec(x, scale, form).options
    if residual is None:
        made = replace(rmsnorm.spec(x, weight, eps, plus_one), op=OP)
    else:
        made = rmsnorm.add_spec(x, residual, weight, eps, plus_one, OP)
    return replace(made, options={**made.options, **options})


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_triton` cannot run a spec; None where it can."""
    if any(spec.options.get(name, spec.dtype) != spec.dtype for name in ("weight_dtype", "residual_dtype")):
        return "it takes x, residual and weight of one dtype"
    return rmsnorm.triton_why_not(spec, device) or rows.form_why_not(spec, device)


def by_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus_one: bool, scale: Tensor | None,
    form: torch.dtype = torch.int8,
) -> Rows:  # fmt: skip
    """The implementation `triton`: one launch."""
    from accelpatch.kernels.triton.rmsnorm import rmsnorm_rows as run

    return run(x, residual, weight, eps, plus_one, scale, form)


def by_operations(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus_one: bool, scale: Tensor | None,
    form: torch.dtype = torch.int8,
) -> Rows:  # fmt: skip
    """The implementation `operations`: the norm, then its rows."""
    if residual is None:
        y, total = rmsnorm.rmsnorm.function(x, weight, eps, plus_one), x
    else:
        y, total = rmsnorm.add_rmsnorm.function(x, residual, weight, eps, plus_one)
    return *rows.quantize_rows.function(y, scale, form), total


@operation(OP)
def rmsnorm_rows(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus_one: bool, scale: Tensor | None,
    form: torch.dtype = torch.int8,
) -> Rows:  # fmt: skip
    """(q[..., K] of the form, scale[..., 1] float32, s[..., K]), contiguous: s = x + residual, q its norm with this
    weight[K].

    scale: a static one, one float; None: one a row. form: a key of `quantize_rows.LARGEST`. Without a residual s is x
    itself. Raises KernelError for arguments that do not fit.
    """
    q, scales, total = dispatch.run(OP, spec, x.device, (x, residual, weight, eps, plus_one, scale, form))
    return q, scales, total


@rmsnorm_rows.register_fake
def _fake(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, plus_one: bool, scale: Tensor | None,
    form: torch.dtype = torch.int8,
) -> Rows:  # fmt: skip
    spec(x, residual, weight, eps, plus_one, scale, form)
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    q, scales = x.new_empty(x.shape, dtype=form), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return q, scales, x.new_empty(x.shape, dtype=dtype)


def cases() -> list[Case]:
    """Cases for parity checks: both kinds of norm, with a residual and without, both kinds of scales, every form."""

    def case(m: int, k: int, plus_one: bool, added: bool, static: bool, form: torch.dtype = torch.int8) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
            x, residual = (torch.randn(m, k, generator=generator).to(device, dtype) for _ in range(2))
            weight = torch.randn(k, generator=generator).to(device, dtype)
            scale = torch.tensor([0.02], device=device) if static else None
            return x, residual if added else None, weight, 1e-5, plus_one, scale, form

        kind = "plus-one" if plus_one else "plain"
        name = f"{'-added' if added else ''}-{'static' if static else 'dynamic'}"
        return Case(f"m{m}-k{k}-{kind}{name}{'' if form == torch.int8 else f'-{form_name(form)}'}", make)

    sizes = ((1, 64), (7, 130), (0, 66), (129, 1537))
    integers = [case(m, k, at % 2 == 1, at < 3, at % 3 == 0) for at, (m, k) in enumerate(sizes)]
    return integers + [case(m, k, m < 7, m == 7, False, form) for m, k in sizes[:2] for form in FP8]


IMPLEMENTATIONS = {
    "triton": Implementation(by_triton, triton_why_not),
    "operations": Implementation(by_operations, dispatch.anywhere),
}
KERNELS = {OP: Kernel(rmsnorm_rows, reference, spec, IMPLEMENTATIONS, cases, composed=True)}
