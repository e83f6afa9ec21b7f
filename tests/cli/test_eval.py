"""accelpatch eval."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from .conftest import Cli


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text("It was the best of times, it was the worst of times. " * 12)  # 636 bytes and so tokens
    return str(file)


def test_exact_changes_nothing_that_counts(cli: Cli, model: str, text: str) -> None:
    found = json.loads(cli("eval", model, "--recipe", "exact", "--text", text, "--json").stdout)
    assert found["kl"] < 1e-6
    assert found["top1"] > 0.99
    assert found["perplexity_after"] == pytest.approx(found["perplexity_before"], rel=1e-4)
    assert found["tokens"] == 633  # windows of 256 tokens, the first of each is not predicted


def test_int4_costs_more_than_int8(cli: Cli, model: str, text: str) -> None:
    kl = [
        json.loads(cli("eval", model, "--recipe", recipe, "--text", text, "--json").stdout)["kl"]
        for recipe in ("int8", "int4")
    ]
    assert 0 < kl[0] < kl[1]


def test_table(cli: Cli, model: str, text: str) -> None:
    result = cli("eval", model, "--text", text, "--max-tokens", "100")
    for words in ("mean KL", "top-1 agreement", "perplexity", "99 predicted tokens"):
        assert words in result.stdout


def test_a_short_text_is_said(cli: Cli, model: str, text: str) -> None:
    result = cli("eval", model, "--recipe", "exact", "--text", text)
    assert result.exit_code == 0
    assert result.stderr == (
        f"warning: {text} has 636 tokens, and figures of fewer than 1000 say little: give a longer text, or none\n"
    )


def test_without_a_text_it_takes_the_one_that_is_shipped(cli: Cli, model: str) -> None:
    result = cli("eval", model, "--recipe", "exact", "--json")
    assert result.stderr == ""
    found = json.loads(result.stdout)
    assert "Wonderland (1865)" in found["text"]
    assert found["tokens"] > 3000  # of bytes; some 2,800 of SmolLM2's


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"", "holds no text; give another one", id="empty"),
        pytest.param(b"a", "at least 2", id="one token"),
        pytest.param(b"caf\xe9 au lait", "not UTF-8 text", id="latin-1"),
    ],
)
def test_texts_that_cannot_be_used(cli: Cli, model: str, tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "bad.txt"
    file.write_bytes(content)
    result = cli("eval", model, "--text", str(file))
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert words in result.stderr


def test_a_window_and_a_stride(cli: Cli, model: str, text: str) -> None:
    """With a stride each token but the first is predicted once, with more before it."""
    plain, strided = (
        json.loads(cli("eval", model, "--text", text, "--json", *options).stdout)
        for options in (("--window", "64"), ("--window", "64", "--stride", "16"))
    )
    assert plain["tokens"] == 636 - 10
    assert strided["tokens"] == 635
    assert strided["perplexity_before"] != plain["perplexity_before"]
    result = cli("eval", model, "--text", text, "--window", "64", "--stride", "100")
    assert result.exit_code == 1
    assert "windows of 64 tokens cannot be 100 apart" in " ".join(result.stderr.split())


HARNESS = {
    "__init__": "",
    "evaluator": """
def simple_evaluate(model, tasks, limit, task_manager):
    name = type(model.pretrained.model.layers[0].mlp.down_proj).__name__
    value = 0.25 if "WeightOnly" in name else 0.5
    held = {"alias": "t", "acc,none": value, "acc_stderr,none": 0.01, "em,strict": 1, "em_stderr,strict": "N/A"}
    return {"results": {task: held for task in tasks}}
""",
    "tasks": "class TaskManager:\n    all_tasks = ['arc_easy', 'piqa']\n",
    "models/__init__": "",
    "models/huggingface": """
class HFLM:
    def __init__(self, pretrained, tokenizer):
        assert tokenizer is not None
        self.pretrained = pretrained
""",
}


def test_tasks_of_the_harness(cli: Cli, model: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, code in HARNESS.items():
        file = tmp_path / "lm_eval" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    options = ("--text", text, "--recipe", "int8", "--max-tokens", "40")
    result = cli("eval", model, *options, "--tasks", "arc_easy,piqa", "--limit", "4")
    assert "arc_easy" in result.stdout
    assert "acc 0.5000 -> 0.2500 (standard error 0.0100)" in result.stdout
    assert "em (strict) 1.0000 -> 1.0000\n" in result.stdout
    found = json.loads(cli("eval", model, *options, "--tasks", "piqa", "--json").stdout)["tasks"]
    assert found[0] == {"task": "piqa", "metric": "acc", "before": 0.5, "after": 0.25, "error": 0.01}
    absent = cli("eval", model, *options, "--tasks", "arc_easyy")
    assert absent.exit_code == 1
    assert "lm-evaluation-harness has no task 'arc_easyy'" in " ".join(absent.stderr.split())
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        del sys.modules[name]


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-evaluation-harness is installed")
def test_without_the_harness(cli: Cli, model: str) -> None:
    result = cli("eval", model, "--tasks", "piqa")
    assert result.exit_code == 1
    assert "pip install lm-eval" in " ".join(result.stderr.split())
