"""Which GEMMs are tuned, and the configurations that are written for them."""

from __future__ import annotations

import errno
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelpatch.errors import AccelpatchError
from accelpatch.tuning.hipblaslt import configuration, stages, workload
from accelpatch.tuning.hipblaslt.space import Space, from_fork, key_of, to_fork
from accelpatch.tuning.hipblaslt.work import Work, write
from tests.support import gemm_logs

#: top keys, and those of a problem's group, in tensilelite/Tensile/Tests/common/gemm/bf16_tn.yaml
SECTIONS = {"GlobalParameters", "BenchmarkProblems", "LibraryLogic"}
GROUP = {"InitialSolutionParameters", "BenchmarkCommonParameters", "ForkParameters", "BenchmarkJoinParameters",
         "BenchmarkFinalParameters"}  # fmt: skip


def _configs(tmp_path: Path, log: str, threshold: float = 1.0, arch: str = "gfx942") -> tuple[Work, stages.Configured]:
    (tmp_path / "program.log").write_text(log)
    work = Work(tmp_path / "out")
    made = stages.configs(work, tmp_path / "program.log", arch=arch, platform="simulated", threshold=threshold)
    return work, made


def _yaml(work: Work, name: str) -> dict[str, Any]:
    found = yaml.safe_load((work.folder / "tunings" / f"{name}.yaml").read_text())
    assert isinstance(found, dict)
    return found


def test_the_guides_log(tmp_path: Path) -> None:
    work, made = _configs(tmp_path, gemm_logs.GUIDE)
    assert made.names == ["BBS_TN_0", "BBS_TN_1"]
    assert [row.gemm.n for row in made.rows] == [113, 109]
    assert made.rows[0].share == pytest.approx(113 / 222)
    found = _yaml(work, "BBS_TN_0")
    ((problem, group),) = found["BenchmarkProblems"]
    assert set(found) == SECTIONS
    assert set(group) == GROUP
    assert problem["TransposeA"], "transA T"
    assert (problem["DataType"], problem["DestDataType"], problem["ComputeDataType"]) == ("B", "B", "S")
    assert group["BenchmarkFinalParameters"][0] == {"ProblemSizes": [{"Exact": [16032, 113, 1, 16384]}]}
    assert found["LibraryLogic"]["ArchitectureName"] == "gfx942"
    instructions = group["ForkParameters"][0]["MatrixInstruction"]
    assert len(instructions) > 50
    assert all(len(one) == 9 and one[:4] in ([16, 16, 16, 1], [32, 32, 8, 1]) for one in instructions)
    script = work.folder / "tunings" / "BBS_TN_0.sh"
    assert script.stat().st_mode & stat.S_IXUSR
    assert "optimize . --only BBS_TN_0" in script.read_text()


def test_calls_times_flops_decide_and_kinds_are_counted_apart(tmp_path: Path) -> None:
    log = gemm_logs.GUIDE + gemm_logs.fp8(64, calls=20) + "\n" + gemm_logs.fp8(1) + "\n"
    work, made = _configs(tmp_path, log, threshold=1.0)
    assert made.names == ["F8NBS_TN_0", "BBS_TN_0", "BBS_TN_1"]
    assert made.rows[-1].left_out == "less than 1% of all flops"
    assert sum(row.share for row in made.rows) == pytest.approx(1)
    assert workload.read(work.summary) == [
        workload.Row(row.name, row.gemm, row.calls, float(f"{row.share:.6g}"), row.epilogues, row.left_out)
        for row in made.rows
    ]


@pytest.mark.parametrize(
    ("arch", "why"),
    [("gfx90a", "its matrix unit has no 8-bit floats"), ("gfx950", "its 8-bit floats are e4m3fn, not e4m3fnuz")],
)
def test_types_that_an_arch_lacks_are_named(tmp_path: Path, arch: str, why: str) -> None:
    _, made = _configs(tmp_path, gemm_logs.GUIDE + gemm_logs.fp8(64) + "\n", arch=arch)
    assert [why in row.left_out for row in made.rows] == [False, False, True]


