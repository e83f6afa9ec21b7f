"""The log of a program: every form is read, what cannot be used is named, and nothing in it does harm."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelpatch.errors import AccelpatchError
from accelpatch.tuning.hipblaslt import lines, logs
from accelpatch.tuning.hipblaslt.gemms import Gemm
from tests.support import gemm_logs

LINES = (gemm_logs.MASK_64 % 109, gemm_logs.MASK_128, gemm_logs.MASK_32, gemm_logs.ROCBLAS_BENCH,
         gemm_logs.ROCBLAS_PROFILE, *gemm_logs.TUNABLE)  # fmt: skip


def _read(tmp_path: Path, text: str | bytes) -> logs.Log:
    file = tmp_path / "program.log"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return logs.read(file)


def _gemm(
    trans: str, m: int, n: int, k: int, types: str, *, batch: int = 1, d: str = "", compute: str = "f32_r"
) -> Gemm:
    a, b = trans
    leading = (k if a == "T" else m, n if b == "T" else k, m, m)
    return Gemm(a, b, m, n, k, batch, types, types, d or types, d or types, compute, leading)


@pytest.mark.parametrize(
    ("line", "form", "gemm", "calls", "epilogue"),
    [
        pytest.param(LINES[0], "hipBLASLt mask 64 or 128", _gemm("TN", 16032, 109, 16384, "bf16_r"), 1, "", id="64"),
        pytest.param(LINES[1], "hipBLASLt mask 64 or 128", _gemm("TN", 16032, 109, 16384, "bf16_r"), 7, "", id="128"),
        pytest.param(LINES[2], "hipBLASLt mask 32", _gemm("NN", 1024, 512, 1024, "f16_r"), 1, "", id="32"),
        pytest.param(LINES[3], "rocBLAS bench", _gemm("NN", 12288, 1, 4096, "f16_r"), 1, "", id="rocBLAS bench"),
        pytest.param(LINES[4], "rocBLAS profile", _gemm("TN", 12288, 4547, 4608, "bf16_r"), 136, "", id="rocBLAS"),
        pytest.param(LINES[5], "TunableOp", _gemm("TN", 4096, 512, 11008, "bf16_r"), 1, "", id="TunableOp"),
        pytest.param(LINES[6], "TunableOp", _gemm("TN", 128, 128, 64, "f32_r", batch=96), 1, "", id="batched"),
        pytest.param(LINES[7], "TunableOp", _gemm("TN", 768, 1024, 768, "f16_r"), 1, "bias", id="bias"),
        pytest.param(LINES[8], "TunableOp", _gemm("TN", 64, 12288, 2048, "f8_r", d="bf16_r"), 1, "", id="8-bit"),
        pytest.param(LINES[9], "TunableOp", _gemm("NT", 25088, 4096, 64, "f32_r"), 1, "", id="a tuned line"),
    ],
)  # fmt: skip
def test_every_form(line: str, form: str, gemm: Gemm, calls: int, epilogue: str) -> None:
    assert lines.form_of(line) == form
    assert lines.parse(line, form) == lines.Call(gemm, calls, epilogue)


def _typed(name: str) -> str:
    return LINES[0].replace("a_type: bf16_r", f"a_type: {name}")


def test_names_of_kinds() -> None:
    assert _gemm("TN", 16, 16, 16, "bf16_r").kind == "BBS_TN"
    assert _gemm("TN", 16, 16, 16, "f8_r", d="bf16_r").kind == "F8BS_TN"
    assert _gemm("NT", 16, 16, 16, "f64_r", compute="f64_r").kind == "DDD_NT"


def test_calls_are_added_up_and_epilogues_are_named(tmp_path: Path) -> None:
    biased = LINES[0].replace("bias_vector: false", "bias_vector: true").replace("type: none", "type: relu")
    found = _read(tmp_path, f"a program's own line\n{LINES[0]}\n{biased}\n{LINES[1]}\n")
    ((gemm, calls),) = found.found.calls.items()
    assert (calls, found.other, found.found.lines) == (9, 1, 3)
    assert found.found.epilogues == {gemm: {"bias, relu"}}


def test_several_forms_in_a_log_count_once(tmp_path: Path) -> None:
    found = _read(tmp_path, "".join(f"{line}\n" for line in (LINES[2], LINES[2], LINES[1], LINES[0])))
    assert found.form == "hipBLASLt mask 64 or 128"
    assert found.found.calls.total() == 8
    assert "2 lines of hipBLASLt mask 32 are left out" in found.notes[0]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        pytest.param(LINES[0][:300], "the line is cut off", id="cut"),
        pytest.param(LINES[2][:60], "--transA is missing", id="a command that is cut"),
        pytest.param(LINES[2].partition("--compute")[0], "--compute_type is missing", id="a command cut at its end"),
        pytest.param(LINES[5][:45], "the line is cut off", id="TunableOp cut"),
        pytest.param(_typed("q3_k"), "unknown data type 'q3_k'", id="a type"),
        pytest.param(LINES[0].replace("c_f32_r", "c_f8_r"), "unknown compute type 'f8_r'", id="a compute type"),
        pytest.param(LINES[0].replace("M: 16032", "M: $(reboot)"), "'$(reboot)', no integer", id="a shell's words"),
        pytest.param(_typed("../../x"), "a_type is '../../x', no name", id="a path"),
        pytest.param(_typed("\x1b[31m"), r"a_type is '\x1b[31m', no name", id="escape"),
        pytest.param(LINES[0].replace("N: 109", "N: 0"), "an empty problem", id="nothing to do"),
        pytest.param(LINES[0].replace("N: 109", "N: -4"), "an empty problem", id="negative"),
        pytest.param(LINES[0].replace("M: 16032", "M: 99999999999"), "a size beyond 2^31", id="too large"),
        pytest.param(LINES[0].replace("lda: 16384", "lda: 7"), "leading dimensions", id="overlapping rows"),
        pytest.param(LINES[0].replace("call_count: 1", "call_count: -1"), "call_count is -1", id="calls"),
        pytest.param(LINES[0].replace("b_type: bf16_r", "b_type: f16_r"), "no name for A of", id="mixed"),
        pytest.param(LINES[2] + " --grouped_gemm", "a grouped GEMM", id="grouped"),
        pytest.param(LINES[3].replace("gemm_ex", "trsm"), "'trsm' is no GEMM", id="no GEMM"),
        pytest.param(LINES[2].replace("-m 1024", "-m 1024 ; rm"), "';' belongs to no option", id="a second command"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named_and_the_rest_is_read(tmp_path: Path, line: str, why: str) -> None:
    found = _read(tmp_path, f"{gemm_logs.GUIDE}{line}\n")
    assert len(found.found.calls) == 2
    assert found.unusable == 1
    assert found.skipped[0][0] == 3
    assert why in found.skipped[0][1]
    assert found.skipped[0][1].isprintable()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"no GEMM here\n", id="other text"),
        pytest.param(b"\xff\xfe\x00" * 1000, id="bytes"),
        pytest.param(b"- {function: matmul, " + b"x" * 300_000 + b"}\n", id="an endless line"),
    ],
)
def test_a_log_without_a_gemm_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(AccelpatchError, match=r"names no GEMM .*HIPBLASLT_LOG_MASK=64"):
        _read(tmp_path, content)


def test_a_log_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AccelpatchError, match="cannot be read"):
        logs.read(tmp_path)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(LINES), st.randoms(use_true_random=False))
def test_damaged_lines_are_read_or_named(line: str, chance: random.Random) -> None:
    """Cut, doubled, swapped and overwritten pieces: never another exception than the one that names the reason."""
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(line) + 1)
        end = min(len(line), start + chance.randint(0, 40))
        piece = "".join(chance.choice("{}[],:'\"$`;|&<>\\\x00\x1b-0129 MNKT_ré") for _ in range(chance.randint(0, 8)))
        line = chance.choice((line[:start], line[:start] + line[end:], line[:start] + piece + line[end:], line * 2))
    form = lines.form_of(line)
    if form is None:
        return
    found = _outcome(line, form)
    if isinstance(found, str):
        assert found.isprintable()
    else:
        assert min(found.gemm.m, found.gemm.n, found.gemm.k, found.calls) >= 1
        assert found.gemm.kind.replace("_", "").isalnum()


def _outcome(line: str, form: str) -> lines.Call | str:
    try:
        return lines.parse(line, form)
    except lines.LineError as error:
        return str(error)


PROGRAM = """
import sys, time
from pathlib import Path
from accelpatch.tuning.hipblaslt import logs
start = time.process_time()
found = logs.read(sys.argv[1])
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(time.process_time() - start, int(peak.split()[1]) / 1024, len(found.found.calls))
"""


def test_a_long_log_takes_seconds_and_little_memory(tmp_path: Path) -> None:
    """100,000 lines that all differ, which is the most work: less than 5 s of the processor and 300 MB."""
    file = tmp_path / "long.log"
    head, tail = (gemm_logs.MASK_64 % 7777).split("N: 7777")
    file.write_text("".join(f"{head}N: {n}{tail}\n" for n in range(1, 100_001)))
    command = [sys.executable, "-c", PROGRAM, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    seconds, megabytes, count = map(float, done.stdout.split())
    assert count == 100_000
    assert seconds < 5
    assert megabytes < 300
