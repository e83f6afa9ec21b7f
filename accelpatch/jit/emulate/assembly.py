"""Assembly text as the emulator keeps it: instructions, labels, symbols, kernel descriptors, metadata, data."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from accelpatch.jit.emulate import operands
from accelpatch.jit.emulate.fault import EmulationError
from accelpatch.jit.emulate.operands import Operand

LABEL = re.compile(r'\s*("[^"]+"|[\w.$@]+):')
COMMENT = re.compile(r"(//|;).*$")
PYTHON_LINE = re.compile(r"//\s*(\S.*:\d+)\s*$")  # of any file: a notebook's have other endings
DATA = {".byte": 1, ".short": 2, ".2byte": 2, ".value": 2, ".long": 4, ".4byte": 4, ".int": 4, ".quad": 8, ".8byte": 8}
WORDY = ("s_waitcnt", "s_setreg_b32", "s_setreg_imm32_b32", "s_getreg_b32", "s_sendmsg")  # no blanks before modifiers
ENCODINGS = re.compile(r"_(e32|e64|sdwa|dpp|e64_dpp)$")


@dataclass(frozen=True)
class Source:
    """The text of an instruction, and its Python line or that of the text."""

    text: str
    place: str


@dataclass(frozen=True)
class Line:
    """An instruction. mnemonic: without the suffix of its encoding. place: its Python line, or that of the text."""

    text: str
    mnemonic: str
    encoding: str
    operands: tuple[Operand, ...]
    modifiers: dict[str, str]
    place: str

    def fault(self, words: str) -> EmulationError:
        return EmulationError(f"{self.place}: {self.text}: {words}")


@dataclass
class Program:
    """labels: name -> number of the instruction that follows. kernels: name -> descriptor.

    data: name of a constant -> its bytes; addresses: name -> where the emulator has put them.
    """

    lines: list[Source] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    symbols: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, dict[str, str]] = field(default_factory=dict)
    data: dict[str, bytes] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)
    metadata: str = ""
    target: str = ""


def parse(text: str) -> Program:
    """The whole of a file; its instructions as they stand, each of which parse_line reads when it is needed."""
    return _Reader().read(text)


class _Reader:
    def __init__(self) -> None:
        self.program = Program()
        self.files: dict[str, str] = {}
        self.source = ""
        self.kernel: dict[str, str] | None = None
        self.named: list[str] = []  # labels since the last instruction or datum

    def read(self, text: str) -> Program:
        lines = iter(enumerate(text.splitlines(), 1))
        for number, line in lines:
            if line.strip() == ".amdgpu_metadata":
                metadata = []
                for _, line in lines:
                    if line.strip() == ".end_amdgpu_metadata":
                        break
                    metadata.append(line)
                self.program.metadata = "\n".join(metadata)
            else:
                self._line(number, line)
        return self.program

    def _line(self, number: int, line: str) -> None:
        code = COMMENT.sub("", line)
        while found := LABEL.match(code):
            name = found[1].strip('"')
            self.program.labels[name] = len(self.program.lines)
            self.named.append(name)
            code = code[found.end() :]
        code = code.strip()
        if not code:
            return
        code = code.replace("\t", " ")
        head, _, rest = code.partition(" ")
        if head.startswith("."):
            self._directive(head, rest.strip())
        elif "=" in code and re.match(r"[\w.$]+\s*=", code):
            name, _, value = code.partition("=")
            self.program.symbols[name.strip()] = value.strip()
        else:
            self.named.clear()
            found = PYTHON_LINE.search(line)
            place = found[1] if found else self.source or f"line {number} of the assembly"
            self.program.lines.append(Source(code, place))

    def _directive(self, head: str, rest: str) -> None:
        if head == ".amdhsa_kernel":
            self.kernel = self.program.kernels.setdefault(rest, {})
        elif head == ".end_amdhsa_kernel":
            self.kernel = None
        elif head.startswith(".amdhsa_") and self.kernel is not None:
            self.kernel[head.removeprefix(".amdhsa_")] = rest
        elif head in (".set", ".equ"):
            name, _, value = rest.partition(",")
            self.program.symbols[name.strip()] = value.strip()
        elif head == ".amdgcn_target":
            self.program.target = rest.strip('"')
        elif head == ".file" and (found := re.match(r'(\d+)\s+(?:"([^"]*)"\s+)?"([^"]*)"', rest)):
            self.files[found[1]] = found[3]
        elif head == ".loc":
            words = rest.split()
            self.source = f"{self.files.get(words[0], words[0])}:{words[1]}"
        elif head in DATA or head in (".zero", ".ascii", ".asciz", ".fill"):
            self._data(head, rest)

    def _data(self, head: str, rest: str) -> None:
        if not self.named:
            return
        name = self.named[-1]
        made = self.program.data.get(name, b"")
        values = [] if head.startswith(".asci") else [self._number(one) for one in rest.split(",")]
        if head == ".zero":
            made += bytes(values[0])
        elif head == ".fill":
            made += bytes(values[0] * values[1])
        elif head in DATA:
            size = DATA[head]
            made += b"".join(struct.pack("<Q", value & (1 << 64) - 1)[:size] for value in values)
        else:
            made += rest.strip().strip('"').encode().decode("unicode_escape").encode("latin-1")
        self.program.data[name] = made

    @staticmethod
    def _number(text: str) -> int:
        return int(text, 0) if operands.INTEGER.fullmatch(text.strip()) else 0


def parse_line(source: Source) -> Line:
    """The instruction in a line. Raises EmulationError for registers that do not exist."""
    head, _, rest = source.text.partition(" ")
    encoding = ENCODINGS.search(head)
    mnemonic = head[: encoding.start()] if encoding else head
    try:
        if mnemonic in WORDY:
            parts, words = [one.strip() for one in re.split(r",(?![^(]*\))", rest) if one.strip()], list[str]()
        else:
            parts, words = operands.split(rest)
        read = tuple(operands.parse(part) for part in parts)
    except EmulationError as error:
        raise EmulationError(f"{source.place}: {source.text}: {error}") from None
    modifiers = dict(_modifier(word) for word in words)
    return Line(source.text, mnemonic, encoding[1] if encoding else "", read, modifiers, source.place)


def _modifier(word: str) -> tuple[str, str]:
    name, _, value = word.partition(":")
    return name, value or "1"
