"""Removes stores that a later one overwrites before anything can have seen what they stored.

Both are in one block, by the same instruction with the same modifiers, to an address that did not change in between.
Stores to registers that are overwritten are dead code (dead_code.py). A kernel with waits of its own counts its stores,
so that there all of them stay, and the pass says which.
"""

from __future__ import annotations

from accelpatch.jit.ir import HIDDEN, Instruction, Operand, Part, Program

_EXEC = ((1 << HIDDEN["exec"][1]) - 1) << HIDDEN["exec"][0]
#: unit -> the units that may read what it stores
_SEEN_BY = {"ds": ("ds", "flat"), "global": ("global", "buffer", "flat", "smem"),
            "buffer": ("global", "buffer", "flat", "smem")}  # fmt: skip
_SHARED = {"glc", "slc", "nt", "sc0", "sc1"}


def remove_dead_stores(program: Program) -> None:
    for block in program.blocks:
        kept: list[Instruction] = []
        later: list[Instruction] = []  # stores below, of which nothing above has changed the address
        for one in reversed(block.instructions):
            over = next((other for other in later if _plain(one) and _same_place(one, other)), None)
            if over is not None and program.waits == "auto":
                continue
            if over is not None:
                reason = 'the kernel\'s own waits count it. Say jit(waits="auto"), or remove it'
                program.note("dead_stores", f"{one.name} stays, which {over.line} overwrites: {reason}", one.line)
            later = [] if _ends(one) else [other for other in later if not _apart(one, other)]
            later += [one] if _plain(one) else []
            kept.append(one)
        block.instructions = kept[::-1]


def _plain(one: Instruction) -> bool:
    """Whether it stores registers, and nothing asks for more than that."""
    name = one.name.startswith(("ds_write_b", "ds_write2", "global_store_", "buffer_store_"))
    return name and not _SHARED & set(one.mod.split()) and one.region.manual is False


def _ends(one: Instruction) -> bool:
    """Whether what was stored before it may be seen by others, or was stored by other lanes."""
    return one.form.unit == "control" or bool(one.writes & _EXEC)


def _apart(one: Instruction, later: Instruction) -> bool:
    """Whether a store above ``one`` must stay, though ``later`` overwrites it."""
    seen = one.form.unit in _SEEN_BY[later.form.unit] and not _plain(one)
    return seen or bool(one.writes & _place_units(later))


def _place(one: Instruction) -> tuple[Operand, ...]:
    """Its operands that make the address."""
    words, unit = one.operands, one.form.unit
    if unit == "buffer":
        return words[1:]
    return (words[0], *words[2:]) if unit == "global" else words[:1]


def _place_units(one: Instruction) -> int:
    units = 0
    for operand in _place(one):
        if isinstance(operand, Part):
            units |= operand.mask
        elif operand in HIDDEN:
            first, many = HIDDEN[operand]
            units |= ((1 << many) - 1) << first
    return units


def _same_place(one: Instruction, other: Instruction) -> bool:
    same = one.name == other.name and one.mod == other.mod and one.region is other.region
    return same and _place(one) == _place(other)
