"""Each program of scripts/ explains every option; that of the benchmarks has topics, each with its table of cases."""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SCRIPTS = ROOT / "scripts"
PROGRAMS = sorted(path.name for path in SCRIPTS.glob("*.py"))
NEEDS = {"triton_gate.py": "triton", "draw_step.py": "matplotlib"}
BENCH = runpy.run_path(str(SCRIPTS / "bench.py"))
TOPICS = list(BENCH["TOPICS"])
SUBCOMMANDS = {"check_kernels.py": ["all", "gemv", "rows"], "bench.py": TOPICS}
PAGES = [(name, ()) for name in PROGRAMS] + [(name, (word,)) for name, words in SUBCOMMANDS.items() for word in words]


@pytest.fixture
def parsers(monkeypatch: pytest.MonkeyPatch) -> list[argparse.ArgumentParser]:
    """Those that parsed a command line, in order; the program's folder is where Python looks first."""
    found: list[argparse.ArgumentParser] = []
    parse = argparse.ArgumentParser.parse_known_args

    def recorded(self: argparse.ArgumentParser, *args: object, **options: object) -> object:
        found.append(self)
        return parse(self, *args, **options)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", recorded)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return found


def run(name: str, *words: str) -> int | str | None:
    """The exit status of a program, run in this process: it has torch already."""
    if (needed := NEEDS.get(name)) and find_spec(needed) is None:
        pytest.skip(f"{name} needs {needed}")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", [name, *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(SCRIPTS / name), run_name="__main__")
    return ended.value.code


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Options, positional arguments and subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action._choices_actions
        elif not isinstance(action, argparse._HelpAction):
            yield action


@pytest.mark.parametrize("name, words", PAGES, ids=lambda part: part if isinstance(part, str) else "".join(part))
def test_help(
    name: str, words: tuple[str, ...], parsers: list[argparse.ArgumentParser], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, *words, "--help") == 0
    assert capsys.readouterr().out.startswith("usage: ")
    assert parsers[-1].description
    unclear = [
        action.dest
        for action in actions(parsers[-1])
        if action.help != argparse.SUPPRESS and not re.fullmatch(r"[A-Z].+\.", action.help or "", re.DOTALL)
    ]
    assert unclear == [], "no sentence says what these are"


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_subcommands(name: str, parsers: list[argparse.ArgumentParser]) -> None:
    assert run(name, "--help") == 0
    assert [action.dest for action in actions(parsers[0])] == SUBCOMMANDS[name]


@pytest.mark.parametrize(
    "name, words",
    [
        ("check_kernels.py", ()),
        ("check_kernels.py", ("--libraries",)),
        ("check_kernels.py", ("gemv",)),
        ("check_kernels.py", ("gemv", "--libraries", ".", "--formats", "none")),
        ("bench.py", ()),
        ("bench.py", ("gemv",)),
        ("bench.py", ("gemv", "--libraries", ".", "--cases", "none")),
    ],
    ids=str,
)
def test_what_is_missing_is_named(
    name: str, words: tuple[str, ...], parsers: list[argparse.ArgumentParser], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, *words) == 2
    assert re.search(r"--libraries|--formats|--cases|TOPIC|command", capsys.readouterr().err)


def test_without_a_subcommand_everything_is_checked(parsers: list[argparse.ArgumentParser]) -> None:
    arguments = runpy.run_path(str(SCRIPTS / "check_kernels.py"))["arguments"]
    assert vars(arguments(["--libraries", "built"])) == {"command": "all", "libraries": Path("built")}
    assert arguments(["gemv", "--libraries", "built", "--small", "--formats", "int8"]).formats == ["int8"]


