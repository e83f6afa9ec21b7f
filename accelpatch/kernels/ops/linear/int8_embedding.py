"""Rows of an int8 embedding table: y[..., K] = q[ids, K] * scale[ids, G], in a dtype of the caller's choice.

The table has the layout of int8_linear, so that a tied embedding and head share one copy. G = 1: one scale per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import FLOATS, check_scale, require, say
from accelpatch.kernels.operation import operation
from accelpatch.kernels.spec import Case, Implementation, Kernel, Spec


def reference(ids: Tensor, q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise the rows in use to a table of their own, then torch's own embedding."""
    used, places = torch.unique(ids, return_inverse=True)
    wide = torch.promote_types(dtype, torch.float32)
    groups = q[used].to(wide).unflatten(1, (scale.shape[1], -1))
    table = (groups * scale[used].to(wide)[:, :, None]).flatten(1)
    return torch.nn.functional.embedding(places, table.to(dtype))


def spec(ids: Tensor, q: Tensor, scale: Tensor, dtype: torch.dtype) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    op = "int8_embedding"
    require(q.dtype == torch.int8 and q.dim() == 2, op, f"q is int8 [N, K], not {say(q)}")
    require(ids.dtype in (torch.int32, torch.int64), op, f"ids are int32 or int64, not {ids.dtype}")
    require(dtype in FLOATS, op, f"dtype is a float dtype, not {dtype}")
    require(ids.device == q.device == scale.device, op, f"ids lie on {ids.device}, the table on {q.device}: move one")
    group_size = check_scale(op, q.shape[0], q.shape[1], scale)
    return Spec(op, {"M": ids.numel(), "N": q.shape[0], "K": q.shape[1]}, dtype, scale.dtype, group_size)


def by_torch(ids: Tensor, q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The implementation `torch`: gathers and dequantises the rows."""
    wide = torch.promote_types(dtype, torch.float32)
    flat = ids.reshape(-1)
    # index_select, as nn.Embedding does: an id out of range, a negative one too, raises IndexError
    rows = q.index_select(0, flat).to(wide).unflatten(1, (scale.shape[1], -1))
    rows = rows.mul_(scale.index_select(0, flat).to(wide).unsqueeze(2))
    return rows.to(dtype).view(*ids.shape, q.shape[1])


@operation("int8_embedding")
def int8_embedding(ids: Tensor, q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """y[..., K] in `dtype`: the rows q[ids] * scale[ids].

    ids[...] int32 or int64 in 0..N-1 (IndexError otherwise); q[N, K] int8; scale[N, G] float, G dividing K.
    Raises KernelError for arguments that do not fit together.
    """
    y: Tensor = dispatch.run("int8_embedding", spec, q.device, (ids, q, scale, dtype))
    return y


@int8_embedding.register_fake
def _fake(ids: Tensor, q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    spec(ids, q, scale, dtype)
    return q.new_empty((*ids.shape, q.shape[1]), dtype=dtype)


def cases() -> list[Case]:
    """Cases for parity checks: odd sizes."""

    def case(shape: tuple[int, ...], n: int, k: int, groups: int) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
            ids = torch.randint(0, n, shape, generator=generator).to(device)
            q = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8).to(device)
            scale = torch.rand(n, groups, generator=generator).to(device) / 127
            return ids, q, scale, dtype

        return Case(f"ids{'x'.join(map(str, shape))}-n{n}-k{k}-g{k // groups}", make)

    return [case((1, 1), 1001, 65, 1), case((2, 7), 129, 576, 9), case((0,), 7, 64, 1), case((129,), 3, 1, 1)]


KERNELS = {
    "int8_embedding": Kernel(
        int8_embedding, reference, spec, {"torch": Implementation(by_torch, dispatch.anywhere)}, cases
    )
}
