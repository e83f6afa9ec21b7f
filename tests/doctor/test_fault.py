"""A program is run as the manuals of the tools say; stand-ins write what they would."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from accelpatch import device
from accelpatch.doctor import fault
from accelpatch.errors import AccelpatchError
from tests.support.fault_recordings import ROCM_7, SANITIZER


def stand_in(path: Path, body: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\nimport json, os, sys\n{body}\n")
    path.chmod(0o755)
    return str(path)


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_a_program_that_is_well(tmp_path: Path) -> None:
    printed = list[str]()
    found = fault.run(python("print('fine')"), "cpu", tmp_path / "run", show=printed.append)
    assert (found.faults, found.status, found.failed, found.tool) == ((), 0, False, None)
    assert "".join(printed) == (tmp_path / "run/output.txt").read_text() == "fine\n"


def test_a_program_that_fails_by_itself(tmp_path: Path) -> None:
    found = fault.run(python("raise SystemExit(3)"), "cpu", tmp_path)
    assert (found.faults, found.status, found.failed) == ((), 3, True)


def test_a_program_that_is_stopped_says_where(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\n\ndef launch():\n    os.abort()\n\nprint('before')\nlaunch()\n")
    found = fault.run([sys.executable, str(script)], "cpu", tmp_path / "run")
    assert found.status == -signal.SIGABRT
    (one,) = found.faults
    assert one.kind == "the process was stopped: Aborted"
    assert one.launch == (f"{script}:4 in launch: os.abort()", f"{script}:7 in <module>: launch()")
    assert (tmp_path / "run/output.txt").read_text().startswith("before\n")


def test_arguments_are_read_by_no_shell(tmp_path: Path) -> None:
    words = ["a b", "$(touch owned)", "`touch owned`", ";touch owned", "--json", "*", "\n"]
    fault.run(python("import sys; print(sys.argv[1:])", *words), "cpu", tmp_path)
    assert (tmp_path / "output.txt").read_text() == f"{words}\n"
    assert not Path("owned").exists()


@pytest.mark.parametrize("name", ["no-such-program", "", "a\0b"])
def test_a_program_that_cannot_be_run(name: str, tmp_path: Path) -> None:
    with pytest.raises(AccelpatchError, match="cannot be run"):
        fault.run([name], "cpu", tmp_path)


def test_a_program_that_hangs_is_stopped_with_what_it_started(tmp_path: Path) -> None:
    code = (
        "import os, time\nif os.fork() == 0:\n  open('child', 'w').write(str(os.getpid()))\nprint('on')\ntime.sleep(60)"
    )
    start = time.perf_counter()
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        found = fault.run(python(code), "cpu", tmp_path / "run", seconds=1)
    finally:
        os.chdir(here)
    assert time.perf_counter() - start < 15
    assert found.status is None
    assert found.failed
    assert "stopped after 1 s" in found.notes[0]
    assert _gone(int((tmp_path / "child").read_text()))


def _gone(process: int) -> bool:
    for _ in range(100):
        state = Path(f"/proc/{process}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_process_that_stays_behind_holds_nothing_up(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\nprint('on')"
    )
    start = time.perf_counter()
    assert fault.run(python(code), "cpu", tmp_path).status == 0
    assert time.perf_counter() - start < 20
    assert (tmp_path / "output.txt").read_text() == "on\n"


AGENT = """
options = os.environ["ROCM_DEBUG_AGENT_OPTIONS"].split()
values = dict(one.partition("=")[::2] for one in options)
open(values["--output"], "w").write({recording!r})
open(values["--save-code-objects"] + "/memory___415882_offset_0x7ff736b8c040_size_17250", "wb").write(b"\\x7fELF")
print(json.dumps({{name: os.environ.get(name) for name in sys.argv[1:]}}))
os.abort()
"""


def test_the_debug_agent_is_set_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "rocm/lib" / fault.AGENT_LIBRARY
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    program = stand_in(tmp_path / "program", AGENT.format(recording=ROCM_7))
    found = fault.run([program], "amd", tmp_path / "run")
    assert found.tool == str(library)
    assert found.faults[0].kernel == "out_of_bounds"
    assert found.faults[0].kind == "MEMORY_VIOLATION"
    assert found.faults[0].launch[0].endswith(": os.abort()") or "train.py" in found.faults[0].launch[0]
    assert [one.name for one in found.code] == ["memory___415882_offset_0x7ff736b8c040_size_17250"]
    expected = {
        "HSA_TOOLS_LIB": str(library), "HSA_ENABLE_DEBUG": "1", "AMD_SERIALIZE_KERNEL": "3",
        "AMD_SERIALIZE_COPY": "3", "HSA_DISABLE_FRAGMENT_ALLOCATOR": "1", "PYTORCH_NO_HIP_MEMORY_CACHING": "1",
        "HIP_LAUNCH_BLOCKING": "1",
    }  # fmt: skip
    assert expected.items() <= found.variables.items()
    assert found.variables["ROCM_DEBUG_AGENT_OPTIONS"].startswith("--all ")
    assert not found.notes


@pytest.mark.parametrize("name", ["a b", "50%"])
def test_a_folder_that_the_agent_cannot_read(name: str, tmp_path: Path) -> None:
    with pytest.raises(AccelpatchError, match="name another folder by --out"):
        fault.variables_for("amd", tmp_path / name, caching=False, agent="librocm-debug-agent.so.2")
    assert "HSA_TOOLS_LIB" not in fault.variables_for("amd", tmp_path / name, caching=False, agent=None)


def test_the_newest_rocm_is_taken(tmp_path: Path) -> None:
    assert fault.agent_library({}, tmp_path) is None
    for release in ("rocm-6.4.0", "rocm-7.1.0"):
        file = tmp_path / "opt" / release / "lib" / fault.AGENT_LIBRARY
        file.parent.mkdir(parents=True)
        file.touch()
    found = fault.agent_library({}, tmp_path)
    assert found is not None
    assert "rocm-7.1.0" in found


def test_without_the_agent_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault, "agent_library", lambda: None)
    found = fault.run(python("print('fine')"), "amd", tmp_path)
    assert "rocm-debug-agent" in found.notes[0]
    assert found.variables["AMD_SERIALIZE_KERNEL"] == "3"


CHECKER = """
at = sys.argv.index("--log-file")
open(sys.argv[at + 1], "w").write({recording!r})
print(json.dumps(sys.argv[1:]))
"""


def test_compute_sanitizer_is_driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path / "bin/compute-sanitizer", CHECKER.format(recording=SANITIZER))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = fault.run(["program", "$(id)"], "nvidia", tmp_path / "run")
    assert found.status == 0
    assert found.failed
    assert found.faults[0].kernel == "scale(float *, const float *, int)"
    assert found.faults[0].source == "/opt/demo/scale.cu:7"
    assert '"program", "$(id)"]' in (tmp_path / "run/output.txt").read_text()
    assert found.variables["CUDA_LAUNCH_BLOCKING"] == found.variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"


UNABLE = """\
========= COMPUTE-SANITIZER
========= Error: process didn't terminate successfully
========= Target application terminated before first instrumented API call
"""


def test_a_tool_that_cannot_start_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded in a container without a GPU: the tool of CUDA 13.5 ends with status 0, and nothing has run."""
    stand_in(tmp_path / "bin/compute-sanitizer", CHECKER.format(recording=UNABLE))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = fault.run(python("print('ran'); raise SystemExit(5)"), "nvidia", tmp_path / "run")
    assert found.status == 5
    assert "could not start the program" in found.notes[0]
    assert (tmp_path / "run/output.txt").read_text() == "ran\n"


