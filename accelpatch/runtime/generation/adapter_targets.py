"""Refuses adapters of PEFT whose `target_parameters` name packed weights.

PEFT looks for them among a module's parameters. A packed weight is no parameter, so that it would get no adapter, and
PEFT warns only where it finds no parameter at all. Weights of experts support them (modules/adapted_experts.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from accelpatch.errors import PatchError
from accelpatch.modules.experts import DOWN, UP
from accelpatch.modules.packed_weight import packed_in
from accelpatch.modules.quantized_experts import QuantizedExperts

CONFIGS = "peft_config"  # the attribute of a model in which PEFT stores its adapters' configurations
WRAPPED = ".base_layer"


def adapter_configs() -> property:
    """The `peft_config` of a patched model's class, which PEFT sets once its first adapter is in.

    Setting it raises PatchError where that adapter is for packed weights, and takes the adapter out again. PEFT adds
    others to the same dict: see `check_next`.
    """

    def get(self: Any) -> Any:
        if CONFIGS not in vars(self):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{CONFIGS}'")
        return vars(self)[CONFIGS]

    def put(self: Any, value: Any) -> None:
        if (refused := _for_packed(self, value)) is not None:
            if CONFIGS not in vars(self):  # else other adapters would be removed too
                _take_out(self)
            raise PatchError(refused[1])
        vars(self)[CONFIGS] = value

    def delete(self: Any) -> None:
        vars(self).pop(CONFIGS)

    return property(get, put, delete)


def check_next(model: nn.Module) -> None:
    """Refuse an adapter for packed weights that PEFT is about to add to others: drop it, and raise PatchError."""
    configs = vars(model).get(CONFIGS, {})
    if (refused := _for_packed(model, configs)) is not None:
        del configs[refused[0]]
        raise PatchError(refused[1])


def _for_packed(model: nn.Module, configs: Mapping[str, Any]) -> tuple[str, str] | None:
    """The first adapter that is for packed weights, and the message that refuses it; None where there is none."""
    for adapter, config in configs.items():
        targets = getattr(config, "target_parameters", None) or ()
        named = tuple(f".{target}" for target in targets)
        if targets and (found := next((name for name in _packed(model) if f".{name}".endswith(named)), None)):
            return adapter, (
                f"the adapter {adapter} is for {found} (target_parameters: {', '.join(sorted(targets))}), which is "
                "packed and no parameter: call accelpatch.unpatch(model), add the adapter, and patch again"
            )
    return None


def _take_out(model: nn.Module) -> None:
    """Put the modules that PEFT has wrapped back: PEFT cannot add an adapter that it has added in part."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            inner: Any = child
            while hasattr(type(inner), "adapter_layer_names"):
                inner = inner._modules.get("base_layer", inner._modules.get("original_module"))
            parent._modules[name] = inner


def _packed(model: nn.Module) -> Iterator[str]:
    """Names that packed weights would have as parameters, without PEFT's wrappers."""
    yield from (f"{path.replace(WRAPPED, '')}.weight" for path, _ in packed_in(model))
    for path, module in model.named_modules():
        if isinstance(module, QuantizedExperts):
            yield from (f"{path.replace(WRAPPED, '')}.{name}" for name in module.packed_names if name not in (UP, DOWN))
