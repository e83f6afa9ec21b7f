"""J.gpr: shapes, types, initial values, parts, and indices that registers do not have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from accelpatch.errors import CompileError
from accelpatch.jit import jit
from tests.support.jit_kernels import LANES, lanes

START = np.arange(LANES, dtype=np.int32)


def table(J: Any, a: Any) -> Any:
    """Arrays, initial values, parts and whole assignments; the sum of what they hold."""
    grid = J.gpr(2, 3, "vi32", 1, 2, 3, 4, 5, 6)
    grid[1, 1:3] = grid[0, 0:2]  # 1 2 3 / 4 1 2
    grid[0] = grid[0] * 10  # 10 20 30
    row = J.gpr(3, "vi32", 7)
    row[0:2] = row[1:3] + 1  # 8 8 7
    row[1:] = row[0:2]  # 8 8 8
    held = J.gpr(2, "ai32", 5)
    held[1] = a
    both = J.gpr(held + 1)  # 6, a + 1
    bits = J.gpr("vu64", a.to("u64") << 32).view("u32")
    total = J.gpr("vi32", 0)
    for one in (*(grid[i, j] for i in range(2) for j in range(3)), row[0], row[1], row[-1], both[0], both[1]):
        total[0] = total + one
    total[0] = total + bits[1].to("i32") + J.gpr("vi32", bits[0])
    return total


def test_arrays() -> None:
    expected = 10 + 20 + 30 + 4 + 1 + 2 + 24 + 6 + 1
    assert lanes(table, START) == [expected + 2 * lane for lane in range(LANES)]


def test_between_files() -> None:
    def body(J: Any, a: Any) -> Any:
        scalar = J.gpr("si32", a)  # of the first lane
        held = J.gpr("ai32", scalar + 100000)
        back = J.gpr("si32", held)
        mask = J.gpr("su64", a < 5)
        return J.gpr("vi32", back + mask.view("u32")[0].to("i32"))

    assert lanes(body, START + 9) == [100009] * LANES
    assert lanes(body, START) == [100031] * LANES


def test_pairs_of_an_array() -> None:
    def body(J: Any, a: Any) -> Any:
        x, y = J.gpr(5, "vf32", 1.0, 2.0, 3.0, 4.0, 5.0), J.gpr(5, "vf32", 0.5)
        x[0] = a.to("f32")
        y[:] = x * y + x
        y[:] = y * y
        total = J.gpr("vf32", 0.0)
        for at in range(5):
            total[0] = total + y[at]
        return (total * 4.0).to("i32")

    assert lanes(body, START) == [9 * (lane**2 + 4 + 9 + 16 + 25) for lane in range(LANES)]


def test_lanes_that_the_kernel_sets_itself() -> None:
    """Between two writes of exec a register keeps what the other lanes have."""

    def body(J: Any, a: Any) -> Any:
        kept, out = J.gpr("su64"), J.gpr("vi32")
        J.s_mov_b64(kept, "exec")
        out[0] = 1
        J.s_mov_b64("exec", 0xFF)
        out[0] = a + 100
        J.s_mov_b64("exec", J.gpr("su64", 0xFF00))
        other = J.gpr("vi32", a * 2)
        out[0] = other
        J.s_mov_b64("exec", kept)
        return out

    assert lanes(body, START) == [lane + 100 if lane < 8 else lane * 2 if lane < 16 else 1 for lane in range(LANES)]


def out_of_range(J: Any, a: Any) -> Any:
    return J.gpr(4, "vi32", 0)[4]


def run_time_index(J: Any, a: Any) -> Any:
    return J.gpr(4, "vi32", 0)[a]


def strided(J: Any, a: Any) -> Any:
    return J.gpr(4, "vi32", 0)[::2]


def other_size(J: Any, a: Any) -> Any:
    return J.gpr(4, "vi32", 0) + J.gpr(3, "vi32", 0)


def too_large(J: Any, a: Any) -> Any:
    out = J.gpr(2, "vi32")
    out[:] = J.gpr(3, "vi32", 0)
    return out


def mixed(J: Any, a: Any) -> Any:
    return a + J.gpr("vf32", 1.0)


def assigned(J: Any, a: Any) -> Any:
    a[0] = J.gpr("vf32", 1.0)
    return a


def unwritten(J: Any, a: Any) -> Any:
    return a + J.gpr("vi32")


@pytest.mark.parametrize("body, message", [
    (out_of_range, "index 4 of a dimension of 4 elements"),
    (run_time_index, "an index of an array of registers must be known at compile time"),
    (strided, "no run of neighbouring registers"),
    (other_size, "arrays of 3 and 4 elements do not go together"),
    (too_large, "3 elements do not fit into 2 registers"),
    (mixed, r"i32 and f32 do not go together: convert one by \.to"),
    (assigned, r"f32 is assigned to registers of i32: convert it by \.to\('i32'\), or \.view its bits"),
    (unwritten, "v_add_u32 reads a register of .* before anything is written there"),
    (lambda J, a: J.gpr("vf33"), "'f33' is no type of a register"),
    (lambda J, a: J.gpr("f32"), "begin with s, v or a"),
    (lambda J, a: J.gpr(0, "vf32"), r"no array of registers has the shape \(0,\)"),
    (lambda J, a: J.gpr(2, "vi32", 1, 2, 3), "3 initial values for 2 registers"),
    (lambda J, a: J.gpr(a < 1), "a condition has no type of register"),
    (lambda J, a: J.gpr(3), "gpr takes a shape, a type"),
    (lambda J, a: a + 1.5, "1.5 is used with a register of type i32"),
    (lambda J, a: a / 0, "division by zero"),
    (lambda J, a: a.to("u64") / 3, "64 bits are divided by powers of two"),
    (lambda J, a: (a < 1) + 1, "a condition cannot be computed with"),
    (lambda J, a: J.gpr("sf32", 1.0).to("f64").to("bf16x2"), "not converted to bf16x2 as a whole"),
    (lambda J, a: J.gpr("vbf16x2", 0) + 1.0, "no instruction computes"),
    (lambda J, a: list(a), "cannot be iterated over"),
], ids=lambda one: getattr(one, "__name__", ""))  # fmt: skip
def test_what_is_wrong_names_the_line(body: Any, message: str) -> None:
    def kernel(J, out: "int*"):
        a = J.gpr("vi32", 3)
        held = J.gpr(body(J, a))
        J.global_store_dword(J.threadIdx.x, held.view("u32")[0], out)

    with pytest.raises(CompileError, match=rf"^test_registers\.py:\d+: .*{message}"):
        jit()(kernel).ir()
