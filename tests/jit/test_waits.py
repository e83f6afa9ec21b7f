"""Waits by hand, checked: a register is neither read nor written before what was loaded into it has come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelpatch.errors import CompileError
from accelpatch.jit import jit

HERE = Path(__file__)
Body = Callable[..., None]


def checked(body: Body) -> None:
    def kernel(J, x: "int*"):
        body(
            J, x, *(J.gpr(kind, name=name) for name, kind in zip("abst", ("vi32", "vi32", "si32", "si32"), strict=True))
        )

    jit()(kernel).ir()


def read(J: Any, x: Any, a: Any, b: Any, s: Any, t: Any) -> None:
    J.global_load_dword(a, J.threadIdx.x, x)
    b[0] = a + 1  # read


def written(J: Any, x: Any, a: Any, b: Any, s: Any, t: Any) -> None:
    J.global_load_dword(a, J.threadIdx.x, x)
    a[0] = 1  # written


def too_few(J: Any, x: Any, a: Any, b: Any, s: Any, t: Any) -> None:
    J.global_load_dword(a, J.threadIdx.x, x)
    J.global_load_dword(b, J.threadIdx.x, x)
    J.s_waitcnt(mod="vmcnt(1)")
    a[0] = a + 1
    J.global_store_dword(J.threadIdx.x, b, x)  # too_few


def other_counter(J: Any, x: Any, a: Any, b: Any, s: Any, t: Any) -> None:
    J.ds_read_b32(a, J.threadIdx.x)
    J.s_waitcnt(mod="vmcnt(0)")
    b[0] = a + 1  # other_counter


def scalar_memory(J: Any, x: Any, a: Any, b: Any, s: Any, t: Any) -> None:
    J.s_load_dword(s, x, 0)
    J.s_load_dword(t, x, 4)
    J.s_waitcnt(mod="lgkmcnt(1)")
    s[0] = s + 1  # scalar_memory


def one_way(J: Any, x: Any, a: Any, b: Any, s: Any, t: Any) -> None:
    J.global_load_dword(a, J.threadIdx.x, x)
    with J.If(J.blockIdx.x == 0):
        J.s_waitcnt(mod="vmcnt(0)")
    b[0] = a + 1  # one_way


def next_round(J: Any, x: Any, a: Any, b: Any, s: Any, t: Any) -> None:
    a[0] = 0
    with J.For(0, 4):
        b[0] = a + 1  # next_round
        J.global_load_dword(a, J.threadIdx.x, x)


def flat(J: Any, x: Any, a: Any, b: Any, s: Any, t: Any) -> None:
    J.flat_load_dword(a, J.gpr("vu64", x))
    J.s_waitcnt(mod="vmcnt(0)")
    b[0] = a + 1  # flat


def stored(J: Any, x: Any, a: Any, b: Any, s: Any, t: Any) -> None:
    J.ds_read_b32(a, J.threadIdx.x)
    J.global_store_dword(J.threadIdx.x, a, x)  # stored


@pytest.mark.parametrize("body, message", [
    (read, r"v_add_u32 reads a, which global_load_dword of .* may not have filled yet: put .*\"vmcnt\(0\)\""),
    (written, "v_mov_b32 writes a, which global_load_dword"),
    (too_few, r'global_store_dword reads b, .*vmcnt\(0\)'),
    (other_counter, r"v_add_u32 reads a, which ds_read_b32 .*lgkmcnt\(0\)"),
    (scalar_memory, r"s_add_u32 reads s, which s_load_dword .*lgkmcnt\(0\)"),
    (one_way, r"v_add_u32 reads a, which global_load_dword"),
    (next_round, r"v_add_u32 reads a, which global_load_dword"),
    (flat, r"reads a, which flat_load_dword .*lgkmcnt\(0\)"),
    (stored, r"global_store_dword reads a, which ds_read_b32"),
], ids=lambda one: getattr(one, "__name__", ""))  # fmt: skip
def test_what_comes_too_early_names_both_lines(body: Body, message: str) -> None:
    lines = HERE.read_text().splitlines()
    number = next(at for at, line in enumerate(lines, 1) if line.endswith(f"# {body.__name__}"))
    with pytest.raises(CompileError, match=rf"^test_waits\.py:{number}: .*{message}"):
        checked(body)


def pipelined(J: Any, x: Any, a: Any, b: Any, s: Any, t: Any) -> None:
    """The next element is under way while one is used."""
    J.global_load_dword(a, J.threadIdx.x, x)
    with J.For(0, 4):
        J.global_load_dword(b, J.threadIdx.x, x)
        J.s_waitcnt(mod="vmcnt(1)")
        J.global_store_dword(J.threadIdx.x, J.gpr("vi32", a + 1), x)
        J.s_waitcnt(mod="vmcnt(1)")
        a[0] = b


def counted(J: Any, x: Any, a: Any, b: Any, s: Any, t: Any) -> None:
    """LDS finishes in order; a store counts too."""
    J.ds_read_b32(a, J.threadIdx.x)
    J.ds_read_b32(b, J.threadIdx.x)
    J.ds_write_b32(J.threadIdx.x, J.gpr("vi32", 1))
    J.s_waitcnt(mod="lgkmcnt(2)")
    a[0] = a + 1
    J.s_waitcnt(mod="lgkmcnt(1)")
    b[0] = b + 1


def loaded_again(J: Any, x: Any, a: Any, b: Any, s: Any, t: Any) -> None:
    """A load after a load of the same kind comes after it."""
    J.global_load_dword(a, J.threadIdx.x, x)
    J.global_load_dword(a, J.threadIdx.x, x)
    J.s_waitcnt(mod="vmcnt(0)")
    b[0] = a


@pytest.mark.parametrize("body", [pipelined, counted, loaded_again])
def test_what_is_waited_for_is_right(body: Body) -> None:
    checked(body)


@pytest.mark.parametrize("text, message", [
    ("vmcnt(64)", "vmcnt counts to 63"), ("lgkmcnt(16)", "lgkmcnt counts to 15"), ("vmcnt", "write the counters"),
])  # fmt: skip
def test_waits_that_are_none(text: str, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        checked(lambda J, *_: J.s_waitcnt(mod=text))
