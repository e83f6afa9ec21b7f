"""Carries changes made to a patched model over to the originals when it is unpatched.

Parameters, buffers, children and attributes that were added to, removed from or changed on a replacement since the
patch are written into its original: adapters, wrappers, a new head, training mode, gradient checkpointing.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from accelpatch.errors import PatchError
from accelpatch.patching.change import give_back
from accelpatch.patching.placement import hooks_of, is_offloaded
from accelpatch.patching.stored import STORED, move_

TABLES = ("_parameters", "_buffers", "_modules")
HOOKED = ("forward", "_old_forward", "_hf_hook")  # attributes that accelerate's hooks set on an instance
UNSAVED = "_non_persistent_buffers_set"
# Attributes bound to the replacement instance, which the original must not get.
INSTANCE_BOUND = (*HOOKED, "_compiled_call_impl")
LISTED = 3  # the most names in a message


@dataclass(frozen=True, eq=False)
class Swap:
    """An original, its replacement, and the state that both shared right after the swap.

    common: entries with the same value in both, as table name ("" for plain attributes) -> name -> value; all of the
    replacement's children count as such. own: all other names of the replacement. kind: the replacement's class.
    """

    old: nn.Module
    new: nn.Module
    common: Mapping[str, dict[str, Any]]
    own: Mapping[str, frozenset[str]]
    kind: type[nn.Module]

    @classmethod
    def of(cls, old: nn.Module, new: nn.Module) -> Swap:
        """Record the state of both modules; call it after all swaps are made."""
        pairs = {"": (vars(old), vars(new))} | {table: (vars(old)[table], vars(new)[table]) for table in TABLES}
        common = {
            table: {name: one for name, one in now.items() if name in was and was[name] is one}
            for table, (was, now) in pairs.items()
        } | {"_modules": dict(new._modules)}
        own = {table: frozenset(now.keys() - common[table].keys()) for table, (_, now) in pairs.items()}
        return cls(old, new, common, own, type(new))

    def leave_out(self, name: str) -> None:
        """Do not carry over the attribute `name`, which the patch itself has set on the replacement after the swap."""
        if name in self.common[""]:
            self.common[""][name] = vars(self.new)[name]


def why_not(model: nn.Module, swaps: Sequence[Swap], hooks: Sequence[Any], forced: bool) -> str | None:
    """Why the originals cannot be put back into `model` now; None where they can.

    hooks: accelerate's hooks from before the patch; newer ones are a reason. forced: ignore a `forward` that the user
    set on a replacement.
    """
    newer = [
        path for path, module in model.named_modules()
        if any(not hasattr(hook, "of_accelpatch") for hook in hooks_of(module))
        and not any(vars(module)["_hf_hook"] is hook for hook in hooks)
    ]  # fmt: skip
    if newer:
        return (
            f"hooks of accelerate came after the patch ({listed(newer)}) and hold weights of the replacements: call "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True) first"
        )
    paths = {id(module): path for path, module in model.named_modules()}
    here = [(paths[id(swap.new)], swap) for swap in swaps if id(swap.new) in paths]
    if other := [path for path, swap in here if type(swap.new) is not swap.kind]:
        return (
            f"the class of a replacement was changed ({listed(other)}), by a parametrization perhaps: remove it first"
        )
    own = [path for path, swap in here if _has_own_forward(swap)]
    if own and not forced:
        return (
            f"a forward was put on the instance after the patch ({listed(own)}), and it belongs to the replacement: "
            "delete it first, and put it on the original after"
        )
    offloaded = {path: getattr(swap.new, "weight_owner", swap.new) for path, swap in here if is_offloaded(swap.old)}
    if lost := [path for path, one in offloaded.items() if vars(one).get("written") or vars(one).get("rewritten")]:
        return f"offloaded weights were written while they were packed ({listed(lost)}), and the map takes none back"
    return None


def _has_own_forward(swap: Swap) -> bool:
    forward = vars(swap.new).get("forward")
    left_behind = getattr(forward, "__func__", None) is type(swap.new).forward  # by accelerate's remove_hook
    return forward is not None and not left_behind and "_hf_hook" not in vars(swap.new)


def listed(paths: Sequence[str]) -> str:
    """The first LISTED paths and the number of the others, for a message."""
    more = f" and {len(paths) - LISTED} more" if len(paths) > LISTED else ""
    return ", ".join(path or "the model itself" for path in paths[:LISTED]) + more


def _carry(swap: Swap, forced: bool) -> bool:
    """Write one replacement's changes into its original; returns whether its packed weight was written."""
    old, new = swap.old, swap.new
    if forced and _has_own_forward(swap):
        old.__dict__["forward"] = vars(new)["forward"]
    for hook in (*new._load_state_dict_pre_hooks.values(), *new._load_state_dict_post_hooks.values()):
        bound: Any = hook
        if getattr(bound, "with_module", False) and bound.module() is new:
            bound.module = weakref.ref(old)
    give_back(old, new)
    restored = getattr(new, "holds", ())  # the parameters that give_back has just restored
    for table in TABLES:
        _copy_changes(vars(old)[table], vars(new)[table], swap.common[table], {*swap.own[table], *restored})
    vars(old)[UNSAVED].update(name for name in vars(new)[UNSAVED] if name in old._buffers)
    ours = {name for name in vars(new) if name.startswith("_accelpatch_")}
    fixed = {*swap.own[""], *ours, *TABLES, UNSAVED, *INSTANCE_BOUND, *getattr(new, "transient", ())}
    offloaded = is_offloaded(old)
    if "_hf_hook" in vars(old) and "_hf_hook" not in vars(new):
        if offloaded:
            vars(old)["_hf_hook"].detach_hook(old)
        for name in HOOKED:
            old.__dict__.pop(name, None)
    _copy_changes(vars(old), vars(new), swap.common[""], fixed)
    if offloaded:  # its weights stay where accelerate keeps them
        return False
    if STORED in vars(new):
        move_(old, next(new.buffers()).device)
        return False
    if hasattr(new, "hand_back"):
        return bool(cast(Any, new).hand_back(old))
    tensors = itertools.chain(new._parameters.values(), new._buffers.values())
    first = next((tensor for tensor in tensors if tensor is not None), None)
    if first is not None:
        device = first.device
        old._apply(lambda tensor: tensor.to(device), recurse=False)
    return False


