"""``J``, through which a kernel is written: registers, instructions by name, LDS. Its base class has control flow."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from accelpatch.jit import expressions, instructions, selection, types
from accelpatch.jit.constants import inline_text, text, words
from accelpatch.jit.control_flow import ControlFlow
from accelpatch.jit.expressions import Condition, Constant, Given, Node, Unary
from accelpatch.jit.ir import Instruction, Operand, Part, Program, Region, special_regunits
from accelpatch.jit.location import Line, fail, here
from accelpatch.jit.prologue import Index, Prologue
from accelpatch.jit.registers import Value
from accelpatch.jit.table import Form
from accelpatch.jit.types import Type

_LDS = {"gfx90a": 64 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}  # bytes of a workgroup

_EXEC = special_regunits("exec")


class Builder(ControlFlow):
    """Every instruction of the arch is a method by its name: ``J.v_add_f32(out, a, b)``, ``mod=`` its modifiers."""

    def __init__(self, program: Program):
        super().__init__(program)
        self.line: Line | None = program.line  # for instructions that no line of the kernel stands for; None: here()
        self.prologue = Prologue(self)
        self.blockIdx, self.threadIdx = Index("block", self.prologue), Index("thread", self.prologue)
        self.line = None

    @property
    def arch(self) -> str:
        """The arch that is compiled for, such as "gfx942"."""
        return self.program.arch

    @property
    def lane_id(self) -> Value:
        """The lane of its wavefront, 0 to 63 (vector, u32)."""
        return self.prologue.lane()

    @property
    def wave_id(self) -> Value:
        """The wavefront of a workgroup of one dimension (scalar, u32)."""
        return self.prologue.wave()

    def gpr(self, *description: Any, name: str = "") -> Value:
        """New registers: ``gpr(shape..., type, initial...)``, or ``gpr(expression)``, which has the expression's type.

        type: s (scalar), v (vector) or a (accumulator) and the type of an element, as in "si32", "vf32", "abf16x2".
        initial: one value for all elements or one for each; without it the registers must be written before they are
        read. They are never spilled.
        """
        shape = [one for one in description[: _type_at(description)] if isinstance(one, int)]
        rest = description[len(shape) :]
        if rest and isinstance(rest[0], str):
            (file, dtype), initial = types.register(rest[0]), rest[1:]
        elif len(rest) == 1 and isinstance(rest[0], Node) and not shape:
            file, dtype, initial = _kind_of(rest[0]), rest[0].type, rest
            shape = [rest[0].count]
        else:
            fail(f"gpr takes a shape, a type such as 'vf32' and initial values, or one expression; not {description}")
        if any(size < 1 for size in shape):
            fail(f"no array of registers has the shape {tuple(shape)}")
        made = self._value(file, dtype, tuple(shape) or (1,), name)
        if initial and len(initial) not in (1, made.count):
            fail(f"{len(initial)} initial values for {made.count} registers: give one, or one for each")
        if len(initial) == 1:
            made[:] = initial[0]
        for at, one in enumerate(initial if len(initial) > 1 else ()):
            selection.assign(self, made.element(at), expressions.constant(one, dtype))
        return made

    def temporary(self, file: str, dtype: Type, count: int = 1) -> Value:
        """Registers for an intermediate result of the jit."""
        return self._value(file, dtype, (count,), "a temporary")

    def named(self, file: str, dtype: Type, name: str) -> Value:
        """Registers of one element, with a name that the jit gives."""
        return self._value(file, dtype, (1,), name)

    def fixed(self, file: str, dtype: Type, name: str, at: int) -> Value:
        """Registers that the hardware fills before the kernel starts."""
        return self._value(file, dtype, (1,), name, at)

    def _value(self, file: str, dtype: Type, shape: tuple[int, ...], name: str, fixed: int | None = None) -> Value:
        count = 1
        for size in shape:
            count *= size
        register = self.program.new_register(file, count * dtype.dwords, self.line or here(), name, fixed)
        # Two or more registers begin at an even number, as most instructions need that of wide operands.
        register.alignment[0] = instructions.alignment(file, min(register.dwords, 2))
        return Value(register, 0, shape, dtype, lambda target, node: selection.assign(self, target, node))

    def emit(self, name: str, *operands: Given | Operand, mod: str = "", in_prologue: bool = False) -> Instruction:
        """Append an instruction; expressions among its operands are computed first."""
        self._end_if()
        words = list(operands)
        if name == "s_waitcnt" and not words:
            words, mod = [mod], ""
        line = self.line or here()
        if name.startswith(("s_set_gpr_idx", "s_movrel")):
            reason = "picks registers by a number at run time: an index must be known at compile time"
            fail(f"{name} {reason}. Keep what is indexed in LDS, or choose by J.select", line)
        form = instructions.form_for(name, self.arch, len(words), mod)
        given = [self._operand(one, form, at) for at, one in enumerate(words)]
        made = instructions.instruction(form, given, mod, line, self.region)
        made.in_prologue = in_prologue
        self.block.instructions.append(made)
        return made

    def _operand(self, given: Given | Operand, form: Form, at: int) -> Operand:
        slot = form.operands[at]
        if isinstance(given, str | Part):
            return given
        if isinstance(given, Value):
            return given.part
        if isinstance(given, Node) and not isinstance(given, Constant):
            return self._computed(given, form, writes=slot.writes)
        if "n" in slot.kinds and isinstance(given, int):
            return str(given)
        value = given if isinstance(given, Constant) else expressions.constant(given, _type_in(form.name, given))
        assert isinstance(value, Constant)
        return inline_text(value) or text(words(value)[-1 if value.type.is_float else 0], value.type)

    def _computed(self, node: Node, form: Form, *, writes: bool) -> Operand:
        if writes:
            fail(f"{form.name} writes that operand: give registers, not an expression")
        # A sign or absolute value costs nothing where the instruction has a modifier for it.
        has_modifiers = form.unit in ("valu", "trans") and re.search(r"f(16|32|64)\b", form.name)
        if has_modifiers and isinstance(node, Unary) and node.type.is_float and isinstance(node.operand, Value):
            part, sign = node.operand.part, "-" if node.op == "-" else "|"
            return Part(part.register, part.first, part.dwords, sign)
        if isinstance(node, Condition):
            return self.mask(node).part
        value = self.compute(node)
        assert isinstance(value, Value)
        return value.part

    def compute(self, node: Node, target: Value | None = None) -> Value | Constant:
        """Emit the computation of one element; returns its value, which is in the target if there is one."""
        return selection.evaluate(self, node, target)

    def operand(self, node: Node) -> Value | Constant:
        """The same for an operand of arithmetic, which is never in an accumulator."""
        return selection.operand(self, node)

    def mask(self, condition: Condition) -> Value:
        """Emit the computation of a condition as a lane mask, 64 bits of scalar registers."""
        return selection.mask(self, condition)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_") or "_" not in name:
            raise AttributeError(f"J has no {name}")
        jumps = any(slot.kinds == "b" for slot in instructions.forms(name, self.arch)[0].operands)

        def call(*operands: Any, mod: str = "") -> None:
            if jumps:
                fail(f"{name} goes to a label, which a kernel has none of: use J.If, J.While, Break and Continue")
            made = self.emit(name, *operands, mod=mod)
            if made.writes & _EXEC:
                self.region = Region(self.region, manual=True)

        return call

    def alloc_lds(self, bytes: int, align: int = 16) -> int:
        """Reserve LDS for the workgroup; returns its address in bytes. Raises CompileError where the arch has less."""
        start = -(-self.program.lds // align) * align
        self.program.lds = start + bytes
        if self.program.lds > _LDS[self.arch]:
            fail(f"{self.program.lds} bytes of LDS, where {self.arch} has {_LDS[self.arch]} for a workgroup")
        return start

    def buffer(self, base: Node, bytes: Given) -> Value:
        """A buffer descriptor for the ``buffer_`` instructions, of a base address (u64) and a size in bytes.

        Stores outside of the buffer are dropped, and loads return zero.
        """
        made = self.gpr(4, "su32", name="a buffer descriptor")
        made.view("u64")[0] = base
        made[1] = expressions.binary("&", made[1], 0xFFFF)
        made[2] = bytes
        made[3] = 0x00027000  # 32-bit elements, addressed by bytes
        return made

    def select(self, condition: Node, yes: Given, no: Given) -> Node:
        """yes where the condition holds, else no."""
        return expressions.select(condition, yes, no)

    def min(self, left: Given, right: Given) -> Node:
        return expressions.binary("min", left, right)

    def max(self, left: Given, right: Given) -> Node:
        return expressions.binary("max", left, right)

    def any(self, condition: Condition) -> Node:
        """Whether a vector condition holds for any active lane: a scalar condition."""
        active = self.temporary("s", types.U64)
        self.emit("s_and_b64", active, self.mask(condition), "exec")
        return expressions.compare("!=", active, 0)


def _type_at(description: Sequence[Any]) -> int:
    """The index of the type among the arguments of gpr."""
    return next((at for at, one in enumerate(description) if isinstance(one, str)), len(description))


def _kind_of(node: Node) -> str:
    if isinstance(node, Condition):
        fail("a condition has no type of register: use J.select(condition, 1, 0)")
    return "v" if node.file != "s" or node.type.is_float else "s"


def _type_in(name: str, value: float) -> Type:
    """The type of a Python number as an operand: an integer, or a float of the width that the mnemonic ends in."""
    if isinstance(value, int):
        return types.I32
    width = next((one for one in ("f64", "f16") if name.endswith(one)), "f32")
    return types.element(width)
