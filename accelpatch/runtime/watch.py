"""Detects changes to a model that make a step derived from it differ from its modules; runs before every step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from accelpatch import own_code
from accelpatch.fusion.adapters import SWITCHES, is_adapter, state_of
from accelpatch.fusion.decoder import layers_in
from accelpatch.fusion.layer_description import LayerDescription
from accelpatch.fusion.spread import is_offloaded, moves_only, offloaded_inside
from accelpatch.modules.attention_settings import SETTING
from accelpatch.modules.paged_setting import implementation
from accelpatch.modules.quantized_experts import QuantizedExperts
from accelpatch.modules.quantized_module import quantised_in, take_over
from accelpatch.modules.replacement import OWN_HOOK

_version = attrgetter("_version")
_in_training = attrgetter("training")
# Where transformers has the hooks that it leaves behind in every layer once hidden states or attentions were asked for.
# They do nothing but in calls that ask for them, and those run the modules anyway.
CAPTURING = "transformers.utils.output_capturing"
CAPTURES = "_output_capturing_hooks_installed"  # transformers' mark of a model with those hooks
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout)
RANDOM = ("dropout", "layerdrop", "jitter", "pdrop", "noise")  # in names of numbers that act in training mode alone
SCALARS = (bool, int, float, str, type(None))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _counts_writes(tensor: Tensor) -> bool:
    """Whether torch counts writes into a tensor: not for inference tensors, nor tensors over their data."""
    try:
        return tensor._version >= 0
    except RuntimeError:
        return False


class Watch:
    """Detects hooks, replaced children and changed weights in a model that steps were derived from.

    uncaptured: places of the layers that no graph may hold: their weights are offloaded, or they run other code than
    their package's. other_code: why one of these may do other things with the KV cache, or None. It checks every module
    before every step; the work is done in C and takes about a tenth of a millisecond.
    """

    def __init__(self, model: nn.Module):
        take_over(model)
        everything = list(model.modules())
        modules = [module for module in everything if not is_offloaded(module)]  # their tensors come and go
        inner = [module for module in everything if module is not model]
        layers = layers_in(model)
        described = [LayerDescription(layer) for layer in layers]
        loose = [offloaded_inside(one.layer) or one.other_code is not None for one in described]
        self.other_code = next(filter(None, (one.other_code_over_cache for one in described)), None)
        self.uncaptured = [place for place, is_loose in enumerate(loose) if is_loose]
        self._hf_hooks = [(vars(m), vars(m)["_hf_hook"]) for m in inner if "_hf_hook" in vars(m)]
        self._layers = [hook_tables(layer.modules()) for layer in layers]
        within = {id(module) for layer in layers for module in layer.modules()}
        self._outer = hook_tables(module for module in inner if id(module) not in within)
        self._hooks = [*self._outer, *chain.from_iterable(self._layers)]
        moving = {id(module) for module in inner if moves_only(module) or is_offloaded(module)}
        self._moved = [(vars(m), vars(m).get("forward")) for m in inner if id(m) in moving]
        self._attributes = [vars(m) for m in inner if id(m) not in moving]
        self._plain = grouped(plain_values(model))
        self._values = values_of(self._plain)
        self._implementations = [(one, implementation(one)) for one in configurations(model)]
        tables: list[dict[str, Any]] = [t for m in modules for t in (m._modules, m._parameters, m._buffers)]
        self._filled = [table for table in tables if table]
        self._empty = [table for table in tables if not table]  # most of them
        self._held = list(chain.from_iterable(map(dict.values, self._filled)))
        tensors = [value for value in self._held if isinstance(value, Tensor)]
        self.several_devices = len({tensor.device for tensor in tensors}) > 1  # or offloaded in part
        self._tensors = [tensor for tensor in tensors if own_code.unusual(tensor) is None]  # others have no address
        self._pointers = list(map(Tensor.data_ptr, self._tensors))
        own = written_by_forward(modules)
        self._written = [tensor for tensor in self._tensors if _counts_writes(tensor) and id(tensor) not in own]
        self._versions = list(map(_version, self._written))
        self._layouts = layouts_of(model, modules)
        self._adapters = [module for module in modules if is_adapter(module)]
        self._switches, self._flags = grouped(switch_places(self._adapters)), grouped(flag_places(model))
        self._switched = deepcopy(values_of(self._switches))
        self._model, self._random = weakref.ref(model), random_in_training(model)
        adapters = {id(part) for module in inner if is_adapter(module) for part in module.modules()}  # seen elsewhere
        self._dropping = [one for one in inner if id(one) not in adapters and _random_number(one) is not None]

    def objection(self) -> str | None:
        """Why the modules must run this step, or None."""
        changed = any(attributes.get("forward") is not forward for attributes, forward in self._moved)
        if changed or any(map(contains, self._attributes, repeat("forward"))):
            return "a module whose forward was replaced"
        everywhere = chain.from_iterable(getattr(torch_module, name).values() for name in _GLOBAL_HOOKS)
        if hooked(self._outer) or not all(map(_idle, everywhere)):
            return "a hook outside of the layers"
        model = self._model()
        training = (model is not None and model.training) or any(map(_in_training, self._dropping))
        return f"training mode, with {self._random}" if self._random is not None and training else None

    def watched(self) -> list[int]:
        """Indices of the layers with hooks, on themselves or inside."""
        return [place for place, tables in enumerate(self._layers) if hooked(tables)] if any(self._hooks) else []

    def stale(self) -> bool:
        """Whether the model has changed since the step was derived from it."""
        return (
            any(attributes.get("_hf_hook") is not hook for attributes, hook in self._hf_hooks)
            or any(self._empty)
            or sum(map(len, self._filled)) != len(self._held)
            or not all(map(is_, chain.from_iterable(map(dict.values, self._filled)), self._held))
            or list(map(Tensor.data_ptr, self._tensors)) != self._pointers
            or list(map(_version, self._written)) != self._versions
            or any(vars(module)[name] is not layout for module, name, layout in self._layouts)
            or values_of(self._plain) != self._values
            or any(implementation(config) != name for config, name in self._implementations)
        )

    def adapters(self) -> tuple[str, ...]:
        """The state of the model's adapters."""
        return state_of(self._adapters)

    def switched(self) -> bool:
        """Whether adapters were switched, scaled or set to another mode since the step was derived from the model."""
        return values_of(self._switches) != self._switched

    def flags(self) -> list[Any]:
        """Plain values that a captured step relies on: scalings, switches, the attention implementation."""
        return values_of(self._flags)


