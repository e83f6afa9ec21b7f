"""The gate of an MLP whose rows go into a product of 8 bits: activation(first half) * second half, and its rows so.

    q, scale = quantize_rows(gated_activation(first half of the columns, second half), form)          both[M, 2 K]

The gate's output is rounded to its dtype before it is quantised, so that the codes are those of the two operations one
after the other (gated_activation.py, quantize_rows.py). For products of which the gate is no part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import require
from accelpatch.kernels.layouts.row_major import FP8, form_name
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.activation import gated_activation
from accelpatch.kernels.ops.activation import quantize_rows as rows
from accelpatch.kernels.ops.activation.gated_activation import ACTIVATIONS
from accelpatch.kernels.spec import Case, Implementation, Kernel, Spec

OP = "gated_rows"
Rows = tuple[Tensor, Tensor]


def reference(both: Tensor, activation: str, scale: Tensor | None, form: torch.dtype) -> Rows:
    """The references of the two operations."""
    first, second = both.chunk(2, dim=-1)
    return rows.reference(gated_activation.reference(first, second, activation), scale, form)


def spec(both: Tensor, activation: str, scale: Tensor | None, form: torch.dtype) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    require(both.dim() >= 1 and both.shape[-1] % 2 == 0, OP, f"both halves are [..., 2 K], not {list(both.shape)}")
    require(activation in ACTIVATIONS, OP, f"activation is one of {', '.join(ACTIVATIONS)}, not {activation!r}")
    made = rows.spec(both.chunk(2, dim=-1)[0], scale, form)
    return Spec(OP, made.sizes, made.dtype, options=made.options)


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_triton` cannot run a spec; None where it can."""
    return rows.triton_why_not(spec, device)


def by_triton(both: Tensor, activation: str, scale: Tensor | None, form: torch.dtype) -> Rows:
    """The implementation `triton`: one launch."""
    from accelpatch.kernels.triton.quantize_rows import gated_rows as run

    return run(both, activation, scale, form)


def by_operations(both: Tensor, activation: str, scale: Tensor | None, form: torch.dtype) -> Rows:
    """The implementation `operations`: the gate, then its rows."""
    first, second = both.chunk(2, dim=-1)
    return rows.quantize_rows.function(
        gated_activation.gated_activation.function(first, second, activation), scale, form
    )


@operation(OP)
def gated_rows(both: Tensor, activation: str, scale: Tensor | None, form: torch.dtype) -> Rows:
    """(q[..., K] of `form`, scale[..., 1] float32), contiguous, of both[..., 2 K] float.

    scale: a static one, one float; None: one a row. form: int8 or an e4m3. Raises KernelError for arguments that do
    not fit.
    """
    q, scales = dispatch.run(OP, spec, both.device, (both, activation, scale, form))
    return q, scales


@gated_rows.register_fake
def _fake(both: Tensor, activation: str, scale: Tensor | None, form: torch.dtype) -> Rows:
    spec(both, activation, scale, form)
    shape = (*both.shape[:-1], both.shape[-1] // 2)
    return both.new_empty(shape, dtype=form), both.new_empty((*shape[:-1], 1), dtype=torch.float32)


def cases() -> list[Case]:
    """Cases for parity checks: every form, both kinds of scales."""

    def case(m: int, k: int, activation: str, static: bool, form: torch.dtype) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
            both = torch.randn(m, 2 * k, generator=generator).to(device, dtype)
            return both, activation, torch.tensor([0.02], device=device) if static else None, form

        return Case(f"m{m}-k{k}-{activation}-{'static' if static else 'dynamic'}-{form_name(form)}", make)

    sizes = ((1, 64, "silu"), (7, 130, "gelu_tanh"), (0, 66, "silu"), (129, 1537, "silu"))
    return [case(*size, at == 1, (*FP8, torch.int8)[at % 3]) for at, size in enumerate(sizes)]


IMPLEMENTATIONS = {
    "triton": Implementation(by_triton, triton_why_not),
    "operations": Implementation(by_operations, dispatch.anywhere),
}
KERNELS = {OP: Kernel(gated_rows, reference, spec, IMPLEMENTATIONS, cases, composed=True)}
