"""Where accelerate placed the parts of a model, on devices, the CPU and the disk, read off its hooks."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from accelerate.hooks import SequentialHook
from accelerate.utils import set_module_tensor_to_device
from torch import nn

from accelpatch.device import probe
from accelpatch.errors import PatchError
from accelpatch.parallel.offload_hook import HostMemory, OffloadHook, OwnTensors
from accelpatch.patching.placement import SHARDS, WHOLE, Placement, device_of, hooks_of, no_weights
from accelpatch.report import human, span


class Place(NamedTuple):
    """The device on which a module computes; and where its weights are offloaded to: "cpu", "disk", or "" if
    nowhere."""

    device: torch.device
    waits: str = ""

    def __str__(self) -> str:
        return f"{self.waits} (offloaded, runs on {self.device})" if self.waits else str(self.device)


def placement_of(model: nn.Module) -> Placement:
    """The placement of a model: WHOLE where neither accelerate has spread it nor tensor parallel split it."""
    shards: Placement | None = vars(model).get(SHARDS)
    if shards is not None:
        return shards
    hooked = any(hasattr(hook, "execution_device") for module in model.modules() for hook in hooks_of(module))
    return DeviceMap(model) if hooked else WHOLE


def aligning(module: nn.Module) -> Any:
    """The hook of accelerate that moves a module's inputs, and its weights where they are offloaded; None for none."""
    return next((hook for hook in hooks_of(module) if hasattr(hook, "execution_device")), None)


def as_device(given: Any) -> torch.device:
    """accelerate's number of a GPU, or its name, as torch's device."""
    return torch.device("cuda", given) if isinstance(given, int) else torch.device(given)


def loader_of(hook: Any, name: str = "") -> tuple[Any, str]:
    """(the mapping that accelerate reads a hook's weights from, the key of a name in it)."""
    weights, key = hook.weights_map, name
    while hasattr(weights, "dataset"):  # PrefixedDataset
        key, weights = f"{weights.prefix}{key}", weights.dataset
    return weights, key


def in_memory(hook: Any, name: str) -> tuple[dict[str, torch.Tensor], str]:
    """(the offloaded weights that are in host memory, the key of a name among them)."""
    weights, key = loader_of(hook, name)
    return getattr(weights, "state_dict", weights), key


def where_waits(hook: Any, name: str) -> str:
    """ "cpu" or "disk": where an offloaded tensor lies. Raises KeyError where the hook's map has none of that name."""
    weights, key = in_memory(hook, name)
    if key in weights:
        return "cpu"
    if key not in loader_of(hook)[0]:
        raise KeyError(key)
    return "disk"


def folder_of(hook: Any) -> str:
    """The folder for files of replacements: the one of the offloaded weights, where accelerate wrote them."""
    return str(getattr(loader_of(hook)[0], "save_folder", None) or tempfile.gettempdir())


def pin(hook: Any, name: str) -> None:
    """Page-lock an offloaded weight in host memory, from where a GPU reads it several times faster.

    A weight that was on a GPU when accelerate offloaded the model to "cpu" is still there, and is left there.
    """
    weights, key = in_memory(hook, name)
    there = key in weights and weights[key].device.type == "cpu" and not weights[key].is_pinned()
    if there and as_device(hook.execution_device).type == "cuda":
        weights[key] = weights[key].pin_memory()


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of a module's own parameters and buffers."""
    yield from chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))


def place_of(module: nn.Module) -> Place | None:
    """Where a module lies; None for one without tensors of its own."""
    tensors, hook = list(own_tensors(module)), aligning(module)
    if not tensors:
        return None
    where = next((one.device for _, one in tensors if not one.is_meta), torch.device("cpu"))
    device = where if hook is None or hook.execution_device is None else as_device(hook.execution_device)
    offloads = hook is not None and hook.offload
    names = [name for name, one in tensors if offloads and (one.is_meta or isinstance(one, nn.Parameter))]
    return Place(device, where_waits(hook, names[0]) if names else "")


