"""The projection of tensor parallel: on one GPU it is the measurement, and the table of the page is what it prints."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks import projection
from scripts.benchmarks.projection import MEASURED, Job, between, rates, rest, sum_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/parallel.md").read_text()


@pytest.mark.parametrize("case", ["1x128", "1x4096", "32x128"])
@pytest.mark.parametrize("recipe", ["exact", "int4"])
def test_one_gpu_is_what_was_measured(recipe: str, case: str) -> None:
    batch, prompt = map(int, case.split("x"))
    found = rates(Job("H200", "Llama-2-7B", recipe, batch, prompt, 1))
    due = 1e3 * batch / MEASURED["steps"][recipe][case][0]
    assert found is not None
    assert found == pytest.approx((due, due), rel=0.01)


def test_more_ranks_have_less_of_the_rest_and_more_to_exchange() -> None:
    one, eight = (Job("H200", "Llama-2-7B", "exact", 1, 128, ranks) for ranks in (1, 8))
    assert rest(one) == pytest.approx((200, 200), abs=1)
    assert rest(eight)[0] == pytest.approx(rest(one)[0] / 8, rel=0.05)
    assert rest(eight)[1] == pytest.approx(rest(one)[1])
    assert between(one) == 0
    assert between(eight) == pytest.approx(65 * sum_of("nvlink", 8, 8192) + 16 + 7 * 8000 / 450e3, rel=1e-6)


def test_what_the_page_says_of_eight() -> None:
    two, eight = (rates(Job("H200", "Llama-2-70B", "exact", 1, 128, ranks)) for ranks in (2, 8))
    assert two is not None
    assert eight is not None
    assert {f"{more / less / 4:.2f}" for less, more in zip(two, eight, strict=True)} == {"0.78", "0.79"}
    job = Job("H200", "Llama-2-7B", "int4", 1, 128, 8)
    ends = rates(job)
    assert ends is not None
    assert between(job) > 0.49 * 1e6 / ends[0]


def test_sums() -> None:
    assert sum_of("nvlink", 2, 100) == sum_of("nvlink", 2, 512) == 3.7
    assert 4.8 < sum_of("nvlink", 4, 65536) < 13.9
    assert sum_of("nvlink", 8, 524288) == pytest.approx(2 * 16.7)
    assert sum_of("links", 8, 8192) == pytest.approx(5 + 8192 / 64e3)
    assert sum_of("links", 8, 1 << 20) == pytest.approx(2 * (5 + (1 << 17) / 64e3))


@pytest.mark.parametrize(
    ("job", "due"),
    [
        (Job("H200", "Llama-2-70B", "exact", 1, 128, 1), False),
        (Job("H100", "Llama-2-70B", "exact", 32, 4096, 2), False),
        (Job("H100", "Llama-2-7B", "exact", 32, 4096, 1), False),
        (Job("H200", "Llama-2-7B", "exact", 32, 4096, 1), True),
        (Job("MI300X", "Llama-2-70B", "exact", 1, 128, 1), True),
    ],
    ids=lambda one: str(one),
)
def test_what_has_no_room(job: Job, due: bool) -> None:
    assert job.fits is due
    assert (rates(job) is not None) is due


def test_every_number_has_a_source() -> None:
    parts = [MEASURED["steps"], *MEASURED["machines"].values(), *MEASURED["sums"].values()]
    assert all(len(one["source"]) > 20 for one in parts)


def test_the_table_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    file = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["bench.py", "projection", "--json", str(file)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "scripts/bench.py"), run_name="__main__")
    assert ended.value.code == 0
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [line for line in PAGE.splitlines() if line in printed] == printed
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 * len(projection.MODELS) * 2 * 2 * 2
