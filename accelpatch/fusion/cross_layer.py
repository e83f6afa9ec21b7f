"""A decoder layer of an encoder-decoder as few launches: one token of each row over static caches.

With norms before attention and MLP (Whisper) a layer is nine launches: norm, q, k and v; cache write and attention; o
and residual; norm and q; the two parts of attention to the encoder's tokens (cross_step.py); o and residual; norm, up
and activation; down and residual. With norms behind (BART) each is one more. Prompts run the modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelpatch import own_code
from accelpatch.device import probe
from accelpatch.fusion.cache_name import CACHE
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.cross_step import CrossStep, step_of
from accelpatch.fusion.encoder_attention import head_size
from accelpatch.fusion.fused_weights import concatenated_linear
from accelpatch.fusion.laid_out import LaidOutLayer, held_by
from accelpatch.fusion.sublayers import ACTIVATION_CLASSES, mlp, normed
from accelpatch.kernels.attention_shape import AttentionShape, Zeros
from accelpatch.kernels.hip.binding import MAX_GEMV_ROWS
from accelpatch.kernels.ops.attention import decode_attention
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear
from accelpatch.kernels.ops.norm.fused_norm import FusedNorm
from accelpatch.models.encoder_decoders import CrossForm, cross_form_of
from accelpatch.models.encoders import part_of
from accelpatch.modules.norm import positional_names
from accelpatch.modules.replacement import adopt

MASK, CROSS_MASK, STATES, BIAS = "attention_mask", "encoder_attention_mask", "encoder_hidden_states", "position_bias"
CROSS_BIAS = "encoder_decoder_position_bias"
ASKS = ("output_attentions", "output_hidden_states")
Attend = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class FusedCross:
    """What a layer computes once its weights are laid out. query: of the attention to the encoder's tokens. own, cross:
    shapes of the two attentions."""

    form: CrossForm
    qkv: FusedLinear
    output: FusedLinear
    query: FusedLinear
    cross_output: FusedLinear
    up: FusedLinear
    down: FusedLinear
    norms: tuple[FusedNorm, FusedNorm, FusedNorm]
    activation: str
    own: AttentionShape
    cross: AttentionShape

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
        if len(x) > MAX_GEMV_ROWS:
            return self._many_rows(x, attend, cross)
        first, second, third = self.norms
        if self.form.post:
            x = first(self.output(attend(self.qkv(x)), residual=x))
            x = second(self.cross_output(cross(self.query(x)), residual=x))
            return third(self.down(self._inner(x, None), residual=x))
        x = self.output(attend(self.qkv(x, first)), residual=x)
        x = self.cross_output(cross(self.query(x, second)), residual=x)
        return self.down(self._inner(x, third), residual=x)

    def _inner(self, x: Tensor, norm: FusedNorm | None) -> Tensor:
        return self.up(x, norm, gate=self.activation if self.gated else None)

    def _many_rows(self, x: Tensor, attend: Attend, cross: Attend) -> Tensor:
        (first, second, third), post = self.norms, self.form.post
        taken: Any = x if post else normed(first, x, None, self.qkv, False)[0]
        made = self.output.large_m(attend(self.qkv.large_m(taken)))
        taken, x = normed(first if post else second, made, x, self.query, post)
        made = self.cross_output.large_m(cross(self.query.large_m(taken)))
        taken, x = normed(second if post else third, made, x, self.up, post)
        up = self.up if self.gated else self.up.without_activation
        made = mlp(up, self.activation, self.down, self.gated, taken)
        return third.of_sum(x, made)[0] if post else x + made


class StepAttention:
    """The attentions of one layer in a step: place is its index in the caches."""

    def __init__(self, fused: FusedCross, step: CrossStep, place: int, masked: bool):
        self._fused, self._step, self._place, self._masked = fused, step, place, masked

    def own(self, qkv: Tensor) -> Tensor:
        """Rows of q, k and v[B, 3 H D] -> rows of the output[B, H D]; k and v are cached."""
        step, held = self._step, self._step.own.layers[self._place]
        args = (qkv, step.positions, step.slot, step.mask, held.keys, held.values, self._fused.own)
        return decode_attention.decode_attention_(*args)

    def own_with_bias(self, bias: Tensor, qkv: Tensor) -> Tensor:
        """The same with scores to which bias[1 or B, H, 1, L] is added, which hides what the mask hides."""
        shape, held = self._fused.own, self._step.own.layers[self._place]
        q, k, v = qkv.view(len(qkv), 3, shape.heads, 1, shape.size).unbind(1)
        keys, values = held.update(k, v)
        made = functional.scaled_dot_product_attention(q, keys, values, attn_mask=bias, scale=shape.scaling)
        return made.reshape(len(qkv), -1)

    def cross(self, q: Tensor) -> Tensor:
        """Rows of q[B, H D] -> rows of the output[B, H D]."""
        step, held = self._step, self._step.cross
        keys, values = held.held[self._place]
        appended = step.appended(self._masked)[:, self._place].flatten(1)
        ends, mask = (held.ends, held.mask) if self._masked else (held.last, held.ones)
        assert mask is not None
        args = (torch.cat([q, appended], 1), step.positions, ends, mask, keys, values, self._fused.cross)
        return decode_attention.decode_attention_(*args)


class FusedCrossLayer(LaidOutLayer[FusedCross]):
    """The module in the place of a decoder layer of an encoder-decoder; steps of one token a row run fused.

    memory: zeros for the attention kernels, shared by the layers of a model.
    """

    transient = (*LaidOutLayer.transient, "memory")
    form: CrossForm
    memory: Zeros | None = None

    def read(self) -> FusedCross:
        """As of LaidOutLayer."""
        return read(self, self.form, self.memory or Zeros())

    def weights(self) -> tuple[Any, ...]:
        """As of LaidOutLayer."""
        names = (*self.form.linears, *self.form.norms)
        return (*(held_by(part_of(self, name)) for name in names),)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden_states[B, L, K] -> [B, L, K], or what else the original gives beside it."""
        if not torch.compiler.is_compiling():
            given = {**dict(zip(self.positional, args, strict=False)), **kwargs}
            step = step_of(given.get(CACHE))
            fused = None if step is None else self._covers(hidden_states, given, step)
            if fused is not None and step is not None:
                return self._by_step(fused, hidden_states, given, step)
        return super().forward(hidden_states, *args, **kwargs)

    def _covers(self, x: Tensor, given: Mapping[str, Any], step: CrossStep) -> FusedCross | None:
        """The fused form, where it computes such a call."""
        if x.shape[1] != 1 or given.get(STATES) is None or any(given.get(name) for name in ASKS):
            return None
        if given.get(CROSS_MASK) is not None and step.cross.mask is None:
            return None
        return self.fused_now(x)

    def _by_step(self, fused: FusedCross, x: Tensor, given: Mapping[str, Any], step: CrossStep) -> Any:
        own: Any = part_of(self, self.form.own.module)
        step.ran.add(own.layer_idx)
        attention = StepAttention(fused, step, own.layer_idx, given.get(CROSS_MASK) is not None)
        attend, bias = attention.own, None
        if self.form.bias:
            bias = step.biased(self._bias(own, given, step, x.dtype), given.get(MASK))
            attend = functools.partial(attention.own_with_bias, bias)
        y = fused(x[:, 0].contiguous(), attend, attention.cross)[:, None]
        return y if bias is None else (y, bias, given.get(CROSS_BIAS))

    def _bias(self, own: Any, given: Mapping[str, Any], step: CrossStep, dtype: torch.dtype) -> Tensor:
        """The bias [1, H, 1, L] of the scores."""
        bias: Tensor | None = given.get(BIAS)
        if bias is not None:
            return bias
        length = step.own.layers[own.layer_idx].keys.shape[2]
        if not own.has_relative_attention_bias:
            return torch.zeros(1, own.n_heads, 1, length, dtype=dtype, device=step.slot.device)
        made: Tensor = own.compute_bias(1, length, device=step.slot.device, past_seen_tokens=step.slot[0])
        return made


