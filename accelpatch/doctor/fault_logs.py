"""Reads which kernel faulted from what a program and the vendors' tools print.

Formats: rocm-debug-agent, its user guide and source (github.com/ROCm/rocr_debug_agent, README, src/debug_agent.cpp and
src/code_object.cpp), in the forms of ROCm 6 and 7; NVIDIA's Compute Sanitizer manual; Python's tracebacks and
faulthandler. AMD's were never recorded here.

A log is text that anybody can have written. Nothing of it is run, no file that it names is opened but a .py file for
one line, lines and lists are cut, and what is shown has no control characters.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

LINE, SHOWN, KINDS = 4096, 300, 64  # characters of a line, of a name; kinds of faults of a log
PROGRAM = 4 << 20  # bytes of a Python file, at most
#: the gravest first: with --all other wavefronts are stopped too
GRAVITY = ("MEMORY_VIOLATION", "ADDRESS_ERROR", "ILLEGAL_INSTRUCTION", "ECC_ERROR", "FATAL_HALT", "ASSERT_TRAP", "TRAP")
IGNORED = {"NONE", "BREAKPOINT", "WATCHPOINT", "SINGLE_STEP", "DEBUG_TRAP"}
_WAVE = re.compile(r"wave_(\d+): pc=0x([0-9a-fA-F]+)(.*)")
_STOPPED = re.compile(r"\((?:stopped, reason: ([A-Z0-9_|]+)|running)\)$")
_ENTRY = re.compile(r"\(kernel_code_entry=0x[0-9a-fA-F]+ <(.*)>, kernargs=0x[0-9a-fA-F]+\)")
_FUNCTION = re.compile(r"Disassembly(?: for function (.*))?:")
_SOURCE = re.compile(r"(\d{1,9})\s+(.*)")
_ARROW = re.compile(r"=> 0x[0-9a-fA-F]+(?: <[+-]\d+>)?:\s+(.*)")
_AMD_FAULT = re.compile(r"memory access fault by GPU(.*)", re.IGNORECASE)
_AMD_ADDRESS, _AMD_REASON = re.compile(r"address (0x[0-9a-fA-F]+)"), re.compile(r"Reasons?: (.*)")
_AMD_QUEUE = re.compile(r"(?:Queue error|aborting with error)[ :(]+(HSA_STATUS_\w+)")
_NEW_AT = re.compile(r"at (.+)\+0x[0-9a-fA-F]+(?: in (.+):(\d+))?$")
_OLD_AT = re.compile(r"at 0x[0-9a-fA-F]+ in (?:(.+):(\d+):)?(.+)$")
_ACCESS = re.compile(r"(?:Access at|Access to|Address) (0x[0-9a-fA-F]+) ")
_BY = re.compile(r"by thread (\([\d,]+\)) in block (\([\d,]+\))")
_INVALID = re.compile(r"(?:Invalid|Misaligned|Illegal|Out-of-range|Stack overflow)\b.*")
_FRAME = re.compile(r'File "(.*)", line (\d+)(?:,)? in (.*)')
_DEVICE_ERROR = re.compile(
    r"(CUDA error|HIP error|Triton Error|illegal memory access|illegal address|unspecified launch failure|"
    r"misaligned address|illegal instruction|device-side assert|cudaErrorIllegalAddress|hipErrorIllegalAddress|"
    r"cudaErrorLaunchFailure)"
)
_RANK = re.compile(r"^\[rank\d+\]: ?")
_LAUNCH = re.compile(r"([A-Za-z_][\w.]*)\s*\[[^\]]*\]\s*\(")
_LIBRARIES = re.compile(r"[/\\](?:site|dist)-packages[/\\](?:torch|triton)[/\\]|^<frozen |^<string>")


@dataclass(frozen=True)
class Fault:
    """One fault, as far as it is known. kind: in the tool's words. source: FILE:LINE of the kernel. launch: frames of
    the host, the innermost first. count: wavefronts or accesses alike."""

    tool: str
    kind: str
    kernel: str | None = None
    source: str | None = None
    instruction: str | None = None
    address: str | None = None
    threads: str | None = None
    code_object: str | None = None
    launch: tuple[str, ...] = ()
    count: int = 1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def clean(text: str, limit: int = SHOWN) -> str:
    """A name from a log as it can be shown: escapes for what is not printable, and not longer than `limit`."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text.strip())
    return shown if len(shown) <= limit else f"{shown[: limit - 3]}..."


