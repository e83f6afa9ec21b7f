"""accelpatch plan: from the configuration alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import accelpatch
from tests.support.checkpoints import saved
from tests.support.packed import plain
from tests.support.tiny import CAUSAL

from .conftest import Cli


def test_table(cli: Cli, model: str) -> None:
    text = cli("plan", model, "--recipe", "int8").stdout
    assert "model.layers.{0..1}.self_attn.q_proj" in text
    assert "int8_weight_only" in text
    assert "bytes a token" in text
    assert "fits" in text


def test_json(cli: Cli, model: str) -> None:
    document = json.loads(cli("plan", model, "--recipe", "int8", "--json").stdout)
    linear = [site for site in document["sites"] if site["replacer"] == "int8_weight_only"]
    assert len(linear) == 15  # 7 in each of 2 layers, and the head
    assert document["memory"]["fits"] is True


def test_why_says_who_runs_and_why_not_others(cli: Cli, model: str) -> None:
    text = cli("plan", model, "--recipe", "int8", "--why").stdout
    plain, _, why = text.partition("\n\nwhich implementation runs for how many rows, on ")
    assert plain.strip() == cli("plan", model, "--recipe", "int8").stdout.strip()
    assert "  rmsnorm  1- torch\n    1- not triton: Triton kernels run on GPUs" in why
    lines = json.loads(cli("plan", model, "--recipe", "int8", "--why", "--json").stdout)["why"]
    assert "\n".join(lines).strip() == f"which implementation runs for how many rows, on {why}".strip()
    planned = accelpatch.plan(CAUSAL["llama"].make(), "int8")
    assert planned.why().splitlines()[1:] == [line for line in planned.why().splitlines() if line.startswith("  ")]


@pytest.mark.parametrize("name", ["llama2-7b", "gpt2", "opt-13b", "smollm2-135m"])
def test_catalog_names_need_no_files(cli: Cli, name: str) -> None:
    document = json.loads(cli("plan", name, "--json").stdout)
    assert document["replaced"] > 10
    assert document["token_bytes"]["after"] < 0.6 * document["token_bytes"]["before"]


def test_llama2_7b_counts_its_parameters(cli: Cli) -> None:
    document = json.loads(cli("plan", "llama2-7b", "--recipe", "int8", "--json").stdout)
    parameters = 6_738_415_616  # from the model's card
    assert sum(site["resident_bytes"][0] for site in document["sites"]) in (2 * parameters, 4 * parameters)


def test_an_arch_that_is_not_here(cli: Cli) -> None:
    document = json.loads(cli("plan", "llama2-7b", "--arch", "gfx942", "--json").stdout)
    assert document["arch"] == "gfx942"
    assert document["memory"]["fits"] is True
    text = cli("plan", "llama2-7b", "--arch", "gfx942").stdout
    assert "AMD Instinct MI300X" in text


def test_it_says_what_does_not_fit(cli: Cli) -> None:
    arguments = ("plan", "opt-13b", "--recipe", "exact", "--arch", "sm_120", "--max-length", "200000")
    assert "does NOT fit" in cli(*arguments).stdout
    assert json.loads(cli(*arguments, "--json").stdout)["memory"]["fits"] is False


def test_max_length_grows_the_cache(cli: Cli, model: str) -> None:
    sizes = [
        json.loads(cli("plan", model, "--max-length", str(length), "--json").stdout)["memory"]["cache_bytes"]
        for length in (100, 200)
    ]
    assert sizes[1] == 2 * sizes[0] > 0


def test_a_saved_patched_model_is_refused(cli: Cli, tmp_path: Path) -> None:
    saved(plain("llama"), "int8", tmp_path / "patched")
    result = cli("plan", str(tmp_path / "patched"))
    assert result.exit_code == 1
    assert "is a saved patched model" in result.stderr