def test_nothing_to_tune_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AccelpatchError, match=r"none of 1 GEMMs .* is tuned.*no 8-bit floats"):
        _configs(tmp_path, gemm_logs.fp8(64), arch="gfx90a")


def test_gaps_between_rows_are_written_down() -> None:
    from tests.tuning.hipblaslt.test_logs import _gemm

    dense = _gemm("TN", 96, 64, 512, "bf16_r")
    from dataclasses import replace

    padded = replace(dense, leading=(520, 512, 96, 128))
    sizes = [
        configuration.document(one, "gfx942")["BenchmarkProblems"][0][1]["BenchmarkFinalParameters"][0]
        for one in (dense, padded)
    ]
    assert sizes[0] == {"ProblemSizes": [{"Exact": [96, 64, 1, 512]}]}
    assert sizes[1] == {"ProblemSizes": [{"Exact": [96, 64, 1, 512, 128, 96, 520, 512]}]}  # ldd, ldc, lda, ldb


def test_a_second_call_changes_nothing_and_another_log_is_refused(tmp_path: Path) -> None:
    work, _ = _configs(tmp_path, gemm_logs.GUIDE)
    file = work.folder / "tunings" / "BBS_TN_0.yaml"
    edited = file.read_text().replace("DepthU: [32, 64, 128]", "DepthU: [64]")
    assert edited != file.read_text()
    file.write_text(edited)
    _, again = _configs(tmp_path, gemm_logs.GUIDE)
    assert again.log is None
    assert configuration.read(file).space.values["DepthU"] == (64,)
    with pytest.raises(AccelpatchError, match="holds a tuning with another log"):
        _configs(tmp_path, gemm_logs.MASK_32)
    with pytest.raises(AccelpatchError, match="holds a tuning with another arch"):
        _configs(tmp_path, gemm_logs.GUIDE, arch="gfx950")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        pytest.param("calls,", "", "it has no column calls", id="an older version"),
        pytest.param("BBS_TN_0", "../../x", "is no name of a BBS_TN problem", id="a path"),
        pytest.param("16032", "many", "invalid literal", id="no number"),
    ],
)
def test_a_summary_of_another_form_is_refused(tmp_path: Path, old: str, new: str, why: str) -> None:
    work, _ = _configs(tmp_path, gemm_logs.GUIDE)
    work.summary.write_text(work.summary.read_text().replace(old, new, 1))
    with pytest.raises(AccelpatchError, match=f"is no summary of this version .*{why}"):
        workload.read(work.summary)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("[]", id="a list"),
        pytest.param("a: [", id="no YAML"),
        pytest.param("!!python/object/apply:os.system ['true']", id="code"),
        pytest.param("{BenchmarkProblems: [[{}, {ForkParameters: 1}]]}", id="no parameters"),
    ],
)
def test_a_configuration_of_another_form_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(AccelpatchError, match="is no tuning configuration of one GEMM"):
        configuration.read(tmp_path / "x.yaml")


def test_a_full_disk_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(1 << 30, 1 << 30, 1 << 20))
    with pytest.raises(AccelpatchError, match=r"has 1 MiB free and a tuning needs 64"):
        _configs(tmp_path, gemm_logs.GUIDE)
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_is_named_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, _ = _configs(tmp_path, gemm_logs.GUIDE)
    before = work.summary.read_text()

    def full(self: Path, *rest: Any, **others: Any) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(AccelpatchError, match=r"summary.csv cannot be written \(No space left on device\): free space"):
        write(work.summary, "new")
    assert work.summary.read_text() == before
    assert [file.name for file in work.folder.iterdir() if file.name.startswith(".")] == []


def test_a_space_goes_through_yaml_and_back() -> None:
    space = Space({"MatrixInstruction": ((16, 16, 16, 1), (32, 32, 8, 1)), "DepthU": (32, 64), "K": ("a",)})
    assert from_fork(yaml.safe_load(configuration.text({"f": to_fork(space)}))["f"]) == space
    choice = space.choice({"DepthU": 1})
    assert space.places(choice) == {"MatrixInstruction": 0, "DepthU": 1}
    assert space.places({**choice, "DepthU": 128}) is None
    assert key_of(choice) == key_of(dict(reversed(list(choice.items()))))
