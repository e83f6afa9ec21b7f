"""Modules whose weight another library quantised: what is known of one, what stands for it, and moves of its tensors.

Such a module is taken over as it is stored. Replacers see a float linear layer in its place, of the same shape, and
build from its codes and scales. Which classes these are is a table that is handed in (replacers/stored.py).
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

STORED = "_accelpatch_stored"  # attribute of a replacement: in what form its original is stored
BOUND = 0.05  # of the format error, where the recipe has units alone: such originals may round their activations
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_HOOKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
OF_ACCELERATE = ("_hf_hook", "_old_forward", "forward")


@dataclass(frozen=True, eq=False)
class Stored:
    """What is known of a module with a quantised weight [n, k]; no reference to the module itself.

    words: its format, for people. bytes: of its tensors. replacer, options: what takes it over. weight: reads the
    canonical weight off the module. floats: reads the weight [n, k] in float32, by the formula of the format. refusal:
    why it stays. suits: why not, by what its replacer proposes. formula: why the module's own forward does not run
    while a patch is verified, but the formula ("": it runs). own_forward: a forward on the instance is its library's.
    unpacked_by: attribute of the model with the handle of a hook that would unpack the module at the first call. lost:
    attributes of the module by which other code reads or writes its codes.
    """

    words: str
    n: int
    k: int
    bytes: int = 0
    replacer: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    weight: Callable[[nn.Module], Any] = lambda module: None
    floats: Callable[[nn.Module], Tensor] = lambda module: torch.empty(0)
    refusal: str | None = None
    suits: Callable[[Any], str | None] = lambda choice: None
    formula: str = ""
    own_forward: bool = False
    unpacked_by: str | None = None
    lost: tuple[str, ...] = ()


class Lost:
    """What other code finds on a replacement in place of an attribute by which it would read or write codes."""

    def __init__(self, message: str):
        self._message = message

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of copy and pickle
            raise AttributeError(name)
        raise PatchError(self._message)


Known = Callable[[nn.Module], Stored | None]


def nothing(module: nn.Module) -> Stored | None:
    """No module is known."""
    return None


def like_float(module: nn.Module, n: int, k: int, dtype: torch.dtype, device: torch.device | None) -> nn.Linear:
    """A linear layer with the module's bias and hooks in which the weight is empty, or without a device on meta.

    A bias of another dtype is cast, as the module's own forward does at each call. The library's own attributes and
    tensors stay behind: they would keep its codes in memory.
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
    """Attributes of the model with the handles of hooks that would unpack modules of these sites."""
    names = dict.fromkeys(site.stored.unpacked_by for site in sites if site.stored is not None)
    return [name for name in names if name is not None and name in vars(model)]


class WithheldHook(Change):
    """Takes a forward hook off a model. name: the attribute that holds its handle."""

    def apply(self) -> None:
        """Take it off; `new` keeps it."""
        self.new = self.owner._forward_pre_hooks.pop(vars(self.owner)[self.name].id, None)

    def revert(self) -> None:
        """Put it back where it was, before all others, unless the handle has been removed since."""
        handle = vars(self.owner).get(self.name)
        if handle is not None and self.new is not None:
            hooks: Any = self.owner._forward_pre_hooks
            hooks[handle.id] = self.new
            hooks.move_to_end(handle.id, last=False)


def move_(module: nn.Module, device: torch.device | str, keep: Iterable[Tensor] = ()) -> None:
    """Move all that a module with a stored weight holds itself to a device, as it is: codes are never cast.

    keep: tensors that stay, since others hold them. Parameters stay the same objects.
    """
    device, stay = torch.device(device), {id(tensor) for tensor in keep}
    moved: dict[Any, Tensor] = {}
    for holder, name, tensor in list(places(module)):
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
def set_aside(pairs: Iterable[tuple[nn.Module, nn.Module]]) -> Iterator[None]:
    """Context manager: moves the stored weights of (original, replacement) to the CPU's memory; where it is left by an
    exception, all back."""
    pairs = list(pairs)
    try:
        for old, new in pairs:
            move_(old, "cpu", keep=held_by(new))
        yield
    except BaseException:
        for old, new in pairs:
            move_(old, next(new.buffers()).device, keep=held_by(new))
        raise


def held_by(module: nn.Module) -> list[Tensor]:
    """Every tensor that a module holds, in its layout too."""
    return [tensor for _, _, tensor in places(module)]


def places(module: nn.Module) -> Iterator[tuple[Any, Any, Tensor]]:
    """(table, name, tensor) of every tensor that a module holds, also inside its library's own objects."""
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


def taken_over(site: Any, replacer: Any, choice: Any) -> nn.Module:
    """The replacement of a module with a stored weight: a linear layer, for as their library's class PEFT would unpack
    its codes."""
    weight = site.stored.weight(site.original)
    new: nn.Module = replacer.restore(float_site(site, weight.w.device), choice, weight)
    new.__dict__[STORED] = site.stored.words
    for name in site.stored.lost:
        new.__dict__[name] = Lost(f"{site.path}: its {name} is the original's; call accelpatch.unpatch(model) first")
    return new
