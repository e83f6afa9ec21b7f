"""Global memory: the host's own, at its own addresses, and of that only what the kernel was given."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from accelpatch.jit.emulate.wave import Array


@dataclass(frozen=True)
class Region:
    """bytes_: uint8 view of the memory. begin, end: addresses. name: in messages. owner: kept alive."""

    name: str
    begin: int
    end: int
    bytes_: Array
    writable: bool
    owner: object


class Memory:
    """What a kernel may touch, as regions. A lane's address outside of all is an error that names the nearest."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.recent: Region | None = None

    def add(self, name: str, address: int, size: int, owner: object, writable: bool = True) -> None:
        """Allow `size` bytes at a host address that `owner` keeps alive."""
        if size:
            buffer = (ctypes.c_uint8 * size).from_address(address)
            region = Region(name, address, address + size, np.ctypeslib.as_array(buffer), writable, owner)
            self.regions.append(region)

    def region(self, first: int, last: int) -> Region | None:
        """The region that has all bytes from `first` up to `last`."""
        recent = self.recent
        if recent is not None and recent.begin <= first and last <= recent.end:
            return recent
        for region in self.regions:
            if region.begin <= first and last <= region.end:
                self.recent = region
                return region
        return None

    def load(self, addresses: Array, size: int) -> Array:
        """uint8[lanes, size] at uint64 addresses. Raises OutOfBounds."""
        out = np.empty((len(addresses), size), np.uint8)
        for region, chosen in self._by_region(addresses, size):
            at = (addresses[chosen] - np.uint64(region.begin)).astype(np.int64)
            out[chosen] = region.bytes_[at[:, None] + np.arange(size)]
        return out

    def store(self, addresses: Array, data: Array) -> None:
        """Write uint8[lanes, size]; of lanes with the same address the last one's stays. Raises OutOfBounds."""
        size = data.shape[1]
        for region, chosen in self._by_region(addresses, size):
            if not region.writable:
                raise OutOfBounds(int(np.flatnonzero(chosen)[0]) if chosen.dtype == bool else 0, region.name, True)
            at = (addresses[chosen] - np.uint64(region.begin)).astype(np.int64)
            region.bytes_[at[:, None] + np.arange(size)] = data[chosen]

    def _by_region(self, addresses: Array, size: int) -> list[tuple[Region, Array]]:
        if not len(addresses):
            return []
        if (region := self.region(int(addresses.min()), int(addresses.max()) + size)) is not None:
            return [(region, np.ones(len(addresses), bool))]
        found: dict[int, list[int]] = {}
        regions: dict[int, Region] = {}
        for at, address in enumerate(addresses.tolist()):
            one = self.region(address, address + size)
            if one is None:
                raise OutOfBounds(at, self._near(address, size))
            regions[one.begin] = one
            found.setdefault(one.begin, []).append(at)
        whole = np.arange(len(addresses))
        return [(regions[begin], np.isin(whole, chosen)) for begin, chosen in found.items()]

    def _near(self, address: int, size: int) -> str:
        if not self.regions:
            return "the kernel was given no memory"
        near = min(self.regions, key=lambda one: max(one.begin - address, address - one.end, 0))
        return f"{address - near.begin:+d} bytes from the start of {near.name}, which has {near.end - near.begin} bytes"


class OutOfBounds(Exception):
    """at: the number, among the addresses, of the one at fault. words: where it lies."""

    def __init__(self, at: int, words: str, read_only: bool = False) -> None:
        super().__init__(words)
        self.at, self.words, self.read_only = at, words, read_only
