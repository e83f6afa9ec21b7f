"""Modules of a model that loads: they lose float weights, get the parts of quantised ones, and are replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelpatch.checkpoints.saved import PARTS, Saved
from accelpatch.errors import LoadError, PatchError
from accelpatch.patching.apply import Built, built
from accelpatch.patching.plan import Entry, Plan
from accelpatch.quant.weight import QuantizedWeight

READ = {
    "I8": torch.int8, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
}  # fmt: skip


def as_saved(plan: Plan, saved: Saved) -> Plan:
    """The plan with exactly those sites quantised that the checkpoint has so. Raises LoadError where it cannot."""
    known = {entry.site.path: entry for entry in plan.entries}
    for path, name in saved.sites.items():
        entry = known.get(path)
        if entry is None:
            raise LoadError(f"the checkpoint has a quantised {path}, which is not in this model: is it another's?")
        if entry.replacer is None or entry.replacer.name != name:
            why = entry.reason or (entry.replacer and f"the recipe makes it {entry.replacer.name}")
            raise LoadError(f"{path} was saved as {name}, which it cannot be here: {why}")
    entries = tuple(
        entry.kept("the checkpoint holds it in float")
        if entry.replacer is not None and entry.replacer.rounds and entry.site.path not in saved.sites
        else entry
        for entry in plan.entries
    )
    return Plan(plan.model, plan.recipe, plan.device, entries, plan.max_length, plan.cache_bytes)


def quantised(plan: Plan) -> list[Entry]:
    return [entry for entry in plan.replaced if entry.replacer is not None and entry.replacer.rounds]


def expect(entry: Entry, saved: Saved) -> None:
    """Give a module on the meta device the parameters that the checkpoint holds for it, in their own dtypes."""
    site = entry.site
    for member in (site, *site.tied):
        weight = member.original._parameters["weight"]
        assert weight is not None
        member.original.__dict__["_saved_like"] = (weight.dtype, weight.requires_grad)
        without_weight(member.original)
    for part in PARTS:
        stored = saved.tensors.get(f"{site.path}.{part}")
        if stored is None:
            if part == "offset":
                continue
            raise LoadError(f"the checkpoint lacks {site.path}.{part}, a part of a quantised weight: fetch it again")
        if stored.dtype not in READ:
            raise LoadError(f"{stored.file}: {site.path}.{part} is {stored.dtype}, which no quantised weight holds")
        empty = torch.empty(stored.shape, dtype=READ[stored.dtype], device="meta")
        site.original.register_parameter(part, nn.Parameter(empty, requires_grad=False))


def check_complete(model: Any, saved: Saved) -> None:
    """Raise LoadError unless the checkpoint has just the tensors that the model awaits: transformers only warns."""
    awaited = model.state_dict()
    for name, stored in saved.tensors.items():
        if name not in awaited:
            raise LoadError(f"{stored.file}: {name} is not in the model that config.json describes: fetch both again")
        if stored.shape != tuple(awaited[name].shape):
            shapes = f"{list(stored.shape)}, and {list(awaited[name].shape)} belongs here"
            raise LoadError(f"{stored.file}: {name} is {shapes}: fetch it and config.json again")
    ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
    tied = {one for pair in ties.items() if saved.tensors.keys() & set(pair) for one in pair}
    if lacking := sorted(awaited.keys() - saved.tensors.keys() - tied):
        raise LoadError(f"the checkpoint lacks {lacking[0]}: fetch it again")


def from_parts(entry: Entry, saved: Saved, device: torch.device) -> Built:
    """The replacement of a site from the parts that were loaded into its module, which loses them. Raises LoadError."""
    original = entry.site.original
    found = [original._parameters.pop(part, None) for part in PARTS]
    q, scale, offset = (None if one is None else one.data for one in found)
    assert q is not None
    assert scale is not None
    for member in (entry.site, *entry.site.tied):
        _without_stand_in(member.original)
        dtype, trainable = member.original.__dict__.pop("_saved_like")
        empty = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=trainable)
        member.original._parameters["weight"] = empty
    try:
        return built(entry, QuantizedWeight(q, scale, offset))
    except PatchError as error:
        file = saved.tensors[f"{entry.site.path}.q"].file
        raise LoadError(f"{file}: {entry.site.path} is damaged: {error.__cause__ or error}") from error


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
    return name.rpartition(".")[0]
