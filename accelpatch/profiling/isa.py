"""Counts in a kernel's instructions: wide loads, waits, matrix instructions, and trips through shared memory.

AMD's names are those of the CDNA ISA guides (`global_load_dwordx4`, `s_waitcnt vmcnt(0)`, `v_mfma_*`), NVIDIA's are
those of SASS as cuobjdump prints it (`LDG.E.128`, `BAR.SYNC`, `HMMA`). A loop counts once, however often it runs. A
trip through shared memory (LDS) is a value that is written there and read again in another layout: in Triton's IR a
`local_load`, or a `convert_layout` between two layouts of registers.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

# count -> what an instruction begins with
_AMD = {
    "loads": r"(?:global|buffer|flat)_load_",
    "wide_loads": r"(?:global|buffer|flat)_load_(?:dwordx4|b128)",
    "stores": r"(?:global|buffer|flat)_store_",
    "shared_reads": r"ds_(?:read|load)",
    "shared_writes": r"ds_(?:write|store)",
    "waits": r"s_wait(?:cnt|_\w+)",
    "full_waits": r"s_waitcnt[^\n]*vmcnt\(0\)|s_wait_loadcnt 0x0",
    "barriers": r"s_barrier",
    "matrix": r"v_(?:s?mfmac?|wmma)_",
    "dots": r"v_dot\dc?_",
    "spills": r"scratch_(?:load|store)",
}
_NVIDIA = {
    "loads": r"(?:LDG|LDGSTS|UBLKCP|UTMALDG)\b",
    "wide_loads": r"(?:LDG|LDGSTS)\.[\w.]*128|UTMALDG\b|UBLKCP\b",
    "stores": r"STG\b",
    "shared_reads": r"(?:LDS|LDSM)\b",
    "shared_writes": r"(?:STS|STSM|LDGSTS)\b",
    "waits": r"(?:\w+\.)?DEPBAR\b|LDGDEPBAR\b|SYNCS\b",
    "full_waits": r"DEPBAR\.LE SB\d, 0x0",
    "barriers": r"BAR\b",
    "matrix": r"(?:[HIDQB]MMA|[HIQ]GMMA|UTC\w*MMA)\b",
    "dots": r"IDP\b",
    "spills": r"(?:LDL|STL)\b",
}


@dataclass(frozen=True)
class Counts:
    """Of one kernel: loads from memory, those of 16 bytes a lane, stores, reads and writes of shared memory, waits for
    memory, those for all loads, barriers, matrix instructions, dot products, accesses of scratch memory."""

    loads: int
    wide_loads: int
    stores: int
    shared_reads: int
    shared_writes: int
    waits: int
    full_waits: int
    barriers: int
    matrix: int
    dots: int
    spills: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


def of_amd(text: str) -> dict[str, Counts]:
    """Kernel -> Counts, of assembly (`.s`) or of what llvm-objdump prints."""
    return {name: _counts(body, _AMD, r"^\s+") for name, body in _functions(text)}


def of_sass(text: str) -> dict[str, Counts]:
    """Kernel -> Counts, of what `cuobjdump -sass` prints."""
    parts = re.split(r"^\s*Function : (\S+)\s*$", text, flags=re.MULTILINE)
    before = r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?"
    return {name: _counts(body, _NVIDIA, before) for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def _counts(body: str, patterns: dict[str, str], before: str) -> Counts:
    found = {name: len(re.findall(f"{before}(?:{one})", body, re.MULTILINE)) for name, one in patterns.items()}
    return Counts(**found)


def _functions(text: str) -> list[tuple[str, str]]:
    """(name, instructions) of each function; labels of blocks within one begin with a dot or L."""
    label = re.compile(r"^(?:[0-9a-f]+ <([\w$.]+)>|([A-Za-z_$][\w$.]*)):", re.MULTILINE)
    found = [one for one in label.finditer(text) if not (one[1] or one[2]).startswith(("L", ".L"))]
    ends = [*(one.start() for one in found), len(text)][1:]
    made = [(one[1] or one[2], text[one.end() : end]) for one, end in zip(found, ends, strict=True)]
    return [(name, body) for name, body in made if re.search(r"^\s+[sv]_\w+", body, re.MULTILINE)]


def trips_through_shared(ir: str) -> int:
    """How often a value goes through shared memory to another layout, in Triton's GPU IR (`.ttgir`)."""
    trips = len(re.findall(r"= ttg\.local_load\b", ir))
    for source, target in re.findall(
        r"(?:ttg|triton_gpu)\.convert_layout[^\n]*?:\s*\(?(tensor<[^\n]*?>)\)?\s*->\s*(tensor<[^\n]*)", ir
    ):
        trips += "#shared" not in target  # a write alone; reading it again is another line
        trips -= "#shared" not in target and _layout(source) == _layout(target)
    return trips


def _layout(tensor: str) -> str:
    return tensor.partition("#")[2].partition(">")[0]
