"""Modules whose weight another library quantised: their description, their replacement, and moves of their tensors.

The replacement uses the same codes and scales; nothing is quantised again. Replacers are given a float linear layer of
the same shape as the site's module, and the quantised weight. Which classes are known is a table in
replacers/stored.py, passed to the plan as `stored_of`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.errors import PatchError
from accelpatch.patching.change import Change

STORED = "_accelpatch_stored"  # attribute of a replacement: the format of its original, for people
# Bound of the format error where the recipe has only units: the originals may round their activations.
FORMAT_BOUND = 0.05
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_HOOKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
OF_ACCELERATE = ("_hf_hook", "_old_forward", "forward")


@dataclass(frozen=True, eq=False)
class Stored:
    """The description of a module with a quantised weight [n, k]; it has no reference to the module.

    format_name: for people. bytes: of its tensors. replacer, options: which replacer uses this format, and with what.
    weight(module): the canonical weight. floats(module): the weight [n, k] in float32, by the formula of the format.
    refusal: why the module stays, or None. why_not(choice): why the replacer's choice does not suit this weight, or
    None. formula_reason: why verification runs the formula of the format in place of the module's own forward; "": the
    forward runs. own_forward: whether a forward on the instance is its library's, not the user's. unpacked_by:
    attribute of the model with the handle of a hook that would unpack the module at its first call. lost: attributes by
    which other code reads or writes the codes; the replacement gets a `Lost` for each.
    """

    format_name: str
    n: int
    k: int
    bytes: int = 0
    replacer: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    weight: Callable[[nn.Module], Any] = lambda module: None
    floats: Callable[[nn.Module], Tensor] = lambda module: torch.empty(0)
    refusal: str | None = None
    why_not: Callable[[Any], str | None] = lambda choice: None
    formula_reason: str = ""
    own_forward: bool = False
    unpacked_by: str | None = None
    lost: tuple[str, ...] = ()


class Lost:
    """Placeholder on a replacement for an attribute of its original (`Stored.lost`); using it raises PatchError."""

    def __init__(self, message: str):
        self._message = message

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of copy and pickle
            raise AttributeError(name)
        raise PatchError(self._message)


StoredOf = Callable[[nn.Module], Stored | None]


def none_stored(module: nn.Module) -> Stored | None:
    """The lookup for models without modules that another library quantised."""
    return None


def like_float(module: nn.Module, n: int, k: int, dtype: torch.dtype, device: torch.device | None) -> nn.Linear:
    """A linear layer with the module's bias and hooks. Its weight has no elements; without a device, [n, k] on meta.

    A bias of another dtype is cast, as the module's own forward does at each call. The library's own attributes and
    tensors are not copied: they would keep its codes in memory.
    """
    new = nn.Linear(k, n, bias=False, device="meta", dtype=dtype)
    if device is not None:
        new._parameters["weight"] = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)
    for table in ("_parameters", "_buffers"):
        bias = getattr(module, table).get("bias")
        if bias is not None:
            new._parameters.pop("bias", None)
            if bias.dtype != dtype and device is not None:
                made = bias.detach().to(dtype)
                bias = nn.Parameter(made, bias.requires_grad) if isinstance(bias, nn.Parameter) else made
            getattr(new, table)["bias"] = bias
    attributes = vars(module)
    names = (*HOOKS, *OF_HOOKS, "training", *(OF_ACCELERATE if "_hf_hook" in attributes else ()))
    new.__dict__.update({name: attributes[name] for name in names if name in attributes})
    return new


def bias_of(module: nn.Module) -> Tensor | None:
    """The module's bias, a parameter or a buffer."""
    found = module._parameters.get("bias")
    return module._buffers.get("bias") if found is None else found


def unpacking_hooks(model: nn.Module, sites: Iterable[Any]) -> list[str]:
    """Names of the model's attributes with the handles of hooks that would unpack modules of these sites."""
    names = dict.fromkeys(site.stored.unpacked_by for site in sites if site.stored is not None)
    return [name for name in names if name is not None and name in vars(model)]


