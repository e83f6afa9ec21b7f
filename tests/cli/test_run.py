"""accelpatch run."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from accelpatch.cli.draft import check_vocabulary
from accelpatch.errors import AccelpatchError
from tests.support import guide_opt
from tests.support.tiny import CAUSAL

from .conftest import CONTEXT, Cli, Shell, byte_tokenizer

DECODING = Path(__file__).parents[2] / "docs/decoding.md"
FOREIGN = Path(__file__).parents[1] / "fixtures/foreign"
SHORT = ("--max-new-tokens", "12")


@pytest.mark.smoke
def test_answer_and_one_table(shell: Shell, model: str) -> None:
    result = shell("run", model, "--recipe", "int8", *SHORT)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""  # no warnings, no bars
    names = [line.split("  ")[0] for line in result.stdout.splitlines()]
    for name in ("model", "recipe", "sites replaced", "bytes a token", "tokens/s", "verified"):
        assert names.count(name) == 1
    assert "every site within its bound" in result.stdout
    assert "worst kernel error" in result.stdout
    assert "KL" in result.stdout


def test_json(cli: Cli, model: str) -> None:
    result = cli("run", model, "--recipe", "int8", "--json", *SHORT)
    document = json.loads(result.stdout)
    assert document["tokens"] == 12
    assert document["ended"] == "length"
    assert document["empty_because"] is None
    assert document["report"]["replaced"] > 0
    assert document["report"]["token_bytes"]["after"] < 0.3 * document["report"]["token_bytes"]["before"]
    assert document["report"]["verification"]["failures"] == []


def test_streamed_text_is_the_answer(cli: Cli, model: str) -> None:
    streamed = cli("run", model, "--recipe", "exact", *SHORT).stdout
    answer = json.loads(cli("run", model, "--recipe", "exact", "--json", *SHORT).stdout)["answer"]
    assert answer != ""
    assert streamed.startswith(answer)


def test_the_command_of_the_page_about_drafts(cli: Cli, model: str) -> None:
    (block,) = re.findall(r"^```sh\n(.*?)^```$", DECODING.read_text(), re.DOTALL | re.MULTILINE)
    words = shlex.split(block.replace("smollm2-135m", model))
    result = cli(*words[1:])
    assert result.exit_code == 0, result.output
    assert re.search(r"drafts +\d+ of \d+ draft tokens accepted", result.output) or "drafts" not in result.output


def test_drafts_of_another_model(cli: Cli, model: str, tmp_path: Path) -> None:
    plain = json.loads(cli("run", model, "--recipe", "int8", "--json", *SHORT).stdout)
    drafted = json.loads(cli("run", model, "--recipe", "int8", "--draft", model, "--json", *SHORT).stdout)
    assert drafted["answer"] == plain["answer"]
    assert cli("run", model, "--draft", model, "--tp", "2").exit_code == 2
    assert cli("run", model, "--draft", str(tmp_path / "none"), *SHORT).exit_code != 0
    small, other = CAUSAL["llama"].make(), CAUSAL["llama"].make(vocab_size=99)
    check_vocabulary("other", CAUSAL["llama"].make(), small)
    with pytest.raises(AccelpatchError, match="99 tokens, and the model one of 160"):
        check_vocabulary("other", other, small)


def test_compare(cli: Cli, model: str) -> None:
    document = json.loads(cli("run", model, "--recipe", "exact", "--compare", "--json", *SHORT).stdout)
    assert document["original"]["answer"] == document["answer"]  # exact rounds nothing that could change it
    assert min(document["tokens_per_second"], document["original"]["tokens_per_second"]) > 0  # however short the answer
    text = cli("run", model, "--recipe", "exact", "--compare", *SHORT).stdout
    assert text.index("--- original") < text.index("--- patched") < text.index("sites replaced")
    assert " -> " in next(line for line in text.splitlines() if line.startswith("tokens/s"))
    assert "answers" in text
    assert re.search(r"[\d.]+ -> [\d.]+, [\d.]+ times \(decode of 64 tokens", text)


def test_prompt_from_stdin(cli: Cli, model: str) -> None:
    given = json.loads(cli("run", model, "--prompt", "Hello", "--json", *SHORT).stdout)
    read = json.loads(cli("run", model, "--prompt", "-", "--json", *SHORT, input="Hello").stdout)
    assert read["prompt"] == "Hello"
    assert read["answer"] == given["answer"]


def test_bytes_from_stdin_that_are_no_text(cli: Cli, model: str) -> None:
    result = cli("run", model, "--prompt", "-", input=b"caf\xe9")
    assert result.exit_code == 2
    assert "not UTF-8 text" in result.stderr


def test_dtype(cli: Cli, model: str) -> None:
    reports = [
        json.loads(cli("run", model, "--recipe", "exact", "--dtype", dtype, "--json", *SHORT).stdout)["report"]
        for dtype in ("float32", "bfloat16")
    ]
    assert reports[0]["token_bytes"]["before"] == 2 * reports[1]["token_bytes"]["before"]


@pytest.mark.parametrize(
    ("which", "arguments", "words"),
    [
        pytest.param("bare_model", [], "has no tokenizer", id="no tokenizer"),
        pytest.param("no_template_model", ["--chat"], "no chat template", id="no chat template"),
        pytest.param("no_template_model", ["--system", "Hi"], "no chat template", id="no place for --system"),
        pytest.param(
            "model", ["--raw", "--prompt", "x" * CONTEXT], f"context {CONTEXT}; shorten", id="prompt fills the context"
        ),
        pytest.param(
            "model", ["--raw", "--prompt", "x" * 200, "--max-new-tokens", "57"], "--max-new-tokens 56", id="no room"
        ),
    ],
)
def test_clear_errors(cli: Cli, request: pytest.FixtureRequest, which: str, arguments: list[str], words: str) -> None:
    result = cli("run", request.getfixturevalue(which), *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert words in result.stderr
    assert result.stdout == ""


def test_context_can_be_filled_to_the_end(cli: Cli, model: str) -> None:
    prompt = "x" * (CONTEXT - 3)
    arguments = ("--recipe", "exact", "--raw", "--prompt", prompt, "--max-new-tokens", "3")
    assert cli("run", model, *arguments).exit_code == 0


def test_a_plugin_that_fails_shows_its_own_lines(shell: Shell, model: str, tmp_path: Path) -> None:
    file = tmp_path / "plugin.py"
    file.write_text("import no_such_module_at_all\n")
    result = shell("run", model, "--plugin", str(file))
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert lines[1] == f'  File "{file}", line 1, in <module>'
    assert lines[-1] == "ModuleNotFoundError: No module named 'no_such_module_at_all'"
    assert "accelpatch" not in result.stderr


def test_a_plugin_that_registers_nothing(cli: Cli, model: str, tmp_path: Path) -> None:
    file = tmp_path / "plugin.py"
    file.write_text("x = 1\n")
    result = cli("run", model, "--plugin", str(file))
    assert result.exit_code == 1
    assert "registers no replacer" in result.stderr


@pytest.mark.parametrize("name", ["gguf-q4_0-q4_1-q8_0", "gguf-q4_k_m"])
def test_a_gguf_file_runs_as_it_is_stored(cli: Cli, tmp_path: Path, name: str) -> None:
    """The fixtures have a vocabulary of 32 and no tokenizer: one of as many bytes lies beside the file."""
    shutil.copy(FOREIGN / name / "model.gguf", tmp_path / "model.gguf")
    tokenizer = byte_tokenizer(29)
    tokenizer.save_pretrained(tmp_path)
    done = cli("run", str(tmp_path), "--prompt", "!!", "--max-new-tokens", "4", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)["report"]
    assert report["recipe"] == "gguf"
    assert {site["replacer"] for site in report["sites"]} >= {"int8_weight_only", "int4_weight_only"}
    assert any(site["replacer"] == "gguf_blocks" for site in report["sites"]) == name.endswith("k_m")
    assert report["verification"]["failures"] == []


STORED = {
    "gptq-4bit-g32-asym-actorder": "int4_weight_only", "gptq-8bit-channel": "int8_weight_only",
    "gptq-v2-4bit-g32-asym": "int4_weight_only", "awq-gemm-4bit-g32": "int4_weight_only",
    "awq-gemv-4bit-g32": "int4_weight_only", "bnb-nf4-double": "nf4_weight_only", "bnb-fp4": "fp4_weight_only",
    "bnb-int8": "int8_weight_only", "ct-pack-w4a16-g32-actorder": "int4_weight_only", "ct-int-w8a8": "w8a8",
    "ct-float-fp8": "w8a8_fp8",
}  # fmt: skip


@pytest.mark.parametrize("name", STORED)
def test_a_checkpoint_of_others_runs_as_it_is_stored(cli: Cli, tmp_path: Path, name: str) -> None:
    shutil.copytree(FOREIGN / name, tmp_path / "it")
    byte_tokenizer(29).save_pretrained(tmp_path / "it")
    done = cli("run", str(tmp_path / "it"), "--prompt", "!!", "--max-new-tokens", "4", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)["report"]
    linears = {site["replacer"] for site in report["sites"] if site["path"].endswith("_proj")}
    assert linears == {STORED[name]}
    assert report["verification"]["failures"] == []


def test_a_published_int8_checkpoint_runs_as_it_is(cli: Cli, tmp_path: Path) -> None:
    float_model = guide_opt.float_opt(vocab_size=260, eos_token_id=2)
    tensors = guide_opt.checkpoint(float_model, guide_opt.inputs(4, 24))
    folder = guide_opt.write(tmp_path / "int8", tensors, float_model.config)
    byte_tokenizer().save_pretrained(folder)
    done = cli("run", str(folder), "--prompt", "ab", "--max-new-tokens", "4", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)["report"]
    assert report["recipe"] == "smoothquant-opt"
    assert sum(site["replacer"] == "int8_opt" for site in report["sites"]) == guide_opt.LAYERS
    shown = cli("inspect", str(folder))
    assert "int8 OPT of SmoothQuant" in shown.stdout
