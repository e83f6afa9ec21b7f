"""Stores finished weights of a float checkpoint that is being quantised, so that an interrupted run can go on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from accelpatch.checkpoints.saved import bytes_of, digest_of
from accelpatch.checkpoints.target import FULL, check_folder
from accelpatch.errors import SaveError
from accelpatch.modules.quantized_module import QuantizedModule
from accelpatch.patching.apply import Built, build
from accelpatch.patching.entry import Entry

MADE_OF = "made_of"


class Store:
    """A folder with a file for each finished weight of a CPU, named by a digest of its inputs. None: nothing is stored.

    A GPU makes a weight again in less time than a disk takes to write it.
    """

    def __init__(self, folder: Path | None):
        self._folder = folder

    def check_room(self, size: int, device: torch.device) -> None:
        """Raise SaveError where the disk lacks room for the finished weights and the folder made of them, `size` bytes
        each."""
        if self._folder is not None:
            kept = sum(file.stat().st_size for file in self._folder.glob("*.safetensors"))
            check_folder(self._folder, (2 if device.type == "cpu" else 1) * size - kept)

    def built(self, entry: Entry, weight: Tensor) -> Built:
        """The replacement of a site, from the store or made from the weight in its module and then stored."""
        if self._folder is None or not weight.is_cpu:
            return _measured(build(entry), weight)
        file = self._folder / f"{entry.site.path}.safetensors"
        made_of = _digest(entry, weight)
        saved = _read(file, made_of)
        assert entry.replacer is not None
        assert entry.choice is not None
        made = _measured(build(entry, saved and entry.replacer.weight(entry.choice, saved)), weight)
        if saved is None and isinstance(made.new, QuantizedModule):
            self._keep(file, made.new.canonical(), made_of)
        return made

    def _keep(self, file: Path, weight: Any, made_of: str) -> None:
        _write(file, weight.tensors(), made_of)


class Blocks:
    """A folder with a file for each block of layers whose weights calibration has made. made_of: describes the inputs
    of all of them; files of other inputs are not used."""

    def __init__(self, folder: Path, made_of: str):
        self._folder, self._made_of = folder, hashlib.sha256(made_of.encode()).hexdigest()

    def finished(self, block: str) -> dict[str, dict[str, Tensor]] | None:
        """path -> tensors by name, as they were stored; None for a block that is not finished, or has other inputs."""
        found = _read(self._file(block), self._made_of)
        if found is None:
            return None
        paths: dict[str, dict[str, Tensor]] = {}
        for name, tensor in found.items():
            path, _, part = name.rpartition(".")
            paths.setdefault(path, {})[part] = tensor
        return paths

    def keep(self, block: str, made: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Store the tensors of a block: path -> tensors by name. Raises SaveError where they cannot be written."""
        parts = {f"{path}.{name}": one for path, tensors in made.items() for name, one in tensors.items()}
        _write(self._file(block), parts, self._made_of)

    def _file(self, block: str) -> Path:
        return self._folder / f"{block}.block.safetensors"


def _write(file: Path, tensors: Mapping[str, Tensor], made_of: str) -> None:
    parts = {name: one.detach().cpu().clone(memory_format=torch.contiguous_format) for name, one in tensors.items()}
    partial = file.with_suffix(".partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(parts, partial, {MADE_OF: made_of} | {name: digest_of(one) for name, one in parts.items()})
        os.replace(partial, file)
    except (OSError, SafetensorError) as error:
        full = "" if isinstance(error, OSError) and error.errno not in FULL else "free some space there, or "
        raise SaveError(f"{file} cannot be written ({error}): {full}name another folder") from error


def _measured(made: Built, weight: Tensor) -> Built:
    """The build with the relative RMSE of its weight, against the float weight in the original's shape."""
    if isinstance(made.new, QuantizedModule):
        with torch.no_grad():
            full = made.new.dequantized()
            own = weight.t() if made.new.transposed else weight
            difference, size = (full - own).float().norm(), own.float().norm()
            made.weight_error = float(difference / size) if difference > 0 else 0.0
    return made


def _digest(entry: Entry, weight: Tensor) -> str:
    assert entry.choice is not None
    assert entry.replacer is not None
    facts = f"{entry.replacer.name} {sorted(entry.choice.detail.items())} {weight.dtype} {list(weight.shape)}"
    digest = hashlib.sha256(facts.encode())
    digest.update(bytes_of(weight))
    return digest.hexdigest()


def _read(file: Path, made_of: str) -> dict[str, Any] | None:
    try:
        with safe_open(file, framework="pt") as opened:
            facts = opened.metadata() or {}
            found: dict[str, Any] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            if facts != {MADE_OF: made_of} | {name: digest_of(one) for name, one in found.items()}:
                return None
    except (OSError, SafetensorError):
        return None
    return found