def lines(stream: TextIO) -> Iterator[str]:
    """The lines of a log without their ends; of a longer one the first LINE characters."""
    begun = False
    while part := stream.readline(LINE):
        ends = part.endswith("\n")
        if not begun:
            yield part.rstrip("\r\n")
        begun = not ends


def read(texts: Iterable[str]) -> list[Fault]:
    """The faults of a log, those that say most first. A log that is cut gives what it has."""
    readers = (_Agent(), _Sanitizer(), _Python())
    for line in texts:
        for reader in readers:
            reader.line(line)
    agent, sanitizer, python = (reader.faults() for reader in readers)
    by_tools = agent + sanitizer
    if not by_tools:
        return python
    launch = next((one.launch for one in python if one.launch), ())
    return [one if one.launch else replace(one, launch=launch) for one in by_tools]


def _add(found: dict[tuple[Any, ...], Fault], key: tuple[Any, ...], fault: Fault) -> None:
    if key in found:
        kept = found[key]
        found[key] = replace(kept, count=kept.count + 1)
    elif len(found) < KINDS:
        found[key] = fault


@dataclass
class _Agent:
    """rocm-debug-agent's report, and the lines of the HIP runtime before and after it."""

    found: dict[tuple[Any, ...], Fault] = field(default_factory=dict)
    key: tuple[Any, ...] | None = None  # of the wavefront whose disassembly comes
    file: str = ""
    number: str = ""
    address: str | None = None
    reason: str | None = None

    def line(self, text: str) -> None:
        stripped = text.strip()
        if wave := _WAVE.match(stripped):
            self._wave(wave[2], wave[3].strip())
        elif fault := _AMD_FAULT.search(stripped):
            address, reason = _AMD_ADDRESS.search(fault[1]), _AMD_REASON.search(fault[1])
            self.address = address[1] if address else self.address
            self.reason = clean(reason[1]) if reason else "memory access fault"
        elif queue := _AMD_QUEUE.search(stripped):
            self.reason = self.reason or queue[1]
        elif self.key in self.found:
            self._disassembly(text, stripped)

    def _wave(self, pc: str, rest: str) -> None:
        stopped = _STOPPED.search(rest)
        reasons = set((stopped[1] or "NONE").split("|")) - IGNORED if stopped else set()
        if not reasons:
            self.key = None
            return
        kind = min(reasons, key=lambda one: GRAVITY.index(one) if one in GRAVITY else len(GRAVITY))
        entry = _ENTRY.search(rest)
        self.key, self.file, self.number = (kind, pc), "", ""
        kernel = clean(entry[1]) if entry else None
        _add(self.found, self.key, Fault("rocm-debug-agent", kind, kernel))

    def _disassembly(self, text: str, stripped: str) -> None:
        fault = self.found[self.key or ()]
        if function := _FUNCTION.fullmatch(stripped):
            name = clean(function[1]) if function[1] else None
            fault = replace(fault, kernel=fault.kernel or name)
        elif stripped.startswith("code object: "):
            fault = replace(fault, code_object=clean(stripped.removeprefix("code object: ")))
        elif arrow := _ARROW.match(stripped):
            where = f"{self.file}:{self.number}" if self.file and self.number else None
            fault = replace(fault, instruction=clean(arrow[1]), source=where or fault.source)
        elif fault.code_object and not text.startswith(" ") and stripped.endswith(":"):
            self.file, self.number = clean(stripped[:-1]), ""
        elif self.file and (source := _SOURCE.match(text)):
            self.number = source[1]
        self.found[self.key or ()] = fault

    def faults(self) -> list[Fault]:
        found = [replace(one, address=self.address) for one in self.found.values()]
        if not found and self.reason:
            return [Fault("HIP runtime", self.reason, address=self.address)]
        order = {kind: place for place, kind in enumerate(GRAVITY)}
        return sorted(found, key=lambda one: (order.get(one.kind, len(order)), -one.count))


