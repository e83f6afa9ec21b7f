"""Tiles of flash_attention's kernel, by arch and head size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from accelpatch.device import Device

LEAST_WIDE = 16  # what a matrix instruction takes


@dataclass(frozen=True)
class Tile:
    """Queries and keys of a program's tile; its warps and pipeline stages. per_simd: of AMD, the wavefronts of a SIMD
    that registers must leave room for (waves_per_eu); 0: as the compiler likes. tma: keys and values are loaded by
    Hopper's TMA, where the call allows that.
    """

    m: int
    n: int
    warps: int
    stages: int
    per_simd: int = 0
    tma: bool = False

    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        more = {"waves_per_eu": self.per_simd} if self.per_simd else {}
        return {"num_warps": self.warps, "num_stages": self.stages, **more}

    def shared(self, wide: int, itemsize: int, vendor: str) -> int:
        """Bytes of shared memory: the stages of keys and values, and of NVIDIA the queries."""
        if vendor == "amd":
            return max(1, self.stages - 1) * 2 * self.n * wide * itemsize
        return (self.m + self.stages * 2 * self.n) * wide * itemsize


Both = tuple[Tile, Tile]  # for causal attention, and for that of all keys

#: (matrix unit or vendor, padded head size) -> the preferred tiles
TILES: Mapping[tuple[str, int], Both] = {
    ("wgmma", 64): (Tile(128, 128, 8, 3, tma=True), Tile(128, 128, 8, 3, tma=True)),
    ("wgmma", 128): (Tile(128, 64, 8, 3, tma=True), Tile(128, 128, 8, 2, tma=True)),
    ("wgmma", 256): (Tile(128, 32, 8, 2, tma=True), Tile(128, 32, 8, 2, tma=True)),
    ("nvidia", 64): (Tile(128, 64, 4, 3), Tile(128, 64, 4, 3)),
    ("nvidia", 128): (Tile(128, 32, 4, 3), Tile(128, 32, 4, 3)),
    ("nvidia", 256): (Tile(64, 32, 4, 2), Tile(64, 32, 4, 2)),
    ("mfma without fp8", 128): (Tile(128, 32, 8, 1, 2), Tile(128, 32, 8, 1, 2)),
    ("wmma", 64): (Tile(128, 32, 8, 1), Tile(128, 32, 8, 1)),
    ("wmma", 128): (Tile(128, 16, 8, 1), Tile(128, 16, 8, 1)),
    ("amd", 64): (Tile(128, 64, 4, 1, 2), Tile(128, 64, 4, 1, 2)),
    ("amd", 128): (Tile(128, 64, 8, 1, 2), Tile(128, 64, 8, 1, 2)),
    ("amd", 256): (Tile(64, 32, 4, 1), Tile(64, 32, 4, 1)),
    ("cpu", 64): (Tile(32, 16, 4, 1), Tile(32, 16, 4, 1)),  # of the interpreter
}
WIDE_FLOATS = Tile(32, 32, 4, 1)  # float32 has no matrix unit in full precision
BIASED_AMD = Tile(64, 32, 4, 1)
#: vendor -> most queries -> tile; on AMD 64 with two stages are more than Triton 3.9's compiler takes with a softcap
FEW: Mapping[str, Mapping[int, Tile]] = {
    "nvidia": {16: Tile(16, 64, 4, 2), 64: Tile(64, 64, 4, 2)},
    "amd": {16: Tile(16, 64, 4, 2), 64: Tile(64, 64, 4, 1)},
}
#: vendor -> masks that are tensors -> most keys of a tile: masks take registers, and with so many keys none spill
MOST_KEYS: Mapping[str, Mapping[str, int]] = {
    "nvidia": {"ranges": 64, "bias": 32},
    "amd": {"ranges": 32, "bias": 32},
}


def padded(size: int) -> int:
    """Columns of a tile for heads of this size: the next power of 2."""
    return max(LEAST_WIDE, 1 << (size - 1).bit_length())


def fits(tile: Tile, device: Device, size: int, itemsize: int = 2) -> bool:
    """Whether a tile's stages fit the shared memory of a block."""
    room = device.facts.block_shared if device.facts else 64 << 10
    return tile.shared(padded(size), itemsize, device.vendor) <= room


def matrix_unit(device: Device) -> str:
    """The name of a GPU's matrix unit; of AMD's first, which has no 8-bit floats, with that."""
    facts = device.facts
    if facts is None or facts.matrix is None:
        return device.vendor
    return "mfma without fp8" if facts.matrix == "mfma" and facts.fp8 is None else facts.matrix


def chosen(device: Device, size: int, dtype: torch.dtype, causal: bool, length: int, masks: str = "") -> Tile:
    """The tile of a call. masks: "ranges" or "bias", "" where no tensor says what is seen."""
    wide = max(64, padded(size))
    if device.kind == "cpu":
        return TILES["cpu", 64][0]
    if dtype == torch.float32:
        return WIDE_FLOATS
    both = TILES.get((matrix_unit(device), wide)) or TILES[device.vendor, wide]
    tile = both[0 if causal else 1]
    few = next((tile for most, tile in FEW[device.vendor].items() if length <= most and wide < 256), None)
    if few is not None and fits(few, device, size):
        tile = few
    if masks == "bias" and device.vendor == "amd":
        return replace(BIASED_AMD, m=min(tile.m, BIASED_AMD.m))
    if masks:
        warps = max(tile.warps, tile.m // 16) if masks == "bias" else tile.warps
        tile = replace(tile, n=min(tile.n, MOST_KEYS[device.vendor][masks]), warps=warps)
    return tile
