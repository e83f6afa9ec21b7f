"""Which kernel faulted, read from logs in the documented formats, cut ones and hostile ones."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from accelpatch.doctor import fault_logs
from accelpatch.doctor.fault_logs import Fault, clean
from tests.support.fault_recordings import OLD_SANITIZER, ROCM_6, ROCM_7, SANITIZER, SCRIPT, TRACEBACK


def read(text: str) -> list[Fault]:
    return fault_logs.read(fault_logs.lines(io.StringIO(text)))


def test_rocm_6() -> None:
    (found,) = read(ROCM_6)
    assert found == Fault(
        "rocm-debug-agent",
        "MEMORY_VIOLATION",
        "scale(float*, float const*, int)",
        "/opt/demo/scale.hip:7",
        "s_waitcnt vmcnt(0)",
        "0x7f10a0f6000",
        code_object="file:////opt/demo/scale#offset=14309&size=31336",
        count=2,
    )


def test_rocm_7_names_the_kernel_beside_the_wavefront() -> None:
    (found,) = read(ROCM_7)
    assert found.kind == "MEMORY_VIOLATION"
    assert found.kernel == "out_of_bounds"
    assert found.source is None
    assert found.code_object == "memory://415882#offset=0x7ff736b8c040&size=17250"
    assert found.launch == ("/opt/demo/train.py:41 in step", "/opt/demo/train.py:60 in <module>")


def test_a_kernel_with_brackets_in_its_name() -> None:
    (found,) = read(ROCM_7.replace("reason: DEBUG_TRAP", "reason: ILLEGAL_INSTRUCTION").partition("wave_9")[0])
    assert found.kernel == "void other<4>(float*, (anonymous namespace)::Box)"


def test_the_gravest_comes_first() -> None:
    found = read(ROCM_7.replace("DEBUG_TRAP", "ASSERT_TRAP"))
    assert [one.kind for one in found] == ["MEMORY_VIOLATION", "ASSERT_TRAP"]


def test_compute_sanitizer() -> None:
    (found,) = read(SANITIZER)
    assert found == Fault(
        "compute-sanitizer",
        "Invalid __global__ write of size 4 bytes",
        "scale(float *, const float *, int)",
        "/opt/demo/scale.cu:7",
        address="0x7f241b0001e0",
        threads="thread (31,0,0) of block (2,0,0)",
        launch=("main in /opt/demo/scale.cu:25 [0x8a81] in scale",),
        count=2,
    )


def test_the_error_of_a_call_where_no_access_is_named() -> None:
    text = SANITIZER[SANITIZER.index("========= Program hit") :]
    (found,) = read(text)
    assert found.kind.startswith("Program hit cudaErrorLaunchFailure")
    assert found.launch == ("main in /opt/demo/scale.cu:29 [0x8a03] in scale",)
    other = text.replace("cudaErrorLaunchFailure", "cudaErrorInvalidValue").replace("unspecified launch failure", "x")
    assert read(other) == []


def test_its_older_form() -> None:
    first, second = read(OLD_SANITIZER)
    assert (first.kernel, first.source) == ("void ns::sum<(int)4, float>(T2 *, int)", "/opt/demo/sum.cu:17")
    assert first.threads == "thread (0,1,0) of block (0,0,8)"
    assert (second.kind, second.kernel) == ("Misaligned Shared or Local Address", "ampere_fp16_gemm")
    assert second.source is None


def test_the_traceback_of_a_blocking_launch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (found,) = read(TRACEBACK.format(script=script))
    assert found.kernel == "out_of_bounds"
    assert found.kind == "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered"
    assert found.launch[0] == f"{script}:9 in main: out_of_bounds[(1,)](x, 1 << 40, BLOCK=128)"
    assert len(found.launch) == 2


def test_a_call_of_a_list_is_no_launch(tmp_path: Path) -> None:
    """Without Triton's frames below it, what a line names is no kernel."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    text = "".join(line for line in TRACEBACK.format(script=script).splitlines(True) if "triton/runtime" not in line)
    (found,) = read(text)
    assert found.kernel is None
    assert found.launch[0].startswith(f"{script}:9 in main")


def test_a_tool_names_the_kernel_and_the_traceback_the_launch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    bare = "".join(line for line in SANITIZER.splitlines(True) if "Host Frame" not in line)
    (found,) = read(bare + TRACEBACK.format(script=script))
    assert found.tool == "compute-sanitizer"
    assert found.launch[0].startswith(f"{script}:9 in main")


def test_without_the_agent_the_runtimes_line_is_what_is_known() -> None:
    (found,) = read(ROCM_6.partition("-----")[0])
    assert (found.tool, found.kernel) == ("HIP runtime", None)
    assert found.kind == "Page not present or supervisor privilege."
    assert found.address == "0x7f10a0f6000"


