"""What is under way, and the check of the waits: nothing reads or writes a register that a load is still to fill.

vmcnt counts loads and stores of buffers and global memory, which finish in order. lgkmcnt counts LDS and scalar memory;
LDS alone finishes in order, scalar memory does not, so while any of it is under way only lgkmcnt(0) is a wait. flat
instructions are counted by both, in no order.
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
#: in place of a unit: accesses of LDS under way, which a barrier is to come after, and stores by scalar memory
LDS, STORED = "LDS ", "stored by scalars"


@dataclass(frozen=True)
class Load:
    """What is under way to a register. after: counter -> how many operations were begun since, at least. left: a wait
    of the kernel's own that came since and was over for none of what is counted, if one did."""

    by: Instruction
    after: Mapping[str, int]
    left: Instruction | None = None

    def least(self, other: Load) -> Load:
        counts = {name: min(self.after.get(name, 99), other.after.get(name, 99)) for name in
                  (*self.after, *other.after)}  # fmt: skip
        return replace(self, after=counts, left=self.left or other.left)


@dataclass
class State:
    """unit -> the load that fills it (also LDS and STORED); the counters with operations that finish in no order."""

    loads: dict[int | str, Load] = field(default_factory=dict)
    unordered: set[str] = field(default_factory=set)

    @property
    def units(self) -> int:
        """The units that loads are to fill."""
        return sum(1 << unit for unit in self.loads if isinstance(unit, int))

    def copy(self) -> State:
        return State(dict(self.loads), set(self.unordered))

    def merge(self, other: State) -> bool:
        """Take in what holds on another way to the same place; returns whether that is anything new."""
        before = self._facts()
        for unit, load in other.loads.items():
            self.loads[unit] = self.loads[unit].least(load) if unit in self.loads else load
        self.unordered |= other.unordered
        return before != self._facts()

    def _facts(self) -> object:
        return {unit: (dict(load.after), load.left) for unit, load in self.loads.items()}, set(self.unordered)

    def step(self, one: Instruction) -> None:
        if one.name == "s_waitcnt":
            for name, value in counts(one).items():
                self.wait(name, value, one)
        for name in _COUNTERS.get(one.form.unit, ()):
            self._begin(name, one)

    def wait(self, name: str, value: int, by: Instruction | None = None) -> None:
        """At most so many operations of a counter are under way from here on. by: the kernel's wait that says so."""
        counted = {unit: load for unit, load in self.loads.items() if name in load.after}
        stay = {unit: load for unit, load in counted.items()
                if load.after[name] < value or (value and name in self.unordered)}  # fmt: skip
        for unit, load in counted.items():
            if unit in stay:
                self.loads[unit] = replace(load, left=by or load.left) if len(stay) == len(counted) else load
                continue
            rest = {other: count for other, count in load.after.items() if other != name}
            if rest:
                self.loads[unit] = replace(load, after=rest)
            else:
                del self.loads[unit]
        if value == 0:
            self.unordered.discard(name)

    def _begin(self, name: str, one: Instruction) -> None:
        for unit, load in self.loads.items():
            if name in load.after and load.by is not one:
                count = min(load.after[name] + 1, MOST[name] + 1)
                self.loads[unit] = replace(load, after={**load.after, name: count})
        if one.form.unit in ("smem", "flat"):
            self.unordered.add(name)
        by_dma = "lds" in one.form.flags or "_lds_" in one.name or "lds" in one.mod.split()
        lds = one.form.unit == "ds" or by_dma or (one.form.unit == "flat" and "load" not in one.name)
        stored = [STORED] if one.form.unit == "smem" and "store" in one.form.flags else []
        units: list[int | str] = [*bits(one.writes), *([LDS + name] if lds else stored)]
        for unit in units:
            self.loads[unit] = Load(one, dict.fromkeys(_COUNTERS[one.form.unit], 0))


def counts(wait: Instruction) -> dict[str, int]:
    """The counters that an s_waitcnt names. Raises CompileError where it says none."""
    text = str(wait.operands[0])
    found = {name: int(value) for name, value in re.findall(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)", text)}
    if not found:
        fail(f"s_waitcnt {text!r}: write the counters, as in mod='vmcnt(0) lgkmcnt(0)'", wait.line)
    for name, value in found.items():
        if value > MOST.get(name, 7):
            fail(f"s_waitcnt {name}({value}): {name} counts to {MOST.get(name, 7)}", wait.line)
    return found


def entries(program: Program, step: Callable[[State, Instruction], None]) -> dict[Block, State]:
    """What is under way where each block begins, on any way to it; blocks that nothing leads to are left out."""
    entry: dict[Block, State] = {program.blocks[0]: State()}
    waiting = [program.blocks[0]]
    while waiting:
        block = waiting.pop()
        state = entry[block].copy()
        for one in block.instructions:
            step(state, one)
        for after in block.next:
            if after not in entry:
                entry[after] = state.copy()
                waiting.append(after)
            elif entry[after].merge(state):
                waiting.append(after)
    return entry


def check_waits(program: Program) -> dict[Instruction, int]:
    """Instruction -> the units that loads are to fill when it is reached. Raises CompileError where it uses one."""
    pending = dict.fromkeys(program.instructions(), 0)
    for block, state in entries(program, State.step).items():
        for one in block.instructions:
            pending[one] = state.units
            for unit, load in touched(one, state):
                if _in_order(one, unit, load, state):
                    continue
                waits = " ".join(f"{name}({count})" for name, count in left(load, state).items())
                fail(f'{early(one, unit, load)}: put J.s_waitcnt(mod="{waits}") before it', one.line)
            state.step(one)
    return pending


def touched(one: Instruction, state: State) -> list[tuple[int, Load]]:
    """The units of an instruction that loads are still to fill."""
    return [(unit, state.loads[unit]) for unit in bits((one.reads | one.writes) & state.units)]


def _in_order(one: Instruction, unit: int, load: Load, state: State) -> bool:
    """Whether it is itself a load that will come after that one."""
    kinds = _COUNTERS.get(one.form.unit, ())
    return not one.reads >> unit & 1 and tuple(load.after) == kinds and not state.unordered & set(kinds)


def left(load: Load, state: State) -> dict[str, int]:
    """Counter -> to how many a wait must come so that a load is over."""
    return {name: 0 if name in state.unordered else min(count, MOST[name]) for name, count in load.after.items()}


def early(one: Instruction, unit: int | str, load: Load) -> str:
    """What is wrong with an instruction that comes before a load is over."""
    if isinstance(unit, str):
        return f"{one.name} comes before {load.by.name} of {load.by.line} is over"
    name = next(operand.register.name for operand in one.operands if isinstance(operand, Part)
                and operand.mask >> unit & 1)  # fmt: skip
    verb = "reads" if one.reads >> unit & 1 else "writes"
    return f"{one.name} {verb} {name}, which {load.by.name} of {load.by.line} may not have filled yet"
