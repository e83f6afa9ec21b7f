"""The replacer of docs/replacers.md, as it stands there: used from Python and from the command line."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import PreTrainedTokenizerFast

import accelpatch
from accelpatch import replacers
from accelpatch.errors import PatchError, PlanError
from tests.support import warm_python
from tests.support.simulated import greedy, logits
from tests.support.tiny import CAUSAL, VOCABULARY, duplicate, padded_batch, snapshot

DOC = Path(__file__).parents[2] / "docs" / "replacers.md"


def block(language: str) -> str:
    """The one block of the page in this language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", DOC.read_text(), re.DOTALL)
    return str(found)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Path]:
    """A folder with the page's plugin and recipe; what a plugin registers is forgotten at the end."""
    (tmp_path / "half_weight.py").write_text(block("python"))
    (tmp_path / "half.yaml").write_text(block("yaml"))
    before = dict(replacers._registry)
    yield tmp_path
    replacers._registry.clear()
    replacers._registry.update(before)
    sys.modules.pop("accelpatch_plugin_half_weight", None)


def rounded(model: nn.Module) -> nn.Module:
    """A copy whose inner linear weights went to bfloat16 and back."""
    copied = duplicate(model)
    for layer in copied.model.layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = module.weight.data.bfloat16().float()
    return copied


@pytest.mark.smoke
def test_from_python(files: Path) -> None:
    assert accelpatch.load_plugin(files / "half_weight.py") == ("half_weight",)
    model = CAUSAL["mistral"].make()
    before, expected, plain = snapshot(model), logits(model, padded_batch()), rounded(model)
    accelpatch.patch(model, files / "half.yaml")
    report = model.accelpatch.report()
    taken = [site for site in report.sites if site.replacer == "half_weight"]
    assert len(taken) == 14
    assert report.verification.failures == []
    assert all(0 < site.format_error < 0.005 and site.kernel_error is None for site in taken)
    assert {site.token_bytes[0] / site.token_bytes[1] for site in taken} == {2.0}
    linear = model.model.layers[0].mlp.up_proj
    assert isinstance(linear, nn.Linear)
    assert linear.weight.dtype == torch.bfloat16
    torch.testing.assert_close(logits(model, padded_batch()), logits(plain, padded_batch()), rtol=1e-4, atol=1e-5)
    assert not logits(model, padded_batch()).equal(expected)
    assert greedy(model, padded_batch()).equal(greedy(plain, padded_batch()))
    accelpatch.unpatch(model)
    assert snapshot(model) == before


def test_originals_of_a_users_replacer_can_be_freed(files: Path) -> None:
    accelpatch.load_plugin(files / "half_weight.py")
    model = CAUSAL["mistral"].make()
    accelpatch.patch(model, files / "half.yaml", keep_original="none")
    with pytest.raises(PatchError, match="originals were freed"):
        accelpatch.unpatch(model)


def test_without_the_plugin(files: Path) -> None:
    with pytest.raises(PlanError, match=r"half\.yaml:5:.*no replacer is called half_weight"):
        accelpatch.plan(CAUSAL["mistral"].make(), files / "half.yaml")


def test_where_it_cannot_it_says_why(files: Path) -> None:
    accelpatch.load_plugin(files / "half_weight.py")
    sites = accelpatch.plan(CAUSAL["mistral"].make(torch.bfloat16), files / "half.yaml").report().sites
    assert {site.reason for site in sites if site.role == "q_proj"} == {"it is no nn.Linear in float32"}


