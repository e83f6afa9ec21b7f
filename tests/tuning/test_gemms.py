"""GEMMs tuned in child processes: what a crash, a hang and a lost device cost, and what a second call goes on with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from accelpatch.errors import AccelpatchError
from accelpatch.runtime import tuned_gemms
from accelpatch.tuning import gemms

GEMMS = [f"GemmTunableOp_float_TN,tn_{n}_8_64_ld_64_64_{n}" for n in (16, 32, 48, 64)]
#: stands for a child with a GPU: it tunes what it is given, crashes at "_32_" and hangs at "_48_", as the folder says
CHILD = """
import json, os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
device = os.environ["CUDA_VISIBLE_DEVICES"]
with (folder / "starts").open("a") as file:
    file.write(device + "\\n")
if (folder / ("lost" + device)).exists():
    print(json.dumps({"error": "no GPU " + device}), flush=True)
    sys.exit()
release = (folder / "release").read_text() if (folder / "release").exists() else "2.13.0"
print("a library's banner", flush=True)
print(json.dumps({"validators": {"PT_VERSION": release, "ACCELPATCH_ARCH": "sm_90"}}), flush=True)
for line in sys.stdin:
    line = line.strip()
    with (folder / "asked").open("a") as file:
        file.write(line + "\\n")
    if "tn_32_" in line and (folder / "crash").exists():
        os.abort()
    if "tn_48_" in line and (folder / "hang").exists():
        time.sleep(60)
    print(json.dumps({"results": [line + ",Default,0.01"]}), flush=True)
"""


@pytest.fixture
def child(tmp_path: Path) -> tuple[str, ...]:
    file = tmp_path / "child.py"
    file.write_text(CHILD)
    return (sys.executable, str(file), str(tmp_path))


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines()


def test_the_file_holds_validators_and_results(child: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    made = gemms.tune(GEMMS, ["0"], out, seconds=20, worker=child)
    assert set(made.results) == set(GEMMS)
    assert _lines(out)[:2] == ["Validator,PT_VERSION,2.13.0", "Validator,ACCELPATCH_ARCH,sm_90"]
    assert sorted(_lines(out)[2:]) == sorted(f"{gemm},Default,0.01" for gemm in GEMMS)
    assert tuned_gemms.read(out).validators["ACCELPATCH_ARCH"] == "sm_90"
    assert not gemms.partial_file(out).exists()


def test_a_crash_and_a_hang_cost_one_gemm_each(child: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "crash").touch()
    (tmp_path / "hang").touch()
    made = gemms.tune(GEMMS, ["0"], tmp_path / "out.csv", seconds=1, worker=child)
    assert set(made.results) == {GEMMS[0], GEMMS[3]}
    assert made.failed == {GEMMS[1]: "it was ended by SIGABRT", GEMMS[2]: "it did not end within 1 s, and was killed"}
    assert len(_lines(tmp_path / "starts")) == 3  # the first, and one after each


def test_work_is_spread_over_devices_and_a_lost_one_is_named(child: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "lost1").touch()
    made = gemms.tune(GEMMS, ["0", "1"], tmp_path / "out.csv", seconds=20, worker=child)
    assert set(made.results) == set(GEMMS)
    assert made.lost == {"1": "no GPU 1"}
    assert set(_lines(tmp_path / "starts")) == {"0", "1"}


def test_an_interrupted_call_goes_on(child: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    (tmp_path / "lost0").touch()
    with pytest.raises(AccelpatchError, match=r"4 of 4 GEMMs are not tuned \(device 0: no GPU 0\): run the command"):
        gemms.tune(GEMMS, ["0"], out, seconds=20, worker=child)
    (tmp_path / "lost0").unlink()
    done = {"gemm": GEMMS[0], "results": [f"{GEMMS[0]},Gemm_Hipblaslt_1,0.01"]}
    validators = {"validators": {"PT_VERSION": "2.13.0", "ACCELPATCH_ARCH": "sm_90"}}
    log = gemms.partial_file(out)
    log.write_text(f'{json.dumps(validators)}\n{json.dumps(done)}\n{{"gemm": "cut o')
    gemms.tune(GEMMS, ["0"], out, seconds=20, worker=child)
    assert _lines(tmp_path / "asked") == GEMMS[1:]
    assert f"{GEMMS[0]},Gemm_Hipblaslt_1,0.01" in _lines(out)


def test_unfinished_work_of_another_release_is_refused(child: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    gemms.partial_file(out).write_text(json.dumps({"validators": {"PT_VERSION": "2.9.0"}}) + "\n")
    with pytest.raises(AccelpatchError, match="begun with another release or device: remove it"):
        gemms.tune(GEMMS, ["0"], out, seconds=20, worker=child)
    assert not out.exists()


def test_recorded_gemms_are_read_once_each(tmp_path: Path) -> None:
    (tmp_path / "untuned0.csv").write_text(f"Validator,PT_VERSION,2\n{GEMMS[0]}\n{GEMMS[1]}\n")
    (tmp_path / "untuned1.csv").write_text(f"{GEMMS[1]}\n\n{GEMMS[2]}\n")
    (tmp_path / "results0.csv").write_text(f"{GEMMS[3]},Default\n")
    assert gemms.untuned_in(tmp_path) == GEMMS[:3]


def test_the_real_child_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(AccelpatchError, match=r"device 0: torch .* sees no GPU"):
        gemms.tune(GEMMS[:1], ["0"], tmp_path / "out.csv", seconds=20)
