"""What some families do to q and k before attention, in place, in the rows of a qkv linear layer.

    qkv[M, (Hq + 2 Hkv) D]   columns: q of all heads, k of all heads, v
    1. RMSNorm over all of a row's q, and over all of its k, if there are norms (OLMo 2)
    2. rotary embedding of neighbouring columns (2 i, 2 i + 1) of each head's first R, if it is interleaved (GLM)

positions[M] int64. The rotary form of decode_attention.py pairs column i with i + R / 2 and is applied there; here are
the families that it does not take. Sources: OLMo et al. 2024, arXiv:2501.00656; Su et al. 2021, arXiv:2104.09864, in
its original layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import require
from accelpatch.kernels.ops.attention import rope
from accelpatch.kernels.ops.norm import rmsnorm
from accelpatch.kernels.query_key_form import QueryKey
from accelpatch.kernels.spec import Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

OP = "prepare_query_key"
WIDEST = 1 << 15  # columns of q that one program holds


def reference_(qkv: Tensor, positions: Tensor, form: QueryKey) -> None:
    """In plain torch."""
    start = 0
    for heads, weight in ((form.heads, form.q_norm), (form.kv_heads, form.k_norm)):
        part = qkv[:, start : start + heads * form.size]
        if weight is not None:
            part.copy_(rmsnorm.reference(part, weight, form.eps, False))
        if form.inv_freq is not None:
            _rotate_(part.view(-1, heads, form.size), positions, form.inv_freq, form.rope_scaling)
        start += heads * form.size


def _rotate_(part: Tensor, positions: Tensor, inv_freq: Tensor, rope_scaling: float) -> None:
    """part[M, H, D] with its first R columns rotated, pair by pair."""
    count = inv_freq.shape[0]
    cos, sin = (
        one[0, :, None, :count] for one in rope.rotary_cos_sin(positions[None], inv_freq, rope_scaling, part.dtype)
    )
    some = part[..., : 2 * count]
    first, second = some[..., 0::2], some[..., 1::2]
    some.copy_(torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2))


def prepare_query_key_(qkv: Tensor, positions: Tensor, form: QueryKey) -> None:
    """Norm and rotary embedding of q and k in place. qkv contiguous; positions[M] int64.

    Raises KernelError for shapes that do not fit together.
    """
    dispatch.run(OP, spec, qkv.device, (qkv, positions, form))


def spec(qkv: Tensor, positions: Tensor, form: QueryKey) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError for arguments that do not fit."""
    columns = (form.heads + 2 * form.kv_heads) * form.size
    fit = qkv.dim() == 2 and qkv.shape[1] == columns and positions.shape == qkv.shape[:1]
    require(fit, OP, f"qkv {list(qkv.shape)} and positions {list(positions.shape)} are not [M, {columns}] and [M]")
    require(positions.dtype == torch.int64, OP, f"positions are int64, not {positions.dtype}")
    norms = ((form.q_norm, form.heads), (form.k_norm, form.kv_heads))
    right = all(weight is None or weight.shape == (heads * form.size,) for weight, heads in norms)
    require(right, OP, "the norms have a weight for each column of q, and of k")
    return Spec(OP, {"M": qkv.shape[0], "K": form.heads * form.size, "D": form.size}, qkv.dtype)


def why_not(spec: Spec, device: Device) -> str | None:
    """Why the Triton kernel cannot run a spec; None where it can."""
    if spec.sizes["K"] > WIDEST or spec.sizes["D"] % 2:
        return f"q of {spec.sizes['K']} columns in heads of {spec.sizes['D']}"
    return launch.why_not(device, spec.dtype)


def by_triton(qkv: Tensor, positions: Tensor, form: QueryKey) -> None:
    """The implementation `triton`: one launch."""
    from accelpatch.kernels.triton import query_key as kernel

    kernel.prepare_query_key_(qkv, positions, form)


IMPLEMENTATIONS = {
    "triton": Implementation(by_triton, why_not),
    "torch": Implementation(reference_, dispatch.anywhere),
}
KERNELS = {OP: Kernel(prepare_query_key_, reference_, spec, IMPLEMENTATIONS)}
