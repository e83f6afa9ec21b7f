"""Attention without the matrix of scores: every query over the keys that it sees, in any precision and on any device.

    s[i, j] = softcap tanh(scaling q_i k_j / softcap)      softcap 0: scaling q_i k_j;  + bias[b, h, i, j]
    y_i = sum_j softmax_j(s)[i, j] v_j                     over the keys j that query i sees

q[B, Hq, L, D], k, v[B, Hkv, S, D] of any strides; query head h uses KV head h // (Hq / Hkv); y[B, L, Hq, D] contiguous,
in q's dtype. ranges[B, L, 2] int32: query i sees the keys low <= j < high, which expresses causality, padding and
packed sequences. Without ranges the queries are the last of the keys where causal, else they see all keys. window > 0
keeps the last `window` keys before high. bias: float, added to the scores, or bool, True for keys that are visible.
sinks[Hq]: one more term exp(sink) in the softmax's denominator. A query that sees no key gets zeros; keys that no query
sees have no influence, not even as NaN. Source: Dao 2023, "FlashAttention-2", arXiv:2307.08691.
"""

from __future__ import annotations

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import FLOATS, require, say
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.attention import on_cpu as attention_cpu
from accelpatch.kernels.ops.attention import packages as attention_packages
from accelpatch.kernels.ops.attention import sdpa as attention_sdpa
from accelpatch.kernels.ops.attention import stored as attention_stored
from accelpatch.kernels.ops.attention.cases import cases
from accelpatch.kernels.ops.attention.mask import by_token, combined, emptied, shown, visible
from accelpatch.kernels.spec import Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

OP = "flash_attention"
LARGEST_HEAD, LARGEST_WIDE_HEAD = 256, 128  # head sizes of the Triton kernel; the second in float32
MOST_PROGRAMS = (1 << 31) - 1  # of a launch


def reference(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor | None = None, bias: Tensor | None = None,
    sinks: Tensor | None = None, causal: bool = True, window: int = 0, softcap: float = 0.0, scaling: float = 1.0,
) -> Tensor:  # fmt: skip
    """As the docstring says, in q's dtype; the softmax in float32 or wider."""
    (heads, queries), keys = q.shape[1:3], k.shape[2]
    k, v = (one.repeat_interleave(heads // one.shape[1], 1) for one in (k, v))
    at, row = torch.arange(keys, device=q.device), torch.arange(queries, device=q.device)
    low, high = torch.zeros_like(row)[None], (row + 1 + keys - queries if causal else row * 0 + keys)[None]
    if ranges is not None:
        low, high = ranges[..., 0], ranges[..., 1]
    if window > 0:
        low = torch.where(low < high - window, high - window, low)
    seen = ((low[..., None] <= at) & (at < high[..., None]))[:, None].expand(len(q), heads, queries, keys)
    if bias is not None and bias.dtype == torch.bool:
        seen = seen & bias
    unseen = ~seen.any(2)[..., None]  # by any query
    scores = q @ k.masked_fill(unseen, 0).transpose(2, 3) * scaling
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None and bias.dtype != torch.bool:
        scores = scores + bias
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(len(q), -1, queries, 1).to(scores.dtype)), -1)
    p = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    p = p.masked_fill(scores.isneginf(), 0)[..., :keys]
    y = p.to(v.dtype) @ v.masked_fill(unseen, 0)
    return y.transpose(1, 2).reshape(-1).view(len(q), queries, heads, v.shape[3])


