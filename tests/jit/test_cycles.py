"""What is counted of assembly, and what llvm-mca says of it."""

from __future__ import annotations

import shutil

import pytest

from accelpatch.errors import CompileError
from accelpatch.jit import cycles
from tests.jit.test_examples import example

needs_mca = pytest.mark.skipif(shutil.which("llvm-mca-19") is None, reason="needs llvm-mca-19: make gate installs it")
TEXT = """
	.text
kernel:
	.loc 1 2
	s_mov_b32 s0, 0	; a comment
.Lout:
	v_mov_b32 v1, 0	// kernel.py:1
.Lin:
	global_load_dwordx4 v[4:7], v0, s[2:3]
	global_load_ushort v3, v0, s[2:3]
	s_cbranch_scc1 .Lin
	buffer_load_dwordx2 v[8:9], off, s[4:7], 0
	s_cbranch_execz .Ldone
	s_branch .Lout
.Ldone:
	s_endpgm
.Lfunc_end0:
	.size kernel
"""


def test_code_and_loops() -> None:
    code = cycles.code(TEXT, "kernel")
    assert code[:3] == ["s_mov_b32 s0, 0", ".Lout:", "v_mov_b32 v1, 0"]
    inner, outer = cycles.loops(code)
    assert (len(inner), len(outer), len(cycles.instructions(code))) == (3, 7, 9)
    assert [cycles.bytes_loaded(one) for one in (inner, outer)] == [18, 26]


@needs_mca
@pytest.mark.parametrize("arch", ["gfx90a", "gfx942"])
def test_cycles(arch: str) -> None:
    alone = cycles.cycles(["v_mov_b32 v1, 0"], arch)
    assert cycles.cycles(["s_nop 7", "v_mov_b32 v1, 0"], arch) - alone == 8
    load = "global_load_dword v1, v0, s[2:3]"
    assert cycles.cycles([load, "s_waitcnt vmcnt(0)", "v_add_f32 v1, v1, v1"], arch) > 60
    for buffer in ("buffer_load_dword v1, v0, s[4:7], 0 offen", "buffer_store_dword v1, off, s[4:7], 0"):
        assert cycles.cycles([buffer], arch) > 1


@needs_mca
def test_what_it_does_not_know_is_an_error() -> None:
    with pytest.raises(CompileError, match="does not know this assembly of gfx942"):
        cycles.cycles(["v_no_such v1, v2"], "gfx942")


def test_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cycles.shutil, "which", lambda name: None)
    with pytest.raises(CompileError, match="install Debian's llvm-19"):
        cycles.cycles(["s_nop 0"], "gfx942")


@pytest.mark.parametrize("depth", [4096, 11008])
def test_the_gemv_loads_as_widely_as_it_can_and_spills_nothing(depth: int) -> None:
    text = example("gemv")["gemv"].source("gfx942", depth)
    code = cycles.instructions(cycles.code(text, "gemv"))
    assert {line.split()[0] for line in code if line.startswith("global_load")} == {"global_load_dwordx4"}
    assert not any(line.startswith("scratch_") for line in code)
    assert ".private_segment_fixed_size: 0" in text
