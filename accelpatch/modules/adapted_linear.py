"""PEFT's LoRA around packed linear layers: in a training step the layer and its adapter are one node of autograd.

PEFT's own forward runs wherever this one does not compute the same: several adapters at once, dropout, DoRA and other
variants, biases, hooks inside. PEFT's classes are recognised by name; PEFT is never imported.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from accelpatch.kernels.arguments import HALVES
from accelpatch.kernels.ops.linear.low_rank_linear import low_rank_linear, why_not
from accelpatch.modules.autocast import autocast
from accelpatch.modules.quantized_linear import QuantizedLinear

WRAPPER = ("peft.tuners.lora.layer", "Linear")


class AdaptsLinear:
    """Mixin for PEFT's Linear around a QuantizedLinear."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As PEFT's: y[..., N] in the dtype of the base layer's."""
        own = cast(Any, self)
        name = None if args or kwargs or (not torch.is_grad_enabled() and not own.training) else _only(own)
        base = own.base_layer
        if name is None or not _takes(base, x):
            return cast(Tensor, super().forward(x, *args, **kwargs))  # type: ignore[misc]
        x, layout = autocast(x), base.layout
        down, up = own.lora_A[name].weight, own.lora_B[name].weight
        if why_not(layout, x, base.bias, down, up) is not None or down.device != x.device:
            return cast(Tensor, super().forward(x))  # type: ignore[misc]
        return low_rank_linear(x, layout, base.bias, down, up, own.scaling[name])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Of PEFT's own class, which is found by its name."""
        (made, (kind, *rest), *state) = cast(Any, super().__reduce_ex__(protocol))
        return made, (_stock(kind), *rest), *state


def _only(module: Any) -> str | None:
    """The one adapter that is active, if it is plain LoRA, which nothing watches; else None."""
    if module._disable_adapters or module.merged_adapters:
        return None
    names = [name for name in module.active_adapters if name in module.lora_A]
    if len(names) != 1 or names[0] in module.lora_variant:
        return None
    name = names[0]
    parts, dropout = (module.lora_A[name], module.lora_B[name]), module.lora_dropout[name]
    if type(dropout) is not nn.Identity and (type(dropout) is not nn.Dropout or (dropout.p and dropout.training)):
        return None
    plain = all(type(one) is nn.Linear and one._parameters["bias"] is None and _unwatched(one) for one in parts)
    return name if plain and _unwatched(dropout) else None


def _takes(base: Any, x: Tensor) -> bool:
    """Whether the base layer's forward is the plain one, which nothing watches, and x is a float that it takes."""
    if type(base).forward is not QuantizedLinear.forward or "forward" in vars(base) or not _unwatched(base):
        return False
    if x.device.type == "cpu" and x.dtype in HALVES:  # PEFT's products in float32 are faster there
        return False
    bias = base.bias
    return bool(x.is_floating_point()) and (bias is None or not bias.requires_grad)


def _unwatched(module: nn.Module) -> bool:
    """Whether a module has no hooks, of its own or of all modules."""
    everywhere = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    forward = module._forward_hooks or module._forward_pre_hooks
    return not (everywhere or forward or module._backward_hooks or module._backward_pre_hooks)


def wrappers_in(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """PEFT's LoRA layers in a model that do not know of this, each with the class that does."""
    for module in model.modules():
        kind = type(module)
        if (kind.__module__, kind.__name__) == WRAPPER and not isinstance(module, AdaptsLinear):
            yield module, _adapting(cast(Any, kind))


@functools.cache
def _adapting(kind: type) -> Any:
    """PEFT asks for its class by name."""
    return type(kind.__name__, (AdaptsLinear, kind), {"__module__": kind.__module__})


def _stock(kind: type) -> type:
    return kind.__mro__[2] if issubclass(kind, AdaptsLinear) else kind
