"""Applies and reverts a plan, all or nothing: first all replacements are built, then all are swapped in."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from accelpatch.errors import AccelpatchError, PatchError
from accelpatch.patching.carry import Swap, freeze, listed, put_back, refuse_or_carry
from accelpatch.patching.change import Absent, Change, SettingsChange
from accelpatch.patching.entry import Entry
from accelpatch.patching.host_copies import HostCopies
from accelpatch.patching.match import inner_name
from accelpatch.patching.placement import Placement
from accelpatch.patching.plan import Plan
from accelpatch.patching.stored import WithheldHook, build_from_stored, moved_to_host, unpacking_hooks
from accelpatch.report import Report

HANDLE = "accelpatch"  # the attribute of a patched model that holds its Handle
PATH = "_accelpatch_path"  # the attribute of a replacement that holds its dotted name, for messages
LOADED = "loaded"  # a value of Handle.keep_original: the model was loaded patched, and never had originals
CODE = "_accelpatch_code"  # the same attribute as in runtime/code_watch.py
ROLE = "_accelpatch_role"  # the attribute of a replacement that holds its site's role


@dataclass(eq=False)
class Built:
    """A finished replacement before the swap.

    modules: (original, replacement, dotted names of the original); first the site's own module, then those tied to it.
    weight_error: relative RMSE of the quantised weight, measured while loading, since the original weight is gone when
    the replacement is verified.
    """

    entry: Entry
    modules: list[tuple[nn.Module, nn.Module, tuple[str, ...]]]
    weight_error: float | None = None

    @property
    def new(self) -> nn.Module:
        """The replacement of the site's own module."""
        return self.modules[0][1]


@dataclass(eq=False)
class Handle:
    """The attribute `model.accelpatch` of a patched model: its plan and report, and the way to undo the patch.

    changes: every change made to the model, in order. swaps: each original with its replacement. hooks: accelerate's
    hooks on the model before the patch. trainable: parameters outside packed weights that required a gradient when the
    model was patched.
    """

    plan: Plan
    changes: list[Change]
    keep_original: str
    record: Report
    swaps: list[Swap] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    trainable: list[nn.Parameter] = field(default_factory=list)

    def report(self) -> Report:
        """The report of the patch."""
        return self.record

    def unpatch(self, *, forced: bool = False) -> None:
        """Put the original modules back: the same objects, bit for bit.

        What happened to the model since the patch is kept: moves, casts, adapters, wrappers, modules that the user
        added. Packed weights that were written since come back with the new values as the format rounded them, with a
        warning. forced: a `forward` that the user set on a replacement moves to its original instead of being an error.
        Raises PatchError if the originals were freed, while continuous batching runs, or for accelerate hooks, classes
        or forwards that were set on the replacements.
        """
        rounded = any(entry.replacer and entry.replacer.rounds for entry in self.plan.replaced)
        if self.keep_original == LOADED and rounded:
            raise PatchError(
                "the weights were quantised before or while the model was loaded: there never were originals here to "
                "put back. For an unpatched model load the float checkpoint without a recipe"
            )
        if self.keep_original == "none" and rounded:
            raise PatchError(
                "the originals were freed when the model was patched with keep_original='none'; load the model again, "
                "or patch with keep_original='cpu'"
            )
        model = self.changes[-1].owner
        _refuse_while_batching(model)
        rewritten = refuse_or_carry(model, self.swaps, self.hooks, forced)
        written = [str(vars(module)[PATH]) for module in rewritten]
        frozen = bool(self.trainable) and not any(parameter.requires_grad for parameter in self.trainable)
        if frozen or any(inner_name(module) for module in model.modules()):  # PEFT freezes every parameter it finds
            freeze(self.swaps)
        put_back(model, self.swaps)
        self.revert()
        if written:
            warnings.warn(
                f"weights were written while they were packed ({listed(written)}): they come back as the patched model "
                "had them, rounded to its format",
                stacklevel=3,
            )

    def attach(self, owner: nn.Module, name: str, value: Any) -> None:
        """Append a change that sets a new attribute (or `__class__`). The last call must be one on the model itself."""
        change = Change(owner, name, type(owner) if name == "__class__" else Absent, value)
        self.changes.append(change)
        change.apply()

    def set(self, owner: nn.Module, name: str, value: Any) -> None:
        """Set an attribute (or `__class__`) of a module's instance until the model is unpatched. Of several such
        changes the first is undone first."""
        before = type(owner) if name == "__class__" else vars(owner).get(name, Absent)
        self._prepend(Change(owner, name, before, value))

    def configure(self, owner: nn.Module, settings: Any) -> None:
        """Give a module another configuration until the model is unpatched."""
        self._prepend(SettingsChange(owner, "config", vars(owner)["config"], settings))
        for swap in self.swaps:
            if swap.new is owner:
                swap.leave_out("config")

    def _prepend(self, change: Change) -> None:
        self.changes.insert(0, change)  # not appended: `unpatch` finds the model as the owner of the last change
        change.apply()

    def show_on(self, wrapper: nn.Module) -> None:
        """Set the handle on a module that wraps the model too, until the model is unpatched."""
        self._prepend(Change(wrapper, HANDLE, Absent, self))

    def revert(self) -> None:
        """Undo every change, in reverse order."""
        for change in reversed(self.changes):
            change.revert()


