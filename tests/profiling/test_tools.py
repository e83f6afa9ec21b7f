"""The tools that record counters, driven; stand-ins write what the tools' documents describe."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from accelpatch.errors import AccelpatchError
from accelpatch.profiling import tools
from tests.cli.conftest import Cli, cli  # noqa: F401
from tests.profiling.test_counters import TRACE


def stand_in(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def path_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH but those of the system."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    return folder


ROCPROFV3 = """while [ "$1" != -d ]; do shift; done; out=$2; shift 3; printf '%s\\n' "$@" > arguments
cat > "$out/x_kernel_trace.csv" <<'END'
{}END"""


def test_rocprofv3_is_driven(path_of: Path, cli: Cli) -> None:  # noqa: F811
    stand_in(path_of, "rocprofv3", ROCPROFV3.format(TRACE))
    done = cli("profile", "counters", "--run", "python 'a b.py' --x '$(touch owned)' ';' `id`", "--json")
    found = json.loads(done.stdout)
    assert found["kernels"][0]["kernel"] == "gemv<float, 4>(float*)"
    assert Path("arguments").read_text().splitlines() == ["python", "a b.py", "--x", "$(touch owned)", ";", "`id`"]
    assert not Path("owned").exists()


def test_where_counters_are_forbidden_times_are_recorded(path_of: Path, cli: Cli) -> None:  # noqa: F811
    forbids = 'case "$*" in *--pmc*) echo "error: Operation not permitted" >&2; exit 1;; esac\n'
    stand_in(path_of, "rocprofv3", forbids + ROCPROFV3.format(TRACE))
    done = cli("profile", "counters", "--run", "python x.py")
    assert done.exit_code == 0
    assert "gemv<float, 4>" in done.stdout
    assert "this host forbids hardware counters" in done.stderr


def test_ncu_where_counters_are_forbidden(path_of: Path, cli: Cli) -> None:  # noqa: F811
    stand_in(path_of, "ncu", "echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission'; exit 1")
    done = cli("profile", "counters", "--tool", "ncu", "--run", "python x.py")
    assert done.exit_code == 0
    assert "NVreg_RestrictProfilingToAdminUsers=0" in done.stderr


def test_a_tool_that_fails(path_of: Path, cli: Cli) -> None:  # noqa: F811
    stand_in(path_of, "ncu", "echo 'no such program'; exit 3")
    done = cli("profile", "counters", "--run", "python x.py")
    assert done.exit_code == 1
    assert "ncu ended with status 3: no such program" in done.stderr


@pytest.mark.parametrize("old, new", list(tools.RENAMED.items()))
def test_old_names_lead_to_the_new(old: str, new: str) -> None:
    with pytest.raises(AccelpatchError, match=f"use --tool {new}"):
        tools.chosen(old)


def test_without_a_tool(path_of: Path, cli: Cli) -> None:  # noqa: F811
    done = cli("profile", "counters", "--run", "python x.py")
    assert done.exit_code == 1
    assert "rocprofiler-sdk" in done.stderr
    assert "nsight-compute" in done.stderr
    assert "ncu is not on PATH" in cli("profile", "counters", "--tool", "ncu", "--run", "x").stderr
    assert "no tool that is known" in cli("profile", "counters", "--tool", "vtune", "--run", "x").stderr


@pytest.mark.parametrize("arguments", [[], ["--run", "'"], ["--run", "x", "y.csv"], ["--run", " "]])
def test_wrong_usage(arguments: list[str], path_of: Path, cli: Cli) -> None:  # noqa: F811
    assert cli("profile", "counters", *arguments).exit_code == 2