def test_the_page_is_true_to_the_contract() -> None:
    """Every attribute of the contract is on the page, and the example is as short as it is said to be."""
    page = DOC.read_text()
    contract = list(vars(accelpatch.Replacer)["__annotations__"])
    known = {"name", "options", "consumes", "ties", "rounds", "fuses", "smooths", "whole", "takes_stored", "by_token"}
    known |= {"stands_for_code", "fusable"}
    assert known == set(contract)
    assert all(f"| `{name}` |" in page for name in contract)
    assert all(f"`{name}" in page for name in ("site.original", "site.token_bytes", "hand_back(self, original)"))
    body = block("python").partition("@accelpatch.replacer")[2]
    assert len([line for line in body.splitlines() if line.strip()]) <= 20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A saved tiny model with a tokenizer of one word an id."""
    folder = tmp_path / "model"
    CAUSAL["mistral"].make().save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w2"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1").save_pretrained(folder)
    return folder


def command(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return warm_python.run(["-m", "accelpatch", *map(str, words)], cwd=cwd)


@pytest.mark.nightly  # `run` plans too
def test_plan_on_the_command_line(files: Path, checkpoint: Path) -> None:
    given = ("--recipe", files / "half.yaml", "--plugin", files / "half_weight.py")
    done = command("plan", checkpoint, *given, "--json")
    assert done.returncode == 0, done.stderr
    sites = json.loads(done.stdout)["sites"]
    assert sum(site["replacer"] == "half_weight" for site in sites) == 14


def test_the_command_of_the_page(files: Path) -> None:
    """As it is printed there, in a folder with the page's two files."""
    program, *words = shlex.split(block("sh"))
    assert program == "accelpatch"
    done = command(*words, cwd=files)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    taken = [line for line in done.stdout.splitlines() if " half_weight " in line]
    assert len(taken) == 7  # each linear layer inside
    assert "0 of 30 layers fused, 0.0% of a step's bytes; model.layers.0: self_attn.q_proj runs by" in done.stdout
    assert "None" not in done.stdout


def test_a_recipe_that_replaces_nothing_is_said(files: Path, checkpoint: Path) -> None:
    alone = block("yaml").replace("extends: exact\n", "")
    (files / "alone.yaml").write_text(alone)
    accelpatch.load_plugin(files / "half_weight.py")
    model = CAUSAL["mistral"].make(torch.bfloat16)
    with pytest.warns(UserWarning, match=r"recipe half replaces none of the .*: it is no nn.Linear in float32") as seen:
        accelpatch.patch(model, files / "alone.yaml")
    assert seen[0].filename == __file__
    given = ("--recipe", files / "alone.yaml", "--plugin", files / "half_weight.py", "--dtype", "bfloat16")
    done = command("run", checkpoint, *given, "--raw", "--prompt", "w5 w6", "--max-new-tokens", "2", cwd=files)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("warning: recipe half replaces none of the")]


def test_run_on_the_command_line(files: Path, checkpoint: Path) -> None:
    given = ("--recipe", files / "half.yaml", "--plugin", files / "half_weight.py")
    done = command("run", checkpoint, *given, "--prompt", "w5 w6 w7", "--max-new-tokens", "4", "--json")
    assert done.returncode == 0, done.stderr
    plain = rounded(CAUSAL["mistral"].make())
    batch = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
    words = [f"w{int(token)}" for token in greedy(plain, batch, tokens=4)[0, 3:]]
    assert all(word in done.stdout for word in words)
    assert '"half_weight"' in done.stdout


PLUGINS = {
    "missing": (None, "no plugin at"),
    "empty": ("x = 1\n", "registers no replacer and no implementation: decorate"),
    "not-a-replacer": ("import accelpatch\n@accelpatch.replacer\nclass A: name = 'a'\n", "is no subclass of"),
    "bad-name": (
        "import accelpatch\n@accelpatch.replacer\nclass A(accelpatch.Replacer): name = 'os.system'\n",
        "name is 'os.system'; a replacer's name is lower case letters",
    ),
    "name-of-ours": (
        "import accelpatch\n@accelpatch.replacer\nclass A(accelpatch.Replacer): name = 'rmsnorm'\n",
        "rmsnorm is a replacer of accelpatch",
    ),
}


@pytest.mark.parametrize("case", PLUGINS)
def test_plugins_that_are_none(case: str, tmp_path: Path) -> None:
    text, message = PLUGINS[case]
    before = dict(replacers.registry())
    if text is not None:
        (tmp_path / "plugin.py").write_text(text)
    with pytest.raises(PlanError, match=message):
        accelpatch.load_plugin(tmp_path / "plugin.py")
    assert dict(replacers.registry()) == before
    assert "accelpatch_plugin_plugin" not in sys.modules