def build_placed(entry: Entry, placement: Placement, stats: Any) -> Built:
    """`build` for a site whose weights may be offloaded: they are in memory only during this call, and the replacement
    is offloaded too. Raises PatchError with the site's name."""
    originals = [member.original for member in (entry.site, *entry.site.tied)]
    with naming(entry.site.path, "its offloaded weights were read"), placement.readable(originals):
        made = build(entry, stats=stats)
        placement.offload([(old, new) for old, new, _ in made.modules])
    return made


def build(entry: Entry, saved: Any = None, stats: Any = None) -> Built:
    """Build a site's replacement. saved: its quantised weight from a checkpoint; None: quantise the original's weight.
    stats: see Replacer.build. Raises PatchError with the site's name."""
    with naming(entry.site.path, "its replacement was built"):
        return _build(entry, saved, stats)


def _build(entry: Entry, saved: Any, stats: Any) -> Built:
    site, replacer, choice = entry.site, entry.replacer, entry.choice
    assert replacer is not None
    assert choice is not None
    if entry.as_stored:
        new = build_from_stored(site, replacer, choice)
    else:
        new = replacer.build(site, choice, stats) if saved is None else replacer.restore(site, choice, saved)
    old_class = nn.Linear if entry.as_stored else type(site.original)
    if not isinstance(new, old_class):  # transformers and PEFT find modules by isinstance
        raise PatchError(
            f"the replacement {type(new).__name__} is no subclass of {old_class.__name__}, so hidden states and "
            "adapters would not find it; derive it from the class that it replaces"
        )
    modules = [(site.original, new, site.own_paths)]
    for tied in site.tied:
        modules.append((tied.original, replacer.build_tied(site, tied, new), tied.own_paths))
    for old, made, paths in modules:
        made.training = old.training
        made.__dict__.update({PATH: paths[0], ROLE: site.role})
    return Built(replace(entry, choice=replacer.finalize(site, choice, new)), modules)


