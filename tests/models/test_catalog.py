"""Names: what they resolve to, what is refused with which advice, and the built-in shapes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from accelpatch.errors import LoadError
from accelpatch.models import catalog, load

# Parameters of the published checkpoints, tied weights once.
PARAMETERS = {
    "smollm2-135m": 134_515_008,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "bloom-7b1": 7_069_016_064,
    "gpt2": 124_439_808,
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", PARAMETERS)
def test_built_in_shapes(name: str) -> None:
    model = load.from_config(name)
    parameters = list(model.parameters())
    assert sum(parameter.numel() for parameter in parameters) == PARAMETERS[name]
    assert {parameter.device.type for parameter in parameters} == {"meta"}
    assert {str(parameter.dtype) for parameter in parameters} == {f"torch.{catalog.CATALOG[name].config['dtype']}"}
    assert type(model).__name__ == catalog.CATALOG[name].config["architectures"][0]
    assert not model.training


def test_every_entry_is_counted() -> None:
    assert set(catalog.CATALOG) == set(PARAMETERS)


@pytest.mark.parametrize("name", ["llama2-7b", "llama2-70b", "llama3.2-1b", "mistral-7b", "qwen3-0.6b"])
def test_no_key_of_a_config_is_misspelt(name: str) -> None:
    config = load.from_config(name).config
    known = type(config)().to_dict().keys() | {"architectures", "dtype", "rope_parameters"}
    assert set(catalog.CATALOG[name].config) <= known
    assert config.rope_parameters == catalog.CATALOG[name].config["rope_parameters"]


def test_short_names_come_from_their_place() -> None:
    default = catalog.resolve("smollm2-135m")
    assert (default.kind, default.name) == ("embedded", "smollm2-135m")
    llama = catalog.resolve("Llama2-7B")
    assert (llama.kind, llama.name, llama.location) == ("hub", "llama2-7b", "meta-llama/Llama-2-7b-hf")


def test_the_table_cannot_be_changed_through_a_source() -> None:
    catalog.resolve("gpt2").config["vocab_size"] = 1  # type: ignore[index]
    assert catalog.CATALOG["gpt2"].config["vocab_size"] == 50257


@pytest.mark.parametrize(
    "name, shapes",
    [("openai-community/gpt2", True), ("someone/Some-Model_1.5", False), ("bert-base-uncased", False)],
    ids=["known", "unknown", "without_owner"],
)
def test_hub_names(name: str, shapes: bool) -> None:
    source = catalog.resolve(name)
    assert (source.kind, source.location) == ("hub", name)
    assert (source.config is not None) == shapes


def test_local_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "weights.gguf").touch()
    assert catalog.resolve("./gpt2").kind == "folder"
    assert catalog.resolve("./gpt2").location == str(tmp_path / "gpt2")
    assert catalog.resolve("gpt2").kind == "hub"
    assert catalog.resolve("weights.gguf").kind == "gguf"


@pytest.mark.parametrize(
    "name, said",
    [
        ("smolm2-135m", "did you mean 'smollm2-135m'"),
        ("lama2-7b", "did you mean 'llama2-7b'"),
        ("./nowhere", "no such file or folder"),
        ("nowhere.gguf", "no such file or folder"),
        ("", "names no model"),
        ("a/b/c", "names no model"),
        ("../nowhere/x", "no such file or folder"),
        ("https://example.org/model", "names no model"),
        ("name with spaces", "names no model"),
    ],
    ids=["smolm2", "lama2", "path", "gguf", "empty", "too_many_parts", "up", "url", "spaces"],
)
def test_names_that_mean_nothing(name: str, said: str) -> None:
    with pytest.raises(LoadError, match=said):
        catalog.resolve(name)


@pytest.mark.parametrize(
    "file, said",
    [("w.bin", "pickled"), ("w.pt", "pickled"), ("w.safetensors", "give the folder"), ("w.zip", "give the folder")],
    ids=["bin", "pt", "safetensors", "zip"],
)
def test_files_that_are_no_model(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(LoadError, match=said):
        catalog.resolve(str(tmp_path / file))


def test_needs_neither_torch_nor_transformers() -> None:
    program = "import sys, accelpatch.models.catalog; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
