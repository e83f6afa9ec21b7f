"""Integer expressions in the emulator against Python: both files, 32 and 64 bits, constants of every kind."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest

from accelpatch.jit import jit
from tests.support.jit_kernels import LANES, elements

OPERATORS = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv, "%": operator.mod,
    "&": operator.and_, "|": operator.or_, "^": operator.xor, "<<": operator.lshift, ">>": operator.rshift,
}  # fmt: skip
CONSTANTS = (1, 2, 3, 5, 7, 9, 31, 64, 641, 1000, 4096, 0x7FFFFFFF, 0x12345678)
SIGNED, UNSIGNED = (-1, -3, -8, -100), (0x80000000, 0xFFFFFFFB)
KINDS = ("i32", "u32", "i64", "u64")


def computed(op: str, a: int, b: int, kind: str) -> int:
    """As the hardware has it: wrapped around, divisions towards zero."""
    bits, signed = int(kind[1:]), kind[0] == "i"
    if op in "/%":
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        made = quotient if op == "/" else a - quotient * b
    else:
        made = {"min": min, "max": max}[op](a, b) if op in ("min", "max") else OPERATORS[op](a, b)
    made &= (1 << bits) - 1
    return made - (1 << bits) if signed and made >> (bits - 1) else made


def cases(kind: str) -> list[tuple[str, int | None]]:
    """Operators with what stands to their right: None is the other register."""
    bits = int(kind[1:])
    found: list[tuple[str, int | None]] = []
    for op in (*OPERATORS, "min", "max"):
        for value in (None, *CONSTANTS, *(SIGNED if kind[0] == "i" else UNSIGNED)):
            if op in ("<<", ">>") and not (value is not None and 0 <= value < bits):
                continue
            power = value is not None and value > 0 and not value & (value - 1)
            if bits == 64 and op in "/%" and not (power and kind == "u64"):
                continue
            found.append((op, value))
    return found


def written(J: Any, op: str, a: Any, b: Any) -> Any:
    return getattr(J, op)(a, b) if op in ("min", "max") else OPERATORS[op](a, b)


def operands(kind: str) -> tuple[np.ndarray, np.ndarray]:
    dtype = np.dtype(f"{'int' if kind[0] == 'i' else 'uint'}{kind[1:]}")
    limits = np.iinfo(dtype)
    random = np.random.default_rng(0)
    x = random.integers(limits.min, limits.max, LANES, dtype, endpoint=True)
    y = random.integers(limits.min, limits.max, LANES, dtype, endpoint=True)
    x[:8] = [0, 1, limits.max, limits.min, limits.max - 1, 7, 100, 5]
    y[:8] = [1, limits.max, 3, 2, limits.max, 7, limits.min + 1, 9]
    y[20:40] &= dtype.type(0xFF)
    y[y == 0] = 1
    return x, y


@pytest.mark.parametrize("kind, arch", [(kind, "gfx942") for kind in KINDS] + [("u64", "gfx90a"), ("i32", "gfx950")])
def test_vectors(kind: str, arch: str) -> None:
    todo, (x, y) = cases(kind), operands(kind)

    def compute(J: Any, a: Any, b: Any) -> list[Any]:
        return [written(J, op, a, b if value is None else value) for op, value in todo]

    made = elements(compute, x, y, len(todo), f"v{kind}", (f"v{kind}", f"v{kind}"), arch)
    for (op, value), row in zip(todo, made, strict=True):
        right = y.tolist() if value is None else [value] * LANES
        expected = [computed(op, a, b, kind) for a, b in zip(x.tolist(), right, strict=True)]
        assert row.tolist() == expected, (op, value)


@jit()
def scalar_row(J, kind, todo, x: "void*", y: "void*", out: "void*"):
    """out[case] of one pair of scalars, the one that the workgroup's index names."""
    wide = kind.endswith("64")
    at = J.gpr("su32", J.blockIdx.x * (8 if wide else 4))
    load = J.s_load_dwordx2 if wide else J.s_load_dword
    a, b = J.gpr(f"s{kind}"), J.gpr(f"s{kind}")
    load(a, x, at)
    load(b, y, at)
    J.s_waitcnt(mod="lgkmcnt(0)")
    row = J.gpr("vu32", J.blockIdx.x * (len(todo) * (8 if wide else 4)))
    for number, (op, value) in enumerate(todo):
        held = J.gpr(f"v{kind}", written(J, op, a, b if value is None else value))
        store = J.global_store_dwordx2 if wide else J.global_store_dword
        store(J.gpr(row + number * (8 if wide else 4)), held, out)


