"""The AMD gate: its table covers what is built, and a kernel that got worse fails it."""

from __future__ import annotations

import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from accelpatch.kernels.compiling.occupancy import Resources

ROOT = Path(__file__).parent.parent
NOT_OF_AMD = ("read_limit", "decode_attention_one")  # of benchmarks; kernels of NVIDIA alone
HELD = {"vgprs": 100, "sgpr_spills": 40, "lds": 1024, "waves": 4}
GOOD = Resources("_Z1k4Bf16", 100, 0, 40, 0, 1024, 512)
LOOP = """.LBB0_1:
\tglobal_load_dwordx4 v[0:3], v4, s[0:1]
\tv_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
\ts_cbranch_scc1 .LBB0_1
"""


@pytest.fixture(scope="module")
def gate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("amd_gate", ROOT / "scripts/amd_gate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_holds_every_figure_of_every_arch(gate: ModuleType) -> None:
    held = json.loads(gate.TABLE.read_text())
    assert set(held) == {f"{arch} {kernel}" for arch in gate.ARCHS for kernel in gate.KERNELS}
    every = [figures for entry in held.values() for figures in entry["kernels"].values()]
    assert len(every) > 200
    assert all(list(figures) == list(gate.CEILINGS) for figures in every)
    assert all(len(entry["digest"]) == 64 for entry in held.values())
    assert {*gate.KERNELS, *NOT_OF_AMD} == {path.stem for path in gate.SOURCES.rglob("*.hip")}


def test_the_same_and_better_pass(gate: ModuleType) -> None:
    assert gate.over(HELD, HELD) == []
    assert gate.over({"vgprs": 90, "sgpr_spills": 0, "lds": 0, "waves": 5}, HELD) == []


@pytest.mark.parametrize("key, value", [("vgprs", 101), ("sgpr_spills", 41), ("lds", 1025), ("waves", 3)])
def test_worse_fails(gate: ModuleType, key: str, value: int) -> None:
    [line] = gate.over({**HELD, key: value}, HELD)
    assert line.startswith(f"{key} is {value}")
    assert gate.over(HELD, None) == ["not in the table"]


@pytest.mark.parametrize(
    "taken, code, words",
    [
        (Resources("_Z1k4Bf16", 100, 2, 0, 8, 0, 512), LOOP, "2 vector registers spilled, 8 bytes of scratch"),
        (GOOD, LOOP.replace("dwordx4", "dword"), "no loop with both"),
        (GOOD, LOOP.replace("v_mfma_f32_16x16x16_bf16", "v_fma_f32"), "no loop with both"),
        (GOOD, LOOP.replace(".LBB0_1\n", ".LBB0_2\n"), "no loop with both"),
        (replace(GOOD, kernel="_Z1kI4Int8ILi0EE4Bf16Ev"), LOOP, "no loop with both v_mfma_i32_16x16x32_i8"),
        (replace(GOOD, kernel="_Z1kI4W8A84Bf16Ev"), LOOP, "no loop with both v_mfma_i32_16x16x32_i8"),
        (replace(GOOD, kernel="_Z1kI7W8A8Fp8ILb1EE4Bf16Ev"), LOOP, "no loop with both v_mfma_f32_16x16x32_fp8_fp8"),
        (replace(GOOD, kernel="_Z1kI7W8A8Fp8ILb0EE4Bf16Ev"), LOOP, "no loop with both v_mfma_f32_16x16x16_f16"),
    ],
    ids=["spills", "narrow", "no-matrix", "no-loop", "bf16-for-int8", "bf16-for-w8a8", "bf16-for-fp8", "other-fp8"],
)
def test_faults(gate: ModuleType, taken: Resources, code: str, words: str) -> None:
    assert gate.faults("gfx942", GOOD, LOOP) == []
    [line] = gate.faults("gfx942", taken, code)
    assert words in line


def test_what_has_changed_is_compiled_and_held_to_the_table(
    gate: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    held = {f"{arch} {name}": {"digest": name, "kernels": {"k": HELD}} for arch in gate.ARCHS for name in gate.KERNELS}
    built = []

    def build(arch: str, source: Path, *rest: object) -> str:
        built.append((arch, source.stem))
        return ""

    monkeypatch.setattr(gate, "commands", lambda wheels, folder: {arch: ["clang"] for arch in gate.ARCHS})
    monkeypatch.setattr(gate, "digest", lambda command, libraries, source: source.stem)
    monkeypatch.setattr(gate, "build", build)
    monkeypatch.setattr(gate, "examine", lambda arch, assembly: ({"k": HELD | {"vgprs": 101}, "new": HELD}, []))
    assert gate.checked(tmp_path, tmp_path, held) == (held, [])
    assert built == []
    held["gfx942 gemv"] = {"digest": "of before", "kernels": {"k": HELD, "gone": HELD}}
    found, bad = gate.checked(tmp_path, tmp_path, held)
    assert built == [("gfx942", "gemv")]
    assert bad == [
        "gfx942 k: vgprs is 101, at most 100 in the table",
        "gfx942 new: not in the table",
        "gfx942 gone: in the table, but no longer built",
    ]
    assert found["gfx942 gemv"]["digest"] == "gemv"


def test_a_digest_is_of_all_that_a_compilation_reads(gate: ModuleType, tmp_path: Path) -> None:
    """By a compiler that prints the text that it is given."""
    program, source, header = tmp_path / "cc", tmp_path / "a.hip", tmp_path / "a.bc"
    program.write_text('#!/bin/sh\n[ "$1" = --version ] && echo 19 || cat "$(eval echo \\${$#})"\n')
    program.chmod(0o755)
    source.write_text("one")
    header.write_text("bits")
    of = lambda flag="-O3": gate.digest([str(program), "-x", "hip", flag], tmp_path, source)  # noqa: E731
    before = of()
    assert of() == before
    assert of("-O2") != before
    source.write_text("two")
    assert of() != before
    source.write_text("one")
    header.write_text("other bits")
    assert of() != before


def test_every_triton_kernel_is_compiled_by_the_gate() -> None:
    text = "".join(path.read_text() for path in (ROOT / "scripts").rglob("*gate*/*.py"))
    text += (ROOT / "scripts/triton_gate.py").read_text()
    for path in sorted((ROOT / "accelpatch/kernels/triton").glob("*.py")):
        for launched in re.findall(r"(\b_\w+)\[", path.read_text()):
            if f"def {launched}(" in path.read_text():
                assert f"{path.stem}.{launched}" in text
