"""What a plan says of fused layers, from the original modules and what replaces them; nothing is built.

What `read_layers` and `native_model` decide of the replaced modules after the patch, this predicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from accelpatch import own_code
from accelpatch.device import Device
from accelpatch.fusion import attention_facts, layer_facts
from accelpatch.fusion.adapters import base_of
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.decoder import Decoder, found_in
from accelpatch.fusion.read_layers import DTYPES
from accelpatch.fusion.spread import OFFLOADED, offloaded_inside
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.cpu.native_library import LINEARS
from accelpatch.kernels.hip.attention import binding as hip_attention
from accelpatch.kernels.ops.attention import decode_attention
from accelpatch.kernels.ops.experts import routed_experts
from accelpatch.kernels.ops.linear.fused_linear import INSIDE, SILU
from accelpatch.models.family import child_of, family_of_layer, form_of, has_layer_norms, linears_of
from accelpatch.patching.replacer import Reason, Replaced
from accelpatch.patching.site import Site

NATIVE_STEP = "native step"
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
    layer: Any = site.original
    dtype = _dtype_of(layer)
    shape = _attention_shape(layer)
    if device.kind == "cpu" or hip_attention.why_not(shape, dtype, device) is not None:
        return ()
    return (hip_attention.library(shape.size, dtype),)


def _dtype_of(layer: Any) -> torch.dtype:
    """What a layer computes in: the dtype of its first float weight; those of others' layers are codes and scales."""
    named = ((name.rpartition(".")[2], one.dtype) for name, one in layer.named_parameters())
    floats = (dtype for name, dtype in named if name == "weight" and dtype.is_floating_point and dtype.itemsize > 1)
    return next(floats, torch.float32)