@dataclass
class _Sanitizer:
    """NVIDIA's compute-sanitizer, tool memcheck: lines that begin with ========="""

    found: dict[tuple[Any, ...], Fault] = field(default_factory=dict)
    open: Fault | None = None

    def line(self, text: str) -> None:
        if not text.startswith("========="):
            return
        stripped = text.lstrip("=").strip()
        api_error = stripped.startswith("Program hit ") and _DEVICE_ERROR.search(stripped)
        if _INVALID.fullmatch(stripped) or api_error:
            self._close()
            self.open = Fault("compute-sanitizer", clean(stripped))
        elif self.open is None:
            return
        elif not stripped:
            self._close()
        elif stripped.startswith("at "):
            self._at(self.open, stripped)
        elif by := _BY.match(stripped):
            self.open = replace(self.open, threads=f"thread {by[1]} of block {by[2]}")
        elif access := _ACCESS.match(stripped):
            self.open = replace(self.open, address=access[1])
        elif stripped.startswith("Host Frame:"):
            self._frame(self.open, stripped.removeprefix("Host Frame:").strip())

    def _at(self, fault: Fault, text: str) -> None:
        if new := _NEW_AT.match(text):
            kernel, file, number = new[1], new[2], new[3]
        elif old := _OLD_AT.match(text):
            file, number, kernel = old[1], old[2], old[3]
        else:
            return
        where = f"{clean(file)}:{number}" if file else None
        self.open = replace(fault, kernel=clean(kernel), source=where)

    def _frame(self, fault: Fault, text: str) -> None:
        """A frame of the host that has a source line, up to eight of them."""
        if re.search(r" in .+:\d+", text) and len(fault.launch) < 8:
            self.open = replace(fault, launch=(*fault.launch, clean(text)))

    def _close(self) -> None:
        if self.open is not None:
            one = self.open
            _add(self.found, (one.kind, one.kernel, one.source), one)
        self.open = None

    def faults(self) -> list[Fault]:
        """Accesses; the errors of calls, which follow from them, where there are none."""
        self._close()
        found = list(self.found.values())
        return [one for one in found if not one.kind.startswith("Program hit ")] or found[:1]


@dataclass
class _Python:
    """Python's tracebacks of errors of the device, and those of faulthandler where the process was aborted. torch
    begins their lines with [rank0]: in a distributed program."""

    frames: list[tuple[str, str, str]] = field(default_factory=list)  # file, line, function
    reading: bool = False
    fatal: str | None = None
    found: list[Fault] = field(default_factory=list)

    def line(self, text: str) -> None:
        text = _RANK.sub("", text, count=1)
        if text.startswith("Traceback (most recent call last):"):
            self.frames, self.reading, self.fatal = [], True, None
        elif text.startswith("Fatal Python error: "):
            self._close()
            self.fatal = clean(text.removeprefix("Fatal Python error: "))
        elif "(most recent call first):" in text and self.fatal:
            if self.frames:  # the current thread's come first
                self._close()
            self.reading = True
        elif self.reading and (frame := _FRAME.match(text.strip())):
            if len(self.frames) < 1000:
                self.frames.append((frame[1], frame[2], frame[3]))
        elif self.reading and self.fatal and not text.strip():
            self._close()
        elif self.reading and not self.fatal and text and not text[0].isspace():
            self._error(text)

    def _error(self, text: str) -> None:
        if _DEVICE_ERROR.search(text) and len(self.found) < KINDS:
            frames = [*reversed(self.frames)]
            self.found.append(_of_frames(clean(text), frames))
        self.frames, self.reading = [], False

    def _close(self) -> None:
        if self.fatal and self.frames and len(self.found) < KINDS:
            self.found.append(_of_frames(f"the process was stopped: {self.fatal}", self.frames))
        self.frames, self.reading, self.fatal = [], False, None

    def faults(self) -> list[Fault]:
        self._close()
        return self.found


def _of_frames(kind: str, frames: list[tuple[str, str, str]]) -> Fault:
    """frames: the innermost first. Those inside of torch and Triton are left out of the launch, if others are there; a
    line below which Triton's frames lie launched a kernel, whose name it has."""
    first = next((place for place, one in enumerate(frames) if not _LIBRARIES.search(one[0])), 0)
    own = [one for one in frames if not _LIBRARIES.search(one[0])] or frames
    shown = tuple(
        clean(f"{file}:{line} in {function}" + (f": {text}" if (text := _text_of(file, line)) else ""))
        for file, line, function in own[:8]
    )
    by_triton = first > 0 and re.search(r"[/\\]triton[/\\]", frames[first - 1][0])
    launch = _LAUNCH.search(_text_of(*frames[first][:2])) if by_triton else None
    kernel = clean(launch[1].rpartition(".")[2]) if launch else None
    return Fault("Python", kind, kernel, launch=shown)


def _text_of(file: str, line: str) -> str:
    """The line of a Python file that a frame names; "" where there is none, or the file is larger than any program."""
    path = Path(file)
    try:
        if not file.endswith(".py") or not path.is_file() or path.stat().st_size > PROGRAM:
            return ""
    except OSError:  # a name that is too long, a folder of another user
        return ""
    return linecache.getline(file, int(line[:9])).strip()[:SHOWN]
