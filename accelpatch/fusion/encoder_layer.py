"""A layer of an encoder as few kernels: q, k and v as one product, residual and norm as one operation.

Attention itself is the one that the model's configuration names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch import own_code
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.encoder_attention import MASK, ROTARY, EncoderAttention, head_size, scaling
from accelpatch.fusion.fused_weights import concatenated_linear
from accelpatch.fusion.laid_out import LaidOutLayer
from accelpatch.fusion.packed_rows import Packing, present
from accelpatch.fusion.sublayers import ACTIVATION_CLASSES, mlp, normed
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear
from accelpatch.kernels.ops.norm.fused_norm import FusedNorm
from accelpatch.models.encoders import EncoderForm, encoder_form_of, part_of
from accelpatch.modules.norm import positional_names
from accelpatch.modules.replacement import adopt

ASKS = ("output_attentions", "output_hidden_states")


@dataclass(frozen=True, eq=False)
class FusedEncoder:
    """What a layer computes once its weights are laid out. norms: None for none (ModernBERT's first)."""

    form: EncoderForm
    qkv: FusedLinear
    output: FusedLinear
    up: FusedLinear
    down: FusedLinear
    norms: tuple[FusedNorm | None, FusedNorm]
    activation: str
    scales: tuple[Tensor | None, Tensor | None] = (None, None)

    @property
    def dtype(self) -> torch.dtype:
        """Of its activations."""
        return self.norms[1].weight.dtype

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.norms[1].weight.device

    def __call__(self, x: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """The layer on rows x[M, K], contiguous. attend: rows of q, k and v -> rows of attention's output."""
        first, second = self.norms
        if self.form.post and first is not None:
            made = self.output.large_m(attend(self.qkv.large_m(x)))
            taken, x = normed(first, made, x, self.up, True)
            return second.of_sum(x, mlp(self.up, self.activation, self.down, self.form.gated, taken))[0]
        taken = x if first is None else normed(first, x, None, self.qkv, False)[0]
        made = self._scaled(self.output.large_m(attend(self.qkv.large_m(taken))), 0)
        taken, x = normed(second, made, x, self.up, False)
        return x + self._scaled(mlp(self.up, self.activation, self.down, self.form.gated, taken), 1)

    def _scaled(self, y: Tensor, place: int) -> Tensor:
        scale = self.scales[place]
        return y if scale is None else y * scale


class FusedEncoderLayer(LaidOutLayer[FusedEncoder]):
    """The module in the place of a layer.

    own: names of its forward's arguments, as a set; unused: those of them that the fused form does not take. in_tuple:
    whether the original gives its output in a tuple.
    """

    form: EncoderForm
    own: frozenset[str]
    unused: frozenset[str]
    in_tuple: bool

    def read(self) -> FusedEncoder:
        """As of LaidOutLayer."""
        return read(self, self.form)

    def parts(self) -> list[Any]:
        """As of LaidOutLayer."""
        return [part_of(self, name) for name in (*self.form.linears, *self.form.norms, *self.form.scales)]

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden_states[B, L, K] -> [B, L, K], or a tuple of it, as the original gives it."""
        if torch.compiler.is_compiling():
            return super().forward(hidden_states, *args, **kwargs)
        packing = present()
        if packing is not None and id(self) in packing.stacks:
            y = self._packed(hidden_states, packing)
        else:
            given = {**dict(zip(self.positional, args, strict=False)), **kwargs}
            fused = self._covers(hidden_states, given)
            if fused is None:
                return super().forward(hidden_states, *args, **kwargs)
            module = part_of(self, self.form.attention)
            attend = EncoderAttention(module, self.form, hidden_states.shape, given, self.own)
            y = fused(hidden_states.reshape(-1, hidden_states.shape[-1]), attend).view(hidden_states.shape)
        return (y,) if self.in_tuple else y

    def _packed(self, x: Tensor, packing: Packing) -> Tensor:
        """The layer on rows without padding; the first of its stack gathers them, the last scatters them."""
        place, last, fused = packing.stacks[id(self)]
        module: Any = part_of(self, self.form.attention)
        size, scale = head_size(module), scaling(module)

        def attend(qkv: Tensor) -> Tensor:
            q, k, v = qkv.view(len(qkv), 3, -1, size).unbind(1)
            return packing.attend(q, k, v, scale).reshape(len(qkv), -1)

        y: Tensor = fused(packing.gather(x) if place == 0 else x[0], attend)
        return packing.scatter(y) if place == last else y[None]

    def _covers(self, x: Tensor, given: Mapping[str, Any]) -> FusedEncoder | None:
        """The fused form, where it computes such a call."""
        if not x.numel() or any(given.get(name) for name in ASKS):
            return None
        others = (given.get(name) for name in self.unused)
        if any(one is not None and one is not False for one in others):
            return None
        return self.fused_now(x)


def made_of(layer: nn.Module, form: EncoderForm) -> FusedEncoderLayer:
    """The replacement of a layer; it runs the modules until `lay_out`."""
    new = adopt(FusedEncoderLayer, layer)
    new.form, new.wanted, new.positional = form, False, positional_names(layer)
    new.own = frozenset(new.positional)
    new.unused = new.own - {MASK, ROTARY if form.rotary else MASK, form.bias or MASK}
    new.in_tuple = ASKS[0] in new.positional or form.bias is not None
    return new


def activation_of(layer: Any, form: EncoderForm) -> str | None:
    """The name of a layer's activation; None for one that is not known."""
    module = part_of(layer, form.activation)
    return ACTIVATION_CLASSES.get(type(module).__name__)


def read(layer: Any, form: EncoderForm) -> FusedEncoder:
    """Lay the weights of a layer out. Raises CannotFuse."""
    if encoder_form_of(layer) != form:
        raise CannotFuse("its modules are of another form than they were")
    children = [one for one in layer.modules() if one is not layer]
    if reason := own_code.why_not_in(children):
        raise CannotFuse(reason)
    weights = (part_of(layer, name)._parameters.get("weight") for name in form.linears)
    places = [one.data_ptr() for one in weights if one is not None]
    if len(set(places)) < len(places):
        raise CannotFuse("two of its linear layers share a weight")
    activation = activation_of(layer, form)
    if activation is None:
        raise CannotFuse(f"its activation is {type(part_of(layer, form.activation)).__name__}")
    norms = [_norm(part_of(layer, name)) for name in form.norms]
    last = norms[1]
    if last is None:
        raise CannotFuse("it has no norm before its MLP")
    dtype = last.weight.dtype
    vectors = [one for norm in norms if norm is not None for one in (norm.weight, norm.bias) if one is not None]
    if any(one.dtype != dtype for one in vectors):
        raise CannotFuse("its norms are of several dtypes")

    def linear(*names: str) -> FusedLinear:
        return concatenated_linear([part_of(layer, name) for name in names], dtype)

    scales = tuple(part_of(layer, name) for name in form.scales) or (None, None)
    return FusedEncoder(
        form, linear(*form.qkv), linear(form.output), linear(form.up), linear(form.down), (norms[0], last), activation,
        (scales[0], scales[1]),
    )  # fmt: skip


def _norm(module: Any) -> FusedNorm | None:
    if isinstance(module, nn.Identity):
        return None
    if module.weight is None:
        raise CannotFuse("a norm has no weight")
    return FusedNorm(module.weight, module.eps, layer=True, bias=module.bias)
