"""Reads the decoder of a patched encoder-decoder for native CPU steps: its packs, norms and constants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch import own_code
from accelpatch.fusion.cached import Cached
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.cross_layer import FusedCrossLayer
from accelpatch.fusion.native_model import NativeModel, adapted, gather_adapters, gather_packs, packed
from accelpatch.kernels.cpu.native_library import ACTIVATIONS, CROSS, LINEARS
from accelpatch.kernels.cpu.step_weights import LayerWeights, NormWeight, StepShape
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.ops.norm.fused_norm import FusedNorm
from accelpatch.models.encoder_decoders import ENDS, CrossForm, Ends
from accelpatch.models.encoders import class_of, part_of

NORMS = ("attention_norm", "cross_norm", "mlp_norm")


def native_encoder_decoder(model: Any) -> NativeModel:
    """The weights of an encoder-decoder for native steps. Raises CannotFuse where one of its parts has no native
    form: no layer runs as a module within such a step."""
    ends = ENDS.get(class_of(model))
    if ends is None:
        raise CannotFuse(f"what a {class_of(model)} computes around its layers is not known to the native step")
    decoder = part_of(model, ends.decoder)
    layers = list(part_of(decoder, ends.layers))
    _look_at(model, decoder, ends)
    gather_packs(model)
    weights = list[LayerWeights | None]()
    for place, layer in enumerate(layers):
        try:
            weights.append(native_layer(layer))
        except CannotFuse as error:
            raise CannotFuse(f"layer {place}: {error}") from None
    embedding, head = packed(part_of(decoder, ends.embedding)), _head(model, ends)
    first, hidden = weights[0], embedding.k
    assert first is not None
    size = head_size(layers[0])
    if any(head_size(layer) != size for layer in layers) or head.k != hidden:
        raise CannotFuse("its layers differ in the size of their heads, or its head is of another width")
    if [layer.place for layer in layers] != list(range(len(layers))):
        raise CannotFuse(f"its layers have the indices {[layer.place for layer in layers]}")
    for place, one in enumerate(weights):
        if one is not None and (reason := one.why_not(hidden, size)):
            raise CannotFuse(f"layer {place}: {reason}")
    positions, padding = _positions(decoder, ends)
    shape = StepShape(
        hidden, size, (), _number(decoder, ends.scale), positions=positions, score_bias=score_bias(layers[0]),
        embedding_norm=None if ends.embedding_norm is None else norm_of(part_of(decoder, ends.embedding_norm)),
    )  # fmt: skip
    head = gather_adapters(weights, head)
    heads = first.kv_heads(size)
    cached = tuple(Cached(0, heads, (size, size), torch.float32) for _ in layers)
    return NativeModel(
        shape, weights, {}, embedding, head, _final_norm(model, decoder, ends), cached, padding=padding,
        masked=ends.masked,
    )  # fmt: skip


def native_layer(layer: Any) -> LayerWeights:
    """The weights of one decoder layer. Raises CannotFuse."""
    if not isinstance(layer, FusedCrossLayer) or not layer.is_fused:
        raise CannotFuse("it runs its modules")
    if reason := own_code.why_not_in([one for one in layer.modules() if one is not layer]):
        raise CannotFuse(reason)
    fused, _ = layer.lay_out()
    if fused.activation not in ACTIVATIONS:
        raise CannotFuse(f"the native step has no activation {fused.activation}")
    names = names_of(layer.form)
    linears = {name: adapted(part_of(layer, path)) for name, path in names.items()}
    norms = {name: _weight(norm) for name, norm in zip(NORMS, fused.norms, strict=True)}
    return LayerWeights(
        linears, norms, fused.activation, fused.own.scaling, rope=-1, cross_scale=fused.cross.scaling,
        post=layer.form.post,
    )  # fmt: skip


def names_of(form: CrossForm) -> dict[str, str]:
    """Name in a native step -> dotted name in a layer, of its linear layers."""
    own, cross = form.own, form.cross
    found = dict(zip(LINEARS, (own.q, own.k, own.v, own.o, *form.up), strict=False))
    return found | {"down": form.down} | dict(zip(CROSS, (cross.q, cross.o), strict=True))


def head_size(layer: FusedCrossLayer) -> int:
    """Columns of each head of a layer, the same in both of its attentions. Raises CannotFuse."""
    fused, _ = layer.lay_out()
    if fused.own.size != fused.cross.size:
        raise CannotFuse("its two attentions have heads of different sizes")
    return fused.own.size


def score_bias(layer: FusedCrossLayer) -> Callable[[int], Tensor] | None:
    """What makes the bias of scores by distance, as of StepShape, which the first layer has for all (T5)."""
    own: Any = part_of(layer, layer.form.own.module)
    if not layer.form.bias or not own.has_relative_attention_bias:
        return None

    def made(length: int) -> Tensor:
        with torch.no_grad():
            bias: Tensor = own.compute_bias(1, length, device=torch.device("cpu"), past_seen_tokens=length - 1)
        return bias[0, :, 0].float().contiguous()

    return made


def _look_at(model: Any, decoder: Any, ends: Ends) -> None:
    """Raise CannotFuse where something around the layers may compute something else than the table says."""
    known = {ends.layers, ends.embedding, ends.norm, ends.embedding_norm, (ends.positions or "").partition(".")[0]}
    for name, child in decoder.named_children():
        if name not in known and any(True for _ in child.parameters()):
            raise CannotFuse(f"its decoder's {name} is not known to the native step")
    parts = [part_of(decoder, name) for name in known if name and name != ends.layers]
    around = [part_of(model, ends.decoder.partition(".")[0]), part_of(model, ends.head)]
    modules = [one for one in (model, decoder, *around, *parts) if isinstance(one, nn.Module)]
    if reason := own_code.why_not_in(modules):
        raise CannotFuse(reason)


def _number(decoder: Any, name: str | None) -> float:
    return 1.0 if name is None else float(part_of(decoder, name))


def _positions(decoder: Any, ends: Ends) -> tuple[Tensor | None, int | None]:
    """(rows of positions [P, hidden], `padding` of a NativeModel)."""
    if ends.positions is None:
        return None, None
    table = part_of(decoder, ends.positions)
    if not isinstance(table, Tensor) or table.dtype != torch.float32 or table.dim() != 2:
        raise CannotFuse("its embedding of positions was replaced, or is not in float32")
    module = part_of(decoder, ends.positions.partition(".")[0])
    return table.detach()[ends.offset :], int(module.padding_idx) if ends.padded else None


def _head(model: Any, ends: Ends) -> Pack:
    """The head, with what the model adds to its logits."""
    pack, bias = adapted(part_of(model, ends.head)), getattr(model, "final_logits_bias", None)
    if bias is None or not bias.any():
        return pack
    added = bias.detach().reshape(-1).float()
    if len(added) != pack.n:
        raise CannotFuse(f"a bias of {len(added)} logits stands behind a head of {pack.n}")
    return replace(pack, bias=added if pack.bias is None else pack.bias + added)


def _final_norm(model: Any, decoder: Any, ends: Ends) -> NormWeight | None:
    if ends.norm is None:
        return None
    norm = norm_of(part_of(decoder, ends.norm))
    if ends.factor is None or not getattr(model.config, ends.factor):
        return norm
    return norm._replace(weight=norm.weight * float(model.model_dim) ** -0.5)


def norm_of(module: Any) -> NormWeight:
    """The weight of a norm around the layers, original or replaced. Raises CannotFuse."""
    weight = getattr(module, "weight", None)
    if weight is None:
        raise CannotFuse("a norm has no weight")
    if isinstance(module, nn.LayerNorm):
        return _weight(FusedNorm(weight, module.eps, layer=True, bias=module.bias))
    return _weight(FusedNorm(weight, module.variance_epsilon))


def _weight(norm: FusedNorm) -> NormWeight:
    if norm.weight.dtype != torch.float32 or norm.weight.device.type != "cpu":
        raise CannotFuse(f"a norm is in {norm.weight.dtype} on {norm.weight.device}")
    bias = None if norm.bias is None else norm.bias.detach()
    return NormWeight(norm.weight.detach(), float(norm.eps), norm.layer, bias)
