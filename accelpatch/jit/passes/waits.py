"""Tracks outstanding memory operations, and checks that no instruction reads or writes a register that an outstanding
load will write.

vmcnt counts loads and stores of buffers and global memory, which complete in order. lgkmcnt counts LDS, which completes
in order, and scalar memory, which does not: while any scalar access is outstanding, only lgkmcnt(0) waits for anything.
flat instructions count in both, in no order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from accelpatch.jit.ir import Block, Instruction, Part, Program
from accelpatch.jit.location import fail
from accelpatch.jit.passes.liveness import bits

_COUNTERS = {"buffer": ("vmcnt",), "global": ("vmcnt",), "scratch": ("vmcnt",), "flat": ("vmcnt", "lgkmcnt"),
             "ds": ("lgkmcnt",), "smem": ("lgkmcnt",)}  # fmt: skip
MOST = {"vmcnt": 63, "lgkmcnt": 15}
#: keys of State.outstanding besides register units: accesses of LDS (LDS and the counter), and scalar stores
LDS, SCALAR_STORE = "LDS ", "stored by scalars"


@dataclass(frozen=True)
class Access:
    """An outstanding access of memory. issued_since: counter -> how many were issued after it, at least. short_wait: a
    later wait of the kernel that completed none of the accesses of its counter, if there was one."""

    by: Instruction
    issued_since: Mapping[str, int]
    short_wait: Instruction | None = None

    def merged(self, other: Access) -> Access:
        counts = {name: min(self.issued_since.get(name, 99), other.issued_since.get(name, 99)) for name in
                  (*self.issued_since, *other.issued_since)}  # fmt: skip
        return replace(self, issued_since=counts, short_wait=self.short_wait or other.short_wait)


@dataclass
class State:
    """outstanding: register unit (or LDS, SCALAR_STORE) -> the access. unordered: counters with accesses that complete
    in no order."""

    outstanding: dict[int | str, Access] = field(default_factory=dict)
    unordered: set[str] = field(default_factory=set)

    @property
    def regunits(self) -> int:
        """The register units that outstanding loads will write."""
        return sum(1 << key for key in self.outstanding if isinstance(key, int))

    def copy(self) -> State:
        return State(dict(self.outstanding), set(self.unordered))

    def merge(self, other: State) -> bool:
        """Merge in the state of another path to the same point; returns whether this state changed."""
        before = self._facts()
        for key, access in other.outstanding.items():
            self.outstanding[key] = self.outstanding[key].merged(access) if key in self.outstanding else access
        self.unordered |= other.unordered
        return before != self._facts()

    def _facts(self) -> object:
        accesses = {key: (dict(one.issued_since), one.short_wait) for key, one in self.outstanding.items()}
        return accesses, set(self.unordered)

    def step(self, one: Instruction) -> None:
        if one.name == "s_waitcnt":
            for name, value in parse_counts(one).items():
                self.wait(name, value, one)
        for name in _COUNTERS.get(one.form.unit, ()):
            self._issue(name, one)

    def wait(self, name: str, value: int, by: Instruction | None = None) -> None:
        """From here on at most ``value`` accesses of a counter are outstanding. by: the kernel's s_waitcnt; None for a
        wait that the jit inserts."""
        counted = {key: access for key, access in self.outstanding.items() if name in access.issued_since}
        stay = {key: access for key, access in counted.items()
                if access.issued_since[name] < value or (value and name in self.unordered)}  # fmt: skip
        for key, access in counted.items():
            if key in stay:
                short_wait = by or access.short_wait if len(stay) == len(counted) else access.short_wait
                self.outstanding[key] = replace(access, short_wait=short_wait)
                continue
            rest = {other: count for other, count in access.issued_since.items() if other != name}
            if rest:
                self.outstanding[key] = replace(access, issued_since=rest)
            else:
                del self.outstanding[key]
        if value == 0:
            self.unordered.discard(name)

    def _issue(self, name: str, one: Instruction) -> None:
        for key, access in self.outstanding.items():
            if name in access.issued_since and access.by is not one:
                count = min(access.issued_since[name] + 1, MOST[name] + 1)
                self.outstanding[key] = replace(access, issued_since={**access.issued_since, name: count})
        if one.form.unit in ("smem", "flat"):
            self.unordered.add(name)
        by_dma = "lds" in one.form.flags or "_lds_" in one.name or "lds" in one.mod.split()
        lds = one.form.unit == "ds" or by_dma or (one.form.unit == "flat" and "load" not in one.name)
        stored = [SCALAR_STORE] if one.form.unit == "smem" and "store" in one.form.flags else []
        keys: list[int | str] = [*bits(one.writes), *([LDS + name] if lds else stored)]
        for key in keys:
            self.outstanding[key] = Access(one, dict.fromkeys(_COUNTERS[one.form.unit], 0))


def parse_counts(wait: Instruction) -> dict[str, int]:
    """Counter -> count of an s_waitcnt. Raises CompileError where it names no counter."""
    text = str(wait.operands[0])
    found = {name: int(value) for name, value in re.findall(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)", text)}
    if not found:
        fail(f"s_waitcnt {text!r}: write the counters, as in mod='vmcnt(0) lgkmcnt(0)'", wait.line)
    for name, value in found.items():
        if value > MOST.get(name, 7):
            fail(f"s_waitcnt {name}({value}): {name} counts to {MOST.get(name, 7)}", wait.line)
    return found


def entry_states(program: Program, step: Callable[[State, Instruction], None]) -> dict[Block, State]:
    """Block -> what may be outstanding at its start, on any path to it; unreachable blocks are left out."""
    entry: dict[Block, State] = {program.blocks[0]: State()}
    waiting = [program.blocks[0]]
    while waiting:
        block = waiting.pop()
        state = entry[block].copy()
        for one in block.instructions:
            step(state, one)
        for successor in block.successors:
            if successor not in entry:
                entry[successor] = state.copy()
                waiting.append(successor)
            elif entry[successor].merge(state):
                waiting.append(successor)
    return entry


def check_waits(program: Program) -> dict[Instruction, int]:
    """Instruction -> the register units that outstanding loads will write. Raises CompileError where it uses one of
    them."""
    pending = dict.fromkeys(program.instructions(), 0)
    for block, state in entry_states(program, State.step).items():
        for one in block.instructions:
            pending[one] = state.regunits
            for regunit, access in touched(one, state):
                if _in_order(one, regunit, access, state):
                    continue
                waits = " ".join(f"{name}({count})" for name, count in needed_counts(access, state).items())
                fail(f'{too_early(one, regunit, access)}: put J.s_waitcnt(mod="{waits}") before it', one.line)
            state.step(one)
    return pending


def touched(one: Instruction, state: State) -> list[tuple[int, Access]]:
    """The register units of an instruction that outstanding loads will write."""
    return [(regunit, state.outstanding[regunit]) for regunit in bits((one.reads | one.writes) & state.regunits)]


def _in_order(one: Instruction, regunit: int, access: Access, state: State) -> bool:
    """Whether the instruction is itself a load, which will write the register after the outstanding one does."""
    kinds = _COUNTERS.get(one.form.unit, ())
    return not one.reads >> regunit & 1 and tuple(access.issued_since) == kinds and not state.unordered & set(kinds)


def needed_counts(access: Access, state: State) -> dict[str, int]:
    """Counter -> the largest count with which s_waitcnt waits for an access."""
    return {name: 0 if name in state.unordered else min(count, MOST[name])
            for name, count in access.issued_since.items()}  # fmt: skip


def too_early(one: Instruction, regunit: int | str, access: Access) -> str:
    """The error message for an instruction that comes before an outstanding access is complete."""
    if isinstance(regunit, str):
        return f"{one.name} comes before {access.by.name} of {access.by.line} is over"
    name = next(operand.register.name for operand in one.operands if isinstance(operand, Part)
                and operand.mask >> regunit & 1)  # fmt: skip
    verb = "reads" if one.reads >> regunit & 1 else "writes"
    return f"{one.name} {verb} {name}, which {access.by.name} of {access.by.line} may not have filled yet"
