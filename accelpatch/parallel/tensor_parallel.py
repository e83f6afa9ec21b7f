"""Tensor parallel: `patch(model, recipe, parallel="tp")` in a job of several processes, each with the same model.

Each rank keeps its part of every weight and patches it as it would a whole model. The ranks check that their models and
arguments are equal before anything is changed, and agree on what is replaced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.errors import ArgumentError, PatchError
from accelpatch.parallel.cuts import Cuts, spanned
from accelpatch.parallel.group import Group, joined
from accelpatch.parallel.reductions import AddUp, Begin, Gather, LookUp
from accelpatch.parallel.room import why_no_room
from accelpatch.parallel.tp_plan import cutter_of
from accelpatch.patching.placement import SHARDS, Placement, hooks_of
from accelpatch.report import human

TP = "tp"


class Shards(Placement):
    """The placement of a model that is split among the ranks of a job.

    parts: what this rank has, for plan and report. group: None for a plan without a job.
    """

    def __init__(self, group: Group | None, cutter: Cuts, whole: int, part: int):
        self.group, self.cutter = group, cutter
        self.parts, self.described = (whole, part), cutter.described()

    def __deepcopy__(self, memo: Any) -> Shards:
        return self

    def agreed(self, reason: str | None) -> str | None:
        return reason if self.group is None else self.group.agreed(reason)

    def agreed_all(self, reasons: Mapping[Any, str]) -> dict[Any, str]:
        every = [dict(reasons)] if self.group is None else self.group.exchange(dict(reasons))
        found: dict[Any, str] = {}
        for one in every:
            found = {**one, **found}
        return found

    def lines(self) -> list[str]:
        cutter, (whole, part) = self.cutter, self.parts
        by = "" if self.group is None else f" ({self.group.by})"
        parts = [*self.described, f"rows {spanned(cutter.logits[cutter.rank])} of the vocabulary"]
        return [
            f"tensor parallel: rank {cutter.rank} of {cutter.world}{by} has {human(part)} of {human(whole)}",
            f"its part of each layer: {', '.join(parts)}; all-reduce after attention and after the MLP",
        ]

    def before_generate(self, ids: Tensor, config: Any) -> None:
        """Before generate() decodes: all ranks must have the same prompt, and get rank 0's random state.

        Raises PatchError where prompts or lengths differ.
        """
        if self.group is None:
            return
        digest = hashlib.sha256(ids.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]
        sampled = bool(getattr(config, "do_sample", False))
        asked: dict[str, Any] = {"the prompt's shape": tuple(ids.shape), "the prompt (by its digest)": digest}
        asked |= {"max_length": getattr(config, "max_length", None), "do_sample": sampled}
        self.group.check_alike(asked)
        if sampled:
            states = self.group.exchange(_random_state(ids.device) if self.group.rank == 0 else None)[0]
            torch.set_rng_state(states[0])
            if states[1] is not None:
                torch.cuda.set_rng_state(states[1], ids.device)


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def shards_of(model: nn.Module) -> Shards | None:
    """The Shards of a split model; None for any other."""
    return vars(model).get(SHARDS)


@contextmanager
def sharded(model: Any, parallel: str | None, recipe: Any, facts: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: the model is split among the ranks; after an exception it is whole again, and the other ranks
    raise too. parallel: None for a model that is not split. facts: of the request, which must be equal on all ranks.

    Raises ArgumentError for another `parallel`, and PatchError where there is no job, the ranks differ, or a dimension
    cannot be split among so many.
    """
    if parallel is None:
        yield
        return
    if parallel != TP:
        raise ArgumentError(f"parallel is {parallel!r}; it is None, or 'tp' for tensor parallel")
    check_whole(model)
    group = joined()
    with group.together():
        group.check_alike({"the recipe's name": recipe.name, **facts, **_facts_of(model)})
        shards = split(model, recipe, group)
        try:
            yield
        except BaseException:
            shards.cutter.undo.back()
            raise
        shards.cutter.undo.steps.clear()  # they reference the whole weights


def check_whole(model: Any) -> None:
    """Raise PatchError for a model that cannot be split as it is."""
    if SHARDS in vars(model):
        raise PatchError("the model is split among the ranks already: load it again to split it in another way")
    if any(True for module in model.modules() for _ in hooks_of(module)):
        raise PatchError("accelerate has spread the model over devices: load it without device_map for parallel='tp'")
    if "peft_config" in vars(model):
        raise PatchError("the model has adapters: merge them before (accelpatch.merge, or merge_and_unload of PEFT)")


def split(model: Any, recipe: Any, group: Group | None, rank: int = 0, world: int = 1) -> Shards:
    """Split a model in place, and move its part to this rank's GPU where the job has GPUs.

    group: None for a plan alone, as `rank` of `world`.
    """
    cutter = cutter_of(model, *((rank, world) if group is None else (group.rank, group.world)), group_sizes(recipe))
    whole = _bytes(model)
    try:
        cutter.cut()
        if group is not None:
            _connect(model, cutter, group)
        shards = Shards(group, cutter, whole, _bytes(model))
        cutter.undo.set(vars(model), SHARDS, shards)
        if group is not None and group.device is not None:
            if (why := group.agreed(why_no_room(model, group.device))) is not None:
                raise PatchError(f"the model cannot be split among {group.world} ranks: {why}")
            model.to(group.device)
    except BaseException:
        cutter.undo.back()
        raise
    return shards


def _connect(model: Any, cutter: Cuts, group: Group) -> None:
    """Register the hooks that all-reduce and gather what the ranks compute."""
    handles = [end.register_forward_hook(AddUp(group, model)) for end in cutter.ends()]
    lookup = LookUp(group, model, cutter.known[group.rank])
    handles.append(cutter.embedding.register_forward_pre_hook(Begin(lookup)))
    handles.append(cutter.embedding.register_forward_hook(lookup))
    sizes = [len(part) for part in cutter.logits]
    handles.append(cutter.head.register_forward_hook(Gather(group, model, sizes)))
    cutter.undo.steps += [handle.remove for handle in handles]


def group_sizes(recipe: Any) -> list[int]:
    """The sizes of groups of columns that a recipe's rules name, the largest first."""
    given = [rule.options.get("group_size") for rule in recipe.rules]
    named = {size for one in given for size in (one if isinstance(one, list) else [one]) if isinstance(size, int)}
    return sorted(named, reverse=True)


def _facts_of(model: Any) -> dict[str, Any]:
    shapes = [(name, tuple(one.shape), str(one.dtype)) for name, one in model.named_parameters()]
    return {
        "the model's class": type(model).__name__,
        **{f"the configuration's {name}": one for name, one in model.config.to_dict().items()},
        "the weights' shapes and dtypes (by their digest)": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
    }


def _bytes(model: nn.Module) -> int:
    return sum(one.numel() * one.element_size() for one in model.parameters())
