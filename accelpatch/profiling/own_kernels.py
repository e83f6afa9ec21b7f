"""Resources of accelpatch's own kernels, compiled for an arch, with the counts of their instructions.

AMD's come from the assembly. NVIDIA's resources come from ptxas, their instructions from cuobjdump where it is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from accelpatch.device import Device
from accelpatch.errors import KernelError
from accelpatch.kernels.compiling import resources, targets
from accelpatch.kernels.compiling.compiler import including
from accelpatch.kernels.compiling.targets import Target
from accelpatch.profiling import code_objects
from accelpatch.profiling.code_objects import Kernel
from accelpatch.profiling.limits import occupancy


def own(device: Device, library: str | None = None) -> list[Kernel]:
    """The kernels of one library for a GPU, or of all. Raises KernelError where they cannot be compiled here."""
    if device.kind == "cpu":
        raise KernelError("a CPU's functions have no occupancy: name a GPU's arch, such as --arch gfx942")
    names = targets.names_of(device)
    if library is not None and library not in names:
        raise KernelError(f"there is no library {library!r} for {device.arch}; there are: {', '.join(names)}")
    found = []
    for name in [library] if library else names:
        made = targets.target(name, device)
        if reason := targets.missing(made):
            raise KernelError(reason)
        kernels = list(_of_assembly(made) if device.vendor == "amd" else _of_nvidia(made))
        readable = resources.demangled([one.used.kernel for one in kernels])
        found += [replace(one, file=name, used=replace(one.used, kernel=readable[one.used.kernel])) for one in kernels]
    return found


def _of_assembly(made: Target) -> Iterator[Kernel]:
    with tempfile.TemporaryDirectory() as folder:
        for source in made.sources:
            into = Path(folder) / "kernels.s"
            resources._run([*_command(made, source), "--cuda-device-only", "-S", "-o", str(into)])
            yield from code_objects.of_file(into)


def _of_nvidia(made: Target) -> Iterator[Kernel]:
    with tempfile.TemporaryDirectory() as folder:
        for place, source in enumerate(made.sources):
            into = Path(folder) / str(place)
            for used in resources._of_source(made, str(targets.compiler(made)), source, into).values():
                counts, why = code_objects.counts_of_cubin(into / "cubin")
                yield Kernel("", made.arch, used, counts=counts.get(used.kernel), occupancy=occupancy(made.arch, used),
                             notes=(why,) if why else ())  # fmt: skip


def _command(made: Target, source: str) -> list[str]:
    return [
        str(targets.compiler(made)), *made.flags, *including(made), *made.sources[source], str(made.home / source),
    ]  # fmt: skip
