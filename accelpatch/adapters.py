"""Adapters of PEFT on a patched model: read from folders, and merged into its float originals or rounded weights."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelpatch.checkpoints.replaced_folder import replaced_folder
from accelpatch.checkpoints.target import check_empty, check_folder
from accelpatch.errors import FOREIGN, ArgumentError, LoadError, PatchError
from accelpatch.from_files import load
from accelpatch.in_memory import AnyRecipe, patch, save, unpatch
from accelpatch.models.precheck import check_adapter
from accelpatch.patching import apply
from accelpatch.patching.match import unwrapped
from accelpatch.patching.patchable import check_module
from accelpatch.progress import Progress

NO_ORIGINALS = ("none", apply.LOADED)


def merge(
    model: nn.Module, *, rounded: bool = False, adapters: Sequence[str] | None = None, **options: Any
) -> nn.Module:
    """Merge a PeftModel's adapters into its model, patched or not, and return that model, patched as it was.

    The float originals take the adapters and are patched again: each weight is rounded once, by the same recipe.
    rounded: add to the rounded weights and round again, where the originals are gone: the error of a weight is then
    that of two roundings, and an adapter that is small beside a step of the format is partly lost. adapters: the names
    of those to merge, at the scales that they have; default: the active ones. The others are dropped. options: of
    `patch`, for the second patch. Raises PatchError, before anything is changed, where there is no adapter, where an
    adapter holds NaN or infinity, and where the originals are gone and `rounded` is False. Where the second patch
    fails, the model is left merged, in its floats.
    """
    check_module(model)
    inner = unwrapped(model)
    if inner is model:
        raise PatchError(
            "the model has no adapters: give the PeftModel that get_peft_model or from_pretrained returned"
        )
    _check_finite(model)
    names = None if adapters is None else _known(model, adapters)
    handle = vars(inner).get(apply.HANDLE)
    if handle is None or rounded:
        return _merged(model, names)
    recipe, keep = handle.plan.recipe, handle.keep_original
    if keep in NO_ORIGINALS and any(entry.replacer and entry.replacer.rounds for entry in handle.plan.replaced):
        raise PatchError(
            "the float originals, into which the adapter would be merged, are gone: load the float model, add the "
            "adapter, merge and patch it, or merge into the rounded weights: accelpatch.merge(model, rounded=True)"
        )
    unpatch(model)
    merged = _merged(model, names)
    settings: dict[str, Any] = {"keep_original": "cpu" if keep == apply.LOADED else keep} | options
    return patch(merged, recipe, **settings)


def attach(model: nn.Module, folders: Sequence[str | Path]) -> tuple[Any, list[str]]:
    """Put the adapters in these folders on a model, patched or not: the PeftModel, and each adapter's name.

    The first one is active; `set_adapter(name)` of the PeftModel takes another. A name is that of the folder. Raises
    LoadError for a folder without an adapter in safetensors, and for an adapter of another model; ArgumentError where
    PEFT is not installed.
    """
    try:
        from peft import PeftModel
    except ImportError:
        raise ArgumentError("adapters need peft; install it with: pip install 'accelpatch[peft]'") from None
    named: dict[str, Path] = {}
    for folder in map(Path, folders):
        check_adapter(folder)
        stem = folder.resolve().name.replace(".", "_") or "adapter"
        named[stem if stem not in named else f"{stem}-{len(named) + 1}"] = folder
    made: Any = None
    for name, folder in named.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                if made is None:
                    made = PeftModel.from_pretrained(model, str(folder), adapter_name=name)
                else:
                    made.load_adapter(str(folder), adapter_name=name)
            except FOREIGN as error:
                raise LoadError(f"{folder}: the adapter does not fit this model: {error!s:.300}") from error
        if missing := [str(one.message) for one in said if "missing adapter keys" in str(one.message)]:
            raise LoadError(f"{folder}: the adapter does not fit this model: {missing[0]:.200}")
    return made.eval(), list(named)


def _merged(model: Any, names: list[str] | None) -> nn.Module:
    """PEFT's own merge, by which each weight becomes w + scale * B A; the model without PEFT's wrapper."""
    made = model.merge_and_unload(adapter_names=names)
    assert isinstance(made, nn.Module)
    return made


def _check_finite(model: Any) -> None:
    """Raise PatchError, naming the parameter, for an adapter with NaN or infinity."""
    prefix = getattr(model.base_model, "prefix", "lora_")
    for name, parameter in model.named_parameters():
        if prefix in name and not bool(torch.isfinite(parameter).all()):
            raise PatchError(
                f"the adapter's {name} holds NaN or infinity: merge an earlier checkpoint; nothing was changed"
            )


def _known(model: Any, names: Sequence[str]) -> list[str]:
    unknown = [name for name in names if name not in model.peft_config]
    if unknown:
        raise PatchError(f"no adapter is called {unknown[0]!r}; there are {', '.join(model.peft_config)}")
    return list(names)


def merge_files(
    name: str, folders: Sequence[str | Path], out: str | Path, recipe: AnyRecipe | None = None, *, dtype: Any = "auto",
    device: Any = "cpu", progress: Progress | bool | None = None,
) -> None:  # fmt: skip
    """Merge the adapters in `folders` into the float model `name`, and save it with its tokenizer, all or nothing.

    recipe: patch the merged model and save it so; None: save it in its floats. Several adapters are added up. Raises
    LoadError, SaveError, and what `attach`, `merge` and `patch` raise.
    """
    check_empty(Path(out))
    check_folder(Path(out))
    loaded = load(name, dtype=dtype, device=device, progress=progress)
    model, names = attach(loaded.model, folders)
    merged: Any = merge(model, adapters=names)
    more = [] if loaded.tokenizer is None else [loaded.tokenizer.save_pretrained]
    if recipe is not None:
        patch(merged, recipe, keep_original="none", tokenizer=loaded.tokenizer, progress=progress)
        save(merged, out, more=more)
        return
    with replaced_folder(Path(out), lambda file: False) as made:
        for write in (merged.save_pretrained, *more):
            write(made)
