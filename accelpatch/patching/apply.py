"""Executes and reverts a plan, all or nothing: build beside the originals, then swap by steps that cannot fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelpatch.errors import AccelpatchError, PatchError
from accelpatch.patching.plan import Entry, Plan
from accelpatch.report import Report

_ABSENT = object()  # an attribute that was not there
HANDLE = "accelpatch"  # the attribute of a patched model that holds its Handle


@dataclass(eq=False)
class Change:
    """`owner.name` from `old` to `new`: a child module, the class of the model, or an attribute of the instance."""

    owner: nn.Module
    name: str
    old: Any
    new: Any

    def apply(self) -> None:
        """Put the new value in."""
        _assign(self.owner, self.name, self.new)

    def revert(self) -> None:
        """Put the old value back."""
        _assign(self.owner, self.name, self.old)


def _assign(owner: nn.Module, name: str, value: Any) -> None:
    if name in owner._modules:
        owner._modules[name] = value
    elif name == "__class__":
        owner.__class__ = value
    elif value is _ABSENT:
        owner.__dict__.pop(name, None)
    else:
        owner.__dict__[name] = value


@dataclass(eq=False)
class Built:
    """A finished replacement that nobody sees yet; `modules` maps each original to what takes its place."""

    entry: Entry
    modules: list[tuple[nn.Module, nn.Module, tuple[str, ...]]]

    @property
    def new(self) -> nn.Module:
        """The replacement of the site's own module."""
        return self.modules[0][1]


@dataclass(eq=False)
class Handle:
    """`model.accelpatch`: what was planned and done, and the way back."""

    plan: Plan
    changes: list[Change]
    keep_original: str
    record: Report

    def report(self) -> Report:
        """What happened and why."""
        return self.record

    def unpatch(self) -> None:
        """Give the model back as it came in: the same module objects, bit for bit.

        Originals follow a `model.to(...)` made in between. Raises PatchError where they were freed.
        """
        if self.keep_original == "none" and any(
            entry.replacer and entry.replacer.rounds for entry in self.plan.replaced
        ):
            raise PatchError(
                "the originals were freed when the model was patched with keep_original='none'; load the model again, "
                "or patch with keep_original='cpu'"
            )
        for change in self.changes:
            hand_back = getattr(change.new, "hand_back", None)
            if hand_back is not None:
                hand_back(change.old)
        self.revert()

    def revert(self) -> None:
        """Undo every swap, the last one first."""
        for change in reversed(self.changes):
            change.revert()


def check_patchable(model: nn.Module) -> None:
    """Raise PatchError where a patch would be wrong: twice, while training, without weights, sharded or compiled."""
    if HANDLE in vars(model):
        raise PatchError("the model is already patched; call accelpatch.unpatch(model) first")
    if type(model).__name__ == "OptimizedModule" or getattr(model, "_compiled_call_impl", None) is not None:
        raise PatchError("the model is compiled; patch the original model first and call torch.compile after")
    kinds = {type(module).__name__ for module in model.modules()}
    if kinds & {"FullyShardedDataParallel", "FSDPModule"} or any(name.startswith("FSDP") for name in kinds):
        raise PatchError("the model is sharded by FSDP; patch it before wrapping, or patch the unwrapped model")
    for name, tensor in model.named_parameters():
        if type(tensor.data).__name__ == "DTensor" or type(tensor).__name__ == "DTensor":
            raise PatchError(f"{name} is a DTensor (tensor parallel or FSDP2); load the model without it, then patch")
        if tensor.is_meta:
            raise PatchError(f"{name} is on the meta device: the model has no weights there, or they are offloaded; "
                             "load it with its weights in memory (plan works without them)")  # fmt: skip
    if model.training:
        raise PatchError("the model is in training mode and accelpatch replaces for inference; call model.eval() first")


def build_all(plan: Plan, progress: Callable[[int, int], None]) -> Iterator[Built]:
    """Build every replacement of `plan`; an error names the site, and the model is untouched."""
    entries = plan.replaced
    for done, entry in enumerate(entries):
        with _naming_site(entry.site.path):
            yield _build(entry)
        progress(done + 1, len(entries))


def _build(entry: Entry) -> Built:
    site, replacer, choice = entry.site, entry.replacer, entry.choice
    assert replacer is not None
    assert choice is not None
    new = replacer.build(site, choice)
    _check_subclass(site.original, new)
    modules = [(site.original, new, site.places)]
    for tied in site.tied:
        modules.append((tied.original, replacer.build_tied(site, tied, new), tied.places))
    for old, made, _ in modules:
        made.train(old.training)
    return Built(entry, modules)


def _check_subclass(old: nn.Module, new: nn.Module) -> None:
    """transformers and PEFT find modules by isinstance; a stranger in the tree would be skipped without an error."""
    if not isinstance(new, type(old)):
        raise PatchError(
            f"the replacement {type(new).__name__} is no subclass of {type(old).__name__}, so hidden states and "
            "adapters would not find it; derive it from the class that it replaces"
        )


class _naming_site:
    """Adds the site to an error that would not name it, and says that nothing was changed."""

    def __init__(self, path: str):
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            raise PatchError(
                f"{self.path}: out of memory while its replacement was built; nothing was changed. Free memory, or "
                "load the model in a smaller dtype"
            ) from error
        if isinstance(error, AccelpatchError):
            raise PatchError(f"{self.path}: {error}; nothing was changed") from error


def commit(
    model: nn.Module, plan: Plan, built: list[Built], keep_original: str, model_class: type[nn.Module], report: Report
) -> Handle:
    """Swap everything in; on any error or interrupt every swap made so far is reverted."""
    replaced = {id(old): new for item in built for old, new, _ in item.modules}
    changes = [change for item in built for change in _swaps(model, item, replaced)]
    handle = Handle(plan.detached(), changes, keep_original, report)
    changes.append(Change(model, "__class__", type(model), model_class))
    changes.append(Change(model, HANDLE, _ABSENT, handle))
    try:
        for change in changes:
            change.apply()
    except BaseException:
        handle.revert()
        raise
    return handle


def settle(handle: Handle, built: list[Built]) -> None:
    """The last step, once nothing can send the model back: free the originals' weights, or move them to the CPU."""
    rounded = [
        (old, new)
        for item in built
        if item.entry.replacer and item.entry.replacer.rounds
        for old, new, _ in item.modules
    ]
    if handle.keep_original == "none":
        gone = {id(old) for old, _ in rounded}
        for change in handle.changes:
            if id(change.old) in gone:
                change.old = None
        for item in built:
            item.modules.clear()
        return
    copies = [(p, p.data.cpu()) for old, new in rounded for p in _own_parameters(old, new) if p.device.type != "cpu"]
    for parameter, copy in copies:
        parameter.data = copy


def _own_parameters(old: nn.Module, new: nn.Module) -> Iterator[nn.Parameter]:
    """The original's parameters that its replacement does not go on using."""
    shared = {id(parameter) for parameter in new.parameters(recurse=False)}
    return (parameter for parameter in old.parameters(recurse=False) if id(parameter) not in shared)


def _swaps(model: nn.Module, item: Built, replaced: dict[int, nn.Module]) -> Iterator[Change]:
    """One change for every name under which the tree holds the module; a replaced parent takes its new child."""
    for old, new, places in item.modules:
        for place in places:
            parent, _, name = place.rpartition(".")
            owner = model.get_submodule(parent)
            yield Change(replaced.get(id(owner), owner), name, old, new)
