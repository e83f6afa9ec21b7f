"""The hook of a replacement whose original accelerate offloads: its own tensors wait in host memory or on disk.

accelerate's own hook finds weights by the names of the original. A replacement has tensors of other names (codes,
scales, packs), and they are fewer bytes to move. Between calls they lie on the host as ordinary tensors, so that a
patched model can still be saved; where the original's weights lie on disk, they are mapped from unlinked files.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook
from accelerate.utils import send_to_device, set_module_tensor_to_device
from torch import Tensor, nn

from accelpatch.errors import PatchError

OF_MODULES = frozenset(vars(nn.Module()))
FOLLOWS = "like"  # buffer of a replacement: empty, on the device that it computes on


def mapped(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """A value in which every tensor went through `fn`: in tuples, dicts and dataclasses too; itself if it has none."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):
        made = {name: mapped(one, fn) for name, one in value.items()}
        return value if all(made[name] is one for name, one in value.items()) else made
    if isinstance(value, tuple):
        parts = [mapped(one, fn) for one in value]
        if all(new is old for new, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if one.init}
        changed = {name: made for name, one in fields.items() if (made := mapped(one, fn)) is not one}
        return dataclasses.replace(value, **changed) if changed else value
    return value


class HostMemory:
    """Where offloaded tensors wait. folder: of their files; None: they wait in memory, pinned for a GPU."""

    def __init__(self, device: torch.device, folder: str | None):
        self.device, self._folder = device, folder

    def keep(self, tensor: Tensor) -> Tensor:
        """The tensor as it waits. Raises PatchError for a disk that takes it not."""
        tensor = tensor.detach()
        if self._folder is not None and tensor.nbytes:
            try:
                return on_disk(tensor, self._folder)
            except OSError as error:
                raise PatchError(f"a replacement could not be written into {self._folder} ({error})") from error
        host = tensor.to("cpu")
        return host.pin_memory() if self.device.type == "cuda" and host.nbytes else host

    def bring(self, tensor: Tensor) -> Tensor:
        """The tensor on the device; a CPU gets it as it is."""
        return tensor.to(self.device, non_blocking=True)


def on_disk(tensor: Tensor, folder: str) -> Tensor:
    """A private mapping of a file with the tensor's bytes. The file is unlinked at once, and freed with the tensor."""
    handle, path = tempfile.mkstemp(prefix="accelpatch-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tofile(file)
        whole = torch.from_file(path, shared=False, size=tensor.nbytes, dtype=torch.uint8)
    finally:
        os.unlink(path)
    return whole.view(tensor.dtype).view(tensor.shape)


class OwnTensors:
    """The tensors of one module that are not its original's."""

    def __init__(self, module: nn.Module, shared: frozenset[str], memory: HostMemory):
        self._memory = memory
        self._offloaded = [(table, name, table[name]) for table, name in _places(module, shared)]
        self._offloaded = [(table, name, self._kept(table, name)) for table, name, _ in self._offloaded]

    def __len__(self) -> int:
        return len(self._offloaded)

    def _kept(self, table: dict[str, Any], name: str) -> Any:
        """Move a value to the host; returns it."""
        if isinstance(table[name], nn.Parameter):
            table[name].data = self._memory.keep(table[name])
            return table[name].data
        table[name] = mapped(table[name], self._memory.keep)
        return table[name]

    def bring(self) -> None:
        """Copy the tensors to the device."""
        for place, (table, name, host) in enumerate(self._offloaded):
            value = table.get(name)
            if isinstance(value, nn.Parameter):
                value.data = self._memory.bring(host)
            elif value is not None or host is not None:
                if value is not host:  # the module has written it since
                    host = None if value is None else self._kept(table, name)
                    self._offloaded[place] = (table, name, host)
                table[name] = mapped(host, self._memory.bring)

    def send_back(self) -> None:
        """Have them wait on the host again."""
        for table, name, host in self._offloaded:
            if isinstance(table.get(name), nn.Parameter):
                table[name].data = host
            else:
                table[name] = host


def _places(module: nn.Module, shared: frozenset[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """(table, name) of each tensor of a module, and of each attribute with tensors; without the names in `shared`."""
    for table in (module._parameters, module._buffers):
        yield from ((table, name) for name in list(table) if name not in shared and name != FOLLOWS)
    attributes = vars(module)
    for name in list(attributes):
        value = attributes[name]
        if name in OF_MODULES or isinstance(value, nn.Module):
            continue
        if mapped(value, Tensor.detach) is not value:  # it has tensors
            yield attributes, name


class OffloadHook(AlignDevicesHook):
    """As accelerate's hook `like`. shared: names of the original's tensors that the replacement has too."""

    of_accelpatch = True  # it belongs to the patch, and goes with it

    def __init__(self, like: Any, shared: frozenset[str], own: OwnTensors):
        super().__init__(
            like.execution_device, offload=True, io_same_device=like.io_same_device, weights_map=like.weights_map,
            offload_buffers=like.offload_buffers, skip_keys=like.skip_keys, tied_params_map=like.tied_params_map,
        )  # fmt: skip
        self.original_devices = like.original_devices
        self.shared, self.own = shared, own

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Have the module's tensors on the device, and its arguments."""
        for name in self.shared:
            set_module_tensor_to_device(module, name, self.execution_device, value=self.weights_map[name])
        self.own.bring()
        moved = send_to_device(kwargs, self.execution_device, skip_keys=self.skip_keys)
        return send_to_device(args, self.execution_device), moved

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Have them wait on the host again."""
        self.own.send_back()
        for name in self.shared:
            set_module_tensor_to_device(module, name, "meta")
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """The tensors stay on the device from now on."""
        self.own.bring()
        for name in self.shared:
            device = self.original_devices.get(name, self.execution_device)
            set_module_tensor_to_device(module, name, device, value=self.weights_map[name])
        return module
