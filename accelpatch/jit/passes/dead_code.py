"""Removes instructions whose results nothing reads.

Stores and atomics stay. So do loads where the kernel contains the waits (``waits="checked"``), as their counts include
the loads; unused loads of arguments are always removed.
"""

from __future__ import annotations

import re

from accelpatch.jit.ir import Instruction, Program, special_regunits
from accelpatch.jit.passes.liveness import dataflow

_UNITS = ("salu", "valu", "trans", "matrix")
#: memory instructions without another effect than to write registers, so no atomics
_LOADS = re.compile(r"(s|global|buffer|flat|scratch|s_scratch|s_buffer)_load_|ds_(read|bpermute|permute|swizzle)")
_STAYS = special_regunits("exec") | special_regunits("m0")


def _removable(one: Instruction, *, loads: bool) -> bool:
    computes = one.form.unit in _UNITS and not one.name.startswith(("s_setreg", "s_setpc", "s_swappc"))
    plain = bool(_LOADS.match(one.name)) and "store" not in one.form.flags
    return bool(one.writes) and not one.writes & _STAYS and (computes or (plain and (loads or one.in_prologue)))


def remove_dead_code(program: Program) -> None:
    removed = True
    while removed:
        removed, flow = False, dataflow(program)
        for block in program.blocks:
            live, kept = flow.live_out[block], []
            for one in reversed(block.instructions):
                if _removable(one, loads=program.waits == "auto") and not one.writes & live:
                    removed = True
                    continue
                live = (live & ~flow.kills(one)) | flow.uses(one)
                kept.append(one)
            block.instructions = kept[::-1]