def test_words_of_newer_runtimes() -> None:
    (found,) = read(
        "OFFLOAD ERROR: memory access fault by GPU 4 (agent 0x5) at virtual address 0x7ff0. Reasons: Unknown"
    )
    assert (found.kind, found.address) == ("Unknown", "0x7ff0")


@pytest.mark.parametrize("text", [ROCM_6, ROCM_7, SANITIZER, OLD_SANITIZER], ids=["6", "7", "sanitizer", "older"])
def test_a_log_that_is_cut_anywhere(text: str) -> None:
    """Nothing is raised, and a kernel that was named by then stays named."""
    named = set[str]()
    for end in range(len(text)):
        now = {one.kernel for one in read(text[:end]) if one.kernel}
        named |= now
    assert {one.kernel for one in read(text)} <= named


def test_ordinary_errors_and_texts_are_no_faults() -> None:
    assert read("") == []
    assert read("wave_1 is a name\nDisassembly\n=> 0x\n========= COMPUTE-SANITIZER\n") == []
    assert read(TRACEBACK.partition('Traceback (most recent call last):\n  File "{script}')[0]) == []
    assert read('Traceback (most recent call last):\n  File "a.py", line 1, in f\nMemoryError: none') == []


def test_names_are_shown_without_control_characters() -> None:
    hostile = ROCM_6.replace("scale(float*", "\x1b]0;owned\x07\x1b[2J$(touch owned)`id`;\u202e(float*")
    (found,) = read(hostile)
    assert found.kernel == r"\x1b]0;owned\x07\x1b[2J$(touch owned)`id`;\u202e(float*, float const*, int)"
    assert found.kernel.isprintable()
    assert not Path("owned").exists()


def test_long_names_and_lines_are_cut() -> None:
    (found,) = read(ROCM_6.replace("for function scale", "for function " + "x" * 3000))
    assert found.kernel is not None
    assert len(found.kernel) == fault_logs.SHOWN
    assert [len(line) for line in fault_logs.lines(io.StringIO("a" * 9999 + "\nb\r\n"))] == [fault_logs.LINE, 1]


def test_many_faults_take_bounded_memory() -> None:
    waves = (f"wave_{n}: pc=0x{n:x} (stopped, reason: MEMORY_VIOLATION)\n" for n in range(10_000))
    assert len(read("".join(waves))) == fault_logs.KINDS


@pytest.mark.parametrize(
    "file", ["/dev/zero", "/etc/passwd", "{}/folder.py", "x" * 280 + ".py"], ids=lambda name: name[:12]
)
def test_no_other_file_than_python_is_opened(file: str, tmp_path: Path) -> None:
    (tmp_path / "folder.py").mkdir()
    frame = f'  File "{file.format(tmp_path)}", line 1, in f\n'
    (found,) = read(f"Traceback (most recent call last):\n{frame}RuntimeError: CUDA error: an illegal memory access\n")
    assert found.launch == (f"{file.format(tmp_path)}:1 in f",)


def test_an_absurd_line_number() -> None:
    (found,) = read(f'Traceback (most recent call last):\n  File "{__file__}", line {"9" * 99}, in f\nX: CUDA error\n')
    assert found.kernel is None


def test_lines_of_a_distributed_program(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    text = "".join(f"[rank3]: {line}" for line in TRACEBACK.format(script=script).splitlines(True))
    assert read(text) == read(TRACEBACK.format(script=script))


HOSTILE = {
    "faults": "memory access fault by GPU " * 150,
    "addresses": "memory access fault by GPU" + "address 0x1 " * 330,
    "waves": "wave_1: pc=0x1 " + "(kernel_code_entry=0x1 <" * 160,
    "stopped": "wave_1: pc=0x1 " + "(stopped, reason: A" * 200,
    "kernels": "=========     at " + "+0x1 in a:1" * 360,
    "frames": 'File "' + '", line 1' * 450,
    "arrows": " => 0x1 <+1>:" * 300,
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE)
def test_hostile_lines_take_no_longer_than_others(line: str) -> None:
    head = "========= Invalid x\nwave_1: pc=0x1 (stopped, reason: TRAP)\nTraceback (most recent call last):\n"
    start = time.perf_counter()
    read(head + f"{line}\n" * 50)
    assert time.perf_counter() - start < 5


def test_a_python_file_of_one_long_line(tmp_path: Path) -> None:
    long = tmp_path / "long.py"
    long.write_text("a" * (1 << 20))
    start = time.perf_counter()
    (found,) = read(f'Traceback (most recent call last):\n  File "{long}", line 1, in f\nX: CUDA error\n')
    assert time.perf_counter() - start < 5
    assert found.launch[0].endswith("...")


def test_clean() -> None:
    assert clean("  a\tb\x00é漢 ") == r"a\tb\x00é漢"
