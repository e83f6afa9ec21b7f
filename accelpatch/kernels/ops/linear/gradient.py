"""The gradient of the linear operations: of y[M, N] = x[M, K] @ w[N, K]^T + bias[N], of a weight of any layout,

    dx[M, K] = dy[M, N] @ w[N, K]        dbias[N] = sum over M of dy        dw[N, K] = dy^T @ x, of a float weight alone

w is dequantised in blocks of rows, each dropped before the next one: never the whole of a large weight.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.row_major import RowMajor
from accelpatch.kernels.layouts.tiling import TILE_ROWS
from accelpatch.kernels.operation import NO_GRADIENT, Operation, is_eager, with_defaults
from accelpatch.kernels.ops.linear import common

#: elements of weight dequantised at once on a CPU: 4 MiB of float32; elsewhere common.DEVICE_BLOCK
CPU_BLOCK = 1 << 20
#: (start, stop, dtype) -> rows start .. stop - 1 of a weight, [stop - start, K], columns in the order of the inputs
Rows = Callable[[int, int, torch.dtype], Tensor]
#: (dy, weight) -> dy @ w by one kernel; None for what it does not take
Native = Callable[[Tensor, Any], Tensor | None]


def of_rows(weight: RowMajor, dense: common.Dense) -> Rows:
    """The rows of a canonical weight. dense: as of `common.dense_of`."""

    def rows(start: int, stop: int, dtype: torch.dtype) -> Tensor:
        return common.dense_of(weight.at(slice(start, stop)), dense, dtype, None)[0]

    return rows


def differentiate(
    operation: Operation[Tensor], layout: Callable[..., Any], rows: Callable[[Any], Rows], *, trains: bool = False,
    native: Native = lambda dy, weight: None,
) -> None:  # fmt: skip
    """Give a linear operation its gradient.

    layout: makes the weight of the operation's arguments between x and the bias. rows: of such a weight. trains:
    whether the weight is the one tensor between them, and a float that may ask for a gradient too.
    """
    name = f"{operation.custom._qualname}_input_gradient"
    schema = torch.library.infer_schema(operation.function, mutates_args=())
    bias = list(inspect.signature(operation.function).parameters).index("bias")  # its place; a name may follow it

    def of_input(dy: Tensor, *args: Any) -> Tensor:
        return _input_gradient(dy, layout(*args[: bias - 1]), rows, native)

    def fake(dy: Tensor, *args: Any) -> Tensor:
        return dy.new_empty((*dy.shape[:-1], layout(*args[: bias - 1]).k))

    like = operation.function
    compute = torch.library.custom_op(name, with_defaults(of_input, like), mutates_args=(), schema=schema)
    compute.register_fake(with_defaults(fake, like))

    def of_args(dy: Tensor, args: tuple[Any, ...]) -> Tensor:
        return (of_input if _direct() else compute)(dy.contiguous(), *args[1:])

    def backward(needed: tuple[bool, ...], args: tuple[Any, ...], dy: Tensor) -> tuple[Any, ...]:
        if any(needed[1 + trains : bias]):
            raise KernelError(NO_GRADIENT)
        flat, made = dy.reshape(-1, dy.shape[-1]), list[Any]([None] * len(args))
        if needed[0]:
            made[0] = of_args(dy, args)
        if trains and needed[1]:
            made[1] = (flat.t() @ args[0].reshape(-1, args[0].shape[-1])).to(args[1].dtype)
        if needed[bias]:
            made[bias] = flat.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(args[bias].dtype)
        return tuple(made)

    operation.differentiate(backward, partial(_kept, trains), of_args)


def _direct() -> bool:
    """Whether nothing traces, transforms or differentiates the backward pass itself."""
    return is_eager() and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _kept(trains: bool, needed: tuple[bool, ...], place: int) -> bool:
    """x is needed for the gradient of a float weight alone."""
    return place > 0 or (trains and needed[1])


def _input_gradient(dy: Tensor, weight: Any, rows: Callable[[Any], Rows], native: Native) -> Tensor:
    made = native(dy, weight)
    return _by_row_blocks(dy, rows(weight), weight.n, weight.k) if made is None else made


def _by_row_blocks(dy: Tensor, rows: Rows, n: int, k: int) -> Tensor:
    """dy[..., N] @ w[N, K] in dy's dtype, summed over blocks of N in float32 or wider."""
    cpu = dy.device.type == "cpu"
    wide = torch.promote_types(dy.dtype, torch.float32)
    dtype = wide if cpu else dy.dtype  # a device's matrix units sum in float32
    flat = dy.reshape(-1, n).to(dtype)
    step = max(1, (CPU_BLOCK if cpu else common.DEVICE_BLOCK) // k)
    step = step if cpu else -(-step // TILE_ROWS) * TILE_ROWS
    if step >= n:
        return (flat @ rows(0, n, dtype)).to(dy.dtype).view(*dy.shape[:-1], k)
    total = torch.zeros(flat.shape[0], k, dtype=wide, device=dy.device)
    for start in range(0, n, step):
        stop = min(start + step, n)
        total += flat[:, start:stop] @ rows(start, stop, dtype)
    return total.to(dy.dtype).view(*dy.shape[:-1], k)
