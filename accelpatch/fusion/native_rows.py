"""A Llama-like model's layers over the rows of several texts on a CPU, by the native functions one after the other.

The layers and their weights are those of the native step (native_model.py), which runs one token of each of a few
texts in one call; here each function runs all rows, prompts beside single tokens, and attention reads pages.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.fusion.native_model import NativeModel
from accelpatch.kernels.cpu import linear as cpu_linear
from accelpatch.kernels.cpu.native_library import ACTIVATIONS, DENSE, PLAIN, check, native, pointer, threads
from accelpatch.kernels.cpu.step_weights import LayerWeights, NormWeight
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.ops.attention.paged_attention import by_cpu
from accelpatch.kernels.ops.experts.choose_experts import choose_experts
from accelpatch.kernels.ops.experts.packed_experts import packed_experts
from accelpatch.modules.paged_cache import PagedCache

Tables = list[tuple[Tensor, Tensor]]  # cosines and sines [T, D / 2] of each kind of rotary frequencies


def logits_of_rows(model: NativeModel, ids: Tensor, positions: Tensor, cache: PagedCache, last: Tensor) -> Tensor:
    """Logits float32 [n, V] of the rows last[n] after ids[T] at positions[T], whose keys and values go into the pages.

    Every layer must have a native form. Raises IndexError, as an embedding does, for an id that it has no row for.
    """
    shape = model.shape
    if not 0 <= int(ids.min()) <= int(ids.max()) < model.embedding.n:
        raise IndexError(f"a token is out of range: the embedding has {model.embedding.n} rows")
    x = cpu_linear.gather(model.embedding, ids)
    if shape.embedding_scale != 1.0:
        x *= shape.embedding_scale
    tables = [_angles(positions, *rope) for rope in shape.rope]
    pending: Tensor | None = None
    for place, layer in enumerate(model.layers):
        assert layer is not None
        x, pending = _layer(layer, place, x, pending, tables, cache, shape.head_dim)
    normal, _ = _normed(model.final_norm, x, pending)
    logits = _linear(normal.index_select(0, last), model.head)
    return torch.tanh(logits / shape.softcap) * shape.softcap if shape.softcap else logits


def _layer(
    layer: LayerWeights, place: int, x: Tensor, pending: Tensor | None, tables: Tables, cache: PagedCache, size: int
) -> tuple[Tensor, Tensor | None]:
    """(x, rest) after the layer on x + pending[T, K]; the rest is added by the next norm."""
    linears, norms = layer.linears, layer.norms
    normal, x = _normed(norms.get("attention_norm"), x, pending)
    q, k, v = (_linear(normal, linears[name]).view(len(x), -1, size) for name in ("q", "k", "v"))
    for part, name in ((q, "q_norm"), (k, "k_norm")):
        if name in norms:
            part.copy_(_normed(norms[name], part.view(-1, size), None)[0].view_as(part))
        _rotate_(part, *tables[layer.rope])
    held = cache.of(place)
    y = by_cpu(q, k, v, held.keys, held.values, held.rows, layer.scale, layer.window, layer.softcap, layer.sinks)
    x, pending = _added(norms.get("after_attention_norm"), _linear(y.view(len(x), -1), linears["o"]), x)
    normal, x = _normed(norms.get("mlp_norm"), x, pending)
    return _added(norms.get("after_mlp_norm"), _mlp(layer, normal), x)


def _mlp(layer: LayerWeights, x: Tensor) -> Tensor:
    """The MLP of rows x[T, K], or the weighted sum of its experts."""
    if (held := layer.experts) is not None:
        ids, weights = choose_experts.function(_linear(x, held.router), held.chosen, held.normalise, False)
        return packed_experts(x, ids, weights, *held.gate_up, *held.down, layer.activation, held.alpha, held.limit)
    inner = _gated(layer, _linear(x, layer.linears["gate"]), _linear(x, layer.linears["up"]))
    return _linear(inner, layer.linears["down"])


def _added(norm: NormWeight | None, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """(x, y still to be added); with a norm, (x + norm(y), None)."""
    return (x, y) if norm is None else (x.add_(_normed(norm, y, None)[0]), None)


def _linear(x: Tensor, pack: Pack) -> Tensor:
    y = functional.linear(x, pack.data, pack.bias) if pack.kind == DENSE else cpu_linear.product(x, pack)
    return y if pack.low is None else pack.low.add_(y, x)


def _normed(norm: NormWeight | None, x: Tensor, pending: Tensor | None) -> tuple[Tensor, Tensor]:
    """(norm(s), s) for s = x + pending; without a norm, (s, s)."""
    if norm is None:
        total = x if pending is None else x + pending
        return total, total
    y, total = torch.empty_like(x), x if pending is None else torch.empty_like(x)
    status = native().ap_rmsnorm(
        pointer(x), pointer(pending), pointer(norm.weight), norm.eps, *x.shape, pointer(y), pointer(total), threads()
    )
    check(status, f"the norm of {list(x.shape)}")
    return y, total


def _angles(positions: Tensor, frequencies: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    angle = positions.to(torch.float32)[:, None] * frequencies.to(torch.float32)
    return (angle.cos() * scaling).contiguous(), (angle.sin() * scaling).contiguous()


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding of x[T, H, D] in place."""
    check(native().ap_rope_(pointer(x), pointer(cos), pointer(sin), *x.shape), f"x of shape {list(x.shape)}")


def _gated(layer: LayerWeights, gate: Tensor, up: Tensor) -> Tensor:
    y = torch.empty(gate.shape, **PLAIN)
    kind = ACTIVATIONS[layer.activation]
    status = native().ap_gated(pointer(gate), pointer(up), kind, gate.numel(), pointer(y), threads())
    check(status, f"a gate of shape {list(gate.shape)}")
    return y
