"""hipBLASLt's tools, by programs that stand for them, in the forms that AMD documents: there is no ROCm here."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from accelpatch.errors import AccelpatchError
from accelpatch.tuning.hipblaslt import bench_output, engines, tensile
from tests.cli.conftest import Cli
from tests.support import gemm_logs

#: writes what TensileLite's client writes: its table with CSVExportWinner, and library logic. Deep tiles are rejected.
TENSILE = """
import sys, yaml
from pathlib import Path
found, out = yaml.safe_load(open(sys.argv[1])), Path(sys.argv[2])
((problem, group),) = found["BenchmarkProblems"]
choice = {name: values for entry in group["ForkParameters"] for name, values in entry.items()}
assert all(len(values) == 1 for values in choice.values()), "one choice a run"
(m, n, batch, k) = group["BenchmarkFinalParameters"][0]["ProblemSizes"][0]["Exact"]
depth, tile = choice["DepthU"][0], choice["MatrixInstruction"][0]
folder = out / "2_BenchmarkData"
folder.mkdir()
if depth == 128:
    print("Tensile::WARNING: all solutions rejected")
    (folder / "x_CSVWinner.csv").write_text("GFlops, SizeI, SizeJ, SizeK, SizeL, WinnerGFlops, WinnerTimeUS\\n")
    sys.exit(0)
us = 300 - depth - tile[5] * tile[6] + 7 * choice["GlobalSplitU"][0]
(folder / "x_CSVWinner.csv").write_text(
    "GFlops, SizeI, SizeJ, SizeK, SizeL, LDD, LDC, LDA, LDB, TotalFlops, WinnerGFlops, WinnerTimeUS, WinnerIdx, "
    "WinnerName\\n"
    f"1, {m}, {n}, {batch}, {k}, {m}, {m}, {k}, {k}, 1, 1, {us}, 0, Cijk\\n")
(out / "3_LibraryLogic").mkdir()
kind = {"DataType": 7, "DestDataType": 7, "ComputeDataType": 0, "TransposeA": True, "TransposeB": False}
logic = [{"MinimumRequiredVersion": "5.0.0"}, "aquavanjaram", {"Architecture": "gfx942", "CUCount": 304},
         ["Device 0049"], kind, [{"SolutionIndex": 0, "SolutionNameMin": "Cijk", "DepthU": depth}], [2, 3, 0, 1],
         [[[m, n, batch, k], [0, 1000.0 / us]]], None, None, "DeviceEfficiency", "Equality"]
(out / "3_LibraryLogic" / "aquavanjaram_Cijk_Alik_Bljk_BBS_BH.yaml").write_text(yaml.safe_dump(logic))
"""
CREATE = """
import sys
from pathlib import Path
assert sys.argv[1:7] == ["--code-object-version", "5", "--library-format", "msgpack", "--architecture", "gfx942"]
assert list(Path(sys.argv[7]).glob("*.yaml")) and sys.argv[9] == "HIP"
(Path(sys.argv[8]) / "library" / "gfx942").mkdir(parents=True)
(Path(sys.argv[8]) / "library" / "gfx942" / "TensileLibrary_lazy_gfx942.dat").write_text("")
"""
#: the head of a release with frequencies and swizzle, of clients/bench/README.md
BENCH = """
import json, os, sys, yaml
from pathlib import Path
assert sys.argv[1] == "--yaml" and sys.argv[3:] == ["--device", "0"]
tuned = os.environ.get("HIPBLASLT_TENSILE_LIBPATH", "")
assert not tuned or Path(tuned, "TensileLibrary_lazy_gfx942.dat").exists()
print("hipBLASLt version: 1200\\nQuery device success: there are 1 devices")
for place, one in enumerate(yaml.safe_load(open(sys.argv[2]))):
    assert one["function"] == "matmul" and one["compute_type"] == "c_f32_r" and one["print_kernel_info"]
    head = ("transA,transB,grouped_gemm,batch_count,m,n,k,alpha,lda,beta,a_type,b_type,c_type,d_type,compute_type,"
            "swizzle_a,flush,lowest_avg_freq,hipblaslt-Gflops,hipblaslt-GB/s,us")
    us = (150 if tuned else 200) + one["N"] / 1000
    row = [one["transA"], one["transB"], 0, one["batch_count"], one["M"], one["N"], one["K"], 1, one["lda"], 0,
           "bf16_r", "bf16_r", "bf16_r", "bf16_r", "f32_r", 0, 1, 2100, 1, 1, us]
    if one.get("norm_check"):
        head += ",CPU-Gflops,CPU-us,norm_error,atol,rtol"
        row += [0.1, 43688, 2.4e-4, 1e-05, 1e-05 if one["N"] == 109 else "failed"]
    print(f"[{place}]:{head}\\n    {','.join(map(str, row))}")
    print(f"    --Solution index: 7\\n    --Solution name:  S\\n    --kernel name:    {'tuned' if tuned else 'stock'}")
