"""Random kernels: programs as trees, what they compute in plain Python, and the kernel that the jit makes of them.

A statement is a tuple: ("v", register, expression), ("s", register, expression), ("if", condition, then, otherwise),
("for", rounds, body), ("while", register that its counter starts from, bound, step, body), ("break",), ("continue",).
An expression is a number, a register ("v", 0) or ("s", 1), or (operator, left, right). A condition is
(comparison, left, right).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from accelpatch.jit import jit

VECTORS, SCALARS, LANES = 4, 3, 64
MASK = 0xFFFFFFFF
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "&": operator.and_, "|": operator.or_,
             "^": operator.xor, "<<": operator.lshift, ">>": operator.rshift}  # fmt: skip
COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq,
               "!=": operator.ne}  # fmt: skip


Statements = Sequence[st.SearchStrategy[Any]]


def signed(value: int) -> int:
    value &= MASK
    return value - (1 << 32) if value >> 31 else value


def expressions(files: str) -> st.SearchStrategy[Any]:
    registers = [("v", at) for at in range(VECTORS) if "v" in files] + [("s", at) for at in range(SCALARS)]
    leaf = st.one_of(st.sampled_from(registers), st.sampled_from([0, 1, 2, 3, 5, 8, 63, 64, 100, 1000, -1, -7]))
    shift = st.tuples(st.sampled_from(["<<", ">>"]), st.sampled_from(registers), st.integers(0, 31))
    return st.recursive(
        leaf,
        lambda inner: st.one_of(shift, st.tuples(st.sampled_from("+-*&|^"), inner, inner)),
        max_leaves=5,
    )


def conditions(files: str) -> st.SearchStrategy[Any]:
    return st.tuples(st.sampled_from(sorted(COMPARISONS)), expressions(files), expressions(files)).filter(
        registers_of  # two numbers are compared by Python
    )


def registers_of(tree: Any) -> bool:
    """Whether an expression has a register in it."""
    return isinstance(tree, tuple) and (tree[0] in ("v", "s") or any(map(registers_of, tree[1:])))


def statements(depth: int, *, loop: bool = False, more: Statements = ()) -> st.SearchStrategy[Any]:
    plain = [
        *more,
        st.tuples(st.just("v"), st.integers(0, VECTORS - 1), expressions("vs")),
        st.tuples(st.just("s"), st.integers(0, SCALARS - 1), expressions("s")),
    ]
    if loop:
        plain.append(st.sampled_from([("break",), ("continue",)]))
    if depth:
        body = bodies(depth - 1, loop=loop, more=more)
        inside = bodies(depth - 1, loop=True, more=more)
        plain += [
            st.tuples(st.just("if"), st.one_of(conditions("vs"), conditions("s")), body, st.one_of(st.just(()), body)),
            st.tuples(st.just("for"), st.integers(1, 4), inside),
            st.tuples(st.just("while"), st.integers(0, VECTORS - 1), st.integers(1, 12), st.integers(1, 5), inside),
        ]
    return st.one_of(plain)


def bodies(depth: int, *, loop: bool = False, more: Statements = ()) -> st.SearchStrategy[Any]:
    """more: statements besides those above."""
    return st.lists(statements(depth, loop=loop, more=more), min_size=1, max_size=4).map(tuple)


@dataclass
class Frame:
    """A loop: the lanes that left it, and those that wait for its next round."""

    broken: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)


class Machine:
    """What a wavefront computes: lanes are sets of numbers, scalars are written once if any lane is there."""

    def __init__(self, vectors: list[list[int]]):
        self.v, self.s = vectors, [0] * SCALARS

    def value(self, tree: Any, lane: int) -> int:
        if isinstance(tree, int):
            return tree
        if tree[0] == "v":
            return self.v[tree[1]][lane]
        if tree[0] == "s":
            return self.s[tree[1]]
        return signed(OPERATORS[tree[0]](self.value(tree[1], lane), self.value(tree[2], lane)))

    def holds(self, condition: Any, lane: int) -> bool:
        return bool(COMPARISONS[condition[0]](self.value(condition[1], lane), self.value(condition[2], lane)))

    def run(self, program: Any, lanes: set[int], loops: tuple[Frame, ...] = ()) -> set[int]:
        """Runs statements; returns the lanes that come to their end."""
        for one in program:
            if not lanes:
                break
            lanes = getattr(self, f"_{one[0]}")(one, lanes, loops)
        return lanes

    def _v(self, one: Any, lanes: set[int], loops: Any) -> set[int]:
        now = {lane: self.value(one[2], lane) for lane in lanes}
        for lane, value in now.items():
            self.v[one[1]][lane] = signed(value)
        return lanes

    def _s(self, one: Any, lanes: set[int], loops: Any) -> set[int]:
        self.s[one[1]] = signed(self.value(one[2], 0))
        return lanes

    def _if(self, one: Any, lanes: set[int], loops: Any) -> set[int]:
        then = {lane for lane in lanes if self.holds(one[1], lane)}
        return self.run(one[2], then, loops) | self.run(one[3], lanes - then, loops)

    def _for(self, one: Any, lanes: set[int], loops: Any) -> set[int]:
        frame = Frame()
        for _ in range(one[1]):
            lanes = self.run(one[2], lanes, (*loops, frame)) | frame.waiting
            frame.waiting = set()
        return lanes | frame.broken

    def _while(self, one: Any, lanes: set[int], loops: Any) -> set[int]:
        frame, done, (_, register, bound, step, body) = Frame(), set(), one
        count = {lane: self.v[register][lane] & 7 for lane in lanes}
        while lanes:
            done |= {lane for lane in lanes if count[lane] >= bound}
            lanes = {lane for lane in lanes if count[lane] < bound}
            count |= {lane: count[lane] + step for lane in lanes}
            lanes = self.run(body, lanes, (*loops, frame)) | frame.waiting
            frame.waiting = set()
        return done | frame.broken

    def _break(self, one: Any, lanes: set[int], loops: Any) -> set[int]:
        loops[-1].broken |= lanes
        return set()

    def _continue(self, one: Any, lanes: set[int], loops: Any) -> set[int]:
        loops[-1].waiting |= lanes
        return set()


def expected(program: Any, start: list[list[int]]) -> list[list[int]]:
    """The vectors, then the scalars, after the program."""
    machine = Machine([list(one) for one in start])
    machine.run(program, set(range(LANES)))
    return [*machine.v, *([value] * LANES for value in machine.s)]


class Writer:
    """Writes a program with J."""

    def __init__(self, J: Any, vectors: list[Any], scalars: list[Any]):
        self.J, self.files = J, {"v": vectors, "s": scalars}

    def tree(self, tree: Any) -> Any:
        if isinstance(tree, int):
            return tree
        if tree[0] in ("v", "s"):
            return self.files[tree[0]][tree[1]]
        left, right = self.tree(tree[1]), self.tree(tree[2])
        made = OPERATORS[tree[0]](left, right)
        return signed(made) if isinstance(made, int) else made

    def condition(self, tree: Any) -> Any:
        return COMPARISONS[tree[0]](self.tree(tree[1]), self.tree(tree[2]))

    def write(self, program: Any) -> None:
        for one in program:
            getattr(self, f"_{one[0]}")(one)

    def _v(self, one: Any) -> None:
        self.files["v"][one[1]][0] = self.tree(one[2])

    def _s(self, one: Any) -> None:
        self.files["s"][one[1]][0] = self.tree(one[2])

    def _if(self, one: Any) -> None:
        with self.J.If(self.condition(one[1])):
            self.write(one[2])
        if one[3]:
            with self.J.Else():
                self.write(one[3])

    def _for(self, one: Any) -> None:
        with self.J.For(0, one[1]):
            self.write(one[2])

    def _while(self, one: Any) -> None:
        _, register, bound, step, body = one
        count = self.J.gpr(self.files["v"][register] & 7)
        with self.J.While(count < bound):
            count[0] = count + step
            self.write(body)

    def _break(self, one: Any) -> None:
        self.J.Break()

    def _continue(self, one: Any) -> None:
        self.J.Continue()


@jit()
def kernel(J, program, x: "int*", out: "int*"):
    offset = J.gpr(J.threadIdx.x * 4)
    vectors = [J.gpr("vi32") for _ in range(VECTORS)]
    for at, one in enumerate(vectors):
        J.global_load_dword(one, offset, x, mod=f"offset:{at * 4 * LANES}")
    J.s_waitcnt(mod="vmcnt(0)")
    scalars = [J.gpr("si32", 0) for _ in range(SCALARS)]
    Writer(J, vectors, scalars).write(program)
    for at, one in enumerate([*vectors, *scalars]):
        J.global_store_dword(offset, J.gpr("vi32", one), out, mod=f"offset:{at * 4 * LANES}")
