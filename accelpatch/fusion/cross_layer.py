"""A decoder layer of an encoder-decoder as few launches: one token of each row.

In captured steps the caches are static (cross_step.py). Where a device captures none, as a CPU, they are transformers'
own, attention is torch's, and calls of modules are saved. With norms before attention and MLP (Whisper) a layer is nine
launches: norm, q, k and v; cache write and attention; o and residual; norm and q; the two parts of attention to the
encoder's tokens; o and residual; norm, up and activation; down and residual. With norms behind (BART) each is one more.
Prompts run the modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch import own_code
from accelpatch.device import probe
from accelpatch.fusion.cache_name import CACHE
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.cross_attention import CacheAttention, StepAttention
from accelpatch.fusion.cross_step import CrossStep, biased, filled, step_of
from accelpatch.fusion.encoder_attention import head_size
from accelpatch.fusion.fused_weights import concatenated_linear, on_cpu
from accelpatch.fusion.laid_out import LaidOutLayer
from accelpatch.fusion.sublayers import ACTIVATION_CLASSES, mlp, normed
from accelpatch.kernels.attention_shape import AttentionShape, Zeros
from accelpatch.kernels.hip.binding import MAX_GEMV_ROWS
from accelpatch.kernels.ops.activation.gated_activation import ACTIVATIONS, gated
from accelpatch.kernels.ops.attention import decode_attention
from accelpatch.kernels.ops.norm.fused_norm import FusedNorm
from accelpatch.models.encoder_decoders import CrossForm, cross_form_of
from accelpatch.models.encoders import part_of
from accelpatch.modules.norm import positional_names
from accelpatch.modules.replacement import adopt

MASK, CROSS_MASK, STATES, BIAS = "attention_mask", "encoder_attention_mask", "encoder_hidden_states", "position_bias"
CROSS_BIAS = "encoder_decoder_position_bias"
ASKS = ("output_attentions", "output_hidden_states")
IMPLEMENTATIONS = ("sdpa", "eager", None)  # of attention, whose masks torch's own takes
Attend = Callable[[Tensor], Tensor]
Linear = Any  # a FusedLinear, or SeparateLinears


@dataclass(frozen=True, eq=False)
class FusedCross:
    """What a layer computes once its weights are laid out. query: of the attention to the encoder's tokens. own, cross:
    shapes of the two attentions. launches: whether few rows have norm and residual in the launches of linear layers.
    place: its index in the caches. config: of its attention."""

    form: CrossForm
    qkv: Linear
    output: Linear
    query: Linear
    cross_output: Linear
    up: Linear
    down: Linear
    norms: tuple[FusedNorm, FusedNorm, FusedNorm]
    activation: str
    own: AttentionShape
    cross: AttentionShape
    launches: bool
    place: int
    config: Any

    @property
    def dtype(self) -> torch.dtype:
        """Of its activations."""
        return self.norms[0].weight.dtype

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.norms[0].weight.device

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return len(self.form.up) > 1

    def __call__(self, x: Tensor, attend: Attend, cross: Attend) -> Tensor:
        """The layer on rows x[M, K], contiguous. attend: rows of q, k and v -> rows of attention's output. cross: rows
        of q -> rows of the attention to the encoder's tokens."""
        if not self.launches:
            return self._by_calls(x, attend, cross)
        by = self._many_rows if len(x) > MAX_GEMV_ROWS else self._few_rows
        return by(x, attend, cross)

    def _by_calls(self, x: Tensor, attend: Attend, cross: Attend) -> Tensor:
        """On a CPU: the fewest calls."""
        (first, second, third), post = self.norms, self.form.post
        x = x + self.output.large_m(attend(self.qkv.large_m(x if post else first(x))))
        x = first(x) if post else x
        x = x + self.cross_output.large_m(cross(self.query.large_m(x if post else second(x))))
        x = second(x) if post else x
        y = self.up.large_m(x if post else third(x))
        y = gated(y, self.activation) if self.gated else ACTIVATIONS[self.activation](y)
        x = x + self.down.large_m(y)
        return third(x) if post else x

    def _few_rows(self, x: Tensor, attend: Attend, cross: Attend) -> Tensor:
        first, second, third = self.norms
        if self.form.post:
            x = first(self.output(attend(self.qkv(x)), residual=x))
            x = second(self.cross_output(cross(self.query(x)), residual=x))
            return third(self.down(self._inner(x, None), residual=x))
        x = self.output(attend(self.qkv(x, first)), residual=x)
        x = self.cross_output(cross(self.query(x, second)), residual=x)
        return self.down(self._inner(x, third), residual=x)

    def _inner(self, x: Tensor, norm: FusedNorm | None) -> Tensor:
        if self.gated:
            return self.up(x, norm, gate=self.activation)
        return self.up_with_activation(x, norm)

    @functools.cached_property
    def up_with_activation(self) -> Any:
        """The first linear layer of an MLP without a gate, with its activation."""
        return replace(self.up, activation=self.activation)

    def _many_rows(self, x: Tensor, attend: Attend, cross: Attend) -> Tensor:
        (first, second, third), post = self.norms, self.form.post
        taken: Any = x if post else normed(first, x, None, self.qkv, False)[0]
        made = self.output.large_m(attend(self.qkv.large_m(taken)))
        taken, x = normed(first if post else second, made, x, self.query, post)
        made = self.cross_output.large_m(cross(self.query.large_m(taken)))
        taken, x = normed(second if post else third, made, x, self.up, post)
        made = mlp(self.up, self.activation, self.down, self.gated, taken)
        return third.of_sum(x, made)[0] if post else x + made


