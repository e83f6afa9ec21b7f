"""An emulator of gfx90a, gfx942 and gfx950 (CDNA, 64 lanes): runs assembly text on numpy arrays, and watches.

``run`` runs a kernel on the host's memory. Besides the results it finds what a GPU would not say: registers read before
the s_waitcnt for their load, or before anything wrote them; races of waves on LDS; addresses out of bounds; loops that
never end. What it does not know is an error, never a shrug. It has its own meanings of the instructions, which the
generator shares no line with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from accelpatch.jit.emulate import families as families
from accelpatch.jit.emulate.fault import EmulationError
from accelpatch.jit.emulate.launch import Options, prepare

__all__ = ["EmulationError", "run"]

STEPS = 1_000_000


def run(
    assembly: str,
    name: str,
    grid: Sequence[int],
    block: Sequence[int],
    arguments: Sequence[tuple[str, Any]],
    *,
    arch: str,
    shared: int = 0,
    steps: int = STEPS,
    memory: Sequence[Any] = (),
    strict: bool = True,
    misaligned: bool = False,
    wait_states: bool = True,
    seed: int = 0,
) -> None:
    """Run the kernel `name` of an assembly file, all its workgroups, one after the other.

    grid: workgroups, block: threads of each, one to three sizes. arguments: (kind, value) in the metadata's order; kind
    is a value_kind of it ("global_buffer", "by_value") or a number's type ("int", "f32", ...). A buffer is a CPU
    tensor, a numpy array, or the address of a live CPU tensor's memory; the kernel may touch that, and tensors or
    arrays in `memory` (to which structures among the arguments may point). shared: bytes of dynamic LDS. steps: most
    instructions of a wave. strict: reading what was never written is an error; without it (for compilers' output, which
    copies such registers where their value does not matter) they hold a pattern. misaligned: allow loads and stores
    that cross words. wait_states: check those that the ISA asks for between instructions (s_nop). seed: of the order in
    which waves run.

    Raises EmulationError, which names the Python line that the assembly carries, the lane and the address.
    """
    options = Options(shared, steps, strict, misaligned, wait_states, seed)
    launch = prepare(assembly, name, grid, block, arguments, arch, memory, options)
    with np.errstate(all="ignore"):
        launch.run()
