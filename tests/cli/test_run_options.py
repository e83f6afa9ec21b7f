"""The options of accelpatch run: what the model is given, how tokens are chosen, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from accelpatch.cli import generation

from .conftest import CONTEXT, ROOT, Cli, Shell, byte_tokenizer, environment, save_model

FOREIGN = Path(__file__).parents[1] / "fixtures/foreign"
SHORT = ("--max-new-tokens", "12")


def answer(cli: Cli, *arguments: str, **options: Any) -> str:
    """The answer that `run` gives."""
    result = cli("run", *arguments, "--json", *SHORT, **options)
    assert result.exit_code == 0, result.output
    return str(json.loads(result.stdout)["answer"])


def test_the_template_is_used_unless_the_prompt_is_raw(cli: Cli, model: str, no_template_model: str) -> None:
    chatted = answer(cli, model, "--prompt", "Hello")
    assert answer(cli, model, "--prompt", "Hello", "--chat") == chatted
    raw = answer(cli, model, "--prompt", "Hello", "--raw")
    assert raw != chatted
    assert answer(cli, model, "--prompt", "[user] Hello\n[assistant] ", "--raw") == chatted
    assert answer(cli, no_template_model, "--prompt", "Hello") == raw  # the same weights


def test_a_system_message_comes_first(cli: Cli, model: str) -> None:
    raw = "[system] Be brief.\n[user] Hello\n[assistant] "
    chatted = answer(cli, model, "--system", "Be brief.", "--prompt", "Hello")
    assert chatted == answer(cli, model, "--raw", "--prompt", raw)
    assert chatted != answer(cli, model, "--prompt", "Hello")


def test_a_template_that_refuses_a_system_message(cli: Cli, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('System role not supported') }}"
    folder = save_model(tmp_path / "model", tokenizer=tokenizer)
    result = cli("run", str(folder), "--recipe", "exact", "--system", "Be brief.")
    assert result.exit_code == 1
    assert "System role not supported; leave out --system" in result.stderr


def test_the_answer_ends_before_a_stop_text(cli: Cli, model: str) -> None:
    whole = answer(cli, model, "--recipe", "exact")
    stop = whole[4:6]
    arguments = ("run", model, "--recipe", "exact", "--stop", "never", "--stop", stop, *SHORT)
    document = json.loads(cli(*arguments, "--json").stdout)
    assert document["ended"] == "stop"
    assert document["answer"] == whole[: whole.index(stop)]
    assert cli(*arguments).stdout.startswith(f"{document['answer']}\n")


@pytest.fixture(scope="module")
def mute_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One that ends at once: all logits are equal, and the first token is that of the end."""
    folder = save_model(tmp_path_factory.mktemp("models") / "mute", tokenizer=byte_tokenizer())
    network = LlamaForCausalLM.from_pretrained(folder)
    network.lm_head.weight.data.zero_()
    network.generation_config.eos_token_id = 0
    network.save_pretrained(folder)
    return str(folder)


def test_an_empty_answer_says_why(cli: Cli, mute_model: str) -> None:
    shown = {name: cli("run", mute_model, "--recipe", "exact", *name.split()).stdout for name in ("", "--raw")}
    assert "the answer is empty: the model ended at once\n" in shown[""]
    assert "ended at once; this model has a chat template: leave out --raw\n" in shown["--raw"]