class WithheldHook(Change):
    """Removes a forward pre-hook from a model. name: the attribute of the model with the hook's handle."""

    def apply(self) -> None:
        """Remove the hook and keep it in `new`."""
        self.new = self.owner._forward_pre_hooks.pop(vars(self.owner)[self.name].id, None)

    def revert(self) -> None:
        """Put it back as the first hook, unless the handle has been removed since."""
        handle = vars(self.owner).get(self.name)
        if handle is not None and self.new is not None:
            hooks: Any = self.owner._forward_pre_hooks
            hooks[handle.id] = self.new
            hooks.move_to_end(handle.id, last=False)


def move_(module: nn.Module, device: torch.device | str, keep: Iterable[Tensor] = ()) -> None:
    """Move all tensors of a quantised module itself to a device, without a cast.

    keep: tensors that are not moved, since other modules share them. Parameters stay the same objects.
    """
    device, stay = torch.device(device), {id(tensor) for tensor in keep}
    moved: dict[Any, Tensor] = {}
    for holder, name, tensor in list(tensor_entries(module)):
        if id(tensor) in stay or tensor.device == device or tensor.is_meta:
            continue
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in moved:
            moved[key] = tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter):
            tensor.data = moved[key]
        else:
            holder[name] = moved[key]


@contextmanager
def moved_to_host(pairs: Iterable[tuple[nn.Module, nn.Module]]) -> Iterator[None]:
    """Context manager: moves the quantised originals of (original, replacement) to host memory; an exception moves all
    back."""
    pairs = list(pairs)
    try:
        for old, new in pairs:
            move_(old, "cpu", keep=tensors_of(new))
        yield
    except BaseException:
        for old, new in pairs:
            move_(old, next(new.buffers()).device, keep=tensors_of(new))
        raise


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Every tensor of a module itself, also in its layout."""
    return [tensor for _, _, tensor in tensor_entries(module)]


def tensor_entries(module: nn.Module) -> Iterator[tuple[Any, Any, Tensor]]:
    """(dict, key, tensor) of every tensor of a module itself, also inside objects of its library's classes."""
    library, seen = type(module).__module__.partition(".")[0], {id(module)}
    left: list[dict[Any, Any]] = [*(vars(module)[table] for table in ("_parameters", "_buffers")), vars(module)]
    while left:
        table = left.pop()
        for name, value in list(table.items()):
            if isinstance(value, Tensor):
                yield table, name, value
            theirs = type(value).__module__.partition(".")[0] == library and not isinstance(value, nn.Module)
            if (theirs or isinstance(value, nn.Parameter)) and hasattr(value, "__dict__") and id(value) not in seen:
                seen.add(id(value))
                left.append(vars(value))


def float_site(site: Any, device: torch.device | None = None) -> Any:
    """The site as a replacer sees it: with a float linear layer (`like_float`) in place of the module."""
    dtype = getattr(torch, site.dtype)
    bias = bias_of(site.original)
    size = site.n * site.k * dtype.itemsize + (0 if bias is None else bias.nbytes)
    made = like_float(site.original, site.n, site.k, dtype, device)
    names = tuple(cls.__name__ for cls in type(made).__mro__ if cls is not object)
    return replace(site, module=made, class_names=names, bytes=size, token_bytes=size, stored=None)


def build_from_stored(site: Any, replacer: Any, choice: Any) -> nn.Module:
    """The replacement of a quantised module, from the same codes. It is a linear layer and not of the library's class,
    because PEFT would unpack the codes of such a class."""
    weight = site.stored.weight(site.original)
    new: nn.Module = replacer.restore(float_site(site, weight.w.device), choice, weight)
    new.__dict__[STORED] = site.stored.format_name
    for name in site.stored.lost:
        new.__dict__[name] = Lost(f"{site.path}: its {name} is the original's; call accelpatch.unpatch(model) first")
    return new
