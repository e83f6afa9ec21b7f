"""What a plan says of fused layers: the description of the original, lowered by what will replace its modules.

Nothing is built. After the patch `read_layers` and `native_model` lower the description of the replaced layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from accelpatch import own_code
from accelpatch.device import Device
from accelpatch.fusion import rotary
from accelpatch.fusion.across import across_of
from accelpatch.fusion.adapters import base_of
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.decoder import Decoder, form_in, found_in
from accelpatch.fusion.layer_description import INNER, QKV, LayerDescription, plain_why_not, size_of
from accelpatch.fusion.native_experts import planned_sizes
from accelpatch.fusion.native_model import form_why_not, sizes_why_not
from accelpatch.fusion.read_layers import DTYPES
from accelpatch.fusion.spread import OFFLOADED, offloaded_inside
from accelpatch.kernels import added
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.cpu.native_library import LINEARS
from accelpatch.kernels.hip.attention import binding as hip_attention
from accelpatch.kernels.ops.attention import decode_attention
from accelpatch.kernels.ops.experts import routed_experts
from accelpatch.kernels.ops.linear import float_linear
from accelpatch.kernels.ops.linear.fused_linear import INSIDE, SILU
from accelpatch.models.family import DecoderForm, child_of
from accelpatch.patching.replacer import Reason, Replaced
from accelpatch.patching.site import Site

NATIVE_STEP, EXPERTS = "native step", "its MLP of experts"
LAUNCHES = 5
OF_EXPERTS = 3  # more: norm, router, choice, and two of the experts
INSIDE_EXPERTS = 2  # of these, norm and choice, which the HIP kernels of experts take in

Sites = Mapping[str, Replaced | None]


def planned(site: Site, replaced: Sites, device: Device) -> str | Reason:
    """The kernels of a decoder layer that is fused, or why it is not. replaced: as in Replacer.complete."""
    try:
        return _planned(site, replaced, device)
    except CannotFuse as error:
        return Reason(str(error))


def libraries(site: Site, device: Device) -> tuple[str, ...]:
    """The device libraries of a fused layer besides those of its weights: attention's, where they have it."""
    dtype, shape = _dtype_of(site.original), _attention_shape(LayerDescription(site.original))
    if device.kind == "cpu" or hip_attention.why_not(shape, dtype, device) is not None:
        return ()
    return (hip_attention.library(shape.size, dtype),)


def _dtype_of(layer: Any) -> torch.dtype:
    """What a layer computes in: the dtype of its first float weight; those of others' layers are codes and scales."""
    named = ((name.rpartition(".")[2], one.dtype) for name, one in layer.named_parameters())
    floats = (dtype for name, dtype in named if name == "weight" and dtype.is_floating_point and dtype.itemsize > 1)
    return next(floats, torch.float32)


def _planned(site: Site, replaced: Sites, device: Device) -> str:
    layer = LayerDescription(site.original)
    if layer.form is None or layer.attention is None:
        raise CannotFuse("its form is not known")
    at = form_in(site.model)[1]
    if not site.path.startswith(f"{at.path}.{at.layers}.") or "lm_head" not in replaced:
        raise CannotFuse("it is no layer of a causal language model's decoder")
    decoder = found_in(site.model)
    if offloaded_inside(layer.layer):
        raise CannotFuse(OFFLOADED)
    stay = (one for name, one in layer.layer.named_modules() if replaced.get(f"{site.path}.{name}") is None)
    if reason := own_code.why_not_in(stay) or layer.unknown():
        raise CannotFuse(reason)
    for what, path in _needed(layer, site.path, decoder.form):
        if replaced.get(path) is None:
            raise CannotFuse(f"{what} is not replaced")
    dtype = _dtype_of(layer.layer)
    if device.kind == "cpu":
        return _native(layer, site, decoder, replaced, dtype, device)
    return _launches(layer, site.path, replaced, dtype, device)


def _needed(layer: LayerDescription, path: str, model: DecoderForm) -> Iterator[tuple[str, str]]:
    """(name for messages, dotted name in the model) of the modules besides linear layers that must be replaced."""
    assert layer.form is not None
    assert layer.attention is not None
    family = layer.family
    if layer.sparse is not None:
        yield EXPERTS, f"{path}.{layer.form.mlp}.{layer.sparse.experts}"
    elif not layer.plain:
        yield "its MLP", f"{path}.{layer.form.mlp}"
    by_length = rotary.planned_by_length(layer.attention.module.config)
    if family.rotary is not None and not family.rotary.tables and not (by_length and rotary.IN_PLACE):
        yield "its rotary embedding", f"{model.path}.rotary_emb"
    if layer.layer_norms:
        return
    norms = [f"{path}.{name}" for name in layer.form.norms.values()]
    norms += [f"{path}.{layer.form.attention}.{name}" for name in ("q_norm", "k_norm") if layer.attention.normed]
    for place in (*norms, f"{model.path}.{model.norm}"):
        yield f"the norm {place}", place


def _linears(layer: LayerDescription, path: str) -> Iterator[tuple[str, str]]:
    """(name for messages, dotted name in the model) of the linear layers of attention and MLP, and of the head."""
    for name in layer.roles.values():
        yield name, f"{path}.{name}"
    yield "lm_head", "lm_head"


