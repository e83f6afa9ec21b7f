"""The Triton GEMM as a platform: right for every choice, the shipped one among them, and end to end on a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accelpatch.tuning.hipblaslt import triton_configuration
from accelpatch.tuning.hipblaslt.gemms import Gemm
from tests.cli.conftest import Cli
from tests.support.interpreted import DEVICE, INTERPRETED, here, interpret, needs_triton

TYPE = "f16_r" if INTERPRETED else "bf16_r"  # the interpreter cuts bfloat16 off where GPUs round


def _gemm(m: int, n: int, k: int, types: str = TYPE) -> Gemm:
    return Gemm("T", "N", m, n, k, 1, types, types, types, types, "f32_r", (k, k, m, m))


@needs_triton
@pytest.mark.skipif(INTERPRETED or DEVICE.type == "cuda", reason="runs in this process")
def test_through_the_interpreter() -> None:
    interpret(__file__)


@needs_triton
@here
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(("m", "n", "k"), [(96, 20, 1088), (64, 7, 1100)], ids=["even", "odd"])
def test_every_choice_is_right(m: int, n: int, k: int, splits: int) -> None:
    from accelpatch.tuning.hipblaslt.triton_gemms import TOLERANCE, TritonGemms, run

    platform, gemm = TritonGemms("0", on=DEVICE), _gemm(m, n, k)
    choices = [(16, 32, 64), (32, 64, 32)]
    for tokens, rows, columns in choices:
        choice = {"TOKENS": tokens, "ROWS": rows, "COLUMNS": columns, "WARPS": 4, "STAGES": 2, "SPLITS": splits}
        assert platform.error(gemm, choice) < TOLERANCE / 4
    x, weights, _ = platform._of(gemm)
    assert run(x, weights[0], choice).shape == (n, m)


@needs_triton
@here
@pytest.mark.parametrize(("m", "n", "k"), [(96, 20, 1088), (192, 5, 2048)])
def test_the_shipped_choice_is_what_is_shipped(m: int, n: int, k: int) -> None:
    from accelpatch.tuning.hipblaslt.triton_gemms import TritonGemms, run, shipped

    gemm = _gemm(m, n, k)
    x, weights, _ = TritonGemms("0", on=DEVICE)._of(gemm)
    assert torch.equal(run(x, weights[0], shipped(gemm)), run(x, weights[0], None))
    assert triton_configuration.space_of(gemm).places(shipped(gemm)) is not None


@needs_triton
@here
def test_a_choice_that_the_gpu_cannot_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    from accelpatch.tuning.hipblaslt import triton_gemms

    def too_large(*_: object) -> None:
        raise OutOfResources(300_000, 232_448, "shared memory")

    platform = triton_gemms.TritonGemms("0", on=DEVICE)
    monkeypatch.setattr(triton_gemms, "run", too_large)
    outcome = platform.measure(_gemm(96, 20, 1088), {}, None, tmp_path)  # type: ignore[arg-type]
    assert outcome.microseconds is None
    assert outcome.reason.startswith("OutOfResources: out of resource: shared memory")


def test_a_sweep_of_a_7b_shape_has_500_choices() -> None:
    for m, k in ((12288, 4096), (4096, 11008)):
        assert triton_configuration.space_of(_gemm(m, 64, k)).size >= 500


def test_what_the_kernel_does_not_do_is_named() -> None:
    gemm = _gemm(96, 20, 1088)
    assert triton_configuration.why_not(gemm, "") is None
    for wrong, why in (
        (replace(gemm, trans_b="T"), "takes A transposed"), (replace(gemm, d_type="f32_r"), "bf16 and f16 alone"),
        (replace(gemm, batch=2), "one product"), (replace(gemm, leading=(1100, 1088, 96, 96)), "without gaps"),
    ):  # fmt: skip
        assert why in (triton_configuration.why_not(wrong, "") or "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused(cli: Cli, tmp_path: Path) -> None:
    from tests.support import gemm_logs

    (tmp_path / "a.log").write_text(gemm_logs.TUNABLE[0] + "\n")
    work = str(tmp_path / "out")
    assert cli("tune", "hipblaslt", "configs", str(tmp_path / "a.log"), "--out", work, "--on", "triton").exit_code == 0
    result = cli("tune", "hipblaslt", "merge", work)
    assert result.exit_code == 1
    assert "sees no GPU for Triton; use --on simulated" in result.stderr


@needs_triton
@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the next test runs it all")
@pytest.mark.usefixtures("in_process")
def test_the_whole_command_through_the_interpreter(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage with the kernels' own results; only the clock is another one, for a CPU has no graphs to time."""
    from accelpatch.tuning.hipblaslt import platforms, triton_gemms

    timed: list[str] = []

    def once(self: triton_gemms.TritonGemms, gemm: Gemm, choice: dict[str, int] | None) -> float:
        timed.append(str(choice))
        x, weights, _ = self._of(gemm)
        triton_gemms.run(x, weights[0], choice)
        return 10.0 if choice is None else 10.0 - choice["WARPS"] / 2

    monkeypatch.setattr(triton_gemms.TritonGemms, "quick_microseconds", once)
    monkeypatch.setattr(triton_gemms.TritonGemms, "microseconds", once)
    monkeypatch.setattr(platforms, "make", lambda name, **_: triton_gemms.TritonGemms("0", on=DEVICE))
    (tmp_path / "a.log").write_text("GemmTunableOp_Half_TN,tn_96_20_1088_ld_1088_1088_96\n")
    words = ("--out", str(tmp_path / "out"), "--on", "triton", "--trials", "6", "--json")
    result = cli("tune", "hipblaslt", str(tmp_path / "a.log"), *words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["platform"], found["simulated"], found["commands"]) == ("triton", False, [])
    (gemm,) = found["gemms"]
    assert gemm["ratio"] == pytest.approx(10 / 6)
    assert 0 < gemm["error"] < 0.01
    assert len(timed) == 6 + 3  # trials, and the runs of the benchmark
    trials = (tmp_path / "out/tunings/build_HHS_TN_0/trials.jsonl").read_text().splitlines()
    assert json.loads(json.loads(trials[0])["choice"]) == triton_gemms.shipped(_gemm(96, 20, 1088))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_whole_command_on_a_gpu(cli: Cli, tmp_path: Path) -> None:
    from tests.support import gemm_logs

    (tmp_path / "a.log").write_text("".join(f"{gemm_logs.MASK_64 % n}\n".replace("16032", "4096") for n in (16, 64)))
    words = ("--out", str(tmp_path / "out"), "--on", "triton", "--trials", "24", "--json")
    result = cli("tune", "hipblaslt", str(tmp_path / "a.log"), *words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert not found["simulated"]
    assert all(one["ratio"] > 0.9 and one["error"] < 0.02 for one in found["gemms"])
