"""Runs a function on every transformers model at its first forward or generate, within a context."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import GenerationMixin, PreTrainedModel

from accelpatch.errors import FOREIGN, AccelpatchError
from accelpatch.modules.replacement import OWN_HOOK


class _Meeting:
    """Calls `act` once for each model, before any of its parts are used on their own."""

    def __init__(self, act: Callable[[nn.Module], None], on_left: Callable[[nn.Module, str], None] | None) -> None:
        self.act, self.on_left = act, on_left
        self.seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.lock = threading.RLock()

    def meet(self, model: nn.Module) -> None:
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
            return
        with self.lock:  # other threads wait until the model is ready
            if model not in self.seen:
                self.seen.update(part for part in model.modules() if isinstance(part, PreTrainedModel))
                self._act(model)

    def _act(self, model: nn.Module) -> None:
        try:
            self.act(model)
        except (AccelpatchError, Warning, *FOREIGN) as error:
            if self.on_left is None:
                raise
            self.on_left(model, f"left as it is: {type(error).__name__}: {error}")


@contextmanager
def on_first_use(
    act: Callable[[nn.Module], None], on_left: Callable[[nn.Module, str], None] | None = None
) -> Iterator[None]:
    """Context manager: `act(model)` runs once for each outermost PreTrainedModel, before its first forward or generate.

    Calls of the model inside `act` run normally. on_left: called with the model and the reason in place of an exception
    that `act` raises. transformers is restored at the end.
    """
    meet, generate = _Meeting(act, on_left).meet, GenerationMixin.generate

    def before_forward(module: nn.Module, args: Any) -> None:
        if isinstance(module, PreTrainedModel):
            meet(module)

    setattr(before_forward, OWN_HOOK, True)

    @functools.wraps(generate)
    def meeting_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        meet(self)
        return generate(self, *args, **kwargs)

    handle = register_module_forward_pre_hook(before_forward)
    GenerationMixin.generate = meeting_generate
    try:
        yield
    finally:
        GenerationMixin.generate = generate
        handle.remove()
