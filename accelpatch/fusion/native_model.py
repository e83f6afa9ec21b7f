"""Reads a patched Llama-like model's packs, norms and sizes off its replaced modules, for the native CPU step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from accelpatch.fusion import rotary
from accelpatch.fusion.across import NOT_NATIVE, across_of
from accelpatch.fusion.adapters import active, base_of
from accelpatch.fusion.attention_description import AttentionDescription
from accelpatch.fusion.cached import Cached, cached_by
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.decoder import Decoder, decoder_of
from accelpatch.fusion.layer_description import LayerDescription, plain_why_not
from accelpatch.fusion.native_experts import step_experts
from accelpatch.fusion.spread import OFFLOADED, is_offloaded
from accelpatch.kernels.cpu.decode_step import DecodeStep
from accelpatch.kernels.cpu.native_library import ACTIVATIONS, LINEARS
from accelpatch.kernels.cpu.step_encoded import StepEncoded
from accelpatch.kernels.cpu.step_weights import LayerWeights, NormWeight, Sizes, StepShape, why_not_layer
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.layouts.pack_adapters import PackAdapters
from accelpatch.kernels.layouts.pack_tensors import in_one_block, is_one_block
from accelpatch.models.family import DecoderForm
from accelpatch.modules.norm import FusedRMSNorm
from accelpatch.modules.quantized_linear import renormalises
from accelpatch.modules.quantized_module import QuantizedModule, quantised_in, take_over

NONE: Mapping[int, str] = {}
NORMS = {"after_attention": "after_attention_norm", "after_mlp": "after_mlp_norm"}
ROPES = 2  # kinds of rotary frequencies that a step has room for


@dataclass(eq=False)
class NativeModel:
    """The part of a native step that does not depend on the cache.

    layers: None for one that must run as a module. unfused: place of such a layer -> why. cached: what each
    layer caches. by_axes: whether positions have several axes. padding: the id of padding tokens, which have the row of
    this index as their position, and those behind it are of the other tokens (M2M100); None where a token does not
    change its position. masked: of a decoder that attends to an encoder, whether a mask hides tokens of it; None for
    one that attends to none.
    """

    shape: StepShape
    layers: list[LayerWeights | None]
    unfused: Mapping[int, str]
    embedding: Pack
    head: Pack
    final_norm: NormWeight | None
    cached: tuple[Cached, ...]
    by_axes: bool = False
    padding: int | None = None
    masked: bool | None = None
    paged: WeakKeyDictionary[Any, Any] = field(default_factory=WeakKeyDictionary, init=False)

    @property
    def places(self) -> set[int]:
        """The places of the layers that have a native form."""
        return {place for place, layer in enumerate(self.layers) if layer is not None}

    def without(self, failed: Mapping[int, str]) -> NativeModel:
        """This model with more layers that run as modules: place -> why."""
        layers = [None if place in failed else layer for place, layer in enumerate(self.layers)]
        return replace(self, layers=layers, unfused={**self.unfused, **failed})

    def first(self, count: int) -> NativeModel:
        """The first layers of this model, with its last norm and head: what an early exit computes."""
        return replace(self, layers=self.layers[:count], cached=self.cached[:count])

    def step(
        self, keys: Sequence[Tensor], values: Sequence[Tensor], tokens: int = 0, encoded: StepEncoded | None = None
    ) -> DecodeStep:
        """A step over keys, values, of each layer [B, Hkv, length, D]. tokens, encoded: as of DecodeStep."""
        ends = (self.embedding, self.head, self.final_norm)
        return DecodeStep(self.shape, self.layers, *ends, keys, values, tokens, encoded)

    def has_position(self, positions: Tensor) -> bool:
        """Whether there is an embedding of each of positions[B], or the model has none of positions."""
        table, first = self.shape.positions, 0 if self.padding is None else self.padding + 1
        return table is None or int(positions.amax()) + first < len(table)

    def positions(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The rows of the positions' embedding of tokens[B] at positions[B], int64."""
        if self.padding is None:
            return positions
        return torch.where(tokens == self.padding, self.padding, positions + self.padding + 1)