"""


def _program(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!{sys.executable}\n{text}")
    file.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the tools of a built checkout; its name would be two words to a shell."""
    root = tmp_path / "rocm libraries; echo"
    _program(root / tensile.TENSILE, TENSILE)
    _program(root / tensile.CREATE, CREATE)
    _program(root / tensile.BENCHES[0], BENCH)
    monkeypatch.chdir(tmp_path)
    Path("program.log").write_text(gemm_logs.GUIDE)
    return root


ALL = ("tune", "hipblaslt", "program.log", "--out", "out", "--arch", "gfx942", "--trials", "12")


@pytest.mark.usefixtures("in_process")
def test_the_whole_workflow(cli: Cli, checkout: Path) -> None:
    result = cli(*ALL, "--hipblaslt", str(checkout))
    assert result.exit_code == 0, result.output
    with Path("out/results/raw_results.csv").open(newline="") as stream:
        rows = {row["n"]: row for row in csv.DictReader(stream)}
    assert (rows["109"]["winner"], rows["113"]["reason"]) == ("tuned", "wrong: the check failed")
    assert float(rows["109"]["us_reference"]) == pytest.approx(200.109)
    assert float(rows["109"]["ratio"]) == pytest.approx(200.109 / 150.109, abs=1e-4)
    (final,) = Path("out/final").iterdir()
    found = yaml.safe_load(final.read_text())
    assert found[7][0][0] == [16032, 109, 1, 16384]
    assert len(found[5]) == 1
    trials = [json.loads(line) for line in Path("out/tunings/build_BBS_TN_0/trials.jsonl").read_text().splitlines()]
    assert len(trials) == 12
    assert {one["reason"] for one in trials} == {"", "Tensile rejected it, or its results were wrong"}
    best = json.loads(Path("out/tunings/build_BBS_TN_0/result.json").read_text())
    assert best["us"] == min(one["us"] for one in trials if one["us"])
    assert best["platform"] == "hipblaslt"
    assert "SIMULATED" not in result.output
    assert "average uplift: +33.3% over 1 GEMMs that are kept" in result.stdout
    commands = result.stdout.partition("yours to run")[2]
    quoted = re.escape(f"'{checkout}/tensilelite/Tensile/bin/TensileMergeLibrary'")
    assert re.search(rf"{quoted} --no_eff --force_merge True '.*/asm_full/gfx942/Equality' \S+/out/final '", commands)
    assert "./install.sh -dc -a gfx942" in commands
    assert not (checkout / "library").exists(), "hipBLASLt itself is left as it was"


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("tool", "text", "said"),
    [
        pytest.param(tensile.CREATE, "import sys; sys.exit('error: no space left on device')",
                     "TensileCreateLibrary failed (no space left on device)", id="no space for the library"),
        pytest.param(tensile.CREATE, "", "TensileCreateLibrary made no", id="no library"),
        pytest.param(tensile.TENSILE, "import os; os.abort()", "Tensile: it was ended by SIGABRT", id="a crash"),
        pytest.param(tensile.BENCHES[0], "print('GPU fault'); raise SystemExit(9)",
                     "hipblaslt-bench failed (GPU fault)", id="hipblaslt-bench fails"),
        pytest.param(tensile.BENCHES[0], "print('[0]:transA,m,n,k\\n   T,1,2,3')",
                     "a release of hipblaslt-bench without the column transB, batch_count, us", id="a release"),
        pytest.param(tensile.BENCHES[0], "print('hipBLASLt version: 1')", "no result of hipblaslt-bench", id="silent"),
    ],
)  # fmt: skip
def test_a_tool_that_fails_is_named(cli: Cli, checkout: Path, tool: str, text: str, said: str) -> None:
    _program(checkout / tool, text)
    result = cli(*ALL[:-1], "2", "--hipblaslt", str(checkout))
    assert result.exit_code == 1
    assert said in result.stderr