def made_of(layer: nn.Module, form: CrossForm) -> FusedCrossLayer:
    """The replacement of a layer; it runs the modules until `lay_out`."""
    new = adopt(FusedCrossLayer, layer)
    new.form, new.wanted, new.positional = form, False, positional_names(layer)
    return new


def read(layer: Any, form: CrossForm, memory: Zeros) -> FusedCross:
    """Lay the weights of a layer out. Raises CannotFuse."""
    if cross_form_of(layer) != form:
        raise CannotFuse("its modules are of another form than they were")
    if reason := own_code.why_not_in([one for one in layer.modules() if one is not layer]):
        raise CannotFuse(reason)
    held = (part_of(layer, name)._parameters.get("weight") for name in form.linears)
    places = [one.data_ptr() for one in held if one is not None]
    if len(set(places)) < len(places):
        raise CannotFuse("two of its linear layers share a weight")
    activation = activation_of(layer, form)
    if activation is None:
        raise CannotFuse(f"its activation is {type(part_of(layer, form.activation)).__name__}")
    first, second, third = (_norm(part_of(layer, name), form.rms) for name in form.norms)
    dtype, gated = first.weight.dtype, len(form.up) > 1
    vectors = [one for norm in (first, second, third) for one in (norm.weight, norm.bias) if one is not None]
    if any(one.dtype != dtype for one in vectors):
        raise CannotFuse("its norms are of several dtypes")

    def linear(*names: str) -> FusedLinear:
        return concatenated_linear([part_of(layer, name) for name in names], dtype, zeros=True)

    own, cross = form.own, form.cross
    up = linear(*form.up)
    up = up if gated else FusedLinear(up.weight, up.bias, activation=activation, prefer=up.prefer)
    return FusedCross(
        form, linear(own.q, own.k, own.v), linear(own.o), linear(cross.q), linear(cross.o), up, linear(form.down),
        (first, second, third), activation, _shape(layer, own, dtype, memory), _shape(layer, cross, dtype, memory),
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
    if reason := decode_attention.why_not(shape, dtype, probe(device)):
        raise CannotFuse(reason)
    return shape


def size_of(module: Any) -> int:
    """Size of a head of an attention module."""
    size = getattr(module, "key_value_proj_dim", None)  # T5's
    return head_size(module) if size is None else int(size)
