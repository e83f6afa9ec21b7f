"""Every file that a stage reads, cut and overwritten at random: it is read, or refused by an error that names it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accelpatch.errors import AccelpatchError
from accelpatch.tuning.hipblaslt import bench_output, configuration, job, logic, workload
from accelpatch.tuning.hipblaslt.space import Space
from accelpatch.tuning.hipblaslt.work import Work
from tests.tuning.hipblaslt.test_logs import _gemm

GEMM = _gemm("TN", 96, 64, 512, "bf16_r")
SMALL = {**configuration.document(GEMM, "gfx942")}
LOGIC = logic.make("a.yaml", "aquavanjaram", "gfx942", {"DataType": 7}, {"DepthU": 64}, (96, 64, 1, 512), 5.0)
FORK = configuration.to_fork(Space({"DepthU": (32, 64), "MatrixInstruction": ((16, 16, 16, 1, 1, 1, 1, 4, 1),)}))
STATE = '{"version": 1, "settings": {"arch": "gfx942", "platform": "triton"}, "done": ["configs"]}'
FILES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "configuration": (configuration.text(configuration.with_choice(SMALL, FORK)), configuration.read),
    "summary": (workload.text([workload.Row("BBS_TN_0", GEMM, 3, 0.5, "bias", "")]), workload.read),
    "benchmark": (bench_output.text([bench_output.Row(GEMM, 12.5, "k", 0.1)] * 2), bench_output.read),
    "logic": (logic.as_text(LOGIC), logic.read),
    "state": (STATE, lambda file: _state(file)),
    "trials": ('{"choice": "{}", "us": 1.5, "reason": "", "failed": false}\n' * 3, lambda file: job.TrialLog(file)),
}


def _state(file: Path) -> Any:
    file.replace(file.parent / "state.json")
    return Work(file.parent).settings()


@pytest.mark.parametrize("kind", FILES)
def test_whole_files_are_read(tmp_path: Path, kind: str) -> None:
    text, read = FILES[kind]
    (tmp_path / "file").write_text(text)
    assert read(tmp_path / "file")


@pytest.mark.parametrize("kind", FILES)
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chance=st.randoms(use_true_random=False))
def test_damaged_files_are_read_or_refused(tmp_path: Path, kind: str, chance: random.Random) -> None:
    text, read = FILES[kind]
    for _ in range(chance.randint(1, 3)):
        start = chance.randrange(len(text) + 1)
        end = min(len(text), start + chance.randint(0, 30))
        piece = "".join(chance.choice("{}[],:'\"-\n \x00!*&019anul.é") for _ in range(chance.randint(0, 6)))
        text = chance.choice((text[:start], text[:start] + text[end:], text[:start] + piece + text[end:]))
    (tmp_path / "file").write_text(text)
    assert _outcome(lambda: read(tmp_path / "file")) in ("read", "refused")


def _outcome(read: Callable[[], Any]) -> str:
    try:
        read()
    except AccelpatchError:
        return "refused"
    return "read"
