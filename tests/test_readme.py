"""README.md and docs/commands.md stay true: their commands run, their programs run, their plan is that of today.

The model behind the default's name and behind the hub's is a tiny random one; all else is as a reader has it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from accelpatch import cache
from accelpatch.bench import read_limit, timing
from accelpatch.cli import app
from accelpatch.device import probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.ops.attention import stored as attention_stored
from accelpatch.models import embedded
from accelpatch.recipe import quality
from tests.cli.conftest import byte_tokenizer, save_model

ROOT = Path(__file__).parent.parent
README, COMMANDS = (ROOT / "README.md").read_text(), (ROOT / "docs/commands.md").read_text()
PAGES = README + COMMANDS
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
# What a reader brings along.
FILES = {
    "notes.txt": "It was the best of times. " * 12,
    "rows.jsonl": '{"prompt": "2+2=", "completion": "4"}\n' * 20,
    "script.py": "import sys\nprint(sys.argv[1:])\n",
}


def blocks(language: str) -> list[str]:
    """The contents of the code fences of this language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES, re.DOTALL | re.MULTILINE)


def commands(program: str) -> list[str]:
    """The lines of the shell fences that call it."""
    lines = dict.fromkeys(line for block in blocks("sh") for line in block.splitlines())
    return [line for line in lines if shlex.split(line)[0] == program]


def block_with(words: str) -> str:
    """The one text fence that has these words."""
    (found,) = [block for block in blocks("text") if words in block]
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("readme") / "tiny", context=2048, tokenizer=byte_tokenizer())


