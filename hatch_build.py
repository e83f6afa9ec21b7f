"""Hatchling's hook of the wheel: takes in the CPU kernels of the folder that ACCELPATCH_WHEEL_KERNELS names.

The folder holds one library, as ``accelpatch build --out`` writes it: ``cpu-ARCH``. The wheel's tag is that of
scripts/build_wheel.py. Where the variable is not set, as in ``pip install .``, the wheel is for any machine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "ACCELPATCH_WHEEL_KERNELS"
PLACE = "accelpatch/kernels/prebuilt"  # kernels/compiling/prebuilt.py looks there
GLIBC = (2, 28)  # the oldest that the libraries run on


class Kernels(BuildHookInterface[Any]):
    """Adds the library to the wheel, and the platform to its tag."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files. Not of an editable install, which has the sources beside it."""
        given = os.environ.get(VARIABLE)
        if not given or version == "editable":
            return
        [library] = Path(given).iterdir()
        arch = library.name.removeprefix("cpu-")
        build_data["force_include"][str(library)] = f"{PLACE}/{library.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{GLIBC[0]}_{GLIBC[1]}_{arch}"
