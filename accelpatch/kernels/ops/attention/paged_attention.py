"""Attention of several texts' new tokens over keys and values in pages, as continuous batching has them.

    q[T, Hq, D], k, v[T, Hkv, D]      the new tokens of all texts, one text after the other, without padding
    keys, values[S, Hkv, D]           tokens of all texts in any order; rows (paged_rows.py) has whose they are
    y[T, Hq, D]                       token t over the cached tokens of its text, then its new ones up to t

k and v are written to keys and values at rows.write. Several new tokens of a text may take the places of cached ones
that are read, as in a ring of the last `window` tokens; a lone one takes none of those. window > 0: a token sees the
last `window` tokens up to itself. softcap c > 0 turns a score s into c tanh(s / c); sinks[Hq]: one more term exp(sink)
in the softmax's denominator. Scores and sums are float32. Rows behind the last text are padding: their
y is zero, and they are written where write says. Sources: Kwon et al. 2023, "PagedAttention", arXiv:2309.06180; Dao
2023, arXiv:2307.08691.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import FLOATS, require, say
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.cpu.native_library import Pages, check, native, pointer, threads
from accelpatch.kernels.ops.attention.flash_attention import by_eager, flash_attention
from accelpatch.kernels.paged_rows import PagedRows, Text
from accelpatch.kernels.spec import Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

OP = "paged_attention"
WIDEST, WIDEST_FLOATS = 256, 128  # heads of the Triton kernel, and of it in float32
MOST_GROUPED = 64  # query heads of a key head, of the native kernel


def reference_(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scaling: float, window: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Text by text in plain torch; the softmax in float32 or wider."""
    y = torch.zeros_like(q)
    for text in rows.texts:
        part = _of_text(q, k, v, keys, values, rows, text)
        y[text.first : text.last] = by_eager(*part, None, None, sinks, True, window, softcap, scaling)[0]
    _write_(k, v, keys, values, rows)
    return y


def _of_text(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, text: Text
) -> tuple[Tensor, Tensor, Tensor]:
    """q[1, Hq, L, D], and k and v[1, Hkv, past + L, D] of a text."""
    own, placed = slice(text.first, text.last), rows.placed(text)

    def after(cached: Tensor, own: Tensor) -> Tensor:
        return (torch.cat((cached.index_select(0, placed), own)) if text.past else own).transpose(0, 1)[None]

    return q[own].transpose(0, 1)[None], after(keys, k[own]), after(values, v[own])


def _write_(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: PagedRows) -> None:
    count = rows.write.shape[0]
    keys.index_copy_(0, rows.write, k[:count])
    values.index_copy_(0, rows.write, v[:count])


