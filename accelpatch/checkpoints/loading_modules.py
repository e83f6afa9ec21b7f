"""Modules of a model that loads: they lose float weights, get the parts of quantised ones, and are replaced."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.checkpoints.saved import Saved
from accelpatch.errors import KernelError, LibraryError, LoadError, PatchError
from accelpatch.patching.apply import Built, build
from accelpatch.patching.entry import Entry
from accelpatch.patching.plan import Plan
from accelpatch.quant.weight import PARTS


def as_saved(plan: Plan, saved: Saved) -> Plan:
    """The plan with exactly those sites quantised that the checkpoint has so. Raises LoadError where it cannot."""
    known = {entry.site.path: entry for entry in plan.entries}
    for path, name in saved.sites.items():
        entry = known.get(path)
        if entry is None:
            hint = "is it another's, or of another class than config.json says?"
            raise LoadError(
                f"{where(path, saved)}the checkpoint has a quantised {path}, which is not in this model: {hint}"
            )
        if entry.replacer is None or entry.replacer.name != name:
            why = entry.reason or (entry.replacer and f"the recipe makes it {entry.replacer.name}")
            why = "output heads of others are read in float alone" if entry.site.role == "head" else why
            raise LoadError(f"{where(path, saved)}{path} was saved as {name}, which it cannot be here: {why}")
    entries = tuple(
        entry.kept("the checkpoint holds it in float")
        if entry.replacer is not None and entry.replacer.rounds and entry.site.path not in saved.sites
        else entry
        for entry in plan.entries
    )
    return Plan(plan.model, plan.recipe, plan.device, entries, plan.max_length, plan.cache_bytes)


def where(path: str, saved: Saved) -> str:
    """The file that has the tensors of a site, or the only one, for the beginning of a message; "" where none has."""
    files = [stored.file for name, stored in saved.tensors.items() if name.startswith(f"{path}.")]
    every = {stored.file for stored in saved.tensors.values()}
    return next((f"{file}: " for file in files or (every if len(every) == 1 else ())), "")


def quantised(plan: Plan) -> list[Entry]:
    """The entries of a plan whose weights are rounded."""
    return [entry for entry in plan.replaced if entry.replacer is not None and entry.replacer.rounds]


def parts_of(entry: Entry, saved: Saved, parts: Sequence[str] = ()) -> list[str]:
    """The names of a quantised site's tensors. Raises LoadError where one is missing. parts: those of another layout,
    whose reader says what is missing."""
    assert entry.replacer is not None
    if parts and entry.replacer.whole and f"{entry.site.path}.{parts[0]}" not in saved.tensors:
        return [name for name in saved.tensors if name.startswith(f"{entry.site.path}.")]  # of layers of their own
    if parts:
        return [name for part in parts if (name := f"{entry.site.path}.{part}") in saved.tensors]
    if (whole := entry.replacer.parts(entry.site, saved.tensors)) is not None:
        if not whole:
            found = where(entry.site.path, saved)
            raise LoadError(f"{found}the checkpoint lacks all tensors of {entry.site.path}: fetch it again")
        return whole
    names = [f"{entry.site.path}.{part}" for part in PARTS]
    if lacking := [name for name in names[:2] if name not in saved.tensors]:
        found = where(entry.site.path, saved)
        raise LoadError(f"{found}the checkpoint lacks {lacking[0]}, a part of a quantised weight: fetch it again")
    return [name for name in names if name in saved.tensors]


def check_complete(model: Any, saved: Saved, parts: Collection[str]) -> None:
    """Raise LoadError unless the checkpoint has just the tensors that the model awaits: transformers only warns.

    parts: the names of those of quantised weights, which the model does not await any more.
    """
    awaited = model.state_dict()
    for name, stored in saved.tensors.items():
        if name in parts:
            continue
        if name not in awaited:
            raise LoadError(f"{stored.file}: {name} is not in the model that config.json describes: fetch both again")
        if awaited[name].is_floating_point() and not stored.dtype.startswith(("F", "BF")):
            raise LoadError(f"{stored.file}: {name} is {stored.dtype}, and a float belongs here: fetch it again")
        if stored.shape != tuple(awaited[name].shape):
            shapes = f"{list(stored.shape)}, and {list(awaited[name].shape)} belongs here"
            raise LoadError(f"{stored.file}: {name} is {shapes}: fetch it and config.json again")
    ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
    tied = {one for pair in ties.items() if saved.tensors.keys() & set(pair) for one in pair}
    if lacking := sorted(awaited.keys() - saved.tensors.keys() - tied):
        files = {str(stored.file) for stored in saved.tensors.values()}
        only = f"{files.pop()}: " if len(files) == 1 else ""
        raise LoadError(f"{only}the checkpoint lacks {lacking[0]}: fetch it again")


def from_parts(
    entry: Entry, device: torch.device, saved: Saved, take: Callable[[str], Tensor | None], layout: Any = None
) -> Built:
    """The replacement of a site, whose modules are without a weight, from a checkpoint's tensors. layout: the parts and
    the reader of one that others wrote, and its arguments."""
    site = entry.site
    assert entry.replacer is not None
    if entry.replacer.whole:
        return _whole(entry, saved, take, layout)
    names = PARTS if layout is None else layout[0].parts
    tensors = {part: take(f"{site.path}.{part}") for part in names}
    for member in (site, *site.tied):
        _without_stand_in(member.original)
        empty = torch.empty(0, dtype=getattr(torch, member.dtype), device=device)
        member.original._parameters["weight"] = nn.Parameter(empty)
    try:
        if layout is None:
            assert entry.choice is not None
            return build(entry, entry.replacer.weight(entry.choice, tensors))
        return build(entry, layout[0].weight(tensors, layout[1], site.n, site.k))
    except KernelError as error:
        raise LoadError(f"{_file_of(site.path, names, saved, error)}: {site.path}.{error}") from error
    except PatchError as error:
        if isinstance(error.__cause__, LibraryError):
            raise error.__cause__ from None  # no fault of the checkpoint's
        why = str(error.__cause__ or error)
        file = _file_of(site.path, names, saved, why)
        why = f".{why}" if why.startswith(PARTS) else f" is damaged: {why}"
        raise LoadError(f"{file}: {site.path}{why}") from error


def _file_of(path: str, names: Sequence[str], saved: Saved, why: object) -> Path:
    """The file of the tensor that a message begins with, or else of the first that a site has."""
    present = [name for name in names if f"{path}.{name}" in saved.tensors]
    named = sorted((name for name in present if str(why).startswith(name)), key=len)
    return saved.tensors[f"{path}.{[*named[-1:], *present][0]}"].file


def _whole(entry: Entry, saved: Saved, take: Callable[[str], Tensor | None], layout: Any) -> Built:
    """The replacement of a module with all that is in it."""
    path, names = entry.site.path, parts_of(entry, saved, () if layout is None else layout[0].parts)
    tensors = {name.removeprefix(f"{path}."): take(name) for name in names}
    try:
        if layout is None:
            return build(entry, tensors)
        assert entry.choice is not None
        sizes = {**layout[1], **entry.choice.detail}
        if (experts := layout[0].experts) is not None:
            return build(entry, experts(tensors, sizes))
        return build(entry, layout[0].weight(tensors, sizes, entry.site.n, entry.site.k))
    except (KernelError, PatchError) as error:
        why = error.__cause__ or error
        raise LoadError(f"{_file_of(path, list(tensors), saved, why)}: {path}.{why}") from error


def stand_in(model: nn.Module, entry: Entry) -> None:
    """Take out of a model that loads what transformers must not await: a weight, or a module with all that is in it."""
    assert entry.replacer is not None
    if not entry.replacer.whole:
        for member in (entry.site, *entry.site.tied):
            without_weight(member.original)
        return
    for place in entry.site.own_paths:
        parent, _, name = place.rpartition(".")
        model.get_submodule(parent)._modules[name] = nn.Module()


def whole_names(plan: Plan) -> list[str]:
    """Patterns of the names of tensors in modules that are replaced with all that is in them."""
    whole = [entry.site for entry in quantised(plan) if entry.replacer is not None and entry.replacer.whole]
    return [rf"^{re.escape(place)}\." for site in whole for place in site.own_paths]


def without_weight(module: nn.Module) -> None:
    """Take the weight from a module, and leave rows without columns: transformers initialises all that it knows."""
    weight = module._parameters.pop("weight")
    module.register_buffer("weight", torch.empty(0 if weight is None else len(weight), 0), persistent=False)


def _without_stand_in(module: nn.Module) -> None:
    if "weight" in module._buffers:
        del module.weight
        module._non_persistent_buffers_set.discard("weight")


def move_in(model: nn.Module, made: Built) -> None:
    """Put a replacement into the model at each of its places, with what was loaded into the original since."""
    for old, new, places in made.modules:
        _without_stand_in(old)
        new._parameters.update({name: one for name, one in old._parameters.items() if name != "weight"})
        new._buffers.update(old._buffers)
        for place in places:
            parent, _, name = place.rpartition(".")
            model.get_submodule(parent)._modules[name] = new


def tie(model: Any) -> None:
    """Tie the weights of a model on the meta device; transformers' own way to do so is off while it loads."""
    for target, source in dict(getattr(model, "all_tied_weights_keys", None) or {}).items():
        path, _, own = target.rpartition(".")
        model.get_submodule(path)._parameters[own] = model.get_parameter(source)


def parent_of(name: str) -> str:
    """The module's part of a tensor's dotted name."""
    return name.rpartition(".")[0]