def layouts_of(model: Any, modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, Any]]:
    """(module, attribute, what it holds) of packed weights of linear layers and experts, offloaded ones aside."""
    linears = [module for module in quantised_in(model) if not is_offloaded(module)]
    experts = [module for module in modules if isinstance(module, QuantizedExperts)]
    return [(one, "own_layout", one.own_layout) for one in linears] + [(one, "layouts", one.layouts) for one in experts]


def configurations(model: Any) -> tuple[Any, ...]:
    """The configurations of a transformers model and of the models in it; () for other models."""
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        return ()
    own = [model.config, model.config.get_text_config(decoder=True)]
    inner = [config for module in model.modules() if hasattr(config := vars(module).get("config"), "get_text_config")]
    return tuple({id(config): config for config in [*own, *inner]}.values())


def plain_values(model: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """(attributes, name) of the numbers that a step relies on: scalings, windows, epsilons, softcaps.

    From the configuration, and from modules that neither hold a linear layer's weight nor do other modules' work.
    """
    owners = [module for module in model.modules() if not isinstance(module, (nn.Linear, nn.ModuleList))]
    for owner in (*configurations(model), *owners):
        for name, value in vars(owner).items():
            private = isinstance(owner, nn.Module) and (name[0] == "_" or name in _OF_EVERY_MODULE)
            if type(value) in SCALARS and not private and name != SETTING:
                yield vars(owner), name


def flag_places(model: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """(attributes, name) of all plain values in configuration and modules; adapters' ones are in `state_of`."""
    owners = (module for module in model.modules() if not is_adapter(module))
    for owner in (*configurations(model), *owners):
        for name, value in vars(owner).items():
            if type(value) in SCALARS and name != CAPTURES and (name != "training" or getattr(owner, "p", 0)):
                yield vars(owner), name


def switch_places(adapters: Iterable[Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """(attributes, name) of what decides which of a model's adapters count, and how."""
    for adapter in adapters:
        yield from ((vars(adapter), name) for name in SWITCHES if name in vars(adapter))
        dropouts = adapter._modules.get("lora_dropout")
        if dropouts is not None:
            yield from ((vars(one), "training") for one in dropouts.modules() if isinstance(one, DROPOUTS))


def random_in_training(model: Any) -> str | None:
    """What makes a model's outputs random in training mode: a dropout, a noise. None where both modes are the same."""
    return next(filter(None, map(_random_number, (*configurations(model), *model.modules()))), None)


def _random_number(owner: Any) -> str | None:
    is_dropout = isinstance(owner, DROPOUTS)
    for name, value in vars(owner).items():
        named = any(part in name for part in RANDOM) or (is_dropout and name == "p")
        if named and type(value) in (int, float) and value:
            return f"{name} = {value} in {type(owner).__name__}"
    return None


def grouped(places: Iterable[tuple[dict[str, Any], str]]) -> list[tuple[Callable[[Any], Any], dict[str, Any]]]:
    """Places as (reader, attributes): of each dictionary, all its names are read at once."""
    names: dict[int, tuple[dict[str, Any], list[str]]] = {}
    for attributes, name in places:
        names.setdefault(id(attributes), (attributes, []))[1].append(name)
    return [(itemgetter(*own), attributes) for attributes, own in names.values()]


def values_of(places: list[tuple[Callable[[Any], Any], dict[str, Any]]]) -> list[Any]:
    """The present values at grouped places; [] where one is gone."""
    try:
        return [read(attributes) for read, attributes in places]
    except KeyError:
        return []


def written_by_forward(modules: Iterable[nn.Module]) -> set[int]:
    """Ids of the tensors that a forward itself writes, such as frequencies chosen by the length (longrope)."""
    longrope = [module for module in modules if getattr(module, "rope_type", None) == "longrope"]
    return {id(buffer) for module in longrope for name, buffer in module._buffers.items() if name == "inv_freq"}


def hook_tables(modules: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """The dicts that hold the modules' hooks."""
    return [table for module in modules for table in (module._forward_hooks, module._forward_pre_hooks)]


def hooked(tables: Iterable[dict[int, Any]]) -> bool:
    """Whether any hook would have an effect during a step."""
    return not all(map(_idle, chain.from_iterable(map(dict.values, filter(None, tables)))))


def _idle(hook: Any) -> bool:
    return hasattr(hook, OWN_HOOK) or getattr(hook, "__module__", None) == CAPTURING