def paged_attention_(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scaling: float, window: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y[T, Hq, D] in q's dtype, contiguous; writes k and v into keys and values.

    The last dimension of q, k and v is contiguous, keys and values are contiguous. Triton runs it in one launch and the
    write's two, and reads nothing on the host. Raises KernelError for arguments that do not fit together.
    """
    args = (q, k, v, keys, values, rows, scaling, window, softcap, sinks)
    y: Tensor = dispatch.run(OP, spec, q.device, args)
    return y


def spec(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scaling: float, window: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Spec:  # fmt: skip
    """The Spec of a call, for dispatch. Raises KernelError for arguments that do not fit."""
    for name, one in (("q", q), ("k", k), ("v", v), ("keys", keys), ("values", values)):
        fits = one.dim() == 3 and one.dtype == q.dtype and one.dtype in FLOATS and one.device == q.device
        require(fits, OP, f"q, k, v and the cache are float [any, heads, D] of one dtype, not {name} {say(one)}")
        require(one.stride(2) == 1, OP, f"the numbers of a head lie behind each other, not those of {name}")
    (tokens, heads, size), kv_heads = q.shape, k.shape[1]
    require(k.shape == v.shape == (tokens, kv_heads, size), OP, f"k and v are [{tokens}, Hkv, {size}], not {say(k)}")
    fits = all(one.shape[1:] == (kv_heads, size) and one.is_contiguous() for one in (keys, values))
    require(fits, OP, f"keys and values are contiguous [S, {kv_heads}, {size}], not {say(keys)} and {say(values)}")
    require(kv_heads > 0 and heads % kv_heads == 0, OP, f"{heads} query heads are no multiple of {kv_heads} KV heads")
    require(rows.write.shape[0] <= tokens, OP, f"{rows.write.shape[0]} tokens are written, and {tokens} are given")
    require(window >= 0 and softcap >= 0, OP, f"a window of {window} and a softcap of {softcap} are at least 0")
    require(sinks is None or sinks.shape == (heads,), OP, f"sinks is [{heads}]")
    options = {"softcap": softcap, "sinks": sinks is not None, "scaling": scaling, "window": window}
    return Spec(OP, {"T": tokens, "H": heads, "Hkv": kv_heads, "D": size}, q.dtype, options=options)


def why_not(spec: Spec, device: Device) -> str | None:
    """Why `triton` cannot run a spec; None where it can."""
    largest = WIDEST_FLOATS if spec.dtype == torch.float32 else WIDEST
    if spec.sizes["D"] > largest:
        return f"the Triton kernel holds heads of up to {largest} in {spec.dtype}"
    if spec.options["scaling"] <= 0:
        return "the Triton kernel takes a positive scaling"
    return launch.why_not(device, spec.dtype)


def by_triton(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scaling: float, window: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The implementation `triton`."""
    from accelpatch.kernels.triton.paged_attention import paged_attention as run

    y = run(q, k, v, keys, values, rows, scaling, window, softcap, sinks)
    _write_(k, v, keys, values, rows)
    return y


def why_not_cpu(spec: Spec, device: Device) -> str | None:
    """Why `cpu` cannot run a spec; None where it can."""
    if device.kind != "cpu":
        return "the native kernel runs on a CPU"
    if spec.dtype != torch.float32:
        return f"the native kernel takes float32, not {spec.dtype}"
    if spec.sizes["H"] > MOST_GROUPED * spec.sizes["Hkv"]:
        return f"the native kernel takes up to {MOST_GROUPED} query heads of a key head"
    return native_library.why_not(device)


def by_cpu(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scaling: float, window: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The implementation `cpu`: one native call for all texts with one new token and for short prompts, the attention
    of prompts for each other text. Under a window a prompt may write over what it reads: none is short then."""
    some = rows.single if window else rows.short
    if whole := some is not None and len(some[0]) == len(q):
        y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    else:
        others = [text for text in rows.texts if text.last - text.first > 1 and (window or not text.is_short)]
        y = _prompts(q, k, v, keys, values, rows, scaling, window, softcap, sinks, others)
    _write_(k, v, keys, values, rows)
    if some is not None:
        own, index, starts, ends = some
        queries = (q if whole else q[own]).contiguous()
        out = y if whole else torch.empty_like(queries)
        starts = starts if not window else torch.maximum(starts, ends - window)
        float_sinks = None if sinks is None else sinks.float().contiguous()
        call = Pages(
            *map(pointer, (queries, keys, values, out, index, starts, ends)),
            len(own), q.shape[1], k.shape[1], q.shape[2], len(keys), scaling, softcap,
            pointer(float_sinks),
        )  # fmt: skip
        check(native().ap_pages_run(byref(call), threads()), f"q of shape {list(q.shape)}")
        if not whole:
            y[own] = out
    return y


def by_torch(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scaling: float, window: int = 0,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The implementation `torch`: the attention of prompts for each text; waits for the device."""
    y = _prompts(q, k, v, keys, values, rows, scaling, window, softcap, sinks, rows.texts)
    _write_(k, v, keys, values, rows)
    return y


def _prompts(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scaling: float, window: int,
    softcap: float, sinks: Tensor | None, texts: Sequence[Text],
) -> Tensor:  # fmt: skip
    """y, in which these texts are filled in, and all else is zero."""
    y = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for text in texts:
        part = _of_text(q, k, v, keys, values, rows, text)
        y[text.first : text.last] = flash_attention(*part, None, None, sinks, True, window, softcap, scaling)[0]
    return y


IMPLEMENTATIONS = {
    "cpu": Implementation(by_cpu, why_not_cpu),
    "triton": Implementation(by_triton, why_not),
    "torch": Implementation(by_torch, dispatch.anywhere),
}
KERNELS = {OP: Kernel(paged_attention_, reference_, spec, IMPLEMENTATIONS, composed=False)}
