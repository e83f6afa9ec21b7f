"""Which attention implementation configurations name: this package's, or for a while those that it stands for.

A FlashAttention has `replaced_config`, its original's configuration, and `replaced_name`, the implementation that this
named. Its own configuration is a copy that names this package's: one that the model has too, or `own_config`, which it
has alone, where some attention modules of the model were not replaced.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from accelpatch import own_code

NAME = "accelpatch_attention"  # without "flash", which transformers takes for the interface of flash-attn
SETTING = "_attn_implementation_internal"  # the attribute of a configuration that holds the implementation's name
EAGER = "eager_attention_forward"  # how the names end of the functions that modules of models have for "eager"
#: owner of an attribute (a module, a configuration), its name, value before, value meanwhile
Aside = list[tuple[Any, str, Any, Any]]


class _Call(threading.local):
    """names: id of a configuration -> the original implementation, in calls that the originals' attention runs."""

    names: Mapping[int, Any] | None = None


_CALL = _Call()


def named(config: Any) -> Any:
    """The same configuration, with this package's implementation in it."""
    vars(config)[SETTING] = NAME
    return config


def unnamed(config: Any) -> Any:
    """The same configuration, in which no part names this package's: transformers validates what it writes, and which
    implementation a loaded model takes is not written."""
    attributes = vars(config)
    if attributes.get(SETTING) == NAME:
        attributes[SETTING] = None
    for part in attributes.values():
        if isinstance(part, PreTrainedConfig):
            unnamed(part)
    return config


class Registered:
    """What the attention function stands for: transformers' own functions and masks under other names."""

    def forward(self) -> Any:
        """Names the two registries, whose entries own_code reads."""
        return ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS


def set_aside(model: nn.Module) -> Aside:
    """Give the attention modules in a model that name this package's function the originals', until `take_up`."""
    found: Aside = []
    for attention in replaced_in(model):
        attributes = vars(attention)
        if attributes["config"] is attributes["own_config"]:
            found.append((attention, "config", attributes["own_config"], attributes["replaced_config"]))
        elif vars(attributes["config"]).get(SETTING) == NAME:
            found.append((attributes["config"], SETTING, NAME, attributes["replaced_name"]))
    for owner, name, _, meanwhile in found:
        owner.__dict__[name] = meanwhile
    return found


def take_up(aside: Aside) -> None:
    """Undo `set_aside`, but for configurations that name another implementation by now."""
    for owner, name, before, meanwhile in aside:
        if vars(owner).get(name) == meanwhile:
            owner.__dict__[name] = before


def names(model: nn.Module) -> list[tuple[dict[str, Any], Any]]:
    """The attributes of each configuration in a model, and the implementation that it names."""
    every = {id(config): vars(config) for one in model.modules() if hasattr(config := _config(one), SETTING)}
    every |= {id(vars(one)["config"]): vars(vars(one)["config"]) for one in replaced_in(model)}
    return [(settings, settings[SETTING]) for settings in every.values()]


@contextmanager
def originals(model: nn.Module) -> Iterator[None]:
    """Context manager: in this thread the originals' attention runs, with the masks that it takes."""
    before = _CALL.names
    _CALL.names = {**(before or {}), **{id(vars(one)["config"]): one.replaced_name for one in replaced_in(model)}}
    try:
        yield
    finally:
        _CALL.names = before


def original_mask(config: Any) -> Callable[..., Any] | None:
    """The function that makes the masks for a configuration in a call of the originals' attention; None in others."""
    name = None if _CALL.names is None else _CALL.names.get(id(config))
    return None if name is None else ALL_MASK_ATTENTION_FUNCTIONS.get(name, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The mask of an implementation that registered none."""


def original_name(module: Any) -> str | None:
    """The implementation that must run a call of an attention module in place of this package's: the original's, or
    one that the model was given since while this module has a configuration of its own; None for this package's."""
    attributes = vars(module)
    if "replaced_config" not in attributes:
        return None
    present = vars(attributes["replaced_config"]).get(SETTING)
    if attributes["config"] is attributes["own_config"] and present not in (attributes["replaced_name"], NAME):
        return str(present)
    return None if _CALL.names is None else str(attributes["replaced_name"])


def was_eager(module: Any) -> bool:
    """Whether the implementation that a module's function stands for is `eager`, which None is too."""
    attributes = vars(module)
    return "replaced_config" in attributes and attributes["replaced_name"] in ("eager", None)


def original_attention(module: Any, name: str) -> Callable[..., Any]:
    """The function that the model's own code runs for a name."""
    cls = type(module).replaced_class
    own = vars(sys.modules[cls.__module__])
    eager = next(own[one] for one in (*names_in(cls.forward), *own) if one.endswith(EAGER) and one in own)
    return own["ALL_ATTENTION_FUNCTIONS"].get_interface(name, eager)


def names_in(forward: Any) -> tuple[str, ...]:
    """The names in the code of a method, inside its decorators."""
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return getattr(getattr(forward, "__code__", None), "co_names", ())


def why_not_interface(module: nn.Module) -> str | None:
    """Why a module's attention cannot go through transformers' attention interface; None where it does."""
    cls = getattr(type(module), "replaced_class", type(module))
    if "ALL_ATTENTION_FUNCTIONS" in names_in(getattr(cls, "forward", None)) and hasattr(
        getattr(module, "config", None), SETTING
    ):
        return None
    return f"{cls.__name__} computes its scores itself, not through transformers' attention interface"


def why_not_implementation(module: Any) -> str | None:
    """Why the function of a module's implementation is none that this package's stands for; None where it is."""
    name = vars(module.config).get(SETTING)
    function = None if name is None else ALL_ATTENTION_FUNCTIONS.get(name)
    if function is None or own_code.is_of_a_package(function):
        return None
    return f"the attention implementation {name} is not one of transformers'"


def configs_with_own_masks(model: nn.Module) -> Iterator[tuple[nn.Module, Any]]:
    """(module, new configuration) for the modules of a model in which FlashAttention stands in every place of a
    configuration: they get a copy with NAME, so that the masks are made for it. Where some attention modules of a
    configuration are not replaced, the model goes on making their masks."""
    configs = [(module, _config(module)) for module in model.modules()]
    ours = {id(config): config for module, config in configs if "replaced_config" in vars(module)}
    stay = [(module, config) for module, config in configs if "replaced_config" not in vars(module)]
    others = {id(config) for module, config in stay if why_not_interface(module) is None}
    memo = {key: named(copy.copy(config)) for key, config in ours.items() if key not in others}
    if not memo:
        return
    for _, config in configs:
        _with_copies(config, memo)
    yield from ((module, memo[id(config)]) for module, config in configs if id(config) in memo)


def _with_copies(config: Any, memo: dict[int, Any]) -> Any:
    """The copy of a configuration that memo, by id, has; a new copy of one that holds others with copies; else itself.

    Dictionaries and lists are those of the original, so that what is changed in them stays when the model is unpatched.
    """
    parts = {name: one for name, one in getattr(config, "__dict__", {}).items() if isinstance(one, PreTrainedConfig)}
    new = {name: _with_copies(one, memo) for name, one in parts.items()}
    new = {name: one for name, one in new.items() if one is not parts[name]}
    if new:
        vars(memo.setdefault(id(config), copy.copy(config))).update(new)
    return memo.get(id(config), config)


def _config(module: nn.Module) -> Any:
    return vars(module).get("replaced_config", vars(module).get("config"))


def replaced_in(model: nn.Module) -> list[Any]:
    """The FlashAttention modules in a model."""
    return [module for module in model.modules() if "replaced_config" in vars(module)]
