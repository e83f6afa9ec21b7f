"""Loading: what comes back equals what was saved."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, LlamaForCausalLM, PreTrainedTokenizerFast, T5Config
from transformers import T5ForConditionalGeneration as T5

from accelpatch.errors import LoadError
from accelpatch.models import load

IDS = torch.arange(1, 13)[None]


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["folder", "sharded"])
def test_loads_what_was_saved(request: pytest.FixtureRequest, kind: str, tiny_llama: LlamaForCausalLM) -> None:
    place = request.getfixturevalue(kind)
    loaded = load.load(str(place))
    assert type(loaded.model) is LlamaForCausalLM
    assert not loaded.model.training
    assert loaded.tokenizer is None
    assert (loaded.source.kind, loaded.source.location) == ("folder", str(place))
    assert torch.equal(loaded.model(IDS).logits, tiny_llama(IDS).logits)


def test_dtype_and_progress(folder: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    loaded = load.load(str(folder), dtype="bfloat16", progress=lambda *stage: stages.append(stage))
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert ("loading", 0, 1) in stages
    assert stages[-1] == ("loading", 1, 1)


def test_is_silent_without_progress(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load.load(str(folder))
    assert capfd.readouterr() == ("", "")


def test_generation_config_is_kept(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7], "max_new_tokens": 5}')
    assert load.load(str(folder)).model.generation_config.eos_token_id == [2, 7]


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            lambda: BertModel(
                BertConfig(
                    vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
                )
            ),
            id="bert",
        ),
        pytest.param(
            lambda: T5(T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)), id="t5"
        ),
    ],
)
def test_models_that_are_no_causal_lm(tmp_path: Path, model: Callable[[], Any]) -> None:
    original = model()
    original.save_pretrained(tmp_path)
    loaded = load.load(str(tmp_path)).model
    assert type(loaded) is type(original)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), original.parameters(), strict=True))


def test_tokenizer(folder: Path) -> None:
    assert load.load(str(folder)).tokenizer is None
    words = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "world": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    assert load.load(str(folder)).tokenizer("hello world")["input_ids"] == [1, 2]
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text().replace("WordLevel", "BPE"))
    with pytest.raises(LoadError, match="no tokenizer that transformers can read: Exception: "):
        load.load(str(folder))
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(LoadError, match=r"tokenizer\.json:1:2: not JSON"):
        load.load(str(folder))


@pytest.mark.smoke
def test_from_config_and_random(folder: Path) -> None:
    on_meta = load.from_config(str(folder))
    assert {parameter.device.type for parameter in on_meta.parameters()} == {"meta"}
    before = torch.get_rng_state()
    first, again, other = (load.random(str(folder), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first(IDS).logits, again(IDS).logits)
    assert not torch.equal(first(IDS).logits, other(IDS).logits)
    assert torch.isfinite(first(IDS).logits).all()
    assert [p.shape for p in first.parameters()] == [p.shape for p in on_meta.parameters()]
    assert next(load.random(str(folder), dtype="bfloat16").parameters()).dtype == torch.bfloat16


def test_one_caller_of_from_pretrained() -> None:
    """Of models and tokenizers; adapters are read by PEFT's."""
    package = Path(load.__file__).parent.parent
    callers = {
        path.name
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "from_pretrained"
        and ast.unparse(node.func) != "PeftModel.from_pretrained"
    }
    assert callers == {"load.py"}
