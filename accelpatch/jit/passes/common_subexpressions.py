"""Value numbering: an operand that was computed before is read from the first register with its value, so that the
instruction that computes it again becomes dead code.

Register units with the same value in the active lanes have the same value number. A block with a single predecessor
continues with the numbers at the end of that one. Numbers of vector registers are dropped where lanes become active
again, as a value was not computed in these lanes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from accelpatch.jit.instructions import alignment, is_number, used
from accelpatch.jit.ir import SPECIAL, Block, Instruction, Part, Program, special_regunits
from accelpatch.jit.passes.liveness import bits

_EXEC = special_regunits("exec")
#: instructions that read or write other lanes than the active ones
_OTHER_LANES = re.compile(r"v_(readlane|writelane|permlane|swap)|ds_(bpermute|permute|swizzle)")
_DPP = re.compile(r"\b(quad_perm|row_\w+|wave_\w+)\b")
#: instructions with state that no register stands for
_STATE = re.compile(r"s_(getreg|setreg|getpc|setpc|swappc|call|rfe|bitreplicate|set_gpr|movrel|cbranch)|v_nop")
_NARROWS = ("s_and_saveexec_b64", "s_andn1_saveexec_b64")
_COPIES = {"s_mov_b32", "s_mov_b64", "v_mov_b32", "v_accvgpr_mov_b32"}
Numbers = tuple[int, ...]


@dataclass
class Values:
    """number_of: register unit -> value number. computed: operation with its operands' numbers -> the numbers of its
    results. register_of: file and numbers -> the first registers with these values."""

    number_of: dict[int, int] = field(default_factory=dict)
    computed: dict[object, Numbers] = field(default_factory=dict)
    register_of: dict[tuple[str, Numbers], Part] = field(default_factory=dict)
    last: list[int] = field(default_factory=lambda: [0])  # the largest number, shared by all blocks

    def copy(self) -> Values:
        return Values(dict(self.number_of), dict(self.computed), dict(self.register_of), self.last)

    def fresh(self) -> int:
        self.last[0] += 1
        return self.last[0]

    def number(self, regunit: int) -> int:
        if regunit not in self.number_of:
            self.number_of[regunit] = self.fresh()
        return self.number_of[regunit]

    def numbers(self, mask: int) -> Numbers:
        return tuple(self.number(regunit) for regunit in bits(mask))

    def forget(self, regunits: int) -> None:
        for regunit in [regunit for regunit in self.number_of if regunits >> regunit & 1]:
            del self.number_of[regunit]


def reuse_subexpressions(program: Program) -> None:
    vectors = 0
    for register in program.registers:
        vectors |= 0 if register.file == "s" else ((1 << register.dwords) - 1) << register.first_regunit
    predecessors: dict[Block, list[Block]] = {block: [] for block in program.blocks}
    for block in program.blocks:
        for successor in block.successors:
            predecessors[successor].append(block)
    ends: dict[Block, Values] = {}
    count = [0]
    for block in program.blocks:
        only = predecessors[block][0] if len(predecessors[block]) == 1 else None
        values = ends[only].copy() if only in ends else Values(last=count)
        for one in block.instructions:
            _replace(one, values)
            _record(one, values, vectors)
        ends[block] = values


def _replace(one: Instruction, values: Values) -> None:
    """Replace operands by the first registers that have their values."""
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
    found = values.register_of.get((operand.register.file, values.numbers(operand.mask)))
    if found is None or values.numbers(found.mask) != values.numbers(operand.mask):
        return operand
    needed = alignment(operand.register.file, operand.dwords)
    if found.first % needed or found.register is operand.register:
        return operand
    found.register.alignment[0] = max(found.register.alignment[0], needed)
    return replace(found, sign=operand.sign)


def _record(one: Instruction, values: Values, vectors: int) -> None:
    """Give the results of an instruction their value numbers."""
    if one.name.startswith("s_setreg"):
        values.computed.clear()  # the same operation may now give another result: s_setreg can change the rounding mode
    key = _key(one, values)
    known = values.computed.get(key) if key is not None else None
    written = _written(one)
    if one.writes & _EXEC and one.name not in _NARROWS and not _and_of_exec(one):
        values.forget(vectors)
    if known is None:
        known = _copied(one, values) or tuple(values.fresh() for _ in written)
        if key is not None:
            values.computed[key] = known
    values.number_of.update(zip(written, known, strict=True))
    for operand, slot in zip(one.operands, one.form.operands, strict=True):
        if isinstance(operand, Part) and slot.writes:
            place = operand.register.file, values.numbers(operand.mask)
            now = values.register_of.get(place)
            if now is None or values.numbers(now.mask) != place[1]:
                values.register_of[place] = replace(operand, sign="")


def _written(one: Instruction) -> list[int]:
    """The register units that it writes, implicit operands first."""
    masks = [special_regunits(name) for name in one.form.writes]
    for operand, slot in zip(one.operands, one.form.operands, strict=True):
        if slot.writes:
            special = special_regunits(operand) if isinstance(operand, str) and operand in SPECIAL else 0
            masks.append(operand.mask if isinstance(operand, Part) else special)
    return list(dict.fromkeys(regunit for mask in masks for regunit in bits(mask & one.writes)))


def _and_of_exec(one: Instruction) -> bool:
    return one.name in ("s_and_b64", "s_andn2_b64") and one.operands[:2] == ("exec", "exec")


def _copied(one: Instruction, values: Values) -> Numbers | None:
    """The value numbers of the source of a copy within one file; None for another instruction."""
    if one.name not in _COPIES or one.mod:
        return None
    target, source = one.operands
    if not isinstance(target, Part) or not isinstance(source, Part) or source.sign:
        return None
    return values.numbers(source.mask) if target.register.file == source.register.file else None


def _key(one: Instruction, values: Values) -> object | None:
    """A key that is equal for instructions with the same results; None where these depend on more than registers."""
    computes = one.form.unit in ("salu", "valu", "trans") and one.writes and not one.writes & _EXEC
    if not computes or _OTHER_LANES.match(one.name) or _STATE.match(one.name) or _DPP.search(one.mod):
        return None
    words = tuple(_words(one, values))
    if None in words:
        return None
    implicit = 0
    for name in one.form.reads:
        implicit |= special_regunits(name)
    # Results in scalar registers (lane masks, v_readfirstlane) depend on which lanes are active.
    registers = {operand.register.file for operand in one.operands if isinstance(operand, Part)}
    lanes = values.numbers(_EXEC) if one.form.unit != "salu" and (registers | _implicit_files(one)) & {"s"} else ()
    return one.name, one.mod, words, values.numbers(implicit), lanes


def _implicit_files(one: Instruction) -> set[str]:
    return {"s"} if one.form.writes or any(operand in SPECIAL for operand in one.operands) else set()


def _words(one: Instruction, values: Values) -> Iterator[object]:
    for operand, slot in zip(one.operands, one.form.operands, strict=True):
        if isinstance(operand, Part):
            read = slot.reads or operand.mask & one.reads
            yield (operand.sign, values.numbers(operand.mask)) if read else operand.dwords
        elif operand in SPECIAL:
            yield values.numbers(special_regunits(operand)) if slot.reads else operand
        else:
            yield operand if is_number(operand) else None