def test_a_rate_is_that_of_64_tokens_or_none(cli: Cli, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def rates(*arguments: str) -> tuple[float | None, str]:
        whole = ("run", model, "--recipe", "exact", *arguments)
        (line,) = [line for line in cli(*whole).stdout.splitlines() if line.startswith("tokens/s")]
        return json.loads(cli(*whole, "--json").stdout)["tokens_per_second"], line

    short, shown = rates("--max-new-tokens", "63")
    assert short is None
    assert "not measured: the answer is shorter than 64 tokens" in shown
    long, shown = rates("--max-new-tokens", "64")
    assert long is not None
    assert shown.endswith("(decode, this answer)")
    full, shown = rates("--compare", "--max-new-tokens", "4", "--prompt", "x" * 200)
    assert full is None
    assert f"the context of {CONTEXT} has no room" in shown
    monkeypatch.setattr(generation, "MAX_SECONDS", 0.0)
    slow, shown = rates("--compare", "--max-new-tokens", "4")
    assert slow is None
    assert "not measured: 64 tokens take over 0 s" in shown


def test_sampling_follows_its_seed(cli: Cli, model: str) -> None:
    hot = (model, "--temperature", "1.5")
    first = answer(cli, *hot, "--seed", "1")
    assert answer(cli, *hot, "--seed", "1") == first
    assert answer(cli, *hot, "--seed", "2") != first
    greedy = answer(cli, model, "--seed", "1")
    assert answer(cli, model, "--seed", "2") == greedy
    assert answer(cli, *hot, "--top-k", "1") == greedy
    assert answer(cli, *hot, "--top-p", "0.0001") == greedy


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "caf\udce9"], "not UTF-8 text"),
        (["--temperature", "1", "--seed", str(2**64)], "18446744073709551615"),
        (["--temperature", "nan"], "neither 0 nor from 0.001 to 100"),
        (["--temperature", "101"], "neither 0 nor from 0.001 to 100"),
        (["--temperature", "1", "--top-p", "0"], "not above 0 and at most 1"),
        (["--temperature", "1", "--top-p", "nan"], "not above 0 and at most 1"),
        (["--temperature", "1", "--top-k", "-1"], "'--top-k'"),
        (["--top-p", "0.5"], "needs a --temperature above 0"),
        (["--top-k", "5"], "needs a --temperature above 0"),
        (["--stop", ""], "is empty, or not UTF-8 text"),
        (["--system", " "], "the system message is empty"),
        (["--raw", "--chat"], "goes without --chat"),
        (["--raw", "--system", "Be brief."], "goes without --system"),
    ],
)
def test_options_that_cannot_be(cli: Cli, model: str, arguments: list[str], words: str) -> None:
    result = cli("run", model, *arguments)
    assert result.exit_code == 2
    assert words in re.sub(r"[│\s]+", " ", result.stderr)


AWQ = str(FOREIGN / "awq-gemm-4bit-g32")


@pytest.mark.parametrize(
    ("command", "arguments", "words"),
    [
        pytest.param("run", ["--max-new-tokens", "999999999"], "the model's context of 8192", id="length"),
        pytest.param("chat", ["--max-new-tokens", "999999999"], "the model's context of 8192", id="chat: length"),
        pytest.param("run", ["./nosuch"], "no such file or folder", id="no folder"),
        pytest.param("chat", ["./nosuch"], "no such file or folder", id="chat: no folder"),
        pytest.param("run", ["."], "has no config.json", id="no model in it"),
        pytest.param("run", ["nosuch/name"], "not asked for on the hub", id="not of the hub"),
        pytest.param("run", ["--recipe", "int9"], "did you mean 'int8'", id="no recipe"),
        pytest.param("run", ["--device", "abacus"], "use auto, cpu, cuda", id="no device"),
        pytest.param("run", [AWQ, "--recipe", "int8"], "leave out --recipe", id="has its recipe"),
        pytest.param("run", [AWQ, "--compare"], "needs the original", id="no original"),
    ],
)
def test_what_cannot_be_is_refused_before_torch_is_imported(
    shell: Shell, tmp_path: Path, command: str, arguments: list[str], words: str
) -> None:
    (tmp_path / "stub" / "torch").mkdir(parents=True)
    (tmp_path / "stub" / "torch" / "__init__.py").write_text("raise SystemExit('torch is imported')")
    variables = environment() | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{tmp_path / 'stub'}:{ROOT}"}
    result = shell(command, *arguments, env=variables)
    assert result.returncode in (1, 2)
    assert words in re.sub(r"[│\s]+", " ", result.stderr)


@pytest.mark.parametrize("level, verified", [("full", True), ("quick", True), ("off", False)])
def test_how_much_is_verified(level: str, verified: bool, cli: Cli, model: str) -> None:
    result = cli("run", model, "--verify", level, "--max-new-tokens", "2", "--json")
    found = json.loads(result.stdout)["report"]["verification"]
    assert (found is not None) == verified
    assert found is None or found["extent"] == level
