"""How long matrix instructions (MFMA) take: AMD's guides count passes, of four cycles each."""

from __future__ import annotations

import re


def is_double(name: str) -> bool:
    """Whether it multiplies f64, for which there is a separate execution unit."""
    return "_f64_" in name


def is_xdl(name: str, arch: str) -> bool:
    """Whether it runs in the XDL unit, which has hazard rules of its own: not for f64, nor from gfx942 on for factors
    in f32."""
    return not is_double(name) and (arch == "gfx90a" or not re.search(r"x\d+(?:_\d+b)?_?f32$", name))


def matrix_passes(name: str, arch: str) -> int:
    """Passes of a matrix instruction, by the chapter on these in the ISA guides of CDNA 2 to 4."""
    shape = re.search(r"_(\d+)x(\d+)x(\d+)", name)
    assert shape is not None
    rows, depth = int(shape[1]), int(shape[3])
    if is_double(name):
        return 4 if rows == 4 else 16 if arch == "gfx950" else 8
    if rows == 4:
        return 2
    long = (depth <= 4 or "f8f6f4" in name) and "xf32" not in name
    if arch == "gfx90a":
        return 8 if rows == 16 else 16
    return (8 if long else 4) if rows == 16 else (16 if long else 8)
