"""Value numbering: what was computed before is read from where it was, and what computed it again is then dead code.

Each 32 bits of a register that hold the same value have the same number, as far as the active lanes go. A block goes on
with the numbers of the one before it if nothing else leads to it. Numbers of vector registers end where lanes come
back, so that no value is taken for lanes in which it was not computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from accelpatch.jit.instructions import alignment, is_number, used
from accelpatch.jit.ir import HIDDEN, Block, Instruction, Part, Program
from accelpatch.jit.passes.liveness import bits

_EXEC = 3 << HIDDEN["exec"][0]
#: what reads or writes more than the active lanes of its registers, or state that has no register
_OTHER_LANES = re.compile(r"v_(readlane|writelane|permlane|swap)|ds_(bpermute|permute|swizzle)")
_DPP = re.compile(r"\b(quad_perm|row_\w+|wave_\w+)\b")
_STATE = re.compile(r"s_(getreg|setreg|getpc|setpc|swappc|call|rfe|bitreplicate|set_gpr|movrel|cbranch)|v_nop")
_NARROWS = ("s_and_saveexec_b64", "s_andn1_saveexec_b64")
_COPIES = {"s_mov_b32", "s_mov_b64", "v_mov_b32", "v_accvgpr_mov_b32"}
Numbers = tuple[int, ...]


@dataclass
class Values:
    """of: unit -> its number. made: what was computed -> the numbers of its results. at: numbers -> where they are."""

    of: dict[int, int] = field(default_factory=dict)
    made: dict[object, Numbers] = field(default_factory=dict)
    at: dict[tuple[str, Numbers], Part] = field(default_factory=dict)
    last: list[int] = field(default_factory=lambda: [0])  # one count for all blocks

    def copy(self) -> Values:
        return Values(dict(self.of), dict(self.made), dict(self.at), self.last)

    def fresh(self) -> int:
        self.last[0] += 1
        return self.last[0]

    def number(self, unit: int) -> int:
        if unit not in self.of:
            self.of[unit] = self.fresh()
        return self.of[unit]

    def numbers(self, mask: int) -> Numbers:
        return tuple(self.number(unit) for unit in bits(mask))

    def forget(self, units: int) -> None:
        for unit in [unit for unit in self.of if units >> unit & 1]:
            del self.of[unit]


def share_subexpressions(program: Program) -> None:
    vectors = 0
    for register in program.registers:
        vectors |= 0 if register.file == "s" else ((1 << register.dwords) - 1) << register.unit
    before: dict[Block, list[Block]] = {block: [] for block in program.blocks}
    for block in program.blocks:
        for after in block.next:
            before[after].append(block)
    ends: dict[Block, Values] = {}
    count = [0]
    for block in program.blocks:
        only = before[block][0] if len(before[block]) == 1 else None
        values = ends[only].copy() if only in ends else Values(last=count)
        for one in block.instructions:
            _replace(one, values)
            _note(one, values, vectors)
        ends[block] = values


def _replace(one: Instruction, values: Values) -> None:
    """Read operands from the first register that has their value."""
    if one.form.unit == "matrix" or _OTHER_LANES.match(one.name) or _DPP.search(one.mod):
        return
    operands = list(one.operands)
    for at, (operand, slot) in enumerate(zip(one.operands, one.form.operands, strict=True)):
        if isinstance(operand, Part) and not slot.writes:
            operands[at] = _first(operand, values)
    if tuple(operands) != one.operands:
        one.operands = tuple(operands)
        one.reads, one.writes = used(one.form, operands, one.mod)


def _first(operand: Part, values: Values) -> Part:
    found = values.at.get((operand.register.file, values.numbers(operand.mask)))
    if found is None or values.numbers(found.mask) != values.numbers(operand.mask):
        return operand
    needed = alignment(operand.register.file, operand.dwords)
    if found.first % needed or found.register is operand.register:
        return operand
    found.register.alignment[0] = max(found.register.alignment[0], needed)
    return replace(found, sign=operand.sign)


def _note(one: Instruction, values: Values, vectors: int) -> None:
    """Give its results their numbers."""
    if one.name.startswith("s_setreg"):
        values.made.clear()  # another rounding, say
    key = _key(one, values)
    known = values.made.get(key) if key is not None else None
    written = _written(one)
    if one.writes & _EXEC and one.name not in _NARROWS and not _and_of_exec(one):
        values.forget(vectors)
    if known is None:
        known = _copied(one, values) or tuple(values.fresh() for _ in written)
        if key is not None:
            values.made[key] = known
    values.of.update(zip(written, known, strict=True))
    for operand, slot in zip(one.operands, one.form.operands, strict=True):
        if isinstance(operand, Part) and slot.writes:
            place = operand.register.file, values.numbers(operand.mask)
            now = values.at.get(place)
            if now is None or values.numbers(now.mask) != place[1]:
                values.at[place] = replace(operand, sign="")


def _written(one: Instruction) -> list[int]:
    """The units that it writes, in the order of its form and its operands."""
    masks = [_hidden(name) for name in one.form.writes]
    for operand, slot in zip(one.operands, one.form.operands, strict=True):
        if slot.writes:
            masks.append(operand.mask if isinstance(operand, Part) else _hidden(operand) if operand in HIDDEN else 0)
    return list(dict.fromkeys(unit for mask in masks for unit in bits(mask & one.writes)))


def _hidden(name: str) -> int:
    first, many = HIDDEN[name]
    return ((1 << many) - 1) << first


def _and_of_exec(one: Instruction) -> bool:
    return one.name in ("s_and_b64", "s_andn2_b64") and one.operands[:2] == ("exec", "exec")


def _copied(one: Instruction, values: Values) -> Numbers | None:
    """The numbers of what a plain copy within one file copies."""
    if one.name not in _COPIES or one.mod:
        return None
    target, source = one.operands
    if not isinstance(target, Part) or not isinstance(source, Part) or source.sign:
        return None
    return values.numbers(source.mask) if target.register.file == source.register.file else None


def _key(one: Instruction, values: Values) -> object | None:
    """What it computes, as far as registers say; None where something else may matter."""
    computes = one.form.unit in ("salu", "valu", "trans") and one.writes and not one.writes & _EXEC
    if not computes or _OTHER_LANES.match(one.name) or _STATE.match(one.name) or _DPP.search(one.mod):
        return None
    words = tuple(_words(one, values))
    if None in words:
        return None
    hidden = 0
    for name in one.form.reads:
        hidden |= _hidden(name)
    # Which lanes are active shows in masks, and in what one lane gives to a scalar register.
    registers = {operand.register.file for operand in one.operands if isinstance(operand, Part)}
    lanes = values.numbers(_EXEC) if one.form.unit != "salu" and (registers | _hidden_files(one)) & {"s"} else ()
    return one.name, one.mod, words, values.numbers(hidden), lanes


def _hidden_files(one: Instruction) -> set[str]:
    return {"s"} if one.form.writes or any(operand in HIDDEN for operand in one.operands) else set()


def _words(one: Instruction, values: Values) -> Iterator[object]:
    for operand, slot in zip(one.operands, one.form.operands, strict=True):
        if isinstance(operand, Part):
            read = slot.reads or operand.mask & one.reads
            yield (operand.sign, values.numbers(operand.mask)) if read else operand.dwords
        elif operand in HIDDEN:
            yield values.numbers(_hidden(operand)) if slot.reads else operand
        else:
            yield operand if is_number(operand) else None