class FusedCrossLayer(LaidOutLayer[FusedCross]):
    """The module in the place of a decoder layer of an encoder-decoder; steps of one token a row run fused.

    by_steps: whether those are captured ones alone. memory: zeros for the attention kernels, shared by the layers of a
    model.
    """

    transient = (*LaidOutLayer.transient, "memory")
    form: CrossForm
    by_steps: bool
    memory: Zeros | None = None

    def read(self) -> FusedCross:
        """As of LaidOutLayer."""
        return read(self, self.form, self.memory or Zeros())

    def parts(self) -> list[Any]:
        """As of LaidOutLayer."""
        return [part_of(self, name) for name in (*self.form.linears, *self.form.norms)]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden_states[B, L, K] -> [B, L, K], or the tuple that the original returns."""
        if hidden_states.shape[1] == 1 and not torch.compiler.is_compiling():
            given = {**dict(zip(self.positional, args, strict=False)), **kwargs}
            fused = self._covers(hidden_states, given)
            if fused is not None:
                return self._by_step(fused, hidden_states, given)
        return super().forward(hidden_states, *args, **kwargs)

    def _covers(self, x: Tensor, given: Mapping[str, Any]) -> FusedCross | None:
        """The fused form, where it computes such a call of one token a row."""
        if given.get(STATES) is None or any(given.get(name) for name in ASKS):
            return None
        step = step_of(given.get(CACHE))
        if step is not None:
            hidden = given.get(CROSS_MASK) is not None and step.cross.mask is None
            return None if hidden or not self.by_steps else self.fused_now(x)
        fused = None if self.by_steps else self.fused_now(x)
        if fused is None or not filled(given.get(CACHE), fused.place):
            return None
        return fused if getattr(fused.config, "_attn_implementation", None) in IMPLEMENTATIONS else None

    @property
    def place(self) -> int:
        """Its index in the caches."""
        return int(part_of(self, self.form.own.module).layer_idx)

    def _by_step(self, fused: FusedCross, x: Tensor, given: Mapping[str, Any]) -> Any:
        step, place, masks = step_of(given[CACHE]), fused.place, (given.get(MASK), given.get(CROSS_MASK))
        attention: Any = CacheAttention(fused, given[CACHE], place, masks)
        if step is not None:
            step.ran.add(place)
            attention = StepAttention(fused, step, place, masks[1] is not None)
        attend, bias = attention.own, None
        if self.form.bias:
            bias = self._bias(given, step, x.dtype)
            attend = functools.partial(attention.own_with_bias, bias)
        y = fused(x[:, 0].contiguous(), attend, attention.cross)[:, None]
        return y if bias is None else (y, bias, given.get(CROSS_BIAS))

    def _bias(self, given: Mapping[str, Any], step: CrossStep | None, dtype: torch.dtype) -> Tensor:
        """What is added to the scores [1 or B, H, 1, L]: the bias, with the lowest number where the mask hides."""
        own: Any = part_of(self, self.form.own.module)
        made: Tensor | None = given.get(BIAS)
        if made is None:
            past, length = _past(given[CACHE], step, self.place)
            device = given[STATES].device
            if own.has_relative_attention_bias:
                made = own.compute_bias(1, length, device=device, past_seen_tokens=past)
            else:
                made = torch.zeros(1, own.n_heads, 1, length, dtype=dtype, device=device)
        made, mask = made.to(dtype), given.get(MASK)
        return biased(made, mask) if step is None else step.biased(made, mask)


def _past(cache: Any, step: CrossStep | None, place: int) -> tuple[Any, int]:
    """(tokens before the new one, number of keys of a layer)."""
    if step is not None:
        return step.slot[0], step.own.layers[place].keys.shape[2]
    past = cache.self_attention_cache.get_seq_length(place)
    return past, past + 1


def made_of(layer: nn.Module, form: CrossForm, by_steps: bool) -> FusedCrossLayer:
    """The replacement of a layer; it runs the modules until `lay_out`."""
    new = adopt(FusedCrossLayer, layer)
    new.by_steps = by_steps
    new.form, new.wanted, new.positional = form, False, positional_names(layer)
    return new


def read(layer: Any, form: CrossForm, memory: Zeros) -> FusedCross:
    """Lay the weights of a layer out. Raises CannotFuse."""
    if cross_form_of(layer) != form:
        raise CannotFuse("its modules are of another form than they were")
    if reason := own_code.why_not_in([one for one in layer.modules() if one is not layer]):
        raise CannotFuse(reason)
    weights = (part_of(layer, name)._parameters.get("weight") for name in form.linears)
    places = [one.data_ptr() for one in weights if one is not None]
    if len(set(places)) < len(places):
        raise CannotFuse("two of its linear layers share a weight")
    activation = activation_of(layer, form)
    if activation is None:
        raise CannotFuse(f"its activation is {type(part_of(layer, form.activation)).__name__}")
    first, second, third = (_norm(part_of(layer, name), form.rms) for name in form.norms)
    dtype = first.weight.dtype
    vectors = [one for norm in (first, second, third) for one in (norm.weight, norm.bias) if one is not None]
    if any(one.dtype != dtype for one in vectors):
        raise CannotFuse("its norms are of several dtypes")

    def linear(*names: str) -> Linear:
        modules = [part_of(layer, name) for name in names]
        return (concatenated_linear if layer.by_steps else on_cpu)(modules, dtype, zeros=True)

    own, cross = form.own, form.cross
    return FusedCross(
        form, linear(own.q, own.k, own.v), linear(own.o), linear(cross.q), linear(cross.o), linear(*form.up),
        linear(form.down), (first, second, third), activation, _shape(layer, own, dtype, memory),
        _shape(layer, cross, dtype, memory), layer.by_steps, layer.place,
        getattr(part_of(layer, own.module), "config", None),
    )  # fmt: skip


def activation_of(layer: Any, form: CrossForm) -> str | None:
    """The name of a layer's activation; None for one that is not known."""
    return ACTIVATION_CLASSES.get(type(part_of(layer, form.activation)).__name__)


def _norm(module: Any, rms: bool) -> FusedNorm:
    if module.weight is None:
        raise CannotFuse("a norm has no weight")
    if rms:
        return FusedNorm(module.weight, module.variance_epsilon)
    return FusedNorm(module.weight, module.eps, layer=True, bias=module.bias)


def _shape(layer: Any, names: Any, dtype: torch.dtype, memory: Zeros) -> AttentionShape:
    module = part_of(layer, names.module)
    size, device = size_of(module), part_of(layer, layer.form.norms[0]).weight.device
    heads = part_of(layer, names.q).out_features // size
    nothing = torch.zeros(size // 2, device=device)  # no rotation: the angle is 0
    shape = AttentionShape(heads, heads, size, float(getattr(module, "scaling", 1.0)), nothing, memory=memory)
    if layer.by_steps and (reason := decode_attention.why_not(shape, dtype, probe(device))):
        raise CannotFuse(reason)
    return shape


def size_of(module: Any) -> int:
    """Size of a head of an attention module."""
    size = getattr(module, "key_value_proj_dim", None)  # T5's
    return head_size(module) if size is None else int(size)
