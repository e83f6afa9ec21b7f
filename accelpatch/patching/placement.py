"""Where a model's parts are while it is patched: the interface, with its methods for a model on one device.

Subclasses in parallel/ (device_map.py, tensor_parallel.py) serve models that accelerate spread over devices, and
tensor-parallel ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.errors import PatchError

SHARDS = "_accelpatch_shards"  # attribute of a tensor-parallel model: its placement


class Placement:
    """The placement of a model that is on one device, with all its weights in memory."""

    #: pairs of names of parameters that are one weight; offloaded ones share no tensor that would show it
    ties: Mapping[str, str] = {}

    @property
    def device(self) -> torch.device | None:
        """The device of the model's inputs; None: the device of its first parameter."""
        return None

    def check(self, model: nn.Module) -> None:
        """Raise PatchError where the weights of a part cannot be read."""
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_meta:
                raise no_weights(name)

    def check_room(self, plan: Any) -> None:
        """Raise PatchError where what the plan builds does not fit a device."""

    def lines(self) -> list[str]:
        """Notes for plan and report about which part is where."""
        return []

    def agreed(self, reason: str | None) -> str | None:
        """The reason of this or another rank of a tensor-parallel job to reject a replacement; None without one."""
        return reason

    def agreed_all(self, reasons: Mapping[Any, str]) -> dict[Any, str]:
        """`agreed` for several, by layer index or path: those for which any rank has a reason."""
        return dict(reasons)

    def before_generate(self, ids: Tensor, config: Any) -> None:
        """Called before generate() decodes. ids[B, L]: the prompts. config: the generation's configuration."""

    def readable(self, modules: Iterable[nn.Module]) -> AbstractContextManager[Any]:
        """Context manager in which offloaded weights of these modules are in memory."""
        return nullcontext()

    def offload(self, pairs: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        """Offload replacements to where their offloaded originals are. pairs: (original, replacement)."""

    def free(self, pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
        """Free the host memory of offloaded weights whose originals will not come back, except weights that the
        replacement shares. pairs: (original, replacement)."""


def no_weights(name: str) -> PatchError:
    """The error for a tensor on the meta device."""
    return PatchError(
        f"{name} is on the meta device and no hook of accelerate can read it: the model has no weights there; load it "
        "with its weights (plan works without them)"
    )


def is_offloaded(module: nn.Module) -> bool:
    """Whether a hook of accelerate loads the module's weights for each call and unloads them after."""
    return any(getattr(hook, "offload", False) for hook in hooks_of(module))


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """The hooks of accelerate on a module, those in a sequence one by one."""
    hook = vars(module).get("_hf_hook")
    if hook is not None:
        yield from getattr(hook, "hooks", None) or (hook,)


def device_of(model: nn.Module) -> torch.device:
    """The device of the first of a model's tensors that is in memory."""
    devices = (tensor.device for tensor in chain(model.parameters(), model.buffers()) if not tensor.is_meta)
    return next(devices, torch.device("cpu"))


WHOLE = Placement()