def _native(
    layer: LayerDescription, site: Site, decoder: Decoder, replaced: Sites, dtype: torch.dtype, device: Device
) -> str:
    if reason := native_library.why_not(device):
        raise CannotFuse(f"no native library: {reason}")
    if dtype != torch.float32:
        raise CannotFuse(f"the native step computes in float32, and the layer is {dtype}")
    if reason := form_why_not(layer, decoder):
        raise CannotFuse(reason)
    read = [*_linears(layer, site.path), ("embed_tokens", f"{decoder.form.path}.{decoder.form.embedding}")]
    if layer.sparse is not None and layer.form is not None:
        read.append((EXPERTS, f"{site.path}.{layer.form.mlp}.{layer.sparse.experts}"))
    for name, place in read:
        made, module = replaced.get(place), child_of(site.model, place)
        if made is not None and made.kernel != "cpu":
            raise CannotFuse(f"{name} runs by {made.kernel}")
        if made is None and (reason := plain_why_not(module)):
            raise CannotFuse(f"{name}: {reason}")
    _check_sizes(layer, decoder)
    return NATIVE_STEP


def _check_sizes(layer: LayerDescription, decoder: Decoder) -> None:
    """Raise CannotFuse where a layer, or the decoder's ends, have sizes that are none of a native step."""
    hidden, head = size_of(decoder.embedding)[1], size_of(decoder.head)[1]
    if hidden != head:
        raise CannotFuse(f"embeddings of {hidden} do not fit a head of {head}")
    parts = zip(LINEARS, (*layer.qkv, *layer.output, *layer.inner, *layer.last), strict=layer.sparse is None)
    sizes = {name: size_of(part) for name, part in parts}
    if layer.sparse is not None:
        sizes |= planned_sizes(layer)
    assert layer.attention is not None
    if reason := sizes_why_not(layer.attention, hidden, layer.attention.head_size, sizes):
        raise CannotFuse(reason)


def _launches(layer: LayerDescription, path: str, replaced: Sites, dtype: torch.dtype, device: Device) -> str:
    if dtype not in DTYPES:
        raise CannotFuse(f"its activations are {dtype}")
    own = dict[str, None]()
    for name, place in _linears(layer, path):
        made = replaced.get(place)
        if made is None or not made.fusable or made.kernel not in ("hip", *added.of(float_linear.OP)):
            raise CannotFuse(f"{name} " + ("stays" if made is None else f"is {made.replacer} by {made.kernel}"))
        own |= {made.kernel: None} if made.kernel != "hip" else {}
    for group in (*QKV, *INNER):  # one weight in a fused layer
        places = (f"{path}.{layer.roles[role]}" for role in group if role in layer.roles)
        if len({made.kernel for place in places if (made := replaced[place]) is not None}) > 1:
            raise CannotFuse(f"{' and '.join(group)} run by several kernels")
    form, attention, shape = layer.form, layer.attention, _attention_shape(layer)
    assert form is not None
    assert attention is not None
    if reason := decode_attention.why_not(shape, dtype, device):
        raise CannotFuse(reason)
    more = sum(norm is not None for norm in (form.after_attention, form.after_mlp)) + 2 * (form.multiplier is not None)
    more += layer.family.by_head
    if layer.sparse is not None:
        experts = replaced[f"{path}.{form.mlp}.{layer.sparse.experts}"]
        more += OF_EXPERTS - INSIDE_EXPERTS * _routed(layer, experts)
    else:
        more += layer.activation not in (INSIDE if layer.plain else SILU)
    more += attention.interleaved or attention.normed_over_all
    by = "hip" if hip_attention.why_not(shape, dtype, device) is None else "hip, attention by triton"
    if own:  # norm, gate and residual are launches of their own then, and so may be those that are its own
        return f"{by}, linear layers by {' and '.join(own)}"
    summed = ", 2 all-reduces" if across_of(child_of(layer.layer, layer.roles["o_proj"])) is not None else ""
    return f"{by}, {LAUNCHES + more} launches{summed}"


def _routed(layer: LayerDescription, made: Replaced | None) -> bool:
    """Whether the experts of a layer take norm and choice into their launches."""
    number, width = layer.experts.down_proj.shape[:2]
    by_hip = made is not None and made.replacer == "int4_experts" and made.kernel == "hip"
    return by_hip and not layer.layer_norms and routed_experts.unfit(number, width) is None


def _attention_shape(layer: LayerDescription) -> AttentionShape:
    """The sizes of a layer's attention, with placeholders for what lies in its tensors. Raises CannotFuse."""
    attention = layer.attention
    if attention is None:
        raise CannotFuse("its form is not known")
    heads, kv_heads, size = attention.heads([size_of(base_of(part))[0] for part in layer.qkv])
    frequencies = torch.empty(int(size * rotary.fraction(attention.module.config)) // 2, device="meta")
    weight = torch.empty(size, device="meta") if attention.normed else None
    return AttentionShape(
        heads, kv_heads, size, attention.scaling, frequencies, 1.0, attention.window, weight, weight,
        softcap=attention.score_cap, sinks=None if attention.sinks is None else torch.empty(heads, device="meta"),
    )  # fmt: skip