@contextmanager
def naming(what: str, doing: str) -> Iterator[None]:
    """Context manager: turns out-of-memory errors and AccelpatchErrors into a PatchError that begins with `what`.

    what: the site's name, or the model. doing: the step in progress, for the message about memory.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise PatchError(
            f"{what}: out of memory while {doing}; nothing was changed. Free memory, or load the model in a smaller "
            "dtype"
        ) from error
    except AccelpatchError as error:
        raise PatchError(f"{what}: {error}; nothing was changed") from error


def commit(
    model: nn.Module,
    plan: Plan,
    built: list[Built],
    keep_original: str,
    attributes: Sequence[tuple[nn.Module, str, Any]],
    report: Report,
) -> Handle:
    """Swap all replacements in and return the Handle; on any error or interrupt the swaps made so far are reverted.

    attributes: (module, attribute name, value) to set on the model and on models inside it; `__class__` is allowed.
    """
    replaced = {id(old): new for item in built for old, new, _ in item.modules}
    changes: list[Change] = [
        WithheldHook(model, name, None, None) for name in unpacking_hooks(model, [item.entry.site for item in built])
    ]
    changes += [change for item in built for change in _changes(model, item, replaced)]
    handle = Handle(plan.detached(), changes, keep_original, report)
    handle.hooks = [vars(module)["_hf_hook"] for module in model.modules() if "_hf_hook" in vars(module)]
    for owner, name, value in (*attributes, (model, HANDLE, handle)):
        before = type(owner) if name == "__class__" else vars(owner).get(name, Absent)
        changes.append(Change(owner, name, before, value))
    try:
        for change in changes:
            change.apply()
        handle.swaps = [Swap.of(old, new) for item in built for old, new, _ in item.modules]
        handle.trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    except BaseException:
        handle.revert()
        raise
    return handle


def release_originals(
    handle: Handle, built: list[Built], copies: HostCopies, progress: Callable[[str, int, int], None],
    placement: Placement,
) -> None:  # fmt: skip
    """The last step of a patch: free the original weights, or keep them in host memory (`keep_original="cpu"`).

    Weights that a replacement can restore bit for bit (`gives_back`) are freed without a copy. copies: host copies of
    the plan's `rounded_weights`; this waits for them and reports progress. An interrupt undoes this step, so that the
    swaps can still be reverted.
    """
    copies.finish(progress)
    rounded = [
        (old, new)
        for item in built
        if item.entry.replacer and item.entry.replacer.rounds
        for old, new, _ in item.modules
    ]
    if handle.keep_original == "none" and rounded:
        # Drop all originals: those whose replacements round nothing still have the rounded ones as children.
        changes: list[tuple[Any, str, Any, Any]] = [
            (change, "old", change.old, None) for change in handle.changes if isinstance(change.old, nn.Module)
        ]
        changes += [(handle, name, getattr(handle, name), []) for name in ("swaps", "trainable")]
        _set_all(changes + [(item, "modules", item.modules, []) for item in built])
        placement.free(rounded)
        return
    lossless = [(old, new) for item in built for old, new, _ in item.modules if getattr(new, "gives_back", False)]
    after = {p: copies.of(p) for old, new in rounded for p in _own_parameters(old, new, recurse=True) if p in copies}
    after |= {p: p.data.new_empty(0) for old, new in lossless for p in _own_parameters(old, new) if not p.is_meta}
    with moved_to_host((old, new) for item in built if item.entry.as_stored for old, new, _ in item.modules):
        _set_all([(parameter, "data", parameter.data, data) for parameter, data in after.items()])


def _set_all(assignments: list[tuple[Any, str, Any, Any]]) -> None:
    """Set each (owner, name, before, after) to `after`; on an exception, all back to `before`."""
    try:
        for owner, name, _, after in assignments:
            setattr(owner, name, after)
    except BaseException:
        for owner, name, before, _ in assignments:
            setattr(owner, name, before)
        raise


def _own_parameters(old: nn.Module, new: nn.Module, *, recurse: bool = False) -> Iterator[nn.Parameter]:
    """The original's parameters that its replacement does not share; with `recurse` those inside too."""
    shared = {id(parameter) for parameter in new.parameters(recurse)}
    return (parameter for parameter in old.parameters(recurse) if id(parameter) not in shared)


def _changes(model: nn.Module, item: Built, replaced: dict[int, nn.Module]) -> Iterator[Change]:
    """One Change for each name of the module in the tree; a child of a replaced parent is set on the replacement."""
    for old, new, paths in item.modules:
        for path in paths:
            parent, _, name = path.rpartition(".")
            owner = model.get_submodule(parent)
            yield Change(replaced.get(id(owner), owner), name, old, new)


def _refuse_while_batching(model: nn.Module) -> None:
    """Raise PatchError while continuous batching runs the model: its calls have no masks, so that the originals'
    attention would mix requests. Sessions that are idle are ended."""
    sessions = getattr(vars(model).get(CODE), "sessions", {})
    for session in list(sessions):
        session.end_if_idle()
    if sessions:
        raise PatchError("continuous batching runs this model: stop its manager (manager.stop()), and unpatch then")
