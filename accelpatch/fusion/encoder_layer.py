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
from accelpatch.models.encoders import EncoderForm, part_of
from accelpatch.models.family import PLAIN_ACTIVATIONS
from accelpatch.modules.norm import positional_names
from accelpatch.modules.replacement import Replacement, adopt, is_observed

ASKS = ("output_attentions", "output_hidden_states")
_LOCK = threading.RLock()
#: classes of activations -> names; those of other MLPs besides
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
    """The module. wanted: whether it runs fused, once its weights are laid out. positional: names of its forward's
    arguments after the hidden states; own: the same; unused: those of them that the fused form does not take."""

    transient = ("_fused", "_seen", "_linears", "_held")
    form: EncoderForm
    positional: tuple[str, ...]
    own: frozenset[str]
    unused: frozenset[str]
    in_tuple: bool
    wanted: bool
    _fused: FusedEncoder | None = None
    _seen: tuple[tuple[nn.Module, str, nn.Module], ...] = ()
    _linears: tuple[Any, ...] = ()
    _held: tuple[Any, ...] = ()

    def lay_out(self) -> None:
        """Concatenate weights and read the layer; raises CannotFuse where it has no fused form."""
        with _LOCK:  # or two threads would each concatenate what the other reads
            if self._is_fresh():
                return
            try:
                made = read(self, self.form)
            except CannotFuse:
                self.wanted = False
                raise
            self._seen = tuple(_children(self))
            self._linears = tuple(part_of(self, name) for name in (*self.form.linears, *self.form.norms))
            self._held = tuple(map(_held_by, self._linears))
            self._fused, self.wanted = made, True

    def run_modules(self) -> None:
        """Run the original's forward from now on."""
        self.wanted, self._fused = False, None

    @property
    def is_fused(self) -> bool:
        """Whether calls that the fused form covers run it."""
        return self.wanted

    @property
    def dtype(self) -> torch.dtype:
        """Of its activations."""
        assert self._fused is not None
        return self._fused.norms[1].weight.dtype

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden_states[B, L, K] -> [B, L, K], or a tuple of it, as the original gives it."""
        packing = present()
        if packing is not None and id(self) in packing.stacks:
            y = self._packed(hidden_states, packing)
        else:
            given = {**dict(zip(self.positional, args, strict=False)), **kwargs}
            if not self._covers(hidden_states, given):
                return super().forward(hidden_states, *args, **kwargs)
            assert self._fused is not None
            module = part_of(self, self.form.attention)
            attend = EncoderAttention(module, self.form, hidden_states.shape, given, self.own)
            y = self._fused(hidden_states.reshape(-1, hidden_states.shape[-1]), attend).view(hidden_states.shape)
        return (y,) if self.in_tuple else y

    def _packed(self, x: Tensor, packing: Packing) -> Tensor:
        """The layer on rows without padding; the first of its stack gathers them, the last scatters them."""
        place, last = packing.stacks[id(self)]
        module: Any = part_of(self, self.form.attention)
        size, scale = head_size(module), scaling(module)

        def attend(qkv: Tensor) -> Tensor:
            q, k, v = qkv.view(len(qkv), 3, -1, size).unbind(1)
            return packing.attend(q, k, v, scale).reshape(len(qkv), -1)

        assert self._fused is not None
        y = self._fused(packing.gather(x) if place == 0 else x[0], attend)
        return packing.scatter(y) if place == last else y[None]

    def _covers(self, x: Tensor, given: Mapping[str, Any]) -> bool:
        """Whether the fused form computes such a call."""
        if not x.numel() or any(given.get(name) for name in ASKS):
            return False
        others = (given.get(name) for name in self.unused)
        if any(one is not None and one is not False for one in others):
            return False
        return self.runs_fused(x) and x.dtype == self.dtype

    def runs_fused(self, x: Tensor | None = None) -> bool:
        """Whether the layer can run fused now, on x."""
        if not self.wanted or self.training or not is_eager():
            return False
        if torch.is_grad_enabled() and wants_gradient((x, *self.parameters())):
            return False
        if not self._is_fresh():
            try:
                self.lay_out()
            except CannotFuse:
                return False
        return self._intact() and not torch.is_autocast_enabled(self._linears[-1].weight.device.type)

    def _is_fresh(self) -> bool:
        """Whether linear layers and norms have the weights that were laid out."""
        held, now = self._held, tuple(map(_held_by, self._linears))
        same = len(held) == len(now) and all(a is b or a == b for a, b in zip(held, now, strict=True))
        return self._fused is not None and same

    def _intact(self) -> bool:
        same = all(parent._modules.get(name) is child for parent, name, child in self._seen)
        return same and not is_observed(*(child for _, _, child in self._seen))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self._fused = None
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
    activation = activation_of(layer, form)
    if activation is None:
        raise CannotFuse(f"its activation is {type(part_of(layer, form.activation)).__name__}")
    norms = [_norm(part_of(layer, name)) for name in form.norms]
    last = norms[1]
    if last is None:
        raise CannotFuse("it has no norm before its MLP")
    dtype = last.weight.dtype

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
    """(parent, name, child) of all modules in a layer that run nothing of their own, parameters of adapters say."""
    return [
        (parent, name, child) for parent in layer.modules() for name, child in parent._modules.items()
        if child is not None
    ]  # fmt: skip


def _held_by(part: Any) -> Any:
    """Where a linear layer or norm has its weight: the same object, or equal, as long as that is the same."""
    if hasattr(part, "own_layout"):
        return part.layout
    return tuple(None if one is None else one.data_ptr() for one in map(part._parameters.get, ("weight", "bias")))
