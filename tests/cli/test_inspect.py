"""accelpatch inspect: formats, errors, and how little it needs."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import accelpatch
from tests.support.checkpoints import saved
from tests.support.packed import plain

from .conftest import ROOT, Cli, environment


def _inspected(cli: Cli, place: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(cli("inspect", str(place), "--json").stdout)
    return found


def test_float(cli: Cli, model: str) -> None:
    found = _inspected(cli, model)
    assert found["format"] == "float, safetensors"
    assert (found["architecture"], found["tied"], found["files"]) == ("LlamaForCausalLM", "none", "1")
    assert found["kinds"].keys() == {"F32"}
    assert found["kinds"]["F32"]["tensors"] == int(found["tensors"]) == 21
    assert found["kinds"]["F32"]["bytes"] == sum(p.numel() * 4 for p in accelpatch.load(model).model.parameters())
    assert f"accelpatch run {model}" in found["advice"]


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_patched(cli: Cli, tmp_path: Path, size: str) -> None:
    saved(plain("llama"), "int4", tmp_path / "patched", max_shard_size=size)
    found = _inspected(cli, tmp_path / "patched")
    assert (found["format"], found["recipe"], found["version"]) == ("accelpatch", "int4", "1")
    assert found["tied"] == "input and output embeddings"
    assert "12 x int4_weight_only in rows with minima" in found["quantised"]
    assert "2 x int4_weight_only in groups of 32 with minima" in found["quantised"]
    assert "1 x int8_weight_only in" in found["quantised"]
    assert (found["files"] == "1") is (size == "5GB")
    text = cli("inspect", str(tmp_path / "patched")).stdout
    assert "in groups of 32" in text
    assert "bytes, I8" in text


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", "hqq"])
def test_those_of_others(cli: Cli, model: str, tmp_path: Path, method: str) -> None:
    weights = {"num_bits": 4, "group_size": 128, "strategy": "group"}
    groups = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": weights}}}
    quantization = {"quant_method": method, "bits": 4, "group_size": 128, **(groups if "tensors" in method else {})}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    (tmp_path / "model.safetensors").write_bytes((Path(model) / "model.safetensors").read_bytes())
    found = _inspected(cli, tmp_path)
    assert (found["format"], found["bits"], found["group_size"]) == (method, "4", "128")
    assert found.get("packing") == ("pack-quantized" if "tensors" in method else None)
    assert ("not read" if method == "hqq" else "loads it as it is") in found["advice"]


def test_what_is_not_read_says_what_reads_it(cli: Cli, model: str, tmp_path: Path) -> None:
    quantization = {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    (tmp_path / "model.safetensors").write_bytes((Path(model) / "model.safetensors").read_bytes())
    assert "(dynamic), is not read here; GPTQModel reads it" in _inspected(cli, tmp_path)["advice"]


def _gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_token_list([f"w{index}" for index in range(200)])
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("token_embd.weight", gguf.quantize(np.ones((128, 64), np.float32), kind), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf(cli: Cli, tmp_path: Path) -> None:
    file = _gguf(tmp_path / "tiny.gguf")
    for place in (file, tmp_path):
        found = _inspected(cli, place)
        assert (found["format"], found["architecture"], found["tensors"]) == ("GGUF", "llama", "2")
        assert found["tied"] == "input and output embeddings"
        assert found["kinds"] == {
            "Q8_0": {"tensors": 1, "bytes": 128 * 64 // 32 * 34},
            "F32": {"tensors": 1, "bytes": 256},
        }
        assert str(file) in found["advice"]
        assert "as they are" in found["advice"]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        pytest.param("a.txt", b"text", "is no .safetensors or .gguf file", id="another file"),
        pytest.param("a.bin", b"", "can run code", id="a pickle"),
        pytest.param("a.gguf", b"GGUX", "begin as a GGUF file", id="no GGUF"),
        pytest.param("a.gguf", b"GGUF\3\0\0\0", "truncated", id="truncated GGUF"),
        pytest.param("a.safetensors", b"\0" * 4, "truncated or damaged", id="truncated"),
        pytest.param("a.safetensors", b"\xff" * 64, "truncated or damaged", id="a header that is too long"),
    ],
)
def test_clear_errors(cli: Cli, tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    result = cli("inspect", str(tmp_path / name))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert words in result.stderr.replace("\n", " ")
    assert result.stdout == ""


@pytest.mark.parametrize("place", ["", "nothing"])
def test_nothing_there(cli: Cli, tmp_path: Path, place: str) -> None:
    result = cli("inspect", str(tmp_path / place))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")


def test_it_is_quick_and_needs_no_torch(tmp_path: Path) -> None:
    saved(plain("llama"), "int4", tmp_path / "patched")
    code = (
        "import sys, accelpatch.cli\n"
        f"sys.argv = ['accelpatch', 'inspect', {str(tmp_path / 'patched')!r}]\n"
        "try:\n    accelpatch.cli.main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.endswith("[]\n")
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 1


def test_a_model_without_a_head_is_not_for_run(cli: Cli, tmp_path: Path) -> None:
    saved(plain("llama").model, "int8", tmp_path / "patched")
    assert _inspected(cli, tmp_path / "patched")["advice"].startswith("`accelpatch.load of ")
