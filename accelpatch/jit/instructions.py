"""From a mnemonic and its operands to an instruction: finds its form, and checks the operands."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from accelpatch.jit import table
from accelpatch.jit.ir import SPECIAL, Instruction, Operand, Part, Region, special_regunits
from accelpatch.jit.location import Line, fail
from accelpatch.jit.table import Form

_ENCODING = re.compile(r"_(e32|e64|dpp|sdwa)$")
_NUMBER = re.compile(r"-?(\d+|0x[0-9a-f]+|\d+\.\d+)")
_FLOAT_INLINE = ("0.5", "1.0", "2.0", "4.0", "-0.5", "-1.0", "-2.0", "-4.0", "0.15915494")
_MEANING = {"v": "a vector register", "a": "an accumulator", "s": "a scalar register", "i": "an inline constant",
            "l": "a constant", "n": "a number", "o": '"off"', "b": "a label"}  # fmt: skip
#: execution units with the constant bus limit: an instruction reads one scalar register or literal, maybe several times
_VECTOR = ("valu", "trans", "matrix")
_DPP = re.compile(r"\b(quad_perm|row_\w+|wave_\w+|row_bcast)\b")


def forms(name: str, arch: str) -> list[Form]:
    """The forms of a mnemonic on an arch. Raises CompileError where there is none."""
    found = table.lookup(name) or table.lookup(_ENCODING.sub("", name))
    if not found:
        near = difflib.get_close_matches(name, table.lines(), 3)
        fail(f"there is no instruction {name}" + (f": is it {', '.join(near)}?" if near else ""))
    here = [form for form in found if arch in form.archs]
    if not here:
        others = sorted({other for form in found for other in form.archs})
        fail(f"{arch} has no {name}: it is an instruction of {', '.join(others)}")
    return here


def form_for(name: str, arch: str, count: int, mod: str) -> Form:
    """The form with this number of operands and these modifiers."""
    words = mod.split()
    fitting = [
        form for form in forms(name, arch) if len(form.operands) == count and ("lds" in words) == ("lds" in form.flags)
    ]
    if not fitting:
        fail(f"{name} takes {' or '.join(_signature(form) for form in forms(name, arch))}, not {count} operands")
    return fitting[0].renamed(name)


def _signature(form: Form) -> str:
    shown = [f"{'/'.join(operand.kinds)}{operand.dwords[-1] or ''}" for operand in form.operands]
    return f"{len(shown)} operands ({', '.join(shown)})"


def instruction(form: Form, operands: Sequence[Operand], mod: str, line: Line, region: Region) -> Instruction:
    """The instruction, its operands checked. Raises CompileError naming the operand that does not fit."""
    for at, (operand, slot) in enumerate(zip(operands, form.operands, strict=True)):
        reason = _why_not(operand, slot)
        if reason:
            fail(f"operand {at + 1} of {form.name} is {_shown(operand)}: {reason}", line)
        if isinstance(operand, Part):
            _align(operand, form.name, line)
    if form.unit in _VECTOR:
        _check_bus(form, operands, line)
    _check_offset(form, operands, mod, line)
    made = Instruction(form, tuple(operands), mod, line, region)
    made.reads, made.writes = used(form, operands, mod)
    return made


def _why_not(operand: Operand, slot: table.Slot) -> str:
    """Why an operand does not fit its slot, "" if it does."""
    wanted = " or ".join(_MEANING[kind] for kind in slot.kinds)
    if isinstance(operand, Part):
        if operand.register.file not in slot.kinds and not takes_copy(operand, slot):
            return f"it takes {wanted}"
        if operand.dwords not in slot.dwords:
            return f"it takes {' or '.join(map(str, slot.dwords))} of 32 bits, not {operand.dwords}"
        return ""
    if operand in SPECIAL:
        return "" if "s" in slot.kinds and SPECIAL[operand][1] in slot.dwords else f"it takes {wanted}"
    if slot.writes:
        return f"it is written, so it takes {wanted}"
    if "n" in slot.kinds or "b" in slot.kinds or (operand == "off" and "o" in slot.kinds):
        return ""
    if not _NUMBER.fullmatch(operand):
        return f"it takes {wanted}"
    if is_inline(operand):
        return "" if "i" in slot.kinds or "l" in slot.kinds else f"it takes {wanted}"
    return "" if "l" in slot.kinds else f"it takes {wanted}, and no constant but -16 to 64, 0.5, 1.0, 2.0, 4.0"


def takes_copy(operand: Part, slot: table.Slot) -> bool:
    """Whether an accumulator is in a slot for vector registers only: the pass accumulator_moves copies it."""
    return operand.register.file == "a" and "a" not in slot.kinds and "v" in slot.kinds


def is_inline(text: str) -> bool:
    """Whether an operand's text is a constant that needs no literal."""
    return text in _FLOAT_INLINE or (bool(re.fullmatch(r"-?\d+", text)) and -16 <= int(text) <= 64)


