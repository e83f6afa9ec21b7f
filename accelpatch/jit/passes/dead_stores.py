"""Removes stores to memory that a later store overwrites before anything can have read them.

Both are in one block, with the same mnemonic and modifiers, and the registers of the address do not change in between.
Overwritten registers are the matter of dead_code.py. Where the kernel contains the waits (``waits="checked"``), their
counts include the stores, so that all stay, and the pass notes which are dead.
"""

from __future__ import annotations

from accelpatch.jit.ir import SPECIAL, Instruction, Operand, Part, Program, special_regunits

_EXEC = special_regunits("exec")
#: execution unit of a store -> the execution units whose instructions may read what it stored
_SEEN_BY = {"ds": ("ds", "flat"), "global": ("global", "buffer", "flat", "smem"),
            "buffer": ("global", "buffer", "flat", "smem")}  # fmt: skip
_SHARED = {"glc", "slc", "nt", "sc0", "sc1"}


def remove_dead_stores(program: Program) -> None:
    for block in program.blocks:
        kept: list[Instruction] = []
        later: list[Instruction] = []  # stores further down that overwrite an equal store at this point
        for one in reversed(block.instructions):
            over = next((other for other in later if _plain(one) and _same_address(one, other)), None)
            if over is not None and program.waits == "auto":
                continue
            if over is not None:
                reason = 'the kernel\'s own waits count it. Say jit(waits="auto"), or remove it'
                program.note("dead_stores", f"{one.name} stays, which {over.line} overwrites: {reason}", one.line)
            later = [] if _is_fence(one) else [other for other in later if not _separates(one, other)]
            later += [one] if _plain(one) else []
            kept.append(one)
        block.instructions = kept[::-1]


def _plain(one: Instruction) -> bool:
    """Whether it is an ordinary store of registers, without cache modifiers, under an exec mask that the jit knows."""
    name = one.name.startswith(("ds_write_b", "ds_write2", "global_store_", "buffer_store_"))
    return name and not _SHARED & set(one.mod.split()) and one.region.manual is False


def _is_fence(one: Instruction) -> bool:
    """Whether other wavefronts may read after it what was stored before, or other lanes store after it than before."""
    return one.form.unit == "control" or bool(one.writes & _EXEC)


def _separates(one: Instruction, later: Instruction) -> bool:
    """Whether a store before ``one`` must stay though ``later`` stores to the same operands: ``one`` may read what it
    stored, or writes a register of the address."""
    seen = one.form.unit in _SEEN_BY[later.form.unit] and not _plain(one)
    return seen or bool(one.writes & _address_regunits(later))


def _address(one: Instruction) -> tuple[Operand, ...]:
    """The operands that determine the address of a store."""
    words, unit = one.operands, one.form.unit
    if unit == "buffer":
        return words[1:]
    return (words[0], *words[2:]) if unit == "global" else words[:1]


def _address_regunits(one: Instruction) -> int:
    regunits = 0
    for operand in _address(one):
        if isinstance(operand, Part):
            regunits |= operand.mask
        elif operand in SPECIAL:
            regunits |= special_regunits(operand)
    return regunits


def _same_address(one: Instruction, other: Instruction) -> bool:
    same = one.name == other.name and one.mod == other.mod and one.region is other.region
    return same and _address(one) == _address(other)