class DeviceMap(Placement):
    """The placement of a model with accelerate's hooks. places: dotted name -> place, of modules with tensors."""

    def __init__(self, model: nn.Module):
        named = list(model.named_modules(remove_duplicate=False))
        self.missing = ""
        self.places: dict[str, Place] = {}
        for path, module in named:
            try:
                place = place_of(module)
            except KeyError as error:
                self.missing = self.missing or f"{path}: accelerate's hook has no weights named {error}"
                place = None
            if place is not None:
                self.places[path] = place
        self._first = next(iter(self.places.values()), Place(device_of(model))).device
        given: Mapping[str, Any] = getattr(model, "all_tied_weights_keys", None) or {}
        self.ties = {name: source for name, source in given.items() if isinstance(source, str)}
        self._order = {path: id(module) for path, module in named}

    @property
    def device(self) -> torch.device | None:
        return self._first

    def check(self, model: nn.Module) -> None:
        if self.missing:
            raise PatchError(f"{self.missing}: load the model again, with its weights or offloaded by accelerate")
        for path, module in model.named_modules():
            lost = [name for name, tensor in own_tensors(module) if tensor.is_meta]
            hook = aligning(module)
            if lost and not (hook is not None and hook.offload):
                raise no_weights(f"{path}.{lost[0]}" if path else lost[0])
        self._check_layers(model)
        self._check_ties()
        self._check_devices()

    def _check_layers(self, model: Any) -> None:
        """Raise PatchError for a layer that the map splits."""
        kinds = getattr(model, "_no_split_modules", None) or ()
        for path, module in model.named_modules():
            if type(module).__name__ in kinds:
                inside = {one: place for one, place in self.places.items() if one.startswith(f"{path}.")}
                if len(set(inside.values())) > 1:
                    first = next(iter(inside))
                    other = next(one for one in inside if inside[one] != inside[first])
                    raise PatchError(
                        f"the map splits {path}: {first} is on {inside[first]}, {other} on {inside[other]}; give a map "
                        f"that keeps it whole (no_split_module_classes=['{type(module).__name__}'])"
                    )

    def _check_ties(self) -> None:
        for name, source in self.ties.items():
            one, other = (self.places.get(full.rpartition(".")[0]) for full in (name, source))
            if one is not None and other is not None and one != other:
                raise PatchError(
                    f"{name} and {source} are one tied weight, and the map has it in two places, on {one} and on "
                    f"{other}: give both modules one place, or untie them"
                )

    def _check_devices(self) -> None:
        devices = list(dict.fromkeys(place.device for place in self.places.values()))
        kinds = {probe(device).arch for device in devices} if len({d.type for d in devices}) == 1 else set()
        if len(devices) > 1 and len(kinds) != 1:
            raise PatchError(
                f"the map's parts run on devices of different kinds ({', '.join(map(str, devices))}), and a plan is "
                "for one kind: leave those out of the map, or offload to them"
            )

    def check_room(self, plan: Any) -> None:
        rounded = [entry for entry in plan.replaced if entry.replacer.rounds and entry.choice is not None]
        spilled = [entry for entry in rounded if (place := self.places.get(entry.site.path)) and place.waits == "disk"]
        needed = sum(entry.choice.resident_after for entry in spilled)
        for folder in {folder_of(aligning(entry.site.original)) for entry in spilled}:
            if needed > (free := shutil.disk_usage(folder).free):
                raise PatchError(f"the replacements take {human(needed)} in {folder}, and {human(free)} are free there")
        for entry in plan.replaced:
            parts = [path for path in self.places if path.startswith(f"{entry.site.path}.")]
            if entry.replacer.whole and any(self.places[path].waits for path in parts):
                raise PatchError(
                    f"{entry.site.path} would be replaced with all that is in it, and its weights are offloaded: keep "
                    "it on a device, or use a recipe that replaces its linear layers"
                )
        for device in dict.fromkeys(place.device for place in self.places.values()):
            here = [entry for entry in rounded if self.places.get(entry.site.path) in (Place(device), None)]
            needed, room = sum(entry.choice.resident_after for entry in here), free_bytes(device)
            if room is not None and needed > room:
                raise PatchError(
                    f"{device} has {human(room)} free, and the replacements of its part take {human(needed)} beside "
                    "the originals; give it fewer layers in the map (max_memory), or free memory there"
                )

    def lines(self) -> list[str]:
        if len(set(self.places.values())) < 2 and not any(place.waits for place in self.places.values()):
            return []
        found: dict[Place, list[str]] = {}
        for path, place in self._tops():
            found.setdefault(place, []).append(path)
        return [f"on {place}: {', '.join(_spans(paths))}" for place, paths in found.items()]

    def _tops(self) -> Iterator[tuple[str, Place]]:
        """(path, place) of the largest modules that lie in one place, in the order of the tree."""
        done = ""
        for path in self._order:
            inside = {self.places[one] for one in self.places if one == path or one.startswith(f"{path}.")}
            if path and len(inside) == 1 and not (done and path.startswith(f"{done}.")):
                done = path
                yield path, inside.pop()

    @contextmanager
    def readable(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        hooked = [(module, hook) for module in modules if (hook := aligning(module)) is not None and hook.offload]
        brought: list[tuple[nn.Module, Any]] = []
        try:
            for module, hook in hooked:
                hook.pre_forward(module)
                brought.append((module, hook))
            yield
        finally:
            for module, hook in brought:
                hook.post_forward(module, None)

    def offload(self, pairs: Sequence[tuple[nn.Module, nn.Module]]) -> None:
        own: dict[int, OwnTensors] = {}
        for old, new in pairs:
            hook = aligning(old)
            if hook is None or not hook.offload:
                continue
            offloaded = {name: one for name, one in own_tensors(old) if name in hook.weights_map}
            shared = frozenset(name for name, one in own_tensors(new) if one is offloaded.get(name))
            waits = {where_waits(hook, name) for name in offloaded}
            memory = HostMemory(as_device(hook.execution_device), folder_of(hook) if "disk" in waits else None)
            owner = vars(new).get("source") or new  # a tied replacement computes with another's tensors
            if id(owner) not in own:
                own[id(owner)] = OwnTensors(owner, shared, memory)
            for name in shared:
                set_module_tensor_to_device(new, name, "meta")
                pin(hook, name)
            if len(own[id(owner)]):
                _swap_hook(new, hook, OffloadHook(hook, shared, own[id(owner)]))

    def free(self, pairs: Iterable[tuple[nn.Module, nn.Module]]) -> None:
        for old, new in pairs:
            hook, shared = aligning(old), {name for name, _ in own_tensors(new)}
            for name, _ in own_tensors(old) if hook is not None and hook.offload else ():
                if name not in shared:
                    weights, key = in_memory(hook, name)
                    weights.pop(key, None)


def _spans(paths: Sequence[str]) -> list[str]:
    """The paths, those of one form as one with ranges of numbers."""
    forms: dict[str, list[str]] = {}
    for path in paths:
        forms.setdefault(re.sub(r"\d+", "#", path), []).append(path)
    return [span(alike) for alike in forms.values()]


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on a GPU; None for other devices."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def _swap_hook(module: nn.Module, before: Any, after: Any) -> None:
    """Replace one of a module's hooks by another. `before` is shared with the original, which keeps it."""
    hook = vars(module)["_hf_hook"]
    single = hook is before
    vars(module)["_hf_hook"] = after if single else SequentialHook(*(after if o is before else o for o in hook.hooks))
