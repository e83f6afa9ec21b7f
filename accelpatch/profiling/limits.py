"""What limits how many waves (warps) of a kernel run at once, and what fewer registers would give."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from accelpatch.device import facts_of
from accelpatch.errors import KernelError
from accelpatch.kernels.compiling.occupancy import Resources, waves

REGISTERS, SHARED, BLOCKS, NOTHING = "registers", "shared memory", "the size of a block", "nothing"
MOST = {"amd": 512, "nvidia": 255}  # registers that a lane can have


@dataclass(frozen=True)
class Occupancy:
    """waves: of a SIMD (NVIDIA: warps of a scheduler). unit: of a CU (SM). most: that a SIMD has room for. limit: what
    keeps it from more. one_less: waves with one register less. next: (registers, waves) from which on there are more;
    None where registers are not what limits it, or where none would help."""

    waves: int
    unit: int
    most: int
    limit: str
    one_less: int
    next: tuple[int, int] | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


def occupancy(arch: str, used: Resources) -> Occupancy:
    """The Occupancy of a kernel. Raises KernelError for an arch whose registers are not known."""
    facts = facts_of(arch)
    if facts is None:
        raise KernelError(f"the occupancy of {arch} is not known: it is for CDNA 2 to 4 and NVIDIA GPUs")
    name, now = facts.name, waves(facts.name, used)
    few, bare = replace(used, registers=1), replace(used, shared=0)
    most = waves(name, replace(few, shared=0, threads=facts.wave_size))
    limit = BLOCKS if now < most else NOTHING
    if waves(name, few) > now:
        limit = REGISTERS
    elif waves(name, bare) > now:
        limit = SHARED
    elif waves(name, replace(few, shared=0)) > now:
        limit = f"{REGISTERS} and {SHARED}"
    fewer = ((count, waves(name, replace(used, registers=count))) for count in range(used.registers - 1, 0, -1))
    better = next(((count, more) for count, more in fewer if more > now), None)
    one_less = waves(name, replace(used, registers=max(1, used.registers - 1)))
    return Occupancy(now, now * facts.schedulers, most, limit, one_less, better)


def steps(arch: str, threads: int = 0) -> list[tuple[int, int]]:
    """(most registers, waves) of an arch, for a kernel that is limited by registers alone: the table of the guides.
    threads: of a block; 0: of one wave."""
    facts = facts_of(arch)
    if facts is None:
        raise KernelError(f"the occupancy of {arch} is not known: it is for CDNA 2 to 4 and NVIDIA GPUs")
    found: dict[int, int] = {}
    for count in range(1, MOST[facts.vendor] + 1):
        found[waves(facts.name, Resources("", count, 0, 0, 0, 0, threads or facts.wave_size))] = count
    return [(count, number) for number, count in found.items()]
