"""Cycle counts of assembly by llvm-mca, for a single wavefront.

Its model has the latencies of instructions and their dependencies, but no caches, other wavefronts or memory bandwidth.
It can compare two versions of a loop, but not predict a time.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence

from accelpatch.errors import CompileError

_TOOLS = ("llvm-mca-19", "/opt/rocm/llvm/bin/llvm-mca", "llvm-mca")
_LABEL = re.compile(r"^([\w.$]+):")
_BYTES = {"ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12,
          "dwordx4": 16}  # fmt: skip


def code(assembly: str, name: str) -> list[str]:
    """The labels and instructions of a kernel in an assembly file, without comments and directives."""
    lines = [re.sub(r"(//|;).*", "", line).strip() for line in assembly.splitlines()]
    start = lines.index(f"{name}:") + 1
    over = (".size", ".Lfunc_end", ".Lend_", ".section")
    end = next(at for at in range(start, len(lines)) if lines[at].startswith(over))
    return [line for line in lines[start:end] if line and (_LABEL.match(line) or not line.startswith("."))]


def instructions(lines: Sequence[str]) -> list[str]:
    return [line for line in lines if not _LABEL.match(line)]


def loops(lines: Sequence[str]) -> list[list[str]]:
    """The instructions of each loop, from a label to the last branch back to it; short loops first, so inner ones
    before outer ones."""
    allocation = {found[1]: at for at, line in enumerate(lines) if (found := _LABEL.match(line))}
    ends: dict[int, int] = {}
    for at, line in enumerate(lines):
        found = re.match(r"s_c?branch\w* +(\S+)", line)
        if found and allocation.get(found[1], at) < at:
            ends[allocation[found[1]]] = at + 1
    return [instructions(lines[start:end]) for start, end in sorted(ends.items(), key=lambda one: one[1] - one[0])]


def bytes_loaded(lines: Sequence[str]) -> int:
    """Bytes that a lane loads from global memory and buffers. Raises CompileError for loads that convert formats."""
    found = [re.match(r"(?:global|buffer|flat)_load_(?:lds_)?(\w+?)(?:_d16\w*)? ", line) for line in lines]
    sizes = [one[1] for one in found if one]
    if unknown := [size for size in sizes if size not in _BYTES]:
        raise CompileError(f"how many bytes a load of {unknown[0]} takes is not known here")
    return sum(_BYTES[size] for size in sizes)


def cycles(lines: Sequence[str], arch: str, rounds: int = 1) -> float:
    """Cycles per round of the instructions, over so many rounds, by LLVM's model of the arch (before LLVM 20 there is
    none for gfx950). An s_nop counts as its number of wait states. Raises CompileError where there is no llvm-mca, or
    it does not know an instruction."""
    tool = next((found for one in _TOOLS if (found := shutil.which(one))), None)
    if tool is None:
        raise CompileError("there is no llvm-mca here: install Debian's llvm-19, or ROCm with its LLVM")
    command = [tool, "-mtriple=amdgcn-amd-amdhsa", f"-mcpu={arch}", f"-iterations={rounds}", "-"]
    text = "\n".join(part for line in lines for part in _plain(line))
    done = subprocess.run(command, input=text + "\n", capture_output=True, text=True, check=False)
    total = re.search(r"Total Cycles: +(\d+)", done.stdout)
    if done.returncode or total is None or "error:" in done.stderr:
        raise CompileError(f"llvm-mca does not know this assembly of {arch}: {done.stderr[:500]}")
    return int(total[1]) / rounds


def _plain(line: str) -> list[str]:
    """A line in a form that llvm-mca can count: an s_nop for each wait state; an s_nop in place of a branch, whose
    label it does not know; and global accesses in place of buffer accesses, which have the same latency, but abort LLVM
    19's llvm-mca."""
    if found := re.match(r"s_nop +(\w+)", line):
        return ["s_nop 0"] * (int(found[1], 0) + 1)
    if found := re.match(r"buffer_(load|store)_(\w+) +([^,]+), *([^,]+), *s\[(\d+):\d+\]", line):
        kind, size, data, address, first = found.groups()
        given = ["v0" if address == "off" else re.sub(r"v\[(\d+):\d+\]", r"v\1", address), data]
        names = ", ".join(given[::-1] if kind == "load" else given)
        return [f"global_{kind}_{size} {names}, s[{first}:{int(first) + 1}]"]
    return ["s_nop 0"] if re.match(r"s_c?branch", line) else [line]