def native_model(model: nn.Module, unfused: Mapping[int, str] = NONE) -> NativeModel:
    """The model's weights for a native step.

    unfused: place -> reason, of layers that must run as modules; others that have no native form join them. Raises
    CannotFuse where no layer has one, or the embedding, last norm or head does not.
    """
    found = decoder_of(model)
    if replace(found.form, path=DecoderForm.path) != DecoderForm() or rotary.by_length(found.rotary):
        raise CannotFuse("the native step is for decoders of Llama's form with fixed frequencies")
    reasons, weights = dict(unfused), list[LayerWeights | None]([None] * len(found.layers))
    described = [LayerDescription(layer) for layer in found.layers]
    for place, layer in enumerate(described):
        if place not in reasons and (reason := layer.changed() or form_why_not(layer, found)):
            reasons[place] = reason
    gather_packs(model)
    embedding, head, norm = packed(found.embedding), adapted(found.head), norm_weight(found.norm)
    if (hidden := embedding.k) != head.k or tuple(norm.weight.shape) != (hidden,):
        raise CannotFuse(f"embeddings of {hidden} do not fit a head of {head.k} and a norm of {norm.weight.numel()}")
    ropes = rope_kinds(found.rotary, [layer for place, layer in enumerate(described) if place not in reasons])
    shape = step_shape(found, hidden, ropes)
    for place, layer in enumerate(described):
        if place not in reasons:
            try:
                weights[place] = layer_weights(layer, shape, ropes)
            except CannotFuse as error:
                reasons[place] = str(error)
    head = gather_adapters(weights, head)
    if not any(weights):
        raise CannotFuse(f"layer 0: {reasons[0]}")
    cached = [
        cached_by(layer, torch.float32, None if one is None else (one.kv_heads(shape.head_dim), shape.head_dim))
        for layer, one in zip(found.layers, weights, strict=True)
    ]
    return NativeModel(shape, weights, reasons, embedding, head, norm, tuple(cached), rotary.by_axes(found.rotary))


def form_why_not(layer: LayerDescription, decoder: Decoder) -> str | None:
    """Why a layer, original or replaced, has a form that the native step does not compute; None where it has none."""
    form, attention = layer.form, layer.attention
    if form is None or attention is None:
        return "its form is not known"
    if across_of(decoder.embedding) is not None:
        return NOT_NATIVE
    if form.attention_norm is None or form.mlp_norm is None or form.multiplier is not None:
        return "its norms or its residual additions have another form than those of the native step"
    if form.parallel or layer.layer_norms or layer.plain:
        return "the native step has no LayerNorm, no parallel attention and MLP, and no MLP without a gate"
    if attention.interleaved or not attention.rotates or attention.normed_over_all:
        return "its rotary embedding or the norms of q and k have another form than those of the native step"
    if (decoder.embedding_multiplier, decoder.logit_divisor) != (1.0, 1.0):
        return "the native step has no multiplier of embeddings or logits"
    if "gate_up_proj" in layer.roles:
        return "gate and up are one linear layer"
    if "qkv_proj" in layer.roles:
        return "q, k and v are one linear layer"
    if rotary.planned_by_length(attention.module.config):
        return "its rotary frequencies change with the length"
    if rotary.fraction(attention.module.config) < 1:
        return "its rotary embedding covers only a part of each head"
    if layer.sparse is not None or layer.activation in ACTIVATIONS:
        return None
    return f"the native step has no activation {layer.activation}"


