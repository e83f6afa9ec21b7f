"""Acting on a transformers model at its first forward or generate, whoever made it, for the length of a context."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from accelpatch.modules.replacement import OWN_HOOK


@contextmanager
def on_first_use(act: Callable[[nn.Module], None]) -> Iterator[None]:
    """Within it, `act(model)` runs once for each outermost PreTrainedModel, before its first forward or generate.

    Restores transformers at its end. Where `act` calls the model itself, that call goes through.
    """
    from transformers import GenerationMixin, PreTrainedModel

    seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
    generate = GenerationMixin.generate

    def meet(model: nn.Module) -> None:
        if model not in seen:
            # its parts first: a model inside it (model.model) is not met on its own while the outer one runs
            seen.update(part for part in model.modules() if isinstance(part, PreTrainedModel))
            act(model)

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