@pytest.mark.usefixtures("in_process")
def test_a_device_on_which_nothing_runs_is_given_up_soon(cli: Cli, checkout: Path) -> None:
    _program(checkout / tensile.TENSILE, "raise SystemExit('error: no ROCm-capable device')")
    result = cli(*ALL[:-1], "100", "--hipblaslt", str(checkout))
    assert result.exit_code == 1
    assert "8 choices failed one after the other, the last: Tensile: no ROCm-capable device" in result.stderr


@pytest.mark.parametrize("tool", [tensile.TENSILE, tensile.CREATE, tensile.BENCHES[0]])
def test_a_missing_tool_is_named(cli: Cli, checkout: Path, tool: str) -> None:
    (checkout / tool).unlink()
    cli(*ALL[:2], "configs", *ALL[2:-2], "--hipblaslt", str(checkout))
    result = cli("tune", "hipblaslt", "benchmark", "out", "--hipblaslt", str(checkout))
    assert result.exit_code == 1
    assert f"has no program {tool}: build hipBLASLt there" in result.stderr


@pytest.mark.parametrize(
    ("row", "why"),
    [
        pytest.param("    T,N,0,1,16032", "is cut off", id="cut"),
        pytest.param("    T,N,0,1,16032,109,16384,-1", "'-1' microseconds are no time", id="no time"),
        pytest.param("    T,N,0,1,16032,109,16384,nan", "'nan' microseconds are no time", id="nan"),
    ],
)
def test_rows_that_are_no_results(tmp_path: Path, row: str, why: str) -> None:
    (tmp_path / "x.out").write_text(f"[0]:transA,transB,grouped_gemm,batch_count,m,n,k,us\n{row}\n")
    with pytest.raises(AccelpatchError, match=re.escape(why)):
        bench_output.read(tmp_path / "x.out")


def test_what_stands_in_for_the_benchmark_is_read_back(tmp_path: Path) -> None:
    from tests.tuning.hipblaslt.test_logs import _gemm

    gemms = [_gemm("TN", 64, 32, 128, "bf16_r", batch=3), _gemm("NT", 8, 8, 8, "f32_r")]
    rows = [bench_output.Row(one, 12.5, "kernel", error) for one, error in zip(gemms, (0.25, None), strict=True)]
    (tmp_path / "x.out").write_text(bench_output.text(rows))
    assert bench_output.read(tmp_path / "x.out") == [
        bench_output.Ran(bench_output.key_of(one.gemm), 12.5, "kernel", one.error) for one in rows
    ]


def test_tuning_at_run_time(cli: Cli) -> None:
    result = cli("tune", "hipblaslt", "any.log", "--engine", "runtime")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "unset HIPBLASLT_TUNING_OVERRIDE_FILE HIPBLASLT_TUNING_FILE"
    assert lines[1].startswith(f"export HIPBLASLT_TUNING_CACHE_PATH={engines.CACHE}")
    assert lines[2].startswith("export HIPBLASLT_TUNING_MODE=tune")
    assert "HIPBLASLT_TUNING_MODE=cache" in result.stderr


@pytest.mark.parametrize(
    ("engine", "tool", "words"),
    [("geko", engines.GEKO, "--search --workload-log"), ("quicktune", engines.QUICKTUNE, "--requested_solution 128")],
)
def test_amds_own_engines(cli: Cli, checkout: Path, engine: str, tool: Path, words: str) -> None:
    ask = ("tune", "hipblaslt", "program.log", "--engine", engine)
    assert "give its checkout with --hipblaslt" in cli(*ask).stderr
    assert f"has no {tool}" in cli(*ask, "--hipblaslt", str(checkout)).stderr
    _program(checkout / tool, "raise SystemExit('it must not run')")
    result = cli(*ask, "--hipblaslt", str(checkout), "--devices", "0,1", "--json")
    assert result.exit_code == 0
    lines = json.loads(result.stdout)["lines"]
    assert any(words in line and f"'{checkout}/{tool}'" in line for line in lines)