def sizes_why_not(attention: AttentionDescription, hidden: int, rotated: int, sizes: Sizes) -> str | None:
    """Why a layer with linear layers of these sizes is none of a native step; None where it is.

    rotated: columns of a head that the rotary frequencies cover.
    """
    if (size := attention.head_size) != rotated:
        return f"its rotary embedding covers {rotated} columns, and each head has {size}"
    return why_not_layer(hidden, size, sizes) or attention.why_not_groups(sizes["q"][0] // sizes["k"][0])


def rope_kinds(embedding: Any, layers: Sequence[LayerDescription]) -> list[str]:
    """The layer types whose rotary frequencies differ; "" where all share one. Raises CannotFuse beyond ROPES."""
    if embedding is None or rotary.one_rope(embedding):
        return [""]
    kinds = sorted({layer.attention.layer_type for layer in layers if layer.attention is not None})
    if len(kinds) > ROPES:
        raise CannotFuse(f"its layers have {len(kinds)} kinds of rotary frequencies")
    return kinds


def step_shape(decoder: Decoder, hidden: int, ropes: Sequence[str]) -> StepShape:
    """What all layers share: sizes, rotary frequencies, constants. Raises CannotFuse where frequencies are missing."""
    rope = tuple(rotary.rope(decoder.rotary, kind) for kind in ropes)
    sizes = {2 * len(inverse) for inverse, _ in rope}
    if len(sizes) != 1:
        raise CannotFuse(f"its rotary frequencies are of heads of {' and '.join(map(str, sorted(sizes)))}")
    scale = float(getattr(decoder.embedding, "embed_scale", 1.0))
    return StepShape(hidden, sizes.pop(), rope, scale, decoder.logit_cap)


def layer_weights(layer: LayerDescription, shape: StepShape, ropes: Sequence[str]) -> LayerWeights:
    """Packs, norms and constants of one layer. Raises CannotFuse where they are none of a native step."""
    attention = layer.attention
    assert attention is not None
    parts = (*layer.qkv, *layer.output, *layer.inner, *layer.last)
    experts = None if layer.sparse is None else step_experts(layer)
    linears = {name: adapted(part) for name, part in zip(LINEARS, parts, strict=experts is None)}
    sizes = {name: (pack.n, pack.k) for name, pack in linears.items()} | ({} if experts is None else experts.sizes)
    if reason := sizes_why_not(attention, shape.hidden, shape.head_dim, sizes):
        raise CannotFuse(reason)
    names = {NORMS.get(place, place): norm for place, norm in layer.norms.items()}
    if attention.normed:
        names |= {"q_norm": attention.module.q_norm, "k_norm": attention.module.k_norm}
    norms = {name: norm_weight(norm) for name, norm in names.items()}
    for name, norm in norms.items():
        due = shape.head_dim if name in ("q_norm", "k_norm") else shape.hidden
        if tuple(norm.weight.shape) != (due,):
            raise CannotFuse(f"its {name} is over {list(norm.weight.shape)}, not {due}")
    made = LayerWeights(
        linears, norms, layer.activation if experts is None else layer.experts.form.activation, attention.scaling,
        attention.window, ropes.index(attention.layer_type) if len(ropes) > 1 else 0, attention.score_cap,
        None if attention.sinks is None else attention.sinks.detach().float(), experts,
    )  # fmt: skip
    if reason := made.why_not(shape.hidden, shape.head_dim):
        raise CannotFuse(reason)
    return made


def norm_weight(norm: nn.Module) -> NormWeight:
    """What a replaced norm in float32 multiplies by, and its epsilon. Raises CannotFuse for any other."""
    if is_offloaded(norm):
        raise CannotFuse(f"{type(norm).__name__}: {OFFLOADED}")
    if not isinstance(norm, FusedRMSNorm) or norm.weight.dtype != torch.float32:
        dtype = next((str(p.dtype) for p in norm.parameters()), "no dtype")
        raise CannotFuse(f"a norm is {type(norm).__name__} in {dtype}, not a replaced one in float32")
    weight = norm.weight.detach()
    return NormWeight(weight + 1 if norm.plus_one else weight, norm.rms_eps)


def adapted(module: Any) -> Pack:
    """The weight of a linear layer with the active adapters around it. Raises CannotFuse for adapters of other kinds
    than plain LoRA, and as `packed`."""
    pairs = active(module)
    if any(factor.device.type != "cpu" for pair in pairs for factor in pair):
        raise CannotFuse("an adapter lies on another device than cpu")
    pack = packed(base_of(module))
    return replace(pack, low=PackAdapters.of(pairs))


def packed(module: Any) -> Pack:
    """The weight of a linear layer or embedding as a Pack with its bias; a float32 weight as it is."""
    if is_offloaded(module):
        raise CannotFuse(f"{type(module).__name__}: {OFFLOADED}")
    if isinstance(module, QuantizedModule):
        if module.like.dtype != torch.float32 or not isinstance(module.layout, Pack):
            raise CannotFuse(f"{type(module).__name__} is in {module.like.dtype} or not packed for the CPU")
        if reason := renormalises(module):
            raise CannotFuse(reason)
        bias: Any = getattr(module, "bias", None)
        return replace(module.layout, bias=None if bias is None else bias.detach().float())
    if reason := plain_why_not(module):
        raise CannotFuse(reason)
    if module.weight.is_meta:
        raise CannotFuse(f"the weight of {type(module).__name__} has no values")
    return Pack.dense(module.weight, getattr(module, "bias", None))


def gather_adapters(layers: list[LayerWeights | None], head: Pack) -> Pack:
    """Move the adapters of all layers into one block, in reading order; returns the head with its own."""
    places = [(layer.linears, name) for layer in layers if layer is not None for name in layer.linears]
    ends = {"head": head}
    found = [(linears, name, low) for linears, name in [*places, (ends, "head")] if (low := linears[name].low)]
    for (linears, name, _), low in zip(found, in_one_block([low for *_, low in found]), strict=True):
        linears[name] = replace(linears[name], low=low)
    return ends["head"]


def gather_packs(model: nn.Module) -> None:
    """Move all packs into one block of memory in reading order, so that a step reads one stream."""
    take_over(model)
    modules = [one for one in quantised_in(model) if isinstance(one.layout, Pack) and not is_offloaded(one)]
    packs = [module.layout for module in modules]
    if is_one_block(packs):  # what is read anew, as when adapters change, is not moved again
        return
    for module, pack in zip(modules, in_one_block(packs), strict=True):
        module.layout = pack
