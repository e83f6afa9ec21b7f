"""Checks the waits: nothing reads or writes a register that a load is still to fill.

vmcnt counts loads and stores of buffers and global memory, which finish in order. lgkmcnt counts LDS and scalar memory;
LDS alone finishes in order, scalar memory does not, so while any of it is under way only lgkmcnt(0) is a wait. flat
instructions are counted by both, in no order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from accelpatch.jit.ir import Block, Instruction, Part, Program
from accelpatch.jit.location import fail
from accelpatch.jit.passes.liveness import bits

_COUNTERS = {"buffer": ("vmcnt",), "global": ("vmcnt",), "scratch": ("vmcnt",), "flat": ("vmcnt", "lgkmcnt"),
             "ds": ("lgkmcnt",), "smem": ("lgkmcnt",)}  # fmt: skip
_MOST = {"vmcnt": 63, "lgkmcnt": 15}


@dataclass(frozen=True)
class Load:
    """What is under way to a register. after: counter -> how many operations were begun since, at least."""

    by: Instruction
    after: Mapping[str, int]

    def least(self, other: Load) -> Load:
        counts = {name: min(self.after.get(name, 99), other.after.get(name, 99)) for name in
                  (*self.after, *other.after)}  # fmt: skip
        return replace(self, after=counts)


@dataclass
class State:
    """unit -> the load that fills it; and the counters with operations that finish in no order."""

    loads: dict[int, Load] = field(default_factory=dict)
    unordered: set[str] = field(default_factory=set)

    def copy(self) -> State:
        return State(dict(self.loads), set(self.unordered))

    def merge(self, other: State) -> bool:
        """Take in what holds on another way to the same place; returns whether that is anything new."""
        before = {unit: dict(load.after) for unit, load in self.loads.items()}, set(self.unordered)
        for unit, load in other.loads.items():
            self.loads[unit] = self.loads[unit].least(load) if unit in self.loads else load
        self.unordered |= other.unordered
        return before != ({unit: dict(load.after) for unit, load in self.loads.items()}, self.unordered)

    def step(self, one: Instruction) -> None:
        if one.name == "s_waitcnt":
            for name, value in counts(one).items():
                self._wait(name, value)
        for name in _COUNTERS.get(one.form.unit, ()):
            self._begin(name, one)

    def _wait(self, name: str, value: int) -> None:
        if value and name in self.unordered:
            return
        for unit, load in list(self.loads.items()):
            if load.after.get(name, -1) >= value:
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
                count = min(load.after[name] + 1, _MOST[name] + 1)
                self.loads[unit] = replace(load, after={**load.after, name: count})
        if one.form.unit in ("smem", "flat"):
            self.unordered.add(name)
        for unit in bits(one.writes):
            self.loads[unit] = Load(one, dict.fromkeys(_COUNTERS[one.form.unit], 0))


def counts(wait: Instruction) -> dict[str, int]:
    """The counters that an s_waitcnt names. Raises CompileError where it says none."""
    text = str(wait.operands[0])
    found = {name: int(value) for name, value in re.findall(r"(vmcnt|lgkmcnt|expcnt)\((\d+)\)", text)}
    if not found:
        fail(f"s_waitcnt {text!r}: write the counters, as in mod='vmcnt(0) lgkmcnt(0)'", wait.line)
    for name, value in found.items():
        if value > _MOST.get(name, 7):
            fail(f"s_waitcnt {name}({value}): {name} counts to {_MOST.get(name, 7)}", wait.line)
    return found


def check_waits(program: Program) -> dict[Instruction, int]:
    """Instruction -> the units that loads are to fill when it is reached. Raises CompileError where it uses one."""
    entry: dict[Block, State] = {program.blocks[0]: State()}
    waiting = [program.blocks[0]]
    while waiting:
        block = waiting.pop()
        state = entry[block].copy()
        for one in block.instructions:
            state.step(one)
        for after in block.next:
            if after not in entry:
                entry[after] = state.copy()
                waiting.append(after)
            elif entry[after].merge(state):
                waiting.append(after)
    pending = {}
    for block in program.blocks:
        state = entry[block]
        for one in block.instructions:
            pending[one] = sum(1 << unit for unit in state.loads)
            _check(one, state)
            state.step(one)
    return pending


def _check(one: Instruction, state: State) -> None:
    for unit in bits((one.reads | one.writes) & sum(1 << unit for unit in state.loads)):
        load = state.loads[unit]
        kinds = _COUNTERS.get(one.form.unit, ())
        if not one.reads >> unit & 1 and tuple(load.after) == kinds and not state.unordered & set(kinds):
            continue  # a load after a load: they finish in this order
        name = next(operand.register.name for operand in one.operands if isinstance(operand, Part)
                    and operand.mask >> unit & 1)  # fmt: skip
        waits = " ".join(
            f"{counter}({0 if counter in state.unordered else count})" for counter, count in load.after.items()
        )
        verb = "reads" if one.reads >> unit & 1 else "writes"
        fail(f"{one.name} {verb} {name}, which {load.by.name} of {load.by.line} may not have filled yet: "
             f'put J.s_waitcnt(mod="{waits}") before it', one.line)  # fmt: skip
