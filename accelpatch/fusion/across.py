"""What ranks of a tensor-parallel job do with the outputs of a module, read off its hook (parallel/reductions.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

NOT_NATIVE = "the native step does not add up between the ranks of a tensor-parallel job"


def across_of(module: Any) -> Callable[..., Tensor] | None:
    """What makes a rank's part of a module's output that of all ranks; None for a module that no job has split.

    Of a module whose parts are added up it is called as across(part), or across(part, residual) to add that too.
    """
    return next((hook.across for hook in module._forward_hooks.values() if hasattr(hook, "across")), None)