def by_eager(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor | None = None, bias: Tensor | None = None,
    sinks: Tensor | None = None, causal: bool = True, window: int = 0, softcap: float = 0.0, scaling: float = 1.0,
) -> Tensor:  # fmt: skip
    """The implementation `eager`: the matrix of scores in q's dtype, as transformers' eager attention has it."""
    (heads, length), (kv_heads, keys) = q.shape[1:3], k.shape[1:3]
    seen = visible(length, keys, ranges, causal, window, q)
    mask = combined(seen, bias, q.dtype if bias is None else bias.dtype)
    if mask is not None:
        k, v = emptied(k, v, shown(mask))
    if heads > kv_heads:
        k, v = (one.repeat_interleave(heads // kv_heads, 1) for one in (k, v))
    s = q @ k.mT * scaling
    if softcap:
        s = (s / softcap).tanh_() * softcap
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else s + mask
    wide = torch.promote_types(s.dtype, torch.float32)
    hidden = s.isneginf() if mask is not None else None
    if hidden is not None:
        s = s.masked_fill(hidden.all(-1, keepdim=True), 0)  # else the gradients of a query that sees no key are NaN
    p = s.softmax(-1, dtype=wide)
    if sinks is not None:
        p = p * torch.sigmoid(s.to(wide).logsumexp(-1, keepdim=True) - sinks.to(wide)[None, :, None, None])
    if hidden is not None:
        p = p.masked_fill(hidden, 0)
    return by_token(p.to(v.dtype) @ v)


def triton_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_triton` cannot run a spec; None where it can."""
    sizes, largest = spec.sizes, LARGEST_WIDE_HEAD if spec.dtype == torch.float32 else LARGEST_HEAD
    if sizes["D"] > largest:
        return f"the Triton kernel holds heads of up to {largest} in {spec.dtype}"
    if spec.options["scaling"] <= 0:
        return "the Triton kernel takes a positive scaling"
    if sizes["B"] * sizes["H"] * sizes["L"] > MOST_PROGRAMS or max(sizes["L"], sizes["S"]) >= 1 << 30:
        return "the Triton kernel takes fewer than 2^31 rows of all heads, and fewer than 2^30 keys"
    if spec.dtype == torch.bfloat16 and device.facts is not None and device.facts.matrix == "mma without bf16":
        return f"the matrix unit of {device.arch} has no bfloat16: use float16"
    return launch.why_not(device, spec.dtype)


def by_triton(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor | None = None, bias: Tensor | None = None,
    sinks: Tensor | None = None, causal: bool = True, window: int = 0, softcap: float = 0.0, scaling: float = 1.0,
) -> Tensor:  # fmt: skip
    """The implementation `triton`: one launch, without a matrix of scores."""
    from accelpatch.kernels.triton.flash_attention import flash_attention as run

    return run(q, k, v, ranges, bias, sinks, causal, window, softcap, scaling)


def spec(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor | None = None, bias: Tensor | None = None,
    sinks: Tensor | None = None, causal: bool = True, window: int = 0, softcap: float = 0.0, scaling: float = 1.0,
) -> Spec:  # fmt: skip
    """The Spec of a call, for dispatch. Raises KernelError for arguments that do not fit together."""
    for name, one in (("q", q), ("k", k), ("v", v)):
        fits = one.dim() == 4 and one.dtype == q.dtype and one.dtype in FLOATS
        require(fits, OP, f"q, k and v are float [B, H, L, D] of one dtype, not {name} {say(one)} beside {say(q)}")
    (b, heads, length, size), (_, kv_heads, keys, _) = q.shape, k.shape
    require(k.shape == (b, kv_heads, keys, size) == v.shape, OP, f"k and v are [{b}, Hkv, S, {size}], not {say(k)}")
    require(kv_heads > 0 and heads % kv_heads == 0, OP, f"{heads} query heads are no multiple of {kv_heads} KV heads")
    require(keys > 0 and size > 0, OP, f"no keys, or empty ones: {say(k)}")
    alone = ranges is None and causal
    require(not alone or length <= keys, OP, f"{length} causal queries are the last ones of {keys} keys; give ranges")
    require(window >= 0 and (causal or not window), OP, f"a window of {window} is at least 0, and causal")
    require(softcap >= 0, OP, f"a softcap of {softcap} is at least 0")
    if ranges is not None:
        fits = ranges.shape == (b, length, 2) and ranges.dtype == torch.int32
        require(fits, OP, f"ranges is int32 [{b}, {length}, 2], not {say(ranges)}")
    if bias is not None:
        due = (b, heads, length, keys)
        fits = bias.dim() == 4 and all(one in (1, of) for one, of in zip(bias.shape, due, strict=True))
        fits = fits and bias.shape[3] == keys and bias.dtype in (torch.bool, *FLOATS)
        require(fits, OP, f"bias is bool or float {list(due)}, 1 for any of the first three, not {say(bias)}")
    if sinks is not None:
        require(sinks.shape == (heads,) and sinks.dtype in FLOATS, OP, f"sinks is float [{heads}], not {say(sinks)}")
    for other in (k, v, ranges, bias, sinks):
        require(other is None or other.device == q.device, OP, f"not all tensors lie on {q.device}: move them")
    return of_shape(
        heads, kv_heads, size, q.dtype, b=b, length=length, keys=keys, causal=causal, window=window, softcap=softcap,
        scaling=scaling, ranges=ranges is not None, sinks=sinks is not None,
        bias=None if bias is None else bias.dtype, bias_heads=1 if bias is None else bias.shape[1],
    )  # fmt: skip


def of_shape(
    heads: int, kv_heads: int, size: int, dtype: torch.dtype, *, b: int = 1, length: int = 1, keys: int = 1,
    causal: bool = True, window: int = 0, softcap: float = 0.0, scaling: float = 1.0, ranges: bool = False,
    sinks: bool = False, bias: torch.dtype | None = None, bias_heads: int = 1,
) -> Spec:  # fmt: skip
    """The Spec of attention of this size, for planning. bias: its dtype. A window that hides no key counts as none."""
    sizes = {"B": b, "H": heads, "Hkv": kv_heads, "L": length, "S": keys, "D": size}
    options = {"causal": causal, "window": window if window < keys else 0, "softcap": softcap, "scaling": scaling,
               "ranges": ranges, "sinks": sinks, "bias": bias, "bias_heads": bias_heads}  # fmt: skip
    return Spec(OP, sizes, dtype, options=options)


@operation(OP)
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor | None = None, bias: Tensor | None = None,
    sinks: Tensor | None = None, causal: bool = True, window: int = 0, softcap: float = 0.0, scaling: float = 1.0,
) -> Tensor:  # fmt: skip
    """y[B, L, Hq, D] in q's dtype, contiguous. Raises KernelError for arguments that do not fit together.

    causal: with ranges it only says that high grows with the query. bias[B or 1, Hq or 1, L or 1, S].
    """
    args = (q, k, v, ranges, bias, sinks, causal, window, softcap, scaling)
    y: Tensor = dispatch.run(OP, spec, q.device, args)
    return y


@flash_attention.register_fake
def _fake(
    q: Tensor, k: Tensor, v: Tensor, ranges: Tensor | None = None, bias: Tensor | None = None,
    sinks: Tensor | None = None, causal: bool = True, window: int = 0, softcap: float = 0.0, scaling: float = 1.0,
) -> Tensor:  # fmt: skip
    spec(q, k, v, ranges, bias, sinks, causal, window, softcap, scaling)
    b, heads, length, size = q.shape
    return q.new_empty((b, length, heads, size))


IMPLEMENTATIONS = {
    "triton": Implementation(by_triton, triton_why_not),
    **attention_cpu.IMPLEMENTATIONS,
    **attention_packages.IMPLEMENTATIONS,
    **attention_sdpa.IMPLEMENTATIONS,
    "eager": Implementation(by_eager, dispatch.anywhere),
}
KERNELS = {OP: Kernel(flash_attention, reference, spec, IMPLEMENTATIONS, cases, measured=attention_stored.preferred)}
