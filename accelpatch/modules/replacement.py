"""How a replacement takes over from an original: a subclass of its class, with its attributes, children and hooks.

A copy of the whole patched model is patched too. A copy of a part alone (PEFT makes such copies to train them) is the
plain part, float and trainable: a packed weight has no parameter that could be trained.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import nn
from torch.nn.modules import module as torch_module

from accelpatch.errors import PatchError

Module = TypeVar("Module", bound=nn.Module)

# Copied, so that what is registered on one of the two modules is not seen by the other ...
OWN_TABLES = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
# ... while hooks are shared: a handle taken before the swap still removes its hook, one added after survives it.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)
OWN_HOOK = "of_accelpatch"  # marks hooks of this package, which change nothing that a module computes
PATH = "_accelpatch_path"  # attribute of a replacement: its dotted name, for messages
ROLE = "_accelpatch_role"  # and the role of its site
ON_DEMAND = "_accelpatch_on_demand"  # attribute of what gives the original back instead of refusing a call
TAKEN = "_accelpatch_taken"  # attribute of a replacement: the names of those that it took over
COPIED = "accelpatch: whole models"  # key of a deep copy's memo: ids of the modules of models that are copied whole


class Replacement(nn.Module):
    """What our replacements have in common; one of the user's own may derive it too.

    own_buffers: names of buffers that the original has not. transient: of attributes that no copy gets. skips: children
    whose work the replacement does itself.
    """

    own_buffers: tuple[str, ...] = ()
    transient: tuple[str, ...] = ()
    skips: tuple[tuple[str, nn.Module], ...] = ()

    def float_parameters(self) -> dict[str, nn.Parameter]:
        """Name -> parameter of what is packed here, as the original has it."""
        return {}


@functools.cache
def subclass(mixin: Any, cls: Any) -> type[nn.Module]:
    """A class that behaves as `mixin` and is an instance of `cls`: hidden states and adapters find it by isinstance."""
    if issubclass(mixin, cls):
        return mixin
    deep = _deep_copy if issubclass(mixin, Replacement) else copy_with_parts
    body = {"__module__": mixin.__module__, "__reduce_ex__": copied_by(deep), "replaced_class": cls}
    return type(f"{mixin.__name__}_{cls.__name__}", (mixin, cls), body)


def adopt(mixin: type[Module], original: nn.Module) -> Module:
    """A module of `subclass(mixin, type(original))` with all that `original` has, leaving `original` as it is.

    Parameters, buffers and children are shared, not copied. A hook of accelerate is carried over.
    """
    new = _with_state_of(original, subclass(cast(Any, mixin), cast(Any, type(original))), vars(original))
    new.__dict__[TAKEN] = frozenset(vars(original))
    return cast(Module, new)


def plain(replacement: Replacement) -> nn.Module:
    """A module of the class that was replaced, sharing the tensors and children that a replacement has now.

    A weight that is packed becomes a parameter in the dtype and shape of the original's.
    """
    cls: type[nn.Module] = cast(Any, type(replacement)).replaced_class
    names: frozenset[str] = vars(replacement)[TAKEN]
    new = _with_state_of(replacement, cls, {name: value for name, value in vars(replacement).items() if name in names})
    new._parameters.update(replacement.float_parameters())
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
        _rewrap_forward(new, forward)
    return new


def _rewrap_forward(new: nn.Module, wrapped: Any) -> None:
    """accelerate puts a partial of its wrapper, bound to the module, on the instance: bind it to the new one."""
    new.__dict__["_old_forward"] = types.MethodType(type(new).forward, new)
    new.__dict__["forward"] = functools.update_wrapper(functools.partial(wrapped.func, new), type(new).forward)


class Copying:
    """A patched module on its way through `copy`, which works, or `pickle`, which is refused.

    By `__reduce_ex__` and no `__deepcopy__`: that one is looked up on wrappers too (PeftModel, torch.compile), which
    pass what they do not have on to the module inside, and a copy of theirs would be a copy of that.
    deep: makes the deep copy of the module, with copy's memo.
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
    """`__reduce_ex__` of a class whose deep copies `deep` makes."""

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        return _copy_of, (Copying(self, deep),)

    return reduce_ex


def _copy_of(made: nn.Module | Copying) -> nn.Module:
    """What `copy` made: a deep copy already, or one that shares all that the module has."""
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
    """A deep copy of the same class; what only lends its weight out for a while (`transient`) is left behind."""
    made = type(module).__new__(type(module))
    memo[id(module)] = made
    transient = getattr(module, "transient", ())
    made.__dict__.update(copy.deepcopy({k: v for k, v in vars(module).items() if k not in transient}, memo))
    return made


def skipped(replacement: nn.Module, *names: str) -> tuple[tuple[str, nn.Module], ...]:
    """The children of these names, as they are when a replacement moves in that does their work itself: its `skips`."""
    return tuple((name, child) for name in sorted(names) if (child := replacement._modules[name]) is not None)


def unchanged(replacement: Replacement) -> bool:
    """Whether the children that a replacement skips are those that it was made for, doing what they did."""
    children = replacement._modules
    return all(
        children.get(name) is child and not (isinstance(child, nn.Dropout) and child.p)
        for name, child in replacement.skips
    )


def intact(replacement: Replacement) -> bool:
    """Whether that is so and nobody observes a call of one; else the original's forward, which calls them, must run."""
    return unchanged(replacement) and not is_observed(*(child for _, child in replacement.skips))


def is_observed(*modules: Any) -> bool:
    """Whether somebody sees or changes a call of one of the modules, so that it must be called as itself: by a hook on
    it or on all modules, or a forward of its own on the instance (accelerate's wrapper among them)."""
    if any(not hasattr(hook, OWN_HOOK) for name in GLOBAL_HOOKS for hook in getattr(torch_module, name).values()):
        return True
    return any("forward" in vars(module) or any(getattr(module, table) for table in HOOKS) for module in modules)
