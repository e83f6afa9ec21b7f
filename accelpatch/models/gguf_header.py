"""Reads the header of a GGUF file (https://github.com/ggml-org/ggml, docs/gguf.md), trusting none of its sizes."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from accelpatch.errors import LoadError

#: GGML type -> (name, values in a block, bytes of a block)
TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4),
    27: ("I64", 1, 8), 28: ("F64", 1, 8), 30: ("BF16", 1, 2),
}  # fmt: skip
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MOST_DIMENSIONS, DEEPEST, MOST_FLOATS = 8, 4, 4096
ALIGNMENT, MOST_ALIGNMENT = 32, 1 << 20  # of the tensors' bytes; 32 where the file does not say
KEPT = 512  # longest array whose values are kept, such as one a layer; of vocabularies only the length is
BESIDE = "put the model's own config.json beside the file, and give the folder"


@dataclass
class Header:
    """values: the file's metadata. tensors: (name, GGML type, shape). offsets: of their bytes, behind byte `start`."""

    version: int
    values: dict[str, Any]
    tensors: list[tuple[str, int, list[int]]]
    offsets: list[int]
    start: int


@dataclass(frozen=True)
class Metadata:
    """What the header of a file says of its architecture."""

    path: Path
    header: Header

    @property
    def architecture(self) -> str:
        """The architecture's name in the file."""
        return str(self.header.values.get("general.architecture"))

    @property
    def facts(self) -> dict[str, Any]:
        """The keys under the architecture's prefix, without it."""
        prefix = f"{self.architecture}."
        found = self.header.values.items()
        return {name.removeprefix(prefix): value for name, value in found if name.startswith(prefix)}

    def of(self, architectures: str) -> bool:
        """Whether the file's architecture is one of these."""
        return self.architecture in architectures.split()

    def number(self, name: str, default: float = math.nan) -> float:
        """The number that a key has, or the default. Raises LoadError for a value that is no finite number."""
        value = self.facts.get(name, default)
        if name in self.facts and (type(value) not in (int, float) or not math.isfinite(value)):
            self.refuse(name)
        return value

    def floats(self, name: str) -> list[float]:
        """The values of a float32 tensor. Raises LoadError for one of another form, and for values that are not
        positive."""
        at = next(at for at, (one, _, _) in enumerate(self.header.tensors) if one == name)
        _, kind, shape = self.header.tensors[at]
        count, start = math.prod(shape), self.header.start + self.header.offsets[at]
        if kind != 0 or len(shape) != 1 or not 0 < count <= MOST_FLOATS or start + 4 * count > self.path.stat().st_size:
            raise LoadError(f"{self.path}: {name} is no list of float32 values, or truncated: fetch the file again")
        with self.path.open("rb") as file:
            file.seek(start)
            values = list(struct.unpack(f"<{count}f", file.read(4 * count)))
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise LoadError(f"{self.path}: {name} has values that are not positive: fetch the file again")
        return values

    def refuse(self, name: str) -> NoReturn:
        """Raise LoadError for a key that no configuration holds."""
        raise LoadError(f"{self.path}: {self.architecture}.{name} is {self.facts.get(name)!r}, which changes what the "
                        f"model computes and is not read: {BESIDE}")  # fmt: skip


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, numbers to float32's precision."""
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)


class _Reader:
    """Reads little-endian values; no read may go beyond the end of the file."""

    def __init__(self, file: BinaryIO, size: int):
        self._file, self._size, self.at = file, size, 0

    def take(self, count: int) -> bytes:
        if count > self._size - self.at:
            raise ValueError(f"{count} bytes are wanted at {self.at}, and the file has {self._size}")
        self.at += count
        return self._file.read(count)

    def scalar(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def count(self, least: int) -> int:
        """A number of items that take at least so many bytes each."""
        found = int(self.scalar("Q"))
        if found * least > self._size - self.at:
            raise ValueError(f"{found} items are announced, and the file has {self._size} bytes")
        return found

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY or depth >= DEEPEST:
            raise ValueError(f"a value has the type {kind}")
        inner = self.scalar("I")
        if inner in SCALARS:
            size = struct.calcsize(f"<{SCALARS[inner]}")
            length = self.count(size)
            data = self.take(length * size)
            return list(struct.unpack(f"<{length}{SCALARS[inner]}", data)) if length <= KEPT else f"{length} values"
        length = self.count(8 if inner == STRING else 12)
        kept = [self.value(inner, depth + 1) for _ in range(length)]
        return kept if length <= KEPT else f"{length} values"


def read_header(path: Path) -> Header:
    """The header of a GGUF file. Raises LoadError for a file that is truncated or damaged."""
    try:
        with path.open("rb") as file:
            return _read(_Reader(file, path.stat().st_size))
    except (ValueError, struct.error, OSError) as error:
        raise LoadError(f"{path} is no GGUF file, or is truncated or damaged ({error}): fetch it again") from error


def _read(reader: _Reader) -> Header:
    if reader.take(4) != b"GGUF":
        raise ValueError("it does not begin as a GGUF file does")
    version = reader.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"it has version {version}, and 2 and 3 are read")
    tensors, values = reader.count(24), reader.count(12)
    found: dict[str, Any] = {}
    for _ in range(values):
        name = reader.text()
        found[name] = reader.value(reader.scalar("I"))
    listed = [_tensor(reader) for _ in range(tensors)]
    unit = found.get("general.alignment", ALIGNMENT)
    if type(unit) is not int or not 0 < unit <= MOST_ALIGNMENT:
        raise ValueError(f"its general.alignment is {unit!r}")
    start = -(-reader.at // unit) * unit
    return Header(version, found, [one for one, _ in listed], [offset for _, offset in listed], start)


def _tensor(reader: _Reader) -> tuple[tuple[str, int, list[int]], int]:
    name, dimensions = reader.text(), reader.scalar("I")
    if dimensions > MOST_DIMENSIONS:
        raise ValueError(f"{name} has {dimensions} dimensions")
    shape = [int(reader.scalar("Q")) for _ in range(dimensions)]
    kind = reader.scalar("I")
    return (name, kind, shape[::-1]), int(reader.scalar("Q"))
