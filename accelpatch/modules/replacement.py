"""How a replacement is made from an original: an instance of a subclass with its attributes, children and hooks.

A deep copy of a whole patched model is patched too. A copy of one module alone (PEFT makes such copies to train them)
is the plain module with float weights: a packed weight has no parameter to train.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers.utils import output_capturing

from accelpatch import own_code
from accelpatch.errors import PatchError
from accelpatch.own_code.wrapped_forward import rewrap_forward

Module = TypeVar("Module", bound=nn.Module)

# Copied, so that what is registered on one of the two modules is not seen by the other ...
OWN_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
# ... while hooks are shared: a handle taken before the swap still removes its hook, one added after survives it.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)
OWN_HOOK = "of_accelpatch"  # marks hooks of this package, which change nothing that a module computes
ASIDE = "_accelpatch_aside"  # marks the functions by which a class stands aside
PATH = "_accelpatch_path"  # attribute of a replacement: its dotted name, for messages
ROLE = "_accelpatch_role"  # attribute of a replacement: the role of its site
STORED = "_accelpatch_stored"  # attribute of a replacement: in what form another library stored its weight
ON_DEMAND = "_accelpatch_on_demand"  # attribute: an OnDemand that unpatches instead of refusing a call
TAKEN = "_accelpatch_taken"  # attribute of a replacement: names of the original's attributes
COPIED = "accelpatch: whole models"  # key in deepcopy's memo: ids of modules in wholly copied models


class Replacement(nn.Module):
    """Base class of accelpatch's replacements; a user's own may derive from it.

    own_buffers: names of buffers that the original does not have. transient: names of attributes that are not copied.
    skips: children whose computation the replacement does itself, as (name, module). runs_original: whether the
    original's forward can run on what the replacement holds.
    """

    runs_original = True
    own_buffers: tuple[str, ...] = ()
    transient: tuple[str, ...] = ()
    skips: tuple[tuple[str, nn.Module], ...] = ()

    def float_parameters(self) -> dict[str, nn.Parameter]:
        """Name -> float parameter of each packed weight, as in the original."""
        return {}

    def copied_parameters(self) -> dict[str, nn.Parameter]:
        """The same for a copy of this module alone, which stands where this one does."""
        return self.float_parameters()


@functools.cache
def subclass(mixin: Any, cls: Any) -> type[nn.Module]:
    """A class that derives from `mixin` and `cls`: transformers and PEFT find modules by isinstance."""
    if issubclass(mixin, cls):
        return mixin
    deep = _deep_copy if issubclass(mixin, Replacement) else copy_with_parts
    body = {"__module__": mixin.__module__, "__reduce_ex__": copied_by(deep), "replaced_class": cls}
    made = type(f"{mixin.__name__}_{cls.__name__}", (mixin, cls), body)
    if mixin.__module__.startswith("accelpatch."):  # another's replacement runs its own forward, whatever changes
        _MADE[made] = vars(made).get("forward")  # transformers wraps the forward of every class of layers
        own_code.reached_by(made)
        own_code.on_refresh(stand_aside)
        stand_aside()
    return made


_MADE: dict[Any, Any] = {}  # every class that `subclass` made of a replacement of this package -> its own forward


def _aside(function: Any) -> Any:
    """Mark a function by which a class stands aside."""
    setattr(function, ASIDE, True)
    return function


def stand_aside() -> None:
    """Let replacements run their original's forward while it is not its package's own, and theirs from then on.

    A `forward` that others put into such a class stays there: it is what runs.
    """
    for made, own in _MADE.items():
        present = vars(made).get("forward")
        if present is not own and not hasattr(present, ASIDE):
            continue
        if own_code.is_others(made):
            made.forward = run_original if getattr(made, "runs_original", True) else _refuse_to_run
        elif own_code.has_overridden(made):
            made.forward = _either(made)
        elif own is not None:
            made.forward = own
        elif present is not None:
            del made.forward


class _Running(threading.local):
    """The modules whose original's forward runs in this thread."""

    def __init__(self) -> None:
        self.modules: list[Any] = []


_RUNNING = _Running()


def runs_original(module: nn.Module) -> bool:
    """Whether the original's forward runs on a replacement at present, in this thread."""
    return any(one is module for one in _RUNNING.modules)