@pytest.mark.parametrize("kind", KINDS)
def test_scalars(kind: str) -> None:
    todo, (x, y) = cases(kind), operands(kind)
    out = np.zeros((8, len(todo)), x.dtype)
    scalar_row([8], [64], kind, tuple(todo), x, y, out, device="emulate")
    for a, b, row in zip(x.tolist(), y.tolist(), out.tolist(), strict=False):
        assert row == [computed(op, a, b if value is None else value, kind) for op, value in todo]


@pytest.mark.parametrize("kind", ["i32", "u32"])
def test_what_is_put_together(kind: str) -> None:
    """Expressions that single instructions compute, and mixtures of scalars and vectors."""
    x, y = operands(kind)

    def compute(J: Any, a: Any, b: Any) -> list[Any]:
        s = J.gpr(f"s{kind}", 12345)
        return [(a << 3) + b, a + b + 7, (a ^ b) + s, (a | b) | s, (a & b) | 0x7777, (a + b) << 5, (a + 3) * 8,
                (a << 2) | b, (a >> 5) & 0xFF, ~a, -a, abs(a) if kind == "i32" else a, a & ~b, s + s * 4 + a, s - a,
                1000 - a, a * s + b, a << (b & 31), a >> (b & 31), J.select(a < b, s, b),
                J.select((a < b) & ~(b == 7) | (a == 0), 1, 0),
                J.min(J.max(a, 5), 500)]  # fmt: skip

    def plain(a: int, b: int) -> list[int]:
        s = 12345
        return [(a << 3) + b, a + b + 7, (a ^ b) + s, (a | b) | s, (a & b) | 0x7777, (a + b) << 5, (a + 3) * 8,
                (a << 2) | b, (a >> 5) & 0xFF, ~a, -a, abs(a), a & ~b, s + s * 4 + a, s - a, 1000 - a, a * s + b,
                a << (b & 31), a >> (b & 31), s if a < b else b,
                int((a < b and b != 7) or a == 0), min(max(a, 5), 500)]  # fmt: skip

    made = elements(compute, x, y, 22, f"v{kind}", (f"v{kind}", f"v{kind}"), "gfx942")
    expected = [[computed("+", one, 0, kind) for one in plain(a, b)] for a, b in
                zip(x.tolist(), y.tolist(), strict=True)]  # fmt: skip
    assert made.T.tolist() == expected


def test_widths() -> None:
    """32 bits beside 64: widened by zeros or by the sign; narrow elements by what they are."""
    x, _ = operands("i32")

    def compute(J: Any, a: Any, b: Any) -> list[Any]:
        low = a & 0xFFFF
        return [a.to("i64"), a.to("u32").to("u64"), a.to("i64") * 3 + 1, a.to("i64").to("i32").to("i64"),
                a.view("i8").to("i32").to("i64"), a.view("u16").to("i64"), a.view("i16").to("i64"),
                low.to("i64") << 20]  # fmt: skip

    made = elements(compute, x, x, 8, "vi64", ("vi32", "vi32"), "gfx942")
    whole = x.astype(np.int64)
    expected = [whole, whole & 0xFFFFFFFF, whole * 3 + 1, whole, x.astype(np.int8), x.astype(np.uint16),
                x.astype(np.int16), (whole & 0xFFFF) << 20]  # fmt: skip
    for row, right in zip(made, expected, strict=True):
        assert row.tolist() == right.tolist()
