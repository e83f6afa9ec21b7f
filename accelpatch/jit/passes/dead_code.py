"""Removes instructions whose results nothing reads.

Those that store stay. So do loads where the kernel has waits of its own, which count them; the loads of arguments go.
"""

from __future__ import annotations

import re

from accelpatch.jit.ir import HIDDEN, Instruction, Program
from accelpatch.jit.passes.liveness import flow

_UNITS = ("salu", "valu", "trans", "matrix")
#: instructions of memory that do nothing but fill registers: no atomic, whose other half others see
_LOADS = re.compile(r"(s|global|buffer|flat|scratch|s_scratch|s_buffer)_load_|ds_(read|bpermute|permute|swizzle)")
_STAYS = sum(((1 << many) - 1) << first for first, many in (HIDDEN["exec"], HIDDEN["m0"]))


def _removable(one: Instruction, *, loads: bool) -> bool:
    computes = one.form.unit in _UNITS and not one.name.startswith(("s_setreg", "s_setpc", "s_swappc"))
    plain = bool(_LOADS.match(one.name)) and "store" not in one.form.flags
    return bool(one.writes) and not one.writes & _STAYS and (computes or (plain and (loads or one.own)))


def remove_dead_code(program: Program) -> None:
    removed = True
    while removed:
        removed, found = False, flow(program)
        for block in program.blocks:
            live, kept = found.live_out[block], []
            for one in reversed(block.instructions):
                if _removable(one, loads=program.waits == "auto") and not one.writes & live:
                    removed = True
                    continue
                live = (live & ~found.kills(one)) | found.uses(one)
                kept.append(one)
            block.instructions = kept[::-1]
