"""The libraries of Composable Kernel, for AMD Instinct alone: one instance each, a form, an output and a tile.

CK is headers of ROCm (the package composablekernel-dev). A library is compiled where they are found, in 15 to 40 s.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

FORMS = ("bmm", "linear", "scaled", "scaled_bias")  # the three are numbered as in gemm_w8a8.h
OUTPUTS = ("i8", "fp32", "bf16", "fp16")
TILES = ("256x128", "64x128", "any", "128x128")
#: form -> its large tile. With scales, whose loads are of single values, clang keeps 256x128's in scratch memory.
LARGE = {"bmm": "256x128", "linear": "256x128", "scaled": "128x128", "scaled_bias": "128x128"}
SOURCE = "gemm_w8a8.hip"
USUAL = "/opt/rocm"
NO_HEADERS = (
    "there are no headers of Composable Kernel here (ck/ck.hpp and ck/config.h): install ROCm's package"
    " composablekernel-dev, or set CK_PATH to the folder in which CK was installed"
)


def library_of(form: str, output: str, tile: str) -> str:
    """The library of an instance: ck_linear_i8_256x128."""
    name = f"ck_{form}_{output}_{tile}"
    assert name in CK_LIBRARIES, name
    return name


def _flags(form: str, output: str, tile: str) -> tuple[str, ...]:
    numbers = {"FORM": FORMS.index(form), "OUTPUT": OUTPUTS.index(output), "TILE": TILES.index(tile)}
    return tuple(f"-DONLY_{name}={number}" for name, number in numbers.items())


#: library -> its source, with the flags that leave it one instance
CK_LIBRARIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    f"ck_{form}_{output}_{tile}": {SOURCE: _flags(form, output, tile)}
    for form in FORMS
    for output in OUTPUTS
    for tile in (LARGE[form], "64x128", "any")
}


def headers() -> Path | None:
    """The folder of CK's headers: of $CK_PATH, else of ROCm ($ROCM_PATH or its usual place); None where there is none.

    $CK_PATH is where CK was installed, or its include folder itself.
    """
    named, rocm = os.environ.get("CK_PATH"), os.environ.get("ROCM_PATH") or USUAL
    places = [Path(named, "include"), Path(named)] if named else [Path(rocm, "include")]
    return next((place for place in places if all((place / "ck" / file).is_file() for file in _NEEDED)), None)


_NEEDED = ("ck.hpp", "config.h")  # a checkout has the latter only as a template, which its build fills in


def version(folder: str) -> str:
    """What identifies the headers in a folder: CK's version file, where it has one."""
    file = Path(folder, "ck", "version.h")
    return f"{folder}\n{file.read_text() if file.is_file() else ''}"