@_aside
def run_original(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The original's forward on a replacement."""
    _RUNNING.modules.append(self)
    try:
        return type(self).replaced_class.forward(self, *args, **kwargs)
    finally:
        _RUNNING.modules.pop()


@functools.cache
def _either(made: Any) -> Any:
    forward = _MADE[made] or super(made, made).forward

    @_aside
    def run_either(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The original's forward where a method that it calls is set on the instance, else the replacement's."""
        if own_code.differs(self):
            return run_original(self, *args, **kwargs)
        return forward(self, *args, **kwargs)

    return run_either


@_aside
def _refuse_to_run(self: Any, *args: Any, **kwargs: Any) -> Any:
    raise PatchError(
        f"{vars(self).get(PATH)}: {own_code.reached_by(type(self)).reason}, and the packed layer cannot run it: call "
        "accelpatch.unpatch(model) first"
    )


def adopt(mixin: type[Module], original: nn.Module) -> Module:
    """An instance of `subclass(mixin, type(original))` with all attributes of `original`, which is not changed.

    Parameters, buffers and children are shared, not copied. An accelerate hook is rebound to the new module.
    """
    new = _with_state_of(original, subclass(cast(Any, mixin), cast(Any, type(original))), vars(original))
    new.__dict__[TAKEN] = frozenset(vars(original))
    return cast(Module, new)


def without_casts(module: nn.Module, before: Mapping[str, Tensor | None]) -> None:
    """Give buffers that a cast of the model changed their dtypes and values back, on the device where they are now.

    before: name -> the buffer as it was.
    """
    for name, earlier in before.items():
        after = module._buffers[name]
        if earlier is not None and after is not None and after.dtype != earlier.dtype:
            module._buffers[name] = earlier.to(after.device)


def plain(replacement: Replacement) -> nn.Module:
    """An instance of the replaced class that shares the replacement's present tensors and children.

    Packed weights become parameters in the original's dtype and shape.
    """
    cls: type[nn.Module] = cast(Any, type(replacement)).replaced_class
    names: frozenset[str] = vars(replacement)[TAKEN]
    new = _with_state_of(replacement, cls, {name: value for name, value in vars(replacement).items() if name in names})
    new._parameters.update(replacement.copied_parameters())
    for name in replacement.own_buffers:
        new._buffers.pop(name, None)
        new._non_persistent_buffers_set.discard(name)
    return new


def _with_state_of(module: nn.Module, cls: type[nn.Module], state: Any) -> nn.Module:
    new = cls.__new__(cls)
    attributes = dict(state)
    for table in OWN_TABLES:
        attributes[table] = attributes[table].copy()
    forward = attributes.pop("forward", None)
    new.__dict__.update(attributes)
    if "_hf_hook" in attributes and forward is not None:
        rewrap_forward(new, forward)
    return new


class Copying:
    """What copy and pickle receive of a patched module from `__reduce_ex__`: copying works, pickling raises PatchError.

    Not by `__deepcopy__`, because wrappers (PeftModel, torch.compile) forward attribute look-ups to the module inside,
    and a copy of the wrapper would become a copy of that module. deep: makes the deep copy of the module, given copy's
    memo.
    """

    def __init__(self, module: nn.Module, deep: Callable[[Any, dict[Any, Any]], nn.Module]):
        self.module, self.deep = module, deep

    def __deepcopy__(self, memo: dict[Any, Any]) -> nn.Module:
        return self.deep(self.module, memo)

    def __reduce__(self) -> Any:
        cls: Any = type(self.module)
        raise PatchError(
            f"a patched {getattr(cls, 'replaced_class', cls).__name__} cannot be pickled (torch.save, an argument of "
            "another process): call accelpatch.unpatch(model) and save the original, or patch it where it is used"
        )


def copied_by(deep: Callable[[Any, dict[Any, Any]], nn.Module]) -> Any:
    """A `__reduce_ex__` for a class whose deep copies are made by `deep`."""

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        return _copy_of, (Copying(self, deep),)

    return reduce_ex


def _copy_of(made: nn.Module | Copying) -> nn.Module:
    """The result of copy: the finished deep copy, or a shallow copy that shares the module's attributes."""
    if isinstance(made, nn.Module):
        return made
    shallow = type(made.module).__new__(type(made.module))
    shallow.__dict__.update(vars(made.module))
    return shallow


def _deep_copy(replacement: Replacement, memo: dict[Any, Any]) -> nn.Module:
    if id(replacement) in memo.get(COPIED, ()):
        return copy_with_parts(replacement, memo)
    made: nn.Module = copy.deepcopy(plain(replacement), memo)
    return made


def copy_with_parts(module: nn.Module, memo: dict[Any, Any]) -> Any:
    """A deep copy of the same class without the `transient` attributes."""
    made = type(module).__new__(type(module))
    memo[id(module)] = made
    transient = getattr(module, "transient", ())
    made.__dict__.update(copy.deepcopy({k: v for k, v in vars(module).items() if k not in transient}, memo))
    return made


def skipped(replacement: nn.Module, *names: str) -> tuple[tuple[str, nn.Module], ...]:
    """The present children of these names, as the value of `skips` of a replacement that does their work itself."""
    return tuple((name, child) for name in sorted(names) if (child := replacement._modules[name]) is not None)


def unchanged(replacement: Replacement) -> bool:
    """Whether the children in `skips` are still the same modules and do the same (a Dropout must have p = 0)."""
    children = replacement._modules
    return all(
        children.get(name) is child and not (isinstance(child, nn.Dropout) and child.p)
        for name, child in replacement.skips
    )


def intact(replacement: Replacement) -> bool:
    """Whether the children in `skips` are unchanged and unobserved; if not, the original's forward must run."""
    return unchanged(replacement) and not is_observed(*(child for _, child in replacement.skips))


def is_observed(*modules: Any) -> bool:
    """Whether anybody observes or changes calls of one of the modules: by a hook on it or on all modules, by a
    `forward` set on the instance (accelerate's wrapper too), or by other code in its class. It must then be called as a
    module."""
    if any(not hasattr(hook, OWN_HOOK) for name in GLOBAL_HOOKS for hook in getattr(torch_module, name).values()):
        return True
    return any(
        "forward" in vars(module) or own_code.differs(module)
        or any(not _idle(hook) for table in HOOKS for hook in getattr(module, table).values())
        for module in modules
    )  # fmt: skip


def _idle(hook: Any) -> bool:
    """Whether a hook is one that transformers left there for outputs of every layer, and none are asked for now."""
    return getattr(hook, "__module__", "") == output_capturing.__name__ and not output_capturing._active_collector.get()
