"""How long the instructions of the matrix unit take, in passes of four cycles."""

from __future__ import annotations

import re


def is_double(name: str) -> bool:
    """Whether it multiplies numbers of 64 bits, which another unit does."""
    return "_f64_" in name


def is_xdl(name: str, arch: str) -> bool:
    """Whether it runs in the units for low precision; from gfx942 on the forms with f32 factors do not."""
    return not is_double(name) and (arch == "gfx90a" or not re.search(r"x\d+(?:_\d+b)?_?f32$", name))


def passes(name: str, arch: str) -> int:
    """Passes of an instruction; CDNA 2 to 4 ISA guides, chapter on matrix instructions."""
    shape = re.search(r"_(\d+)x(\d+)x(\d+)", name)
    assert shape is not None
    rows, depth = int(shape[1]), int(shape[3])
    if is_double(name):
        return 4 if rows == 4 else 16 if arch == "gfx950" else 8
    if rows == 4:
        return 2
    several = (depth <= 4 or "f8f6f4" in name) and "xf32" not in name
    if arch == "gfx90a":
        return 8 if rows == 16 else 16
    return (8 if several else 4) if rows == 16 else (16 if several else 8)