def _copy_changes(old: dict[str, Any], new: Mapping[str, Any], common: Mapping[str, Any], fixed: set[str]) -> None:
    """Write the entries of `new` that differ from `common` into `old`, and remove missing ones; not `fixed` names."""
    for name, value in new.items():
        if name not in fixed and (name not in common or common[name] is not value):
            old[name] = value
    for name in common.keys() - new.keys() - fixed:
        old.pop(name, None)


def freeze(swaps: Iterable[Swap]) -> None:
    """Set requires_grad to False on originals of packed weights: whoever froze the model (PEFT) could not see them."""
    for swap in swaps:
        for name, parameter in swap.old._parameters.items():
            if parameter is not None and name not in swap.new._parameters:
                parameter.requires_grad_(False)


def put_back(model: nn.Module, swaps: Iterable[Swap]) -> None:
    """Replace every replacement in the module tree by its original, wherever it is now; other modules stay."""
    back = {id(swap.new): swap.old for swap in swaps}
    seen, left = {id(model)}, [model]
    while left:
        module = left.pop()
        for name, child in module._modules.items():
            if child is None:
                continue
            module._modules[name] = child = back.get(id(child), child)
            if id(child) not in seen:
                seen.add(id(child))
                left.append(child)


def refuse_or_carry(model: nn.Module, swaps: Sequence[Swap], hooks: Sequence[Any], forced: bool) -> list[nn.Module]:
    """Write each replacement's changes into its original; returns the replacements whose packed weights were written.

    A replacement with packed tensors does part of this in its `hand_back(original)`, which returns whether its weight
    was written since the patch. Such weights come back with the values that the replacement computed with. Raises
    PatchError where `why_not` has a reason.
    """
    if reason := why_not(model, swaps, hooks, forced):
        raise PatchError(f"the model stays patched: {reason}")
    return [swap.new for swap in swaps if _carry(swap, forced)]
