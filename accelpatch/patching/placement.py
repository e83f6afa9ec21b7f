"""Where a model's parts lie while it is patched; the one here is of a model that lies whole in memory.

Models that accelerate spread over devices have one of their own (parallel/device_map.py), which is handed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.errors import PatchError

SHARDS = "_accelpatch_shards"  # attribute of a model that tensor parallel split: its placement


class Placement:
    """Of a model on one device."""

    #: pairs of names of parameters that are one weight, which offloaded parts do not show by sharing a tensor
    ties: Mapping[str, str] = {}

    @property
    def device(self) -> torch.device | None:
        """The device that the model's inputs go to; None: that of its first parameter."""
        return None

    def check(self, model: nn.Module) -> None:
        """Raise PatchError where the weights of a part cannot be read."""
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_meta:
                raise no_weights(name)

    def check_room(self, plan: Any) -> None:
        """Raise PatchError where what the plan builds does not fit a device."""

    def lines(self) -> list[str]:
        """What lies where, for plan and report."""
        return []

    def agreed(self, reason: str | None) -> str | None:
        """Why a replacement may not stay, here or on another rank of a tensor-parallel job; None where it may."""
        return reason

    def agreed_all(self, reasons: Mapping[Any, str]) -> dict[Any, str]:
        """The same of several, by their place or path: all that some rank has a reason for."""
        return dict(reasons)

    def begin(self, ids: Tensor, config: Any) -> None:
        """Called before generate() decodes after ids[B, L], with its configuration."""

    def readable(self, modules: Iterable[nn.Module]) -> AbstractContextManager[Any]:
        """Context manager in which offloaded weights of these modules are in memory."""
        return nullcontext()

    def offload(self, pairs: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        """Offload replacements, as (original, replacement), in the place of their originals, which are so already."""

    def free(self, pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
        """Free offloaded weights in the host's memory of originals that will not come back, as (original,
        replacement): those that the replacement does not share."""


def no_weights(name: str) -> PatchError:
    """The error for a tensor that is nowhere."""
    return PatchError(
        f"{name} is on the meta device and no hook of accelerate can read it: the model has no weights there; load it "
        "with its weights (plan works without them)"
    )


def is_offloaded(module: nn.Module) -> bool:
    """Whether a hook of accelerate brings the module's weights for each call alone."""
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
