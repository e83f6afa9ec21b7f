"""The whole command on the simulated device: from the guide's log to tables, a final library and the uplift."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pymoo
import pytest

from accelpatch.errors import AccelpatchError
from accelpatch.tuning.hipblaslt import bench_output, job, logic, platforms, results, simulated, stages
from accelpatch.tuning.hipblaslt.gemms import Gemm
from accelpatch.tuning.hipblaslt.search import Outcome
from accelpatch.tuning.hipblaslt.work import STAGES, Work
from tests.cli.conftest import Cli, environment
from tests.support import gemm_logs

LOG = gemm_logs.GUIDE + gemm_logs.fp8(64, calls=3) + "\n"
ALL = ("--on", "simulated", "--trials", "40", "--devices", "0,1")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.log").write_text(LOG)


def _table(name: str) -> list[dict[str, str]]:
    with Path("out", "results", name).open(newline="") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.usefixtures("in_process")
def test_one_command(cli: Cli) -> None:
    result = cli("tune", "hipblaslt", "program.log", "--out", "out", *ALL)
    assert result.exit_code == 0, result.output
    raw, final = _table("raw_results.csv"), _table("final_results.csv")
    assert {row["name"] for row in raw} == {"BBS_TN_0", "BBS_TN_1", "F8NBS_TN_0"}
    assert final == [row for row in raw if row["winner"] == "tuned"]
    kept = {row["name"] for row in final}
    assert kept
    served = sum(len(logic.read(file).sizes()) for file in Path("out/final").glob("*.yaml"))
    assert served == len(kept)
    before = sum(int(row["calls"]) * float(row["us_reference"]) for row in raw)
    after = sum(int(row["calls"]) * float(row["us_tuned" if row["name"] in kept else "us_reference"]) for row in raw)
    found = re.search(r"SIMULATED weighted uplift: \+([\d.]+)%", result.stdout)
    assert found
    assert float(found[1]) == pytest.approx(100 * (before / after - 1), abs=0.06)
    ratios = [float(row["ratio"]) for row in final]
    assert f"SIMULATED average uplift: {sum(ratios) / len(ratios) - 1:+.1%}" in result.stdout
    for file in Path("out").rglob("device_*.log"):
        assert all("SIMULATED" in line for line in file.read_text().splitlines())
    assert "TensileMergeLibrary" not in result.stdout
    assert all("simulated" in file.name for file in Path("out/final").iterdir())


@pytest.mark.usefixtures("in_process")
def test_the_stages_one_by_one_are_the_same(cli: Cli) -> None:
    whole = cli("tune", "hipblaslt", "program.log", "--out", "out", *ALL)
    alone = [
        ("configs", "program.log", "--out", "alone", "--on", "simulated"), ("optimize", "alone", "--trials", "40"),
        ("merge", "alone"), ("benchmark", "alone"), ("postprocess", "alone"),
    ]  # fmt: skip
    ran = [cli("tune", "hipblaslt", *words) for words in alone]
    assert [one.exit_code for one in ran] == [0] * 5
    assert [words[0] for words in alone] == list(STAGES)
    assert Path("alone/results/raw_results.csv").read_text() == Path("out/results/raw_results.csv").read_text()
    assert ran[-1].stdout.replace("alone/", "out/") == whole.stdout


@pytest.mark.usefixtures("in_process")
def test_options_may_come_before_the_log(cli: Cli) -> None:
    Path("program.log").write_text(LOG + LOG[:100] + "\n")
    result = cli("tune", "hipblaslt", *ALL, "--out", "out", "program.log", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["platform"], found["simulated"], len(found["gemms"])) == ("simulated", True, 3)
    assert "warning: line 4 is left out: the line is cut off" in result.stderr


@pytest.mark.usefixtures("in_process")
def test_what_is_done_is_not_done_again(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cli("tune", "hipblaslt", "program.log", "--out", "out", *ALL)
    monkeypatch.setattr(job, "main", lambda words: pytest.fail("a search ran again"))
    monkeypatch.setattr(simulated, "microseconds", lambda *_: pytest.fail("a benchmark ran again"))
    assert cli("tune", "hipblaslt", "program.log", "--out", "out", *ALL).stdout == first.stdout


def test_a_killed_command_goes_on(tmp_path: Path) -> None:
    """Killed with its searches half done: what was measured is not measured again, and the result is the same."""
    words = [sys.executable, "-m", "accelpatch", "tune", "hipblaslt", "program.log", *ALL, "--trials", "300", "--json"]
    places = os.pathsep.join((environment()["PYTHONPATH"], str(Path(pymoo.__file__).parents[1])))
    options = {
        "cwd": tmp_path, "env": environment() | {"PYTHONPATH": places}, "stderr": subprocess.PIPE,
        "stdout": subprocess.PIPE,
    }  # fmt: skip
    child = subprocess.Popen([*words, "--out", "out"], start_new_session=True, **options)  # type: ignore[call-overload]
    trials = tmp_path / "out" / "tunings" / "build_BBS_TN_0" / job.TRIALS
    end = time.monotonic() + 60
    while not (trials.exists() and trials.stat().st_size > 5000):
        assert time.monotonic() < end
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)  # the command alone: its children end by themselves
    child.wait()
    assert not stages.has_result(Work(tmp_path / "out"), "BBS_TN_0")
    before = trials.read_text().rpartition("\n")[0].splitlines()
    again = subprocess.run([*words, "--out", "out"], check=False, **options)  # type: ignore[call-overload]
    assert again.returncode == 0, again.stderr
    after = trials.read_text().splitlines()
    assert after[: len(before)] == before
    keys = [json.loads(line)["choice"] for line in after]
    assert len(keys) == len(set(keys)) == 300
    assert json.loads(again.stdout)["weighted_uplift"] > 0


@pytest.mark.usefixtures("in_process")
def test_wrong_and_slow_kernels_are_left_out(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "error", lambda gemm, choice: 0.7 if gemm.n == 113 else 1e-3)
    stock = simulated.reference
    monkeypatch.setattr(simulated, "reference", lambda gemm, arch: _best(gemm.n) or stock(gemm, arch))
    result = cli("tune", "hipblaslt", "program.log", "--out", "out", *ALL, "--json")
    found = {one["name"]: one for one in json.loads(result.stdout)["gemms"]}
    assert found["BBS_TN_0"]["reason"] == "wrong: its error is 0.7"
    assert found["BBS_TN_1"]["reason"] == "not better: 1.000 times as fast"
    assert found["F8NBS_TN_0"]["winner"] == "tuned"
    (library,) = Path("out/final").iterdir()
    assert logic.read(library).sizes()[0][0] == (16032, 64, 1, 16384)


def _best(n: int) -> dict[str, object] | None:
    """For n 109 the reference is what the search found, so that nothing is gained."""
    if n != 109:
        return None
    found = json.loads(Path("out/tunings/build_BBS_TN_1", job.RESULT).read_text())["choice"]
    return {name: tuple(one) if isinstance(one, list) else one for name, one in found.items()}


@pytest.mark.usefixtures("in_process")
def test_a_search_that_failed_is_done_by_the_next_call(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = platforms.Simulated.measure

    def measure(self: platforms.Simulated, gemm: Gemm, *rest: Any) -> Outcome:
        return Outcome(None, "broken", failed=True) if gemm.n == 113 else stock(self, gemm, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(platforms.Simulated, "measure", measure)
        first = cli("tune", "hipblaslt", "program.log", "--out", "out", *ALL)
    assert first.exit_code == 0
    assert "BBS_TN_0: error: BBS_TN_0: none of 40 choices could run; the last: broken" in first.stderr
    assert {row["name"] for row in _table("raw_results.csv")} == {"BBS_TN_1", "F8NBS_TN_0"}
    again = cli("tune", "hipblaslt", "program.log", "--out", "out", *ALL)
    assert again.exit_code == 0
    assert {row["name"] for row in _table("raw_results.csv")} == {"BBS_TN_0", "BBS_TN_1", "F8NBS_TN_0"}


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_stage_without_the_one_before_says_which(cli: Cli, stage: str) -> None:
    result = cli("tune", "hipblaslt", stage, "nowhere")
    assert result.exit_code == 1
    assert "accelpatch tune hipblaslt configs LOG --out nowhere" in result.stderr


@pytest.mark.parametrize(
    ("stage", "before"), [("merge", "optimize"), ("benchmark", "merge"), ("postprocess", "benchmark")]
)
def test_stages_out_of_order_say_what_to_run(cli: Cli, stage: str, before: str) -> None:
    cli("tune", "hipblaslt", "configs", "program.log", "--out", "out", "--on", "simulated")
    result = cli("tune", "hipblaslt", stage, "out")
    assert result.exit_code == 1
    assert f"run `accelpatch tune hipblaslt {before}" in result.stderr


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        pytest.param(("missing.log",), 1, "the log missing.log is not here", id="no log"),
        pytest.param(("program.log", "--devices", "0,x"), 2, "no list of numbers of GPUs", id="devices"),
        pytest.param(("program.log", "--arch", "gfx000"), 1, "known are: gfx90a, gfx942, gfx950", id="arch"),
        pytest.param(("program.log", "--on", "hipblaslt", "--arch", "gfx942"), 1, "needs --hipblaslt", id="no tools"),
        pytest.param(("optimize", "--only", "x"), 1, "holds no tuning", id="nothing begun"),
    ],
)  # fmt: skip
def test_bad_input(cli: Cli, words: tuple[str, ...], status: int, said: str) -> None:
    result = cli(
        "tune", "hipblaslt", *words, *(() if "--on" in words or words[0] == "optimize" else ("--on", "simulated"))
    )
    assert result.exit_code == status
    assert said in " ".join(result.output.replace("│", " ").split())


def test_a_damaged_library_is_left_out_of_the_merge(tmp_path: Path) -> None:
    good = logic.make("a.yaml", "s", "gfx942", {"DataType": "B"}, {"K": 1}, (1, 2, 1, 3), 5.0)
    better = logic.make("b.yaml", "s", "gfx942", {"DataType": "B"}, {"K": 2}, (1, 2, 1, 3), 9.0)
    other = logic.make("c.yaml", "s", "gfx942", {"DataType": "H"}, {"K": 3}, (4, 2, 1, 3), 9.0)
    files = []
    for one in (good, better, other):
        files.append(tmp_path / one.name)
        files[-1].write_text(logic.as_text(one))
    (tmp_path / "d.yaml").write_text("[1, 2")
    (tmp_path / "e.yaml").write_text(logic.as_text(good).replace("- [0, 5.0]", "- [7, 5.0]"))
    made = logic.merge([*files, tmp_path / "d.yaml", tmp_path / "e.yaml"])
    assert [one.sizes() for one in made.of] == [[((1, 2, 1, 3), 0, 9.0)], [((4, 2, 1, 3), 0, 9.0)]]
    assert made.of[0].part(logic.SOLUTIONS) == [{"SolutionIndex": 0, "K": 2}]
    assert len(made.left_out) == 2


def test_uplift_counts_every_call() -> None:
    from tests.tuning.hipblaslt.test_logs import _gemm

    def compared(calls: int, before: float, after: float, error: float = 0.0) -> results.Compared:
        gemm = _gemm("TN", 64, 64, 64, "bf16_r")
        row = results.workload.Row("BBS_TN_0", gemm, calls, 0.5)
        key = bench_output.key_of(gemm)
        ran = [bench_output.Ran(key, one, name, None) for one, name in ((before, "a"), (after, "b"))]
        return results.Compared(row, "lib", *ran, error)

    found = results.summarise(
        [compared(1, 10, 5), compared(9, 10, 9.9), compared(10, 10, 1, 0.5)], error=0.03, uplift=1.03
    )
    assert [one.winner for one in found.compared] == ["tuned", "reference", "reference"]
    assert found.mean == pytest.approx(1.0)
    assert found.weighted == pytest.approx(200 / 195 - 1)
    none = results.summarise([compared(1, 10, 10)], error=0.03, uplift=1.03)
    assert (none.mean, none.weighted) == (None, 0.0)


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"version": 99, "settings": {}, "done": []}')
    with pytest.raises(AccelpatchError, match="of another version of accelpatch"):
        Work(tmp_path).settings()
