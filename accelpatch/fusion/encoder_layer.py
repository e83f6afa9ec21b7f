"""A layer of an encoder as few kernels: q, k and v as one product, residual and norm as one operation.

Activations that go into products of 8 bits are made by the operation before: norm and rows, or activation and rows.
Attention itself is the one that the model's configuration names. The layer stands where its original stood; it runs
its modules before its weights are laid out, and for every call that the fused form does not cover.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from accelpatch import own_code
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.encoder_attention import MASK, ROTARY, EncoderAttention, head_size, scaling
from accelpatch.fusion.fused_layer import activations_of
from accelpatch.fusion.fused_weights import concatenated_linear
from accelpatch.fusion.packed_rows import Packing, present
from accelpatch.kernels.operation import is_eager, wants_gradient
from accelpatch.kernels.ops.activation.activated_rows import activated_rows
from accelpatch.kernels.ops.activation.gated_activation import ACTIVATIONS, gated
from accelpatch.kernels.ops.activation.gated_rows import gated_rows
from accelpatch.kernels.ops.activation.quantize_rows import QuantizedRows
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear
from accelpatch.kernels.ops.norm.fused_norm import FusedNorm
from accelpatch.models.encoders import EncoderForm, encoder_form_of, part_of
from accelpatch.models.family import PLAIN_ACTIVATIONS
from accelpatch.modules.norm import positional_names
from accelpatch.modules.replacement import Replacement, adopt, is_observed

ASKS = ("output_attentions", "output_hidden_states")
_LOCK = threading.RLock()
#: class of an activation -> its name among those of `gated_activation.ACTIVATIONS`
ACTIVATION_CLASSES: Mapping[str, str] = {**PLAIN_ACTIVATIONS, "QuickGELUActivation": "quick_gelu"}


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
            taken, x = self._normed(first, made, x, self.up)
            return second.of_sum(x, self._mlp(taken))[0]
        taken = x if first is None else self._normed(first, x, None, self.qkv)[0]
        made = self._scaled(self.output.large_m(attend(self.qkv.large_m(taken))), 0)
        taken, x = self._normed(second, made, x, self.up)
        return x + self._scaled(self._mlp(taken), 1)

    def _normed(self, norm: FusedNorm, x: Tensor, residual: Tensor | None, layer: FusedLinear) -> tuple[Any, Tensor]:
        """(norm(s) as `layer` takes it, what the next sum takes) for s = x + residual."""
        form = activations_of(layer)
        if form is None:
            y, total = norm.of_sum(x, residual)
            return y, y if self.form.post else total
        weight: Any = layer.weight
        return norm.rows_of_sum(x, residual, weight.input_scale, weight.w.dtype, self.form.post)

    def _mlp(self, taken: Any) -> Tensor:
        y, form = self.up.large_m(taken), activations_of(self.down)
        if form is None:
            return self.down.large_m(gated(y, self.activation) if self.form.gated else ACTIVATIONS[self.activation](y))
        rows, weight = gated_rows if self.form.gated else activated_rows, cast(Any, self.down.weight)
        made = rows.function(y, self.activation, weight.input_scale, weight.w.dtype)
        return self.down.large_m(QuantizedRows(*made, y.dtype))

    def _scaled(self, y: Tensor, place: int) -> Tensor:
        scale = self.scales[place]
        return y if scale is None else y * scale


class FusedEncoderLayer(Replacement):
    """The module in the place of a layer.

    wanted: whether it runs fused, once its weights are laid out. positional: names of its forward's arguments after the
    hidden states, in their order; own: the same as a set; unused: those of them that the fused form does not take.
    in_tuple: whether the original gives its output in a tuple.
    """

    transient = ("_fused", "_seen", "_dropouts", "_held")
    form: EncoderForm
    positional: tuple[str, ...]
    own: frozenset[str]
    unused: frozenset[str]
    in_tuple: bool
    wanted: bool
    _fused: FusedEncoder | None = None
    _seen: tuple[tuple[nn.Module, str, nn.Module], ...] = ()
    _dropouts: tuple[nn.Dropout, ...] = ()
    _held: tuple[Any, ...] = ()

    def lay_out(self) -> FusedEncoder:
        """Concatenate weights and read the layer; raises CannotFuse where it has no fused form."""
        with _LOCK, torch.inference_mode(False):  # or two threads would each concatenate what the other reads
            fused = self._fused
            if fused is not None and self._is_fresh():
                return fused
            try:
                fused = read(self, self.form)
            except CannotFuse:
                self.wanted = False
                raise
            self._seen = tuple(_children(self))
            self._dropouts = tuple(child for _, _, child in self._seen if isinstance(child, nn.Dropout))
            self._fused, self.wanted = fused, True
            self._held = self._weights()
            return fused

    def run_modules(self) -> None:
        """Run the original's forward from now on."""
        self.wanted, self._fused = False, None

    @property
    def is_fused(self) -> bool:
        """Whether calls that the fused form covers run it."""
        return self.wanted

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

    def fused_now(self, x: Tensor | None = None) -> FusedEncoder | None:
        """What the layer computes by the weights that it has now; None where it must run its modules, on x."""
        if not self.wanted or self.training or not is_eager() or vars(self).get("_is_replica", False):
            return None
        if torch.is_grad_enabled() and wants_gradient((x, *self.parameters())):
            return None
        fused = self._fused
        if fused is None or not self._is_fresh():
            try:
                fused = self.lay_out()
            except CannotFuse:
                return None
        if not self._intact() or torch.is_autocast_enabled(fused.device.type):
            return None
        return fused if x is None or x.dtype == fused.dtype else None

    def _weights(self) -> tuple[Any, ...]:
        """Where linear layers, norms and scales have their weights, and the norms' epsilons."""
        parts = (part_of(self, name) for name in (*self.form.linears, *self.form.norms))
        return (*map(_held_by, parts), *(part_of(self, name).data_ptr() for name in self.form.scales))

    def _is_fresh(self) -> bool:
        """Whether it has the weights that were laid out."""
        held, now = self._held, self._weights()
        return len(held) == len(now) and all(a is b or a == b for a, b in zip(held, now, strict=True))

    def _intact(self) -> bool:
        """Whether its modules are those that were read, nobody watches them, and none drops anything."""
        same = all(parent._modules.get(name) is child for parent, name, child in self._seen)
        if not same or any(one.training and one.p for one in self._dropouts):
            return False
        return not is_observed(*(child for _, _, child in self._seen))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self._held = ()  # its weights move one by one: they are concatenated again
        return super()._apply(fn, recurse)


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
    held = (part_of(layer, name)._parameters.get("weight") for name in form.linears)
    places = [one.data_ptr() for one in held if one is not None]
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


def _children(layer: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, child) of all modules in a layer."""
    return [
        (parent, name, child) for parent in layer.modules() for name, child in parent._modules.items()
        if child is not None
    ]  # fmt: skip


def _held_by(part: Any) -> Any:
    """Where a linear layer or norm has its weight: the same object, or equal, as long as that is the same."""
    if hasattr(part, "own_layout"):
        return part.layout
    own = (None if one is None else one.data_ptr() for one in map(part._parameters.get, ("weight", "bias")))
    return (*own, getattr(part, "eps", None))
