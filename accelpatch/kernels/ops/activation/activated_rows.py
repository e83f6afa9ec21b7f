"""An activation whose rows go into a product of 8 bits: activation(x), and its rows so.

    q, scale = quantize_rows(activation(x), form)          x[..., K]

The activation's output is rounded to x's dtype before it is quantised, so that the codes are those of the two
operations one after the other (quantize_rows.py). For MLPs without a gate; with one: gated_rows.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import require
from accelpatch.kernels.layouts.row_major import FP8, form_name
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.activation import quantize_rows as rows
from accelpatch.kernels.ops.activation.gated_activation import ACTIVATIONS, activated_reference
from accelpatch.kernels.spec import Case, Implementation, Kernel, Spec

OP = "activated_rows"
Rows = tuple[Tensor, Tensor]


def reference(x: Tensor, activation: str, scale: Tensor | None, form: torch.dtype) -> Rows:
    """The references of the two operations."""
    return rows.reference(activated_reference(x, activation), scale, form)


def spec(x: Tensor, activation: str, scale: Tensor | None, form: torch.dtype) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    require(activation in ACTIVATIONS, OP, f"activation is one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    made = rows.spec(x, scale, form)
    return Spec(OP, made.sizes, made.dtype, options=made.options)


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_triton` cannot run a spec; None where it can."""
    return rows.triton_why_not(spec, device)


def by_triton(x: Tensor, activation: str, scale: Tensor | None, form: torch.dtype) -> Rows:
    """The implementation `triton`: one launch."""
    from accelpatch.kernels.triton.quantize_rows import activated_rows as run

    return run(x, activation, scale, form)


def by_operations(x: Tensor, activation: str, scale: Tensor | None, form: torch.dtype) -> Rows:
    """The implementation `operations`: the activation, then its rows."""
    return rows.quantize_rows.function(ACTIVATIONS[activation](x), scale, form)


@operation(OP)
def activated_rows(x: Tensor, activation: str, scale: Tensor | None, form: torch.dtype) -> Rows:
    """(q[..., K] of `form`, scale[..., 1] float32), contiguous, of activation(x[..., K] float).

    scale: a static one, one float; None: one a row. form: a key of `quantize_rows.LARGEST`. Raises KernelError for
    arguments that do not fit.
    """
    q, scales = dispatch.run(OP, spec, x.device, (x, activation, scale, form))
    return q, scales


@activated_rows.register_fake
def _fake(x: Tensor, activation: str, scale: Tensor | None, form: torch.dtype) -> Rows:
    spec(x, activation, scale, form)
    return x.new_empty(x.shape, dtype=form), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def cases() -> list[Case]:
    """Cases for parity checks: every form, both kinds of scales."""

    def case(m: int, k: int, activation: str, static: bool, form: torch.dtype) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
            x = torch.randn(m, k, generator=generator).to(device, dtype)
            return x, activation, torch.tensor([0.02], device=device) if static else None, form

        return Case(f"m{m}-k{k}-{activation}-{'static' if static else 'dynamic'}-{form_name(form)}", make)

    sizes = ((1, 64, "relu"), (7, 130, "gelu"), (0, 66, "gelu"), (129, 1537, "gelu_tanh"))
    return [case(*size, at == 1, (torch.int8, *FP8)[at % 3]) for at, size in enumerate(sizes)]


IMPLEMENTATIONS = {
    "triton": Implementation(by_triton, triton_why_not),
    "operations": Implementation(by_operations, dispatch.anywhere),
}
KERNELS = {OP: Kernel(activated_rows, reference, spec, IMPLEMENTATIONS, cases, composed=True)}
