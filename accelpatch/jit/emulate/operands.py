"""Operands of an instruction as the assembler writes them: registers, constants, symbols, and what is put around them.

Registers have one numbering: 0 to 127 scalar registers in the hardware's own numbers (vcc is 106, m0 124, exec 126),
256 to 511 vector registers, 512 to 767 accumulation registers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from accelpatch.jit.emulate.fault import EmulationError

VGPR, AGPR, REGISTERS = 256, 512, 768
FLAT_SCRATCH, VCC, M0, EXEC = 102, 106, 124, 126
NAMED = {
    "flat_scratch": (FLAT_SCRATCH, 2),
    "flat_scratch_lo": (FLAT_SCRATCH, 1),
    "flat_scratch_hi": (FLAT_SCRATCH + 1, 1),
    "xnack_mask": (104, 2),
    "xnack_mask_lo": (104, 1),
    "xnack_mask_hi": (105, 1),
    "vcc": (VCC, 2),
    "vcc_lo": (VCC, 1),
    "vcc_hi": (VCC + 1, 1),
    "m0": (M0, 1),
    "exec": (EXEC, 2),
    "exec_lo": (EXEC, 1),
    "exec_hi": (EXEC + 1, 1),
}
FIRST = {"s": 0, "ttmp": 108, "v": VGPR, "a": AGPR, "acc": AGPR}
LIMIT = {"s": 102, "ttmp": 16, "v": 256, "a": 256, "acc": 256}
REGISTER = re.compile(r"(s|ttmp|v|a|acc)(?:(\d+)|\[\s*(\d+)\s*(?::\s*(\d+)\s*)?\])")
INTEGER = re.compile(r"[-+]?(0x[0-9a-f]+|0b[01]+|\d+)", re.IGNORECASE)
FLOAT = re.compile(r"[-+]?(\d+\.\d*|\.\d+|\d+(?=e))(e[-+]?\d+)?", re.IGNORECASE)
SPECIAL = ("off", "null", "scc", "src_scc", "src_vccz", "vccz", "src_execz", "execz", "src_shared_base",
           "src_private_base", "src_shared_limit", "src_private_limit")  # fmt: skip


@dataclass(frozen=True)
class Operand:
    """kind: "register", "integer", "float", "special" or "expression". count: of 32-bit registers."""

    kind: str
    text: str
    register: int = 0
    count: int = 1
    number: float = 0
    negative: bool = False
    absolute: bool = False
    extended: bool = False  # sext() of SDWA

    @property
    def vector(self) -> bool:
        return self.kind == "register" and self.register >= VGPR


def name_of(register: int) -> str:
    """A register in the assembler's words."""
    if register >= VGPR:
        return f"{'v' if register < AGPR else 'a'}{(register - VGPR) % 256}"
    return next((name for name, (at, count) in NAMED.items() if at == register and count == 1), f"s{register}")


def parse(text: str) -> Operand:
    """One operand. Raises EmulationError for a register that does not exist."""
    text = text.strip()
    for pattern, change in (
        (r"-\s*(?=[a-z|])(.+)", {"negative": True}),
        (r"neg\((.+)\)", {"negative": True}),
        (r"\|(.+)\|", {"absolute": True}),
        (r"abs\((.+)\)", {"absolute": True}),
        (r"sext\((.+)\)", {"extended": True}),
    ):
        if (found := re.fullmatch(pattern, text)) and not text.startswith("-."):
            return replace(parse(found[1]), text=text, **change)  # type: ignore[arg-type]
    if text in NAMED:
        register, count = NAMED[text]
        return Operand("register", text, register, count)
    if found := REGISTER.fullmatch(text):
        return _register(text, found)
    if INTEGER.fullmatch(text):
        return Operand("integer", text, number=int(text, 0))
    if FLOAT.fullmatch(text):
        return Operand("float", text, number=float(text))
    return Operand("special" if text in SPECIAL else "expression", text)


def _register(text: str, found: re.Match[str]) -> Operand:
    kind, single, first, last = found.groups()
    begin = int(single or first)
    count = int(last) - begin + 1 if last else 1
    if count < 1 or begin + count > LIMIT[kind]:
        raise EmulationError(f"{text} is no register: there are {LIMIT[kind]} of this kind")
    return Operand("register", text, FIRST[kind] + begin, count)


def split(text: str) -> tuple[list[str], list[str]]:
    """The operands of an instruction, and behind them its modifiers, by the commas outside brackets."""
    parts, depth, begin = [], 0, 0
    for at, sign in enumerate(text):
        if sign in "[(":
            depth += 1
        elif sign in "])":
            depth -= 1
        elif sign == "," and depth == 0:
            parts.append(text[begin:at].strip())
            begin = at + 1
    last = re.findall(r"(?:[^\s\[(]|\[[^\]]*\]|\([^)]*\))+", text[begin:])
    if last and _operator(last[1:2]):  # an expression with blanks in it
        return [*parts, text[begin:].strip()], []
    if last and not parts and ":" in last[0] and not last[0].endswith("]"):
        return [], last
    return [*parts, *last[:1]], last[1:]


def _operator(following: list[str]) -> bool:
    return bool(following) and following[0][0] in "+-&*/|"
