"""What scripts/transformers_suite.py makes of the tests that it ran: records, counts, reasons, its table."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"
TESTS = """
import unittest

class ModelTest(unittest.TestCase):
    def test_passes(self):
        pass

    def test_part_fails(self):
        for part in range(3):
            with self.subTest(part=part):
                self.assertNotEqual(part, 1, "the part is one")

    def test_part_skips(self):
        for part in range(3):
            with self.subTest(part=part):
                if part == 0:
                    self.skipTest("not this part")

    def test_skips(self):
        self.skipTest("not this model")

    def test_late(self):
        while True:
            try:
                sum(range(10**6))
            except Exception:
                pass

    def test_not_wanted(self):
        pass
"""
CACHES = "transformers.cache_utils"
CLASSES = "E   AssertionError: <class '{0}.DynamicLayer'> != <class '{0}.{1}'>"
IMAGES = "E   ValueError: Image features and image tokens do not match, tokens: 0, features: 2"
RECORDS = [
    {"test": "a::test_started", "outcome": "started"},
    {"test": "a::test_one", "outcome": "started"},
    {"test": "a::test_one", "outcome": "passed", "sites": 12, "models": 2},
    {"test": "a::test_no_site", "outcome": "passed", "sites": 0, "models": 1},
    {"test": "a::test_no_model", "outcome": "passed"},
    {"test": "a::test_images", "outcome": "failed", "sites": 4, "error": {"text": IMAGES}},
    {"test": "a::test_odd", "outcome": "failed", "error": {"text": "E   KeyError: 'odd'"}},
]  # fmt: skip


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs' folder is where Python looks first."""
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    file = tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in RECORDS))
    return file


def test_the_plugin_records_each_test(tmp_path: Path) -> None:
    """Parts count with their test, a part that skips does not skip it, and no test outlives its limit."""
    (tmp_path / "test_model.py").write_text(TESTS)
    names = [
        f"test_model.py::ModelTest::test_{name}" for name in ("passes", "part_fails", "part_skips", "skips", "late")
    ]
    (tmp_path / "only.txt").write_text("\n".join(names))
    words = ["-q", "-p", "no:cacheprovider", "-p", "transformers_tests.plugin", "--only", "only.txt"]
    command = [sys.executable, "-m", "pytest", *words, "--records", "records.jsonl", "--test-seconds", "1"]
    environment = {"PYTHONPATH": str(SCRIPTS), "PATH": ""}
    done = subprocess.run(
        [*command, "--rootdir", ".", "test_model.py"], cwd=tmp_path, env=environment, capture_output=True, check=False
    )
    assert done.returncode == 1, done.stdout.decode()
    from transformers_tests.plugin import read

    found = {one["test"].rpartition("test_")[2]: one for one in read(tmp_path / "records.jsonl")}
    outcomes = {name: one["outcome"] for name, one in found.items()}
    assert outcomes == {
        "passes": "passed", "part_fails": "failed", "part_skips": "passed", "skips": "skipped", "late": "failed",
    }  # fmt: skip
    assert "the part is one" in found["part_fails"]["error"]["message"]
    assert "OutOfTime" in found["late"]["error"]["text"]


def test_counts(recorded: Path) -> None:
    from transformers_tests.plugin import read
    from transformers_tests.table import row_of

    row = row_of("llama", "int8", 6, read(recorded))
    assert (row.stock, row.sites, row.passed, row.touched) == (6, 16, 3, 1)
    assert row.reasons == {
        "ended the process": ["test_started"],
        "look for an image's place by embeddings that were taken before the patch": ["test_images"],
        "unexplained": ["test_odd"],
    }


@pytest.mark.parametrize(
    ("recipe", "text", "reason"),
    [
        pytest.param("int8", IMAGES, "look for an image's place", id="embeddings, int8"),
        pytest.param("exact", IMAGES, "unexplained", id="embeddings, exact"),
        pytest.param("exact", CLASSES.format(CACHES, "DynamicLayer"), "compare the classes", id="a subclass"),
        pytest.param("exact", CLASSES.format(CACHES, "StaticLayer"), "unexplained", id="another class"),
        pytest.param("int8", "E   assert x.max().item() < 1e-3", "compare numbers", id="a bound, int8"),
        pytest.param("int8", "E   AssertionError: Tensor-likes are not close!", "compare numbers", id="numbers, int8"),
        pytest.param("exact", "E   AssertionError: Tensor-likes are not close!", "unexplained", id="numbers, exact"),
        pytest.param("exact", "E   plugin.OutOfTime: the test ran", "ran out of time", id="time"),
        pytest.param("int8", "E   ValueError: no", "unexplained", id="another"),
    ],
)
def test_reasons(recipe: str, text: str, reason: str) -> None:
    from transformers_tests.reasons import reason_of

    assert reason_of({"outcome": "failed", "error": {"text": text}}, recipe).startswith(reason)


def test_the_table_of_a_former_run(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers_tests.plugin import read
    from transformers_tests.table import row_of

    file = tmp_path / "results.json"
    rows: list[dict[str, Any]] = [row_of("llama", "int8", 6, read(recorded)).to_dict()]
    file.write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(sys, "argv", ["transformers_suite.py", "--read", str(file)])
    runpy.run_path(str(SCRIPTS / "transformers_suite.py"))["main"]()
    head, line, row = capsys.readouterr().out.splitlines()
    assert head.count("|") == line.count("|") == row.count("|")
    assert row.startswith("| llama | `int8` | 6 | 16 | 3 | 1 | 1 ")
    assert "1 unexplained" in row


def test_a_run_needs_a_checkout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["transformers_suite.py"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPTS / "transformers_suite.py"))["main"]()
    assert "name a --checkout" in capsys.readouterr().err