def is_number(text: str) -> bool:
    return bool(_NUMBER.fullmatch(text))


def is_literal(operand: Operand) -> bool:
    return isinstance(operand, str) and bool(_NUMBER.fullmatch(operand)) and not is_inline(operand)


def _shown(operand: Operand) -> str:
    if isinstance(operand, str):
        return operand
    return f"{operand.register.name} ({operand.dwords} x 32 bits, {operand.register.file})"


def alignment(file: str, dwords: int) -> int:
    """The alignment of an operand's first register."""
    if file == "s":
        return 1 if dwords == 1 else 2 if dwords == 2 else 4
    return 1 if dwords == 1 else 2


def _align(operand: Part, name: str, line: Line) -> None:
    register, needed = operand.register, alignment(operand.register.file, operand.dwords)
    if operand.first % needed:
        fail(
            f"{name} takes registers that begin at a multiple of {needed}; its part of {register.name} begins at "
            f"element {operand.first}, misaligned", line,
        )  # fmt: skip
    register.alignment[0] = max(register.alignment[0], needed)


def _check_bus(form: Form, operands: Sequence[Operand], line: Line) -> None:
    sources = [operand for operand, slot in zip(operands, form.operands, strict=True) if slot.reads and not slot.writes]
    literals = {operand for operand in sources if is_literal(operand)}
    scalars = {
        (operand.register.first_regunit, operand.first) if isinstance(operand, Part) else operand
        for operand in sources
        if (isinstance(operand, Part) and operand.register.file == "s") or operand in SPECIAL
    }
    if len(scalars) + len(literals) > 1:
        fail(f"{form.name} reads {len(scalars)} scalar registers and {len(literals)} literals: it can read one of all; "
             "move the others to vector registers first", line)  # fmt: skip
    masks = [one for one, slot in zip(operands, form.operands, strict=True) if slot.writes and slot.kinds == "s"]
    plain = "short" in form.flags and all(one == "vcc" for one in masks)
    if literals and not plain and not any(slot.kinds == "l" for slot in form.operands):
        fail(f"{form.name} has no room for the literal {literals.pop()}: move it to a register first", line)


#: last part of the mnemonic -> the alignment of an LDS offset in bytes
_SIZES = {"b16": 2, "u16": 2, "i16": 2, "b64": 8, "b96": 16, "b128": 16}


def _check_offset(form: Form, operands: Sequence[Operand], mod: str, line: Line) -> None:
    """Raise CompileError for a misaligned offset in LDS or scalar memory."""
    last = operands[-1] if operands else ""
    if form.unit == "smem" and isinstance(last, str) and _NUMBER.fullmatch(last) and int(last, 0) % 4:
        fail(f"{form.name} has offset {last}, misaligned: it must be a multiple of 4", line)
    found = re.search(r"\boffset:(0x[0-9a-f]+|\d+)", mod)
    size = _SIZES.get(form.name.rpartition("_")[2], 4 if form.name.endswith("b32") else 1)
    if form.unit == "ds" and found and int(found[1], 0) % size:
        fail(f"{form.name} has offset {found[1]}, misaligned: it must be a multiple of {size}", line)


def used(form: Form, operands: Sequence[Operand], mod: str) -> tuple[int, int]:
    """The register units that an instruction reads, and those that it writes, implicit operands included."""
    reads = sum(special_regunits(name) for name in form.reads)
    writes = sum(special_regunits(name) for name in form.writes)
    # With these modifiers a result leaves a part of its register as it was, which counts as a read.
    partly = bool(_DPP.search(mod)) or "UNUSED_PRESERVE" in mod
    partly = partly or ("op_sel:" in mod and not form.name.startswith("v_pk_") and form.unit == "valu")
    # A buffer atomic returns the old value, in its data operand, only with glc or sc0.
    returns_nothing = form.name.startswith("buffer_atomic") and not {"glc", "sc0"} & set(mod.split())
    for operand, slot in zip(operands, form.operands, strict=True):
        mask = operand.mask if isinstance(operand, Part) else special_regunits(operand) if operand in SPECIAL else 0
        reads |= mask if slot.reads or (slot.writes and partly) else 0
        writes |= mask if slot.writes and not returns_nothing else 0
    return reads, writes
