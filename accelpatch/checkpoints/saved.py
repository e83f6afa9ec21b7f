"""What a saved patched model is on disk, and reading its headers.

config.json        the family's own, with quantization_config: {quant_method: accelpatch, version, recipe (YAML)}
recipe.yaml        the same recipe, for people
*.safetensors      float tensors under the family's names. A quantised weight is PATH.q, PATH.scale, PATH.offset,
                   PATH.order and PATH.input_scale in the canonical layout (kernels/layouts), which no device decides; a
                   layer that was replaced with all that is in it has its replacement's tensors under its name
  header metadata  accelpatch: JSON {version, sites: {path: replacer}, sha256: {tensor: hex digest of its bytes}}
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from accelpatch.errors import LoadError
from accelpatch.models.checkpoint import header

METHOD = "accelpatch"  # quant_method in config.json, and the key of the header's metadata
VERSION = 1
RECIPE = "recipe.yaml"
THREADS = 16


@dataclass(frozen=True)
class SavedTensor:
    """One tensor of a checkpoint, as a header says. dtype: in safetensors' words, such as F16. sha256: "" for none."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class Saved:
    """The headers of a checkpoint. sites: dotted path of a quantised module -> its replacer's name. opener: opens a
    file for its `get_tensor(name)`; None: a safetensors file."""

    sites: Mapping[str, str]
    tensors: Mapping[str, SavedTensor]
    opener: Callable[[Path], Any] | None = None


def read(files: Iterable[str | Path], layout: Callable[[Iterable[str]], dict[str, str]] | None = None) -> Saved:
    """Read the headers of a checkpoint's weight files. Raises LoadError, naming the file, for what does not fit.

    layout: of a checkpoint that others wrote, without these headers: names of all tensors -> sites.
    """
    sites: dict[str, str] = {}
    tensors: dict[str, SavedTensor] = {}
    for file in map(Path, files):
        metadata, shapes = header(file, "fetch or write it again")
        facts = _facts(file, metadata) if layout is None else {"sites": {}, "sha256": dict.fromkeys(shapes, "")}
        digests = facts["sha256"]
        if digests.keys() != shapes.keys():
            odd = sorted(digests.keys() ^ shapes.keys())
            raise LoadError(f"{file}: its header lists other tensors than it holds ({odd[0]}): write it again")
        sites |= facts["sites"]
        tensors |= {name: SavedTensor(file, *shapes[name], digests[name]) for name in shapes}
    return Saved(sites if layout is None else layout(tensors), tensors)


def _facts(file: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        facts = json.loads(metadata[METHOD])
        version = facts["version"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise LoadError(f"{file} was not written by accelpatch, though config.json says so: write it again") from error
    if version != VERSION:
        raise LoadError(
            f"{file} has version {version!r} of the format, and this accelpatch reads {VERSION}: upgrade it"
        )
    for key in ("sites", "sha256"):
        if not isinstance(facts.get(key), dict) or not all(isinstance(value, str) for value in facts[key].values()):
            raise LoadError(f"{file}: its header's {key} is damaged: write it again")
    return dict(facts)


class Reading:
    """All tensors of a checkpoint, read once by several threads, which compare each with its SHA-256.

    wanted: names of those that are kept, on `device`; of the others, which somebody else loads, only the hash is taken.
    """

    def __init__(self, saved: Saved, wanted: Collection[str], device: torch.device):
        self._pool = ThreadPoolExecutor(max_workers=min(os.cpu_count() or 1, THREADS))
        self._files = ExitStack()
        opener = saved.opener or _opened
        opened = {
            file: self._files.enter_context(opener(file)) for file in {one.file for one in saved.tensors.values()}
        }
        self._reads = {
            name: self._pool.submit(_checked, opened[stored.file], name, stored, device if name in wanted else None)
            for name, stored in saved.tensors.items()
        }

    def take(self, name: str) -> torch.Tensor | None:
        """A wanted tensor, which is given up; None where the checkpoint has none of this name."""
        return self._reads.pop(name).result() if name in self._reads else None

    def finish(self) -> None:
        """Wait for all others. Raises LoadError with the name of a tensor that is not what was saved."""
        for read in self._reads.values():
            read.result()

    def close(self) -> None:
        """Stop reading."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._files.close()


@contextmanager
def one_by_one(saved: Saved) -> Iterator[Callable[[str], torch.Tensor]]:
    """Context manager: a function that reads one tensor by its name, and compares it with its SHA-256 (LoadError)."""
    with ExitStack() as files:
        opened = {file: files.enter_context(_opened(file)) for file in {one.file for one in saved.tensors.values()}}

        def tensor(name: str) -> torch.Tensor:
            stored = saved.tensors[name]
            found = _checked(opened[stored.file], name, stored, torch.device("cpu"))
            assert found is not None
            return found

        yield tensor


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{file} cannot be read ({error}): fetch it again") from error


def _checked(opened: Any, name: str, stored: SavedTensor, device: torch.device | None) -> torch.Tensor | None:
    try:
        tensor: torch.Tensor = opened.get_tensor(name)
        same = not stored.sha256 or digest_of(tensor) == stored.sha256
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{stored.file}: {name} cannot be read ({error}): fetch it again") from error
    if not same:
        raise LoadError(f"{stored.file}: {name} is not what was saved (its SHA-256 differs): fetch it again")
    return None if device is None else tensor.to(device)


def digest_of(tensor: torch.Tensor) -> str:
    """SHA-256 of a CPU tensor's bytes, in row-major order."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a CPU tensor, in row-major order; copied only where it is not contiguous."""
    data: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(data)