def test_a_program_that_a_signal_ends_under_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool's own status is 0 then."""
    stand_in(tmp_path / "bin/compute-sanitizer", CHECKER.format(recording="\n".join(UNABLE.splitlines()[:2])))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    found = fault.run(["program"], "nvidia", tmp_path / "run")
    assert (found.status, found.failed) == (1, True)
    assert "the status is the tool's own" in found.notes[0]


#: a stand-in for Triton, which compiles a kernel and then launches it
TRITON = """
import os, pathlib

class Kernel:
    def __getitem__(self, grid):
        return self.run

    def run(self, x):
        code = pathlib.Path(os.environ["TRITON_CACHE_DIR"], "abc")
        code.mkdir(parents=True)
        first = '#loc = loc("/opt/demo/kernel.py":7:0)'
        (code / "past_the_end.ttir").write_text(first + '\\nmodule {}\\n#loc1 = loc("/opt/demo/kernel.py":9:4)\\n')
        (code / "past_the_end.cubin").write_bytes(b"ELF")
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
"""


def test_without_a_tool_launches_block_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault, "sanitizer", lambda: None)
    library = tmp_path / "site-packages/triton/runtime.py"
    library.parent.mkdir(parents=True)
    library.write_text(TRITON)
    script = tmp_path / "script.py"
    script.write_text("from triton.runtime import Kernel\npast_the_end = Kernel()\npast_the_end[(1,)](0)\n")
    monkeypatch.setenv("PYTHONPATH", str(library.parents[1]))
    found = fault.run([sys.executable, str(script)], "nvidia", tmp_path / "run")
    assert "compute-sanitizer is not here" in found.notes[0]
    (one,) = found.faults
    assert "illegal memory access" in one.kind
    assert one.kernel == "past_the_end"
    assert one.source == "/opt/demo/kernel.py:7 (where it is defined)"
    assert one.launch == (f"{script}:3 in <module>: past_the_end[(1,)](0)",)
    assert [file.name for file in found.code] == ["past_the_end.cubin"]


def test_caching_can_be_kept(tmp_path: Path) -> None:
    found = fault.variables_for("nvidia", tmp_path, caching=True, agent=None)
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" not in found
    assert found["CUDA_LAUNCH_BLOCKING"] == "1"


def test_where_compute_sanitizer_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(device, "packaged", lambda: [str(tmp_path / "nvidia/cu13/bin")])
    assert fault.sanitizer() is None
    package = stand_in(tmp_path / "nvidia/cu13/bin/compute-sanitizer", "")
    assert fault.sanitizer() == package
    toolkit = stand_in(tmp_path / "cuda/bin/compute-sanitizer", "")
    assert fault.sanitizer() == toolkit
