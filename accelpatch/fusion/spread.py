"""Layers that lie on several devices, or whose weights are offloaded: what a fused model knows of it.

accelerate hangs a hook on every module of such a model. Those that only move inputs to a device are no concern of fused
layers, which move the hidden state themselves where the next layer lies elsewhere.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.fusion.signals import SentinelBuffers
from accelpatch.own_code.wrapped_forward import wraps_own_forward
from accelpatch.patching.carry import HOOKED
from accelpatch.patching.placement import device_of, hooks_of, is_offloaded

__all__ = ["ByModule", "Sentinels", "Spread", "device_of", "is_offloaded", "moves_only", "rotary_on", "spread_of"]

OFFLOADED = "its weights are offloaded"


def moves_only(module: nn.Module) -> bool:
    """Whether the `forward` on an instance is accelerate's, with a hook that moves inputs to a device and no more."""
    forward, hooks = vars(module).get("forward"), list(hooks_of(module))
    ours = isinstance(forward, functools.partial) and len(forward.args) == 1 and forward.args[0] is module
    return ours and bool(hooks) and all(_aligns(hook) for hook in hooks) and wraps_own_forward(module)


def _aligns(hook: Any) -> bool:
    kind = type(hook)
    return kind.__module__ == "accelerate.hooks" and kind.__name__ == "AlignDevicesHook" and not hook.offload


def offloaded_inside(module: nn.Module) -> bool:
    """Whether the weights of a module, or of one inside, are offloaded."""
    return any(is_offloaded(one) for one in module.modules())


@dataclass(frozen=True)
class Spread:
    """The device of each layer, of the embedding (first), and of the head (last)."""

    layers: tuple[torch.device, ...]
    first: torch.device
    last: torch.device

    @property
    def devices(self) -> list[torch.device]:
        """All devices, each once."""
        return list(dict.fromkeys((self.first, *self.layers, self.last)))

    def stretches(self, places: Iterable[int]) -> Iterator[tuple[torch.device, list[int]]]:
        """(device, places) of neighbours on one device."""
        stretch: list[int] = []
        for place in places:
            if stretch and self.layers[place] != self.layers[stretch[-1]]:
                yield self.layers[stretch[-1]], stretch
                stretch = []
            stretch.append(place)
        if stretch:
            yield self.layers[stretch[-1]], stretch


def spread_of(layers: Sequence[nn.Module], embedding: nn.Module, head: nn.Module) -> Spread | None:
    """Where the parts of a decoder lie; None for one device. An offloaded part is where it computes."""
    found = Spread(tuple(map(computes_on, layers)), computes_on(embedding), computes_on(head))
    return found if len(found.devices) > 1 else None


def several_devices(model: nn.Module) -> bool:
    """Whether a model's tensors lie on several devices, or some are offloaded: no graph holds its modules."""
    return len({tensor.device for tensor in chain(model.parameters(), model.buffers())}) > 1


def computes_on(module: nn.Module) -> torch.device:
    """The device that a module computes on."""
    for one in module.modules():
        hook = next((hook for hook in hooks_of(one) if getattr(hook, "offload", False)), None)
        if hook is not None and hook.execution_device is not None:
            given = hook.execution_device
            return torch.device("cuda", given) if isinstance(given, int) else torch.device(given)
    return device_of(module)


class Sentinels:
    """The sentinel-filled buffers of layers on several devices."""

    def __init__(self, by_device: dict[torch.device, SentinelBuffers]):
        self._by_device = by_device

    def reset(self, rows: int) -> None:
        """Reset all before a step of `rows` rows."""
        for one in self._by_device.values():
            one.reset(rows)

    def on(self, device: torch.device) -> SentinelBuffers:
        """Those of one device's layers."""
        return self._by_device.get(device) or SentinelBuffers(0, 0, device)


_ROTARY: weakref.WeakKeyDictionary[nn.Module, dict[torch.device, Any]] = weakref.WeakKeyDictionary()


def rotary_on(rotary: Any, device: torch.device) -> Any:
    """A rotary embedding, or its copy on another device, without accelerate's hook."""
    tensor = next(chain(rotary.buffers(), rotary.parameters()), None) if isinstance(rotary, nn.Module) else None
    if tensor is None or tensor.device == device:
        return rotary
    copies = _ROTARY.setdefault(rotary, {})
    if device not in copies:
        made = copy.copy(rotary)
        made.__dict__ = {name: value for name, value in vars(rotary).items() if name not in HOOKED}
        made.__dict__["_buffers"] = {
            name: one if one is None else one.to(device) for name, one in rotary._buffers.items()
        }
        copies[device] = made
    return copies[device]


@dataclass(frozen=True, eq=False)
class ByModule:
    """A norm or head whose weights are offloaded, in the place of its fused form: its module is called."""

    module: nn.Module

    def __call__(self, x: Tensor, norm: Any = None) -> Tensor:
        """As FusedLinear.__call__ of a head."""
        return self.large_m(x if norm is None else norm.of_sum(x)[0])

    def large_m(self, x: Tensor) -> Tensor:
        """As FusedLinear.large_m."""
        return self.module(x)

    def of_sum(self, x: Tensor, added: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As FusedNorm.of_sum."""
        total = x if added is None else x + added
        return self.module(total), total