@pytest.mark.parametrize("name, word", [("check_kernels.py", "rows"), ("bench.py", "gemv")])
def test_run_by_its_path(name: str, word: str, tmp_path: Path) -> None:
    """From another folder, with the checkout on PYTHONPATH and nothing installed."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / name), word, "--help"], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "--libraries" in done.stdout


@pytest.mark.parametrize("topic", TOPICS)
def test_the_table_of_cases_of_a_topic(topic: str) -> None:
    """It is built without a GPU, and what is asked for by default is of it; a case is what its words say."""
    found = BENCH["topic_of"](topic)
    options = {option.name: option for option in found.options}
    assert len(options) == len(found.options) > 0
    assert found.text
    for option in options.values():
        many = option.default if isinstance(option.default, list | tuple) else []
        assert set(many) <= set(option.choices or many)
        assert all(type(case).read(str(case)) == case for case in many if hasattr(case, "read"))


def test_turns_and_their_ratios() -> None:
    """Turns that warm up do not count, the order may change from turn to turn; rates are of all sequences together."""
    from scripts.benchmarks.engines import Engine, Taken, in_turn
    from scripts.benchmarks.harness import Case
    from scripts.benchmarks.rates import Rates

    order: list[str] = []
    calls = {name: (lambda name=name: order.append(name) or len(order)) for name in ("a", "b")}
    assert in_turn(calls, repeats=2, warmup=1, alternating=True) == {"a": [3, 6], "b": [4, 5]}
    assert order == ["b", "a", "a", "b", "b", "a"]
    table, case = Rates("", ["a"], limit=1e9), Case(8, 128, 64)
    engines = [Engine(name, None, print, size, cached=1000) for name, size in (("a", 50_000_000), ("b", 5_000_000))]
    taken = [Taken([0.2, 0.4], [0.1, 0.1]), Taken([0.1, 0.2], [0.01, 0.01])]
    one, other = (table.row(case, engine, took) for engine, took in zip(engines, taken, strict=True))
    assert one["first token, ms"] == pytest.approx(300)
    assert one["times a"] == 1
    read = 5e6 + 8 * (128 + 65 / 2) * 1000
    assert (other["tok/s"], other["ms a step"]) == pytest.approx((800, 10))
    assert (other["GB a step"], other["share of its limit"]) == pytest.approx((read / 1e9, 100 * read / 1e9))
    assert (other["times a"], other["first token, times a"]) == pytest.approx((10, 2))


def test_attention_is_timed_on_a_cpu_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn, figures = tmp_path / "rates.png", tmp_path / "rates.json"
    words = ["--tiny", "--only", "sdpa", "eager", "--json", str(figures)]
    words += ["--plot", str(drawn)] if find_spec("matplotlib") else []
    assert run("bench.py", "flash", *words) == 0
    printed = capsys.readouterr().out
    assert "checks of parity passed" in printed
    assert printed.count("| sdpa |") == 1 + 4  # the head of the table, and what was chosen for each of its lines
    found = json.loads(figures.read_text())
    assert {"command", "date", "commit", "device", "versions"} <= found["run"].keys()
    rates = [one["tflops"] for one in found["figures"]]
    assert all(one.keys() == {"sdpa", "eager"} and min(one.values()) > 0 for one in rates)
    assert drawn.is_file() == bool(find_spec("matplotlib"))


@pytest.mark.parametrize("topic", ["attention", "kv_cache"])
def test_small_sizes_of_a_decode_steps_attention(topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from scripts.benchmarks import attention

    sizes: list[int] = []
    monkeypatch.setattr(attention.Caches, "timed", lambda self, work: (sizes.append(self.bytes) or 1.0, 0.0))
    monkeypatch.setattr(attention.Caches, "alone", lambda self: 1.0)
    assert run("bench.py", topic, "--tiny", "--json", str(tmp_path / "found.json")) == 0
    assert 0 < max(sizes) < 2_000_000


def test_small_sizes_of_prompt_lookup_and_of_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench.py", "lookup", "--tiny", "--recipes", "int8", "--cases", "copying", "--repeats", "1") == 0
    monkeypatch.syspath_prepend(str(ROOT))
    from scripts.benchmarks import train

    monkeypatch.setattr(train, "find_spec", lambda name: None)
    assert run("bench.py", "train", "--tiny", "--engines", "bitsandbytes") == 0
    assert "bitsandbytes is not installed: left out" in capsys.readouterr().out


@pytest.mark.parametrize("length, least", [(8, 0.5), (64, 0.2)])
def test_heads_of_the_untrained_retrieval_model(length: int, least: float) -> None:
    """The first layer's looks at the token before, the second's at the token behind the one that is asked for."""
    from scripts.kv_retrieval import model_of, sequences

    model = model_of(length)
    model.set_attn_implementation("eager")
    ids, keys, _ = sequences(32, length, torch.Generator().manual_seed(0))
    with torch.no_grad():
        first, second = model(torch.cat([ids, keys[:, :1]], 1), output_attentions=True).attentions
    assert first[:, 0].diagonal(-1, 1, 2).median() > 0.9
    answers = (ids == keys[:, :1]).int().argmax(1) + 1
    assert (second[:, 0, -1].argmax(-1) == answers).float().mean() > least


def test_a_retrieval_model_that_learns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts import kv_retrieval

    words = "--length 8 --batch 512 --steps 300 --needles 20 --device cpu --dtype float32"
    monkeypatch.setattr(sys, "argv", ["kv_retrieval.py", *words.split()])
    kv_retrieval.main()
    asked, *found = (int(part) for part in capsys.readouterr().out.splitlines()[-1].split("|")[2:6])
    assert asked == 20
    assert len(found) == 3
    assert min(found) >= 17


def test_small_models_that_see(tmp_path: Path) -> None:
    words = ["--tiny", "--recipes", "int8", "--tokens", "4", "--repeats", "1", "--json", str(tmp_path / "found.json")]
    assert run("bench.py", "multimodal", *words) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [(row["model"], row["by"]) for row in rows] == [(n, "native step") for n in ("Llava-1.5-7B", "Gemma-3-4B")]


def test_small_checkpoints_by_every_method(tmp_path: Path) -> None:
    assert run("bench.py", "quantize", "--tiny", "--json", str(tmp_path / "found.json")) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [one["method"] for one in rows] == ["rtn", "gptq", "awq", "gptq+awq"]
    assert all(one.get("calibrate, s", 0) > 0 for one in rows[1:])


def test_small_checkpoints_of_others(tmp_path: Path) -> None:
    """Every format's groups divide the widths of --tiny."""
    words = ["--tiny", "--cases", "gptq", "fp8 blocks", "--new", "4", "--repeats", "1"]
    assert run("bench.py", "foreign", *words, "--json", str(tmp_path / "found.json")) == 0
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["engine"] for row in rows] == ["int4, own", "gptq", "fp8 blocks"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
@pytest.mark.parametrize(
    "words, said",
    [
        (("generate",), "give --device cpu, or --tiny"), (("checkpoint", "--device", "cuda:1"), "give --device cpu"),
        (("gemm_search",), "it needs one"), (("tensor_parallel",), "--tiny to try it"),
    ],
    ids=str,
)  # fmt: skip
def test_a_benchmark_without_its_gpu_says_so(words: tuple[str, ...], said: str) -> None:
    assert re.search(f"sees no GPU here; {said}", str(run("bench.py", *words)))


def test_a_benchmark_of_an_unknown_implementation_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench.py", "flash", "--only", "abacus") == 2
    assert "invalid choice: 'abacus'" in capsys.readouterr().err


def test_every_script_that_is_named_is_there() -> None:
    """In docs, in tests, in the Makefile and in the scripts themselves."""
    files = [ROOT / "Makefile", *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *SCRIPTS.rglob("*.py")]
    named = {found for file in files for found in re.findall(r"\bscripts/[\w/]+\.\w+", file.read_text())}
    assert len(named) > 10
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_commands_of_docs_are_understood(parsers: list[argparse.ArgumentParser]) -> None:
    """Each command of the benchmarks that a page shows: its topic, options and cases."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text().replace("\\\n", " ")
        blocks = re.findall(r"^(?:\w+=\S+ )?python scripts/bench\.py (.+)$", text, re.MULTILINE)
        found += [
            *blocks,
            *(" ".join(one.split()) for one in re.findall(r"`python\s+scripts/bench\.py ([^`]+)`", text)),
        ]
    assert len(found) > 30
    for command in found:
        words = shlex.split(command, comments=True)
        if words[0] != "TOPIC":
            assert BENCH["arguments"](words).topic == words[0]
