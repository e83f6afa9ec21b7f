"""Removes instructions whose results nothing reads.

Those that touch memory stay, since waits that the user wrote count them; the loads of arguments do not.
"""

from __future__ import annotations

from accelpatch.jit.ir import HIDDEN, Instruction, Program
from accelpatch.jit.passes.liveness import flow

_UNITS = ("salu", "valu", "trans", "matrix")
_STAYS = sum(((1 << many) - 1) << first for first, many in (HIDDEN["exec"], HIDDEN["m0"]))


def _removable(one: Instruction) -> bool:
    computes = one.form.unit in _UNITS and not one.name.startswith(("s_setreg", "s_setpc", "s_swappc"))
    return bool(one.writes) and not one.writes & _STAYS and (computes or (one.own and one.form.unit == "smem"))


def remove_dead_code(program: Program) -> None:
    removed = True
    while removed:
        removed, found = False, flow(program)
        for block in program.blocks:
            live, kept = found.live_out[block], []
            for one in reversed(block.instructions):
                if _removable(one) and not one.writes & live:
                    removed = True
                    continue
                live = (live & ~found.kills(one)) | found.uses(one)
                kept.append(one)
            block.instructions = kept[::-1]
