"""The public functions: plan, patch, unpatch and the rest. They call the stages in order and hold no other logic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from accelpatch.adapters import attach, merge, merge_files
from accelpatch.checkpoints.export import export
from accelpatch.from_files import is_patched, load, quantize, register_checkpoints
from accelpatch.in_memory import (
    AnyRecipe,
    calibrate,
    check_tasks,
    choose_bits,
    evaluate,
    evaluate_tasks,
    patch,
    patched,
    plan,
    plan_from_config,
    save_statistics,
    unpatch,
)  # fmt: skip
from accelpatch.kernels.check.selftest import run as selftest
from accelpatch.models.load import random as random_model
from accelpatch.patching import apply
from accelpatch.replacers import replacer
from accelpatch.replacers.plugin import load_plugin
from accelpatch.runtime.code_watch import CODE
from accelpatch.runtime.generation.first_use import on_first_use
from accelpatch.runtime.generation.on_demand import unpatch_on_demand
from accelpatch.training.runs import finetune
from accelpatch.trials import Use, recipe_named, trial, tune_auto, tune_kernels, tuned_recipe
from accelpatch.tuning.attention import tune as tune_attention

__all__ = [
    "Use", "attach", "calibrate", "check_tasks", "choose_bits", "evaluate", "evaluate_tasks", "export", "finetune",
    "is_patched", "load", "load_plugin", "merge", "merge_files", "patch", "patch_on_first_use", "patched", "plan",
    "plan_from_config", "quantize", "random_model", "recipe_named", "register_checkpoints", "replacer",
    "save_statistics", "selftest", "trial", "tune_attention", "tune_auto", "tune_kernels", "tuned_recipe", "unpatch",
]  # fmt: skip


@contextmanager
def patch_on_first_use(
    recipe: AnyRecipe,
    *,
    on_patched: Callable[[nn.Module], None] | None = None,
    on_left: Callable[[nn.Module, str], None] | None = None,
    **options: Any,
) -> Iterator[None]:
    """Context manager: patches every transformers model at its first forward or generate; used by `accelpatch exec`.

    That is the first in eval mode that asks for no gradient. options: those of `patch`. on_patched: called with each
    model after it was patched. on_left: called with the reason and a model that cannot be patched, or not yet, or that
    is there at the end and was never called; without it what cannot be patched is an error. With it and
    keep_original="cpu", a model is also unpatched as soon as the program trains, saves, resizes or pickles it.
    """

    def whole(model: nn.Module) -> None:
        for part in [one for one in model.modules() if apply.HANDLE in vars(one) and one is not model]:
            with vars(part)[CODE].alone():
                unpatch(part)  # it was used, and patched, on its own

    def act(model: nn.Module) -> None:
        if apply.HANDLE not in vars(model):
            patch(model, recipe, **options)
            if on_left is not None and options.get("keep_original", "cpu") == "cpu":
                unpatch_on_demand(model, on_left)
            if on_patched is not None:
                on_patched(model)

    with on_first_use(act, on_left, whole):
        yield
