"""If, loops, Break and Continue of lanes and of all, against the same in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from accelpatch.errors import CompileError
from accelpatch.jit import jit
from tests.support.jit_kernels import LANES, lanes

START = np.random.default_rng(1).integers(-50, 50, LANES, dtype=np.int32)


def branches(J: Any, a: Any) -> Any:
    out = J.gpr("vi32")
    with J.If(a < 0):
        out[0] = 1
    with J.Elif(a < 10):
        out[0] = 2
    with J.Elif((a & 1) == 0):
        with J.If(a > 30):
            out[0] = 30
        with J.Else():
            out[0] = 4
    with J.Else():
        out[0] = a * 2
    return out


def branches_in_python(a: int) -> int:
    return 1 if a < 0 else 2 if a < 10 else (30 if a > 30 else 4) if a % 2 == 0 else a * 2


def collatz(J: Any, a: Any) -> Any:
    count = J.gpr("vi32", 0)
    a[0] = J.max(a, 1)
    with J.While(a != 1):
        with J.If((a & 1) == 0):
            a[0] = a >> 1
        with J.Else():
            a[0] = a * 3 + 1
        count[0] = count + 1
    return count


def collatz_in_python(a: int) -> int:
    a, count = max(a, 1), 0
    while a != 1:
        a, count = (a // 2 if a % 2 == 0 else 3 * a + 1), count + 1
    return count


def leaving(J: Any, a: Any) -> Any:
    """Lanes leave loops one after the other, and out of the inner loop the outer one."""
    n, i, b = J.gpr("vi32", 0), J.gpr("si32", 0), J.gpr("vi32")
    with J.While(i < 8) as outer:
        b[0] = a + i
        i[0] = i + 1
        with J.While(b > 0):
            with J.If(b == 7):
                J.Break()
            with J.If(n > 30):
                n[0] = n * 3
                outer.Break()
            with J.If((b & 7) == 5):
                outer.Continue()
            b[0] = b - 3
            n[0] = n + 1
        n[0] = n + 10
    return J.gpr("vi32", n + 1)


def leaving_in_python(a: int) -> int:
    n = 0
    for i in range(8):
        b, then = a + i, ""
        while b > 0 and not then:
            if b == 7:
                break
            if n > 30:
                n, then = n * 3, "break"
            elif b & 7 == 5:
                then = "continue"
            else:
                b, n = b - 3, n + 1
        if then == "break":
            break
        n += 0 if then else 10
    return n + 1


def counting(J: Any, a: Any) -> Any:
    n = J.gpr("vi32", 0)
    with J.For(0, 20) as i:
        with J.If(a < 0):
            J.Break()
        with J.If((a & 3) == 2):
            a[0] = a - 5
            J.Continue()
        n[0] = n + a + i
        a[0] = a - 1
    with J.For(10, 0, -3) as i:
        n[0] = n + i
    with J.For(a, a + 4) as each:
        n[0] = n + each
    return n


def counting_in_python(a: int) -> int:
    n = 0
    for i in range(20):
        if a < 0:
            break
        if a & 3 == 2:
            a -= 5
            continue
        n, a = n + a + i, a - 1
    return n + sum(range(10, 0, -3)) + sum(range(a, a + 4))


def scalars(J: Any, a: Any) -> Any:
    s, t = J.gpr("si32", 0), J.gpr("si32", 0)
    with J.While() as loop:
        s[0] = s + 1
        with J.If((s % 3 == 0) & (s > 5) | (s == 2)):
            loop.Continue()
        with J.If(~(s < 40)):
            loop.Break()
        with J.If(s >= 10):
            t[0] = t + s
        with J.Elif(s == 1):
            t[0] = t + 1000
        with J.Else():
            t[0] = t - 1
    with J.If(J.any(a > 1000)):
        t[0] = 0
    return J.select(a < 5, t, -t)


def scalars_in_python(a: int) -> int:
    t = 0
    for s in range(1, 40):
        if (s % 3 == 0 and s > 5) or s == 2:
            continue
        t += s if s >= 10 else 1000 if s == 1 else -1
    return t if a < 5 else -t


CASES = {
    "branches": (branches, branches_in_python),
    "collatz": (collatz, collatz_in_python),
    "leaving": (leaving, leaving_in_python),
    "counting": (counting, counting_in_python),
    "scalars": (scalars, scalars_in_python),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_python_does(name: str) -> None:
    body, plain = CASES[name]
    assert lanes(lambda J, a: J.gpr("vi32", body(J, a)), START) == [plain(int(a)) for a in START]


def test_a_loop_that_is_known_to_run_is_not_tested_before() -> None:
    def kernel(J, n: "int", out: "int*"):
        total = J.gpr("si32", 0)
        with J.For(0, 3):
            total[0] = total + 1
        J.s_store_dword(total, out, 0)

    program = jit()(kernel).ir()
    assert [one.name for one in program.instructions() if one.name.startswith("s_c")] == [
        "s_cmp_lt_i32",
        "s_cbranch_scc1",
    ]


def test_a_value_is_chosen_lane_by_lane_over_both_branches() -> None:
    """What the first branch wrote is still there after the second one, which runs later, wrote other lanes."""

    def body(J: Any, a: Any) -> Any:
        out = J.gpr("vi32")
        with J.If(a < 0):
            out[0] = a * a
            a[0] = 7  # its register is free for others from here on
        with J.Else():
            out[0] = a + 1
        return out

    assert lanes(body, START) == [int(a) ** 2 if a < 0 else int(a) + 1 for a in START]


def late(J: Any) -> None:
    J.s_nop(0)
    with J.If(J.threadIdx.x < 3):
        J.s_nop(0)
    J.s_nop(0)
    with J.Else():  # here
        J.s_nop(0)


def crossed(J: Any) -> None:
    n = J.gpr("si32", 0)
    with J.While(n < 3) as outer, J.While(n < 2):
        with J.If(n == 1):
            outer.Break()
        with J.If(J.threadIdx.x < 5):
            J.Break()  # here


@pytest.mark.parametrize("kernel, message", [
    pytest.param(late, r"J\.Else must follow the body of a J\.If at once", id="Else alone"),
    pytest.param(lambda J: J.Break(), r"J\.Break is outside of a loop", id="Break alone"),
    pytest.param(lambda J: J.If(J.threadIdx.x).__enter__(), r"J\.If takes a condition", id="no condition"),
    pytest.param(lambda J: J.If(1 < 2).__enter__(), r"known at compile time use Python's", id="Python's condition"),
    pytest.param(lambda J: bool(J.threadIdx.x < 3), r"has no value while the kernel is built", id="Python's if"),
    pytest.param(lambda J: J.For(0, 3, 0).__enter__(), r"step 0 never ends", id="step 0"),
    pytest.param(crossed, r"all of them left the outer loop in the lines before", id="crossed"),
])  # fmt: skip
def test_what_is_wrong_names_the_line(kernel: Any, message: str) -> None:
    with pytest.raises(CompileError, match=rf"test_control_flow\.py:\d+: .*{message}"):
        jit()(kernel).ir()
