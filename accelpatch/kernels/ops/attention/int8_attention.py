"""Attention in int8, with static scales: both batched products of SmoothQuant's OPT, and the softmax between them.

    s[i, j] = qk_scale sum_d q[i, d] k[j, d] (+ mask)      exact sums of integers, then float32
    p[i, j] = rint(127 softmax_j(s[i, :]))                 whole numbers from 0 to 127
    y[i, d] = rint(pv_scale sum_j p[i, j] v[j, d])         saturated at -128 and 127

q[B, H, Lq, D], k, v[B, H, Lkv, D] int8, of any strides; scales[2] = (qk_scale, pv_scale) float32; y[B, Lq, H D] int8.
A probability below 1 / 254 is 0: that is the format, and over long contexts it costs accuracy. A query that sees no key
gets zeros. Source: Xiao et al. 2022, arXiv:2211.10438.
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

OP = "int8_attention"
LEVELS = 127
LARGEST_HEAD, MOST_HEADS = 256, 65535  # of the second axis of a launch
EXACT = 1024  # head size up to which float32 adds the products up exactly


def reference(q: Tensor, k: Tensor, v: Tensor, scales: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """As the docstring says, in float32; in float64 for scales in float64, and for heads of more than 1,024."""
    wide = torch.float64 if q.shape[-1] > EXACT else torch.promote_types(scales.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * scales[0].to(wide)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(wide)
    if causal:
        queries, keys = scores.shape[-2:]
        later = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
        scores = scores.masked_fill(later, -torch.inf)
    p = (scores.softmax(-1) * LEVELS).round()
    p = torch.where(scores.isneginf().all(-1, keepdim=True), 0.0, p)
    y = (p @ v.to(wide) * scales[1].to(wide)).round().clamp(-128, 127).to(torch.int8)
    return y.transpose(1, 2).flatten(2)


def spec(q: Tensor, k: Tensor, v: Tensor, scales: Tensor, mask: Tensor | None, causal: bool) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError for arguments that do not fit together."""
    for name, one in (("q", q), ("k", k), ("v", v)):
        require(one.dtype == torch.int8 and one.dim() == 4, OP, f"{name} is int8 [B, H, L, D], not {say(one)}")
        require(one.device == q.device, OP, f"q lies on {q.device}, {name} on {one.device}: move one")
    b, h, m, d = q.shape
    n = k.shape[2]
    require(k.shape == (b, h, n, d) == v.shape and n >= 1, OP, f"k and v are [{b}, {h}, Lkv, {d}], not {say(k)}")
    require(not causal or m <= n, OP, f"{m} queries of a causal attention are the last ones of {n} keys")
    require(scales.shape == (2,) and scales.dtype in FLOATS, OP, f"scales is float [2], not {say(scales)}")
    if mask is not None:
        fits = mask.dim() == 4 and all(one in (1, due) for one, due in zip(mask.shape, (b, h, m, n), strict=True))
        kinds = (torch.bool, *FLOATS)
        require(fits and mask.dtype in kinds, OP, f"mask is bool or float [{b}, {h}, {m}, {n}], not {say(mask)}")
    return of_shape(h, d, m=m, n=n, b=b, added=mask is not None and mask.dtype != torch.bool)


def of_shape(heads: int, size: int, *, m: int = 1, n: int = 1, b: int = 1, added: bool = False) -> Spec:
    """The Spec of attention of this size, for planning. added: whether a mask of floats is added to the scores."""
    return Spec(OP, {"B": b, "H": heads, "M": m, "N": n, "D": size}, torch.float32, options={"added": added})


def by_torch(q: Tensor, k: Tensor, v: Tensor, scales: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """The implementation `torch`: the reference."""
    return reference(q, k, v, scales, mask, causal)


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_triton` cannot run a spec; None where it can."""
    if spec.sizes["D"] > LARGEST_HEAD:
        return f"the Triton kernel holds heads of up to {LARGEST_HEAD}"
    if spec.sizes["B"] * spec.sizes["H"] > MOST_HEADS or spec.sizes["M"] * spec.sizes["N"] >= 1 << 31:
        return f"the Triton kernel takes {MOST_HEADS} heads of all rows, and masks below 2^31"
    if spec.options.get("added"):
        return "the Triton kernel takes boolean masks"
    return launch.why_not(device, spec.dtype)


def by_triton(q: Tensor, k: Tensor, v: Tensor, scales: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """The implementation `triton`: one launch, which reads the keys twice: for the softmax, and for its products."""
    from accelpatch.kernels.triton.int8_attention import int8_attention as run

    return run(q, k, v, scales, mask, causal)


@operation(OP)
def int8_attention(q: Tensor, k: Tensor, v: Tensor, scales: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """y[B, Lq, H D] int8, contiguous.

    mask[B or 1, H or 1, Lq or 1, Lkv or 1]: bool, True for keys that are seen, or float, added to the scores. causal:
    the queries are the last Lq positions, and see no later key. Raises KernelError for arguments that do not fit.
    """
    y: Tensor = dispatch.run(OP, spec, q.device, (q, k, v, scales, mask, causal))
    return y


@int8_attention.register_fake
def _fake(q: Tensor, k: Tensor, v: Tensor, scales: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    spec(q, k, v, scales, mask, causal)
    b, h, m, d = q.shape
    return q.new_empty((b, m, h * d))


def cases() -> list[Case]:
    """Cases for parity checks: odd sizes, prompts and steps, masks, queries that see nothing."""

    def case(b: int, h: int, m: int, n: int, d: int, masked: str) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
            shapes = ((b, h, m, d), (b, h, n, d), (b, h, n, d))
            q, k, v = (torch.randint(-127, 128, one, generator=generator).to(device, torch.int8) for one in shapes)
            mask = None
            if masked == "bool":
                mask = (torch.rand(b, 1, m, n, generator=generator) > 0.3).to(device)
                mask[:, :, :1] = m == 1  # the first of several queries sees nothing
            elif masked == "float":
                mask = torch.randn(b, 1, m, n, generator=generator).to(device, dtype)
            scales = torch.tensor([2 / (127 * 127 * d**0.5), 1 / 127], device=device)
            return q, k, v, scales, mask, masked == "causal"

        return Case(f"b{b}-h{h}-m{m}-n{n}-d{d}-{masked}", make)

    sizes = ((1, 2, 1, 7, 64), (2, 3, 7, 33, 80), (1, 1, 0, 5, 64), (1, 2, 129, 129, 128), (2, 1, 19, 19, 40))
    masks = ("none", "bool", "none", "causal", "float")
    return [case(*size, masked) for size, masked in zip(sizes, masks, strict=True)]


IMPLEMENTATIONS = {
    "triton": Implementation(by_triton, triton_why_not),
    "torch": Implementation(by_torch, dispatch.anywhere),
}
KERNELS = {OP: Kernel(int8_attention, reference, spec, IMPLEMENTATIONS, cases)}