@pytest.fixture(autouse=True)
def _reader(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reader's folder, environment and models; a small buffer for the read limit, times of this process alone."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(embedded, "folder", lambda *_: tiny)
    original = transformers.AutoModelForCausalLM.from_pretrained

    def from_pretrained(name: str, **options: Any) -> Any:
        assert name == HUB_NAME
        return original(tiny, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(read_limit, "FLOOR", 1 << 22)
    monkeypatch.setattr(read_limit, "last_level_cache", lambda: 0)
    monkeypatch.setattr(timing, "perf_counter", time.process_time)
    environment, threads = dict(os.environ), torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    os.environ.clear()
    os.environ.update(environment)


def invoke(line: str) -> str:
    """What `accelpatch ...` prints on stdout; anything but success fails the test."""
    result = CliRunner().invoke(app, shlex.split(line)[1:], input="Hello\n")  # what `chat` answers
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_fence_is_of_a_kind_that_is_tested() -> None:
    assert len(re.findall(r"^```", PAGES, re.MULTILINE)) == 2 * sum(
        len(blocks(language)) for language in ("sh", "python", "text")
    )
    known = [line for program in ("accelpatch", "make", "pip") for line in commands(program)]
    assert set(known) == {line for block in blocks("sh") for line in block.splitlines()}


@pytest.fixture
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What `tune` stores is nobody else's."""
    monkeypatch.setattr(attention_stored, "KIND", "attention-of-the-readme")
    yield
    cache.clear(attention_stored.KIND)
    attention_stored.orders_of.cache_clear()
    dispatch.forget()


@pytest.mark.usefixtures("_forgotten")
@pytest.mark.parametrize("line", commands("accelpatch"))
def test_commands(line: str) -> None:
    if "--plot" in line:
        pytest.importorskip("matplotlib", reason="the plot extra is not installed")
    if "finetune" in line or "--adapter" in line:
        pytest.importorskip("trl", reason="the train extra is not installed")
    if "--adapter" in line:
        invoke(next(one for one in commands("accelpatch") if "--data rows.jsonl" in one))
    if "inspect" in line or "export" in line:  # what a command before it writes
        invoke(next(one for one in commands("accelpatch") if "quantize" in one))
    printed = invoke(line)
    assert printed.strip()
    if "script.py" in line:
        assert "['--its', '--own', '--flags']" in printed
    if "--plot" in line:
        assert Path("speed.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_has_every_command() -> None:
    listed = re.findall(r"^\| `([\w ]+)` \|", COMMANDS, re.MULTILINE)
    shown = {shlex.split(line)[1] for line in commands("accelpatch")}
    names = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    if None in names:
        names = set(re.findall(r"^│ (\w+) ", invoke("accelpatch --help"), re.MULTILINE))
    assert set(listed) == names
    assert shown == {str(name).partition(" ")[0] for name in names}  # `bench kernel` is a kind of `bench`


def test_programs() -> None:
    """All in one namespace, as somebody types them one after the other."""
    namespace: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for number, program in enumerate(blocks("python")):
            exec(compile(program, f"README.md, program {number}", "exec"), namespace)
            if number == 0:
                assert namespace["model"].accelpatch.report().replaced > 0
    assert "every site within its bound" in printed.getvalue()
    assert not hasattr(namespace["model"], "accelpatch")


@pytest.mark.parametrize("line", [*commands("make"), *re.findall(r"`(make [^`]*)`", README)])
def test_make(line: str) -> None:
    """Each target is there and has something to do; what it does is the Makefile's own matter."""
    done = subprocess.run(
        [*shlex.split(line), "--dry-run", "--always-make"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ".venv/bin/" in done.stdout


@pytest.mark.parametrize("line", commands("pip"))
def test_pip(line: str) -> None:
    """With no index: what it asks for beyond this checkout is tests/test_packaging.py's matter."""
    alone = ("--dry-run", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
    done = subprocess.run(
        [sys.executable, "-m", "pip", *shlex.split(line)[1:], *alone], cwd=ROOT, capture_output=True, text=True,
        check=False, env=os.environ | {"PIP_CONFIG_FILE": os.devnull},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Would install accelpatch-" in done.stdout


@pytest.mark.skipif(
    libraries.why_not("cpu", probe("cpu")) is not None,
    reason="the plan of a machine without a C++ compiler names torch",
)
def test_the_plan() -> None:
    """Line by line what the command above it prints, cut before the last column."""
    (line,) = [line for line in commands("accelpatch") if "plan smollm2" in line]
    shown = block_with("model.rotary_emb").splitlines()
    _, fused, _, *printed = invoke(line).splitlines()
    assert f'"{fused}"' in COMMANDS.replace("\n", " ")
    cut = shown[0].rindex("after") + len("after")
    cropped = [text if text.startswith("bytes") else text[:cut].rstrip() for text in printed]
    assert shown == cropped[: len(shown)]


def test_what_run_prints() -> None:
    """The same lines in the same order; the figures are those of a real model."""
    (line,) = [line for line in commands("accelpatch") if "--prompt" in line and "--adapter" not in line]
    shown = block_with("sites replaced").splitlines()[2:]
    printed = invoke(line).splitlines()[-len(shown) :]
    assert [text.split("  ")[0] for text in shown] == [text.split("  ")[0] for text in printed]


def test_the_recipes() -> None:
    """All bundled ones, with the bytes that a plan has for the default model."""
    shown = dict(re.findall(r"^\| `(\w+)` \|.*\| ([\d.]+)% \|$", README, re.MULTILINE))
    assert set(shown) == set(re.findall(r"^(\w+)", invoke("accelpatch recipes"), re.MULTILINE))
    for recipe, percent in shown.items():
        text = invoke(f"accelpatch plan smollm2-135m --recipe {recipe}")
        found = re.search(r"^bytes a token: .*? \(([\d.]+)%\);", text, re.MULTILINE)
        assert found is not None
        assert float(found[1]) == float(percent)


def test_fidelity_is_the_measured_one() -> None:
    """The README's figures are rows of docs/fidelity.md, for the formats that the recipes have."""
    table = (ROOT / "docs" / "fidelity.md").read_text()
    for recipe, row in {"int8": "int8, groups of 128", "int4": "int4, groups of 128, asymmetric"}.items():
        measured = re.search(rf"^\| noised \| {row} \| ([\d.]+) \| ([\d.]+%) \|", table, re.MULTILINE)
        shown = re.search(rf"^\| `{recipe}` \|.*\| ([\d.]+) \| ([\d.]+%) \| [\d.]+% \|$", README, re.MULTILINE)
        assert measured is not None
        assert shown is not None
        assert shown[2] == measured[2]
        digits = len(shown[1].partition(".")[2])
        assert float(shown[1]) == round(float(measured[1]), digits)


def test_the_known_figures_are_those_of_the_table() -> None:
    """What a report says of a recipe whose loss it could not measure, as the README has it for a CPU."""
    for (recipe, kind), (kl, top1) in quality.KNOWN.items():
        shown = re.search(rf"^\| `{recipe}` \|.*\| ([\d.]+) \| ([\d.]+%) \| [\d.]+% \|$", README, re.MULTILINE)
        assert shown is not None
        if kind == "cpu":
            assert float(shown[1]) == round(kl, len(shown[1].partition(".")[2]))
            assert shown[2] == f"{top1:.1%}"
    assert (
        f"| noised | int8, per channel | {quality.KNOWN['int8', 'cuda'][0]} | 95.1% |"
        in (ROOT / "docs" / "fidelity.md").read_text()
    )


def test_links() -> None:
    found = re.findall(r"\]\(([^)]+)\)", README)
    assert {"docs/replacers.md", "docs/benchmarks.md", "docs/kernels.md", "LICENSE"} <= set(found)
    for target in found:
        assert (ROOT / target).exists(), target
    for target in re.findall(r"\]\(([^)]+)\)", COMMANDS):
        assert (ROOT / "docs" / target).exists(), target


def test_the_length() -> None:
    assert README.count("\n") <= 150
