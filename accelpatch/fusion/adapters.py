"""LoRA adapters (PEFT) around linear layers inside fused layers, which run inside the launch of the layer itself.

    y = w x + sum over active adapters of scaling B (A x)

PEFT's classes are recognised by their attributes; PEFT is never imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.kernels.hip.low_rank import concatenated
from accelpatch.kernels.ops.linear.adapted_linear import AdaptedLinear
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear

SWITCHES = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling", "cast_input_dtype_enabled")


def is_adapter(module: Any) -> bool:
    """Whether a module is a PEFT wrapper around another."""
    return "base_layer" in module._modules and hasattr(module, "adapter_layer_names")


def base_of(module: Any) -> Any:
    """The module inside PEFT wrappers; any other module itself."""
    while is_adapter(module):
        module = module.base_layer
    return module


def state_of(adapters: Iterable[nn.Module]) -> tuple[str, ...]:
    """The adapters' settings that are not tensors: active names, scalings, switches."""
    states = map(vars, adapters)
    return tuple(repr([state.get(name) for name in SWITCHES]) for state in states)


def with_adapters(base: FusedLinear, modules: Sequence[Any], dtype: torch.dtype) -> FusedLinear | AdaptedLinear:
    """`base`, the linear layers inside `modules` concatenated, with the active adapters of each. Raises CannotFuse."""
    parts = [_one(active(module)) for module in modules]
    if not any(parts):
        return base
    place = base.weight.w.device
    if any(factor.device != place for part in filter(None, parts) for factor in part):
        raise CannotFuse(f"an adapter lies on another device than {place}")
    inner = map(base_of, modules)
    sizes = [one.nf if hasattr(one, "nf") else one.out_features for one in inner]  # nf: of a Conv1D
    low = concatenated(parts, sizes, torch.empty(0, dtype=dtype, device=place))
    return AdaptedLinear(base, replace(low, words=low.new_words()))


def _one(adapters: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor] | None:
    """All adapters of a module as one."""
    if not adapters:
        return None
    downs, ups = zip(*adapters, strict=True)
    return torch.cat(downs), torch.cat(ups, 1)


def active(module: Any) -> list[tuple[Tensor, Tensor]]:
    """(scaling * A[r, K], B[N, r]) of each active adapter around a module."""
    if not is_adapter(module):
        return []
    kind = type(module)
    if kind.__module__ != "peft.tuners.lora.layer" or kind.__name__ != "Linear" or is_adapter(module.base_layer):
        raise CannotFuse(f"an adapter is {kind.__name__} of {kind.__module__}")
    if module.merged_adapters and module.disable_adapters:
        raise CannotFuse("an adapter is merged and switched off")
    if module.merged_adapters or module.disable_adapters:
        return []
    names = [name for name in module.active_adapters if name in module.lora_A]
    return [_low_rank(module, name) for name in names]


def _low_rank(module: Any, name: str) -> tuple[Tensor, Tensor]:
    down: Any = module.lora_A[name]
    up: Any = module.lora_B[name]
    dropout = module.lora_dropout[name]
    if name in module.lora_variant or type(down) is not nn.Linear or type(up) is not nn.Linear:
        raise CannotFuse(f"the adapter {name} is not plain LoRA")
    if any(isinstance(one.bias, Tensor) for one in (down, up)):
        raise CannotFuse(f"the adapter {name} has a bias")
    if type(dropout) is not nn.Identity and dropout.training:
        raise CannotFuse(f"the adapter {name} has dropout: call model.eval()")
    return module.scaling[name] * down.weight.detach(), up.weight.detach()