def _planned(site: Site, replaced: Sites, device: Device) -> str:
    layer: Any = site.original
    form = form_of(layer)
    family = family_of_layer(layer)
    if form is None or family is None:
        raise CannotFuse("its form is not known")
    model = family.decoder.path
    if not site.path.startswith(f"{model}.{family.decoder.layers}.") or "lm_head" not in replaced:
        raise CannotFuse("it is no layer of a causal language model's decoder")
    decoder, attention = found_in(site.model), layer_facts.attention_of(layer)
    if offloaded_inside(layer):
        raise CannotFuse(OFFLOADED)
    stay = (one for name, one in layer.named_modules() if replaced.get(f"{site.path}.{name}") is None)
    if reason := own_code.why_not_in(stay) or layer_facts.why_not(layer) or attention_facts.why_not(attention):
        raise CannotFuse(reason)
    sparse = layer_facts.sparse_of(layer)
    needed = [] if layer_facts.has_plain_mlp(layer) else [("MLP", f"{site.path}.{form.mlp}")]
    if sparse is not None:
        needed = [("MLP of experts", f"{site.path}.{form.mlp}.{sparse.experts}")]
    by_length = _rope_parameters(attention.config).get("rope_type") == attention_facts.LONGROPE
    if family.rotary is not None and not family.rotary.tables and not (by_length and attention_facts.IN_PLACE):
        needed.append(("rotary embedding", f"{model}.rotary_emb"))
    for what, path in needed:
        if replaced.get(path) is None:
            raise CannotFuse(f"its {what} is not replaced")
    norms = [f"{site.path}.{name}" for name in form.norms.values()]
    norms += [f"{site.path}.{form.attention}.{name}" for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    for path in (*norms, f"{model}.{family.decoder.norm}"):
        if replaced.get(path) is None and not has_layer_norms(layer):
            raise CannotFuse(f"the norm {path} is not replaced")
    dtype = _dtype_of(layer)
    if device.kind == "cpu":
        return _native(site, decoder, replaced, dtype, device)
    return _launches(layer, site.path, replaced, dtype, device)


def _linears(layer: Any, path: str) -> Iterator[tuple[str, str]]:
    """(name for messages, dotted name in the model) of the linear layers of attention and MLP, and of the head."""
    for name in linears_of(layer).values():
        yield name, f"{path}.{name}"
    yield "lm_head", "lm_head"


def _native(site: Site, decoder: Decoder, replaced: Sites, dtype: torch.dtype, device: Device) -> str:
    layer: Any = site.original
    if reason := native_library.why_not(device):
        raise CannotFuse(f"no native library: {reason}")
    if dtype != torch.float32:
        raise CannotFuse(f"the native step computes in float32, and the layer is {dtype}")
    if reason := attention_facts.native_why_not(layer, site.model):
        raise CannotFuse(reason)
    if layer_facts.sparse_of(layer) is not None:
        raise CannotFuse("the native step has no experts: they run as modules")
    if hasattr(layer.mlp, "gate_up_proj"):
        raise CannotFuse("gate and up are one linear layer")
    if _rope_parameters(layer.self_attn.config).get("rope_type") == attention_facts.LONGROPE:
        raise CannotFuse("its rotary frequencies change with the length")
    if _rotary_fraction(layer.self_attn.config) < 1:
        raise CannotFuse("its rotary embedding covers only a part of each head")
    if layer_facts.activation_of(layer) not in native_library.ACTIVATIONS:
        raise CannotFuse(f"activation {layer_facts.activation_of(layer)}")
    embedding = ("embed_tokens", f"{decoder.form.path}.{decoder.form.embedding}")
    for name, place in (*_linears(layer, site.path), embedding):
        made, module = replaced.get(place), child_of(site.model, place)
        if made is not None and made.kernel != "cpu":
            raise CannotFuse(f"{name} runs by {made.kernel}")
        if made is None and (reason := layer_facts.plain_why_not(module)):
            raise CannotFuse(f"{name}: {reason}")
    _check_sizes(layer, decoder)
    return NATIVE_STEP


def _check_sizes(layer: Any, decoder: Decoder) -> None:
    """Raise CannotFuse where a layer, or the decoder's ends, have sizes that are none of a native step."""
    hidden, head = layer_facts.size_of(decoder.embedding)[1], layer_facts.size_of(decoder.head)[1]
    if hidden != head:
        raise CannotFuse(f"embeddings of {hidden} do not fit a head of {head}")
    attention = layer_facts.attention_of(layer)
    parts = zip(
        LINEARS,
        (*layer_facts.qkv_of(layer), attention.o_proj, *layer_facts.inner_of(layer), layer.mlp.down_proj),
        strict=True,
    )
    sizes = {name: layer_facts.size_of(part) for name, part in parts}
    rotated = attention_facts.head_size(attention)
    if reason := attention_facts.native_sizes_why_not(attention, hidden, rotated, sizes):
        raise CannotFuse(reason)


def _launches(layer: Any, path: str, replaced: Sites, dtype: torch.dtype, device: Device) -> str:
    if dtype not in DTYPES:
        raise CannotFuse(f"its activations are {dtype}")
    for name, place in _linears(layer, path):
        made = replaced.get(place)
        if made is None or not made.fusable or made.kernel != "hip":
            raise CannotFuse(f"{name} " + ("stays" if made is None else f"is {made.replacer} by {made.kernel}"))
    attention = layer_facts.attention_of(layer)
    shape = _attention_shape(layer)
    if reason := decode_attention.why_not(shape, dtype, device):
        raise CannotFuse(reason)
    form = form_of(layer)
    assert form is not None
    more = sum(norm is not None for norm in (form.after_attention, form.after_mlp)) + 2 * (form.multiplier is not None)
    more += layer_facts.by_head(layer)
    if (sparse := layer_facts.sparse_of(layer)) is not None:
        experts = f"{path}.{form.mlp}.{sparse.experts}"
        more += OF_EXPERTS - INSIDE_EXPERTS * _routed(layer, replaced[experts])
    else:
        more += layer_facts.activation_of(layer) not in (INSIDE if layer_facts.has_plain_mlp(layer) else SILU)
    interleaved = attention_facts.form_of_rotary(attention).interleaved and attention_facts.applies_rotary(attention)
    more += interleaved or attention_facts.normed_over_all(attention)
    by = "hip" if hip_attention.why_not(shape, dtype, device) is None else "hip, attention by triton"
    return f"{by}, {LAUNCHES + more} launches"


def _routed(layer: Any, made: Replaced | None) -> bool:
    """Whether the experts of a layer take norm and choice into their launches."""
    mlp, sparse = layer_facts.mlp_of(layer), layer_facts.sparse_of(layer)
    assert sparse is not None
    number, width = getattr(mlp, sparse.experts).down_proj.shape[:2]
    by_hip = made is not None and made.replacer == "int4_experts" and made.kernel == "hip"
    return by_hip and not has_layer_norms(layer) and routed_experts.unfit(number, width) is None


def _rope_parameters(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _rotary_fraction(config: Any) -> float:
    """The fraction of a head's columns that get the rotary embedding."""
    return float(
        _rope_parameters(config).get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    )


def _attention_shape(layer: Any) -> AttentionShape:
    """The sizes of a layer's attention, with placeholders for what lies in its tensors. Raises CannotFuse."""
    attention, parts = layer_facts.attention_of(layer), map(base_of, layer_facts.qkv_of(layer))
    heads, kv_heads, size = attention_facts.heads_of(attention, [layer_facts.size_of(part)[0] for part in parts])
    frequencies = torch.empty(int(size * _rotary_fraction(attention.config)) // 2, device="meta")
    norm = getattr(attention, "q_norm", None)
    weight = None if norm is None else torch.empty(size, device="meta")
    return AttentionShape(
        heads, kv_heads, size, float(attention.scaling), frequencies, 1.0,
        attention_facts.window(attention), weight, weight, softcap=attention_facts.score_cap(attention),
    )  # fmt: skip
