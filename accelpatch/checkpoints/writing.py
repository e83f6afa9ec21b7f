"""Writes safetensors files tensor by tensor, so that no more than one need exist in memory at a time.

The header of a safetensors file stands before the data and lists it. Here room is reserved for it, and it is written
last, padded with spaces, as the format allows: https://github.com/huggingface/safetensors (format).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from accelpatch.checkpoints.saved import METHOD, VERSION, bytes_of
from accelpatch.errors import SaveError
from accelpatch.models import checkpoint

WORDS = {getattr(torch, name): word for word, name in checkpoint.DTYPES.items()}
INDEX = "model.safetensors.index.json"
ALIGNMENT = 8  # bytes; readers view the data at multiples of a tensor's element size
PER_TENSOR = 320  # bytes of header for a tensor, besides its name, which is there twice


class Shard:
    """One safetensors file in the making. room: bytes reserved for its header. facts: whether that has ours.

    entries: what the header says of its tensors, by their names. sites: path of a quantised module -> its replacer.
    """

    def __init__(self, path: Path, room: int, facts: bool = True):
        self.path, self.size, self._end = path, 0, 0
        self._room, self._facts = -(-room // ALIGNMENT) * ALIGNMENT, facts
        self._file = path.open("wb")
        self._file.seek(8 + self._room)
        self.entries: dict[str, Any] = {}
        self._digests: dict[str, str] = {}
        self.sites: dict[str, str] = {}
        self._last: list[tuple[str, torch.Tensor]] = []  # of sizes that would misalign what follows

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor."""
        if tensor.dtype not in WORDS:
            raise SaveError(f"{name} is {tensor.dtype}, which safetensors does not hold")
        self.size += tensor.nbytes
        data = tensor.detach().cpu()
        if data.nbytes % ALIGNMENT:
            self._last.append((name, data))
        else:
            self._write(name, data)

    def close(self) -> None:
        """Write what is left, and the header."""
        for name, tensor in sorted(self._last, key=lambda one: -one[1].element_size()):
            self._write(name, tensor)
        facts = {"version": VERSION, "sites": self.sites, "sha256": self._digests}
        own = {METHOD: json.dumps(facts)} if self._facts else {}
        header = {"__metadata__": {"format": "pt", **own}, **self.entries}
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > self._room:
            raise SaveError(f"{self.path}: its header takes {len(text)} bytes, and {self._room} were reserved")
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._room) + text.ljust(self._room))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.abandon()

    def abandon(self) -> None:
        """Close the file as it is."""
        self._file.close()

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        data = bytes_of(tensor)
        self._digests[name] = hashlib.sha256(data).hexdigest()
        self._file.write(data)
        place = [self._end, self._end + len(data)]
        self._end += len(data)
        self.entries[name] = {"dtype": WORDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}


class Shards:
    """The weight files of a checkpoint in `folder`; a new one begins where `most` bytes would be exceeded.

    names: all tensors that may come, for which each header reserves room. facts: whether headers have ours: what is
    quantised, and the tensors' SHA-256.
    """

    def __init__(self, folder: Path, names: list[str], most: int, facts: bool = True):
        self._folder, self._most, self._facts = folder, most, facts
        self._room = 4096 + sum(2 * len(json.dumps(name)) + PER_TENSOR for name in names)
        self._shards: list[Shard] = []

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        for shard in self._shards:
            shard.abandon()

    def add(self, tensors: dict[str, torch.Tensor], site: tuple[str, str] | None = None) -> None:
        """Write tensors that belong together. site: (path, replacer) of the quantised module that they are."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if not self._shards or (self._shards[-1].size and self._shards[-1].size + size > self._most):
            if self._shards:
                self._shards[-1].close()
            self._shards.append(Shard(self._folder / f"part-{len(self._shards)}", self._room, self._facts))
        if site is not None:
            self._shards[-1].sites |= [site]
        for name, tensor in tensors.items():
            self._shards[-1].add(name, tensor)

    def finish(self) -> None:
        """Close the last file, and give all their names, with an index where there are several."""
        if self._shards:
            self._shards[-1].close()
        if len(self._shards) == 1:
            self._shards[0].path.rename(self._folder / "model.safetensors")
            return
        places: dict[str, str] = {}
        for shard, name in zip(self._shards, self._names(), strict=True):
            shard.path.rename(self._folder / name)
            places |= dict.fromkeys(shard.entries, name)
        index = {"metadata": {"total_size": sum(shard.size for shard in self._shards)}, "weight_map": places}
        (self._folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))

    def _names(self) -> Iterator[str]:
        count = len(self._shards)
        return (f"model-{place:05}-of-{count:05}.safetensors" for place in range(1, count + 1))
