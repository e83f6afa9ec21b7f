"""What LLVM's assemblers take of the jit's instruction table, arch by arch."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from accelpatch.jit.table import Form, Slot

ARCHS = ("gfx90a", "gfx942", "gfx950")
#: instruction -> what its lines need besides operands
ENDINGS = (
    (r"(flat|global)_atomic.*", "sc0"),
    (r"ds_\w*gws.*|ds_ordered_count", "gds"),
)


def assembler(arch: str, wheels: Path) -> list[str]:
    """The command that assembles from standard input, saying all that is wrong with it."""
    if arch != "gfx950":
        return ["llvm-mc-19", "-triple=amdgcn-amd-amdhsa", f"-mcpu={arch}", "-o", "/dev/null", "-filetype=obj", "-"]
    zig = next(wheels.rglob("ziglang/zig"))
    options = [f"-mcpu={arch}", "-c", "-x", "assembler", "-", "-o", "/dev/null", "-ferror-limit=0"]
    return [str(zig), "clang", "--target=amdgcn-amd-amdhsa", *options]


def refused(lines: Sequence[str], arch: str, wheels: Path) -> dict[int, str]:
    """Index of each line that the assembler of an arch does not take -> what it says."""
    text = "\n".join(["there:", *(line.replace("sc0", "glc") if arch == "gfx90a" else line for line in lines), ""])
    done = subprocess.run(assembler(arch, wheels), input=text, capture_output=True, text=True, check=False)
    found = re.findall(r"^<?(?:stdin|-)>?:(\d+):\d+: error: (.*)$", done.stderr, re.MULTILINE)
    if done.returncode and not found:
        raise RuntimeError(f"{arch}: {done.stderr[:1000]}")
    return {int(number) - 2: message for number, message in found}


def _text(operand: Slot, at: int, name: str) -> str:
    """An operand that may stand at a place."""
    first, many = 8 * (at + 1) * (4 if "mfma" in name else 1), operand.dwords[-1]
    if name.startswith(("v_mfma", "v_smfmac")) and "i" in operand.kinds:
        first = 32  # the accumulator is written where it was read
    if name == "v_writelane_b32" and at == 2:
        return "3"  # a second scalar register is one too many
    if operand.kinds == "vo":
        many = 1
    for kind in operand.kinds:
        if kind in "vas" and many:
            return f"{kind}{first}" if many == 1 else f"{kind}[{first}:{first + many - 1}]"
        if kind == "o":
            return "off"
        if kind == "l":
            return "0x1234"
        if kind == "b":
            return "there"
    return "hwreg(HW_REG_MODE)" if "reg" in name else "sendmsg(MSG_INTERRUPT)" if "sendmsg" in name else "0"


def sample(one: Form) -> str:
    """A line of assembly with this instruction."""
    operands = [_text(operand, at, one.name) for at, operand in enumerate(one.operands)]
    if one.unit == "global" and one.operands[-1].kinds == "so":
        operands[-1] = "off"
    if one.unit == "scratch":
        operands = [text if "o" not in operand.kinds else "off" for text, operand in
                    zip(operands, one.operands, strict=True)]  # fmt: skip
    ending = next((text for pattern, text in ENDINGS if re.fullmatch(pattern, one.name)), "")
    if "atomic" in one.name and not one.operands[0].use:
        ending = ""
    if one.unit == "buffer" and "vo" in {operand.kinds for operand in one.operands}:
        ending = "offen lds" if "lds" in one.flags else "offen"
    return f"{one.name} {', '.join(operands)} {ending}".strip()
