"""If, Elif, Else, While, For, Break and Continue.

Scalar conditions become branches. Vector conditions become exec masks: the lanes for which a condition holds run the
body, then the others run the Else. Scalar registers have no lanes: in the body of a vector condition they are written
once, if any lane is active.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from accelpatch.jit import expressions, types
from accelpatch.jit.expressions import Condition, Constant, Given, Node
from accelpatch.jit.ir import Block, Instruction, Program, Region
from accelpatch.jit.location import fail
from accelpatch.jit.registers import Value
from accelpatch.jit.scopes import Branch, Loop

if TYPE_CHECKING:
    from accelpatch.jit.builder import Builder


class ControlFlow:
    """The part of ``J`` that makes blocks; instructions are appended to ``block``."""

    def __init__(self, program: Program):
        self.program = program
        self.region = Region()
        self.block = Block("entry")
        program.blocks.append(self.block)
        self._labels = 0
        self._scopes: list[Branch | Loop] = []
        self._open_if: Branch | None = None  # an If that an Else may still follow

    # -- blocks ---------------------------------------------------------------------------------------------------

    def new_block(self, what: str) -> Block:
        self._labels += 1
        return Block(f"{what}_{self._labels}")

    def start(self, block: Block) -> None:
        """Append a block to the program, and continue there; the block before falls through to it."""
        last = self.block.instructions[-1] if self.block.instructions else None
        if last is None or last.name not in ("s_branch", "s_endpgm"):
            self.block.successors.append(block)
        self.program.blocks.append(block)
        self.block = block

    def jump(self, name: str, to: Block) -> Instruction:
        """Emit a branch instruction, and continue in a new block."""
        made = self._J.emit(name, to.label)
        self.block.successors.append(to)
        self.start(self.new_block("after"))
        return made

    @property
    def _J(self) -> Builder:
        return self  # type: ignore[return-value]

    def _end_if(self) -> None:
        """Close the last If: no Else follows."""
        if self._open_if is not None:
            branch, self._open_if = self._open_if, None
            branch.close()

    # -- conditions -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def If(self, condition: Node) -> Iterator[None]:
        """``with J.If(a < b):`` runs its body where the condition holds."""
        self._end_if()
        with self._body(Branch(self._J, _condition(condition, "If"))):
            yield

    @contextlib.contextmanager
    def Else(self) -> Iterator[None]:
        """``with J.Else():`` after an If, and its Elifs, runs its body where none of their conditions held."""
        branch = self._take_open_if("Else")
        branch.otherwise()
        with self._body(branch, else_may_follow=False):
            yield

    @contextlib.contextmanager
    def Elif(self, condition: Node) -> Iterator[None]:
        """``with J.Elif(a == b):`` after an If is an Else with an If in it."""
        outer = self._take_open_if("Elif")
        outer.otherwise()
        with self._body(Branch(self._J, _condition(condition, "Elif"), else_of=outer)):
            yield

    @contextlib.contextmanager
    def _body(self, branch: Branch, *, else_may_follow: bool = True) -> Iterator[None]:
        before = len(self._scopes)
        self._scopes += branch.chain
        yield
        self._end_if()
        del self._scopes[before:]
        if else_may_follow:
            self._open_if = branch
        else:
            branch.close()

    def _take_open_if(self, what: str) -> Branch:
        if self._open_if is None:
            fail(f"J.{what} must follow the body of a J.If at once")
        branch, self._open_if = self._open_if, None
        return branch

    # -- loops ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def While(self, condition: Node | None = None) -> Iterator[Loop]:
        """``with J.While(a < b) as loop:`` repeats its body; the condition is computed again for each round. Without a
        condition only Break ends the loop."""
        self._end_if()
        test = None if condition is None else _condition(condition, "While")
        with self._loop(Loop(self._J, test)) as loop:
            yield loop

    @contextlib.contextmanager
    def For(self, start: Given, stop: Given, step: Given = 1) -> Iterator[Value]:
        """``with J.For(0, n) as i:`` counts in a new register, a vector register if start or stop is one.

        step: positive, or a negative Python number.
        """
        self._end_if()
        if step == 0 if isinstance(step, int) else False:
            fail("a loop with step 0 never ends")
        at = self._counter(start, stop)
        down = isinstance(step, int) and step < 0
        condition = expressions.compare(">" if down else "<", at, stop)
        runs = isinstance(start, int) and isinstance(stop, int) and (start > stop if down else start < stop)
        loop = Loop(self._J, condition, entered=runs)
        loop.advance = lambda: at.__setitem__(slice(None), expressions.binary("+", at, step))
        with self._loop(loop):
            yield at

    def _counter(self, start: Given, stop: Given) -> Value:
        nodes = [one for one in (start, stop) if isinstance(one, Node)]
        of = next((one.type for one in nodes if not isinstance(one, Constant)), types.I32)
        file = "v" if any(one.file != "s" for one in nodes) else "s"
        return self._J.gpr(f"{file}{of}", start)

    @contextlib.contextmanager
    def _loop(self, loop: Loop) -> Iterator[Loop]:
        self._scopes.append(loop)
        yield loop
        self._end_if()
        self._scopes.remove(loop)
        loop.close()

    def Break(self, loop: Loop | None = None) -> None:
        """Leave a loop, by default the innermost."""
        self._leave(loop, "Break")

    def Continue(self, loop: Loop | None = None) -> None:
        """Continue with the next round of a loop, by default the innermost."""
        self._leave(loop, "Continue")

    def _leave(self, loop: Loop | None, what: str) -> None:
        self._end_if()
        loops = [scope for scope in self._scopes if isinstance(scope, Loop)]
        if not loops or (loop is not None and loop not in loops):
            fail(f"J.{what} is outside of {'that' if loop else 'a'} loop")
        loop = loop or loops[-1]
        inside: list[Any] = self._scopes[self._scopes.index(loop) + 1 :]
        masked = [scope for scope in inside if scope.saved_exec is not None]
        for scope in inside:
            scope.left_uniformly = not masked
        loop.leave(masked, again=what == "Continue")


def _condition(node: Node, what: str) -> Condition:
    if not isinstance(node, Condition):
        fail(f"J.{what} takes a condition on registers, such as a < b; for what is known at compile time use Python's")
    return node
