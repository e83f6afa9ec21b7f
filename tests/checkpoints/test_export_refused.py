"""What `export` refuses, with nothing written, and what a kill, damage or a full disk leaves behind: nothing."""

from __future__ import annotations

import json
import signal
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from accelpatch import api
from accelpatch.checkpoints import writing
from accelpatch.checkpoints.saved import digest_of
from accelpatch.errors import LoadError, SaveError
from tests.support.checkpoints import digests
from tests.support.exports import SYMMETRIC, saved
from tests.support.tiny import CAUSAL

ROOT = Path(__file__).parents[1] / "fixtures/foreign"
REFUSED: dict[str, tuple[Any, str, str, str]] = {
    "float minima": ("int4", "llama", "gptq", "has float minima, and other formats have integer zero points"),
    "names the option": ("int4", "llama", "compressed-tensors", "options: {symmetric: true}"),
    "names the option of its bits": ("int3", "llama", "gptq", "int3_weight_only has options: {symmetric: true}"),
    "8 bits in awq": ("int8", "llama", "awq", "is int8, and awq holds int4: compressed-tensors and gptq do"),
    "w8a8 in gptq": (
        "smoothquant",
        "llama",
        "gptq",
        "is w8a8, and gptq holds int3, int4, int8: compressed-tensors does",
    ),
    "fp8 in awq": ("fp8", "llama", "awq", "is fp8, and awq holds int4"),
    "nothing quantised": ("exact", "llama", "gptq", "no quantised linear layer (recipe exact)"),
    "whole layers": ("smoothquant-opt", "opt", "compressed-tensors", "is replaced by int8_opt"),
    "names all kinds": ("smoothquant-opt", "opt", "gptq", "w8a8, fp8, fp8 weights, mxfp4, nvfp4, fp8 blocks are"),
    "Conv1D": ("int8", "gpt2", "compressed-tensors", "is no nn.Linear but Conv1D"),
    "experts": ("int8", "qwen3_moe", "compressed-tensors", "experts lie in other tensors"),
}


@pytest.mark.parametrize(("recipe", "name", "to", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_format_cannot_hold_is_refused(recipe: Any, name: str, to: str, message: str, tmp_path: Path) -> None:
    source = saved(recipe, tmp_path / "ours", name, torch.float16 if recipe == "smoothquant-opt" else torch.float32)
    with pytest.raises(SaveError) as caught:
        api.export(source, to)
    assert message in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_bad_places_are_refused(tmp_path: Path) -> None:
    source = saved(SYMMETRIC, tmp_path / "ours")
    CAUSAL["llama"].make().save_pretrained(tmp_path / "floats")  # type: ignore[operator]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    before = digests(source)
    cases: list[tuple[type[Exception], str, tuple[Any, ...]]] = [
        (SaveError, "compressed-tensors, gptq, awq", (source, "exl2")),
        (SaveError, "is not empty", (source, "gptq", tmp_path / "full")),
        (SaveError, "is not empty", (source, "gptq", source)),
        (SaveError, "is a file", (source, "gptq", source / "config.json")),
        (LoadError, "holds float weights: quantise them first", (tmp_path / "floats", "gptq")),
        (LoadError, "is gptq already", (ROOT / "gptq-4bit-g32", "awq")),
        (LoadError, "has no config.json", (tmp_path / "full", "gptq")),
        (LoadError, "no such file or folder", (tmp_path / "none", "gptq")),
        (LoadError, "is no folder of a saved patched model", ("smollm2-135m", "gptq")),
    ]
    for kind, message, arguments in cases:
        with pytest.raises(kind, match=message):
            api.export(*arguments)
    assert digests(source) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["floats", "full", "ours"]


@pytest.mark.parametrize(
    ("site", "message"),
    [("model.layers.7.mlp.up_proj", "is in no model"), ("model.layers.0.mlp.up_proj", "write the checkpoint again")],
    ids=["no such layer", "scales of another shape"],
)
def test_headers_that_do_not_fit_are_refused(site: str, message: str, tmp_path: Path) -> None:
    file = saved(SYMMETRIC, tmp_path / "ours") / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = dict(opened.metadata())
    tensors, facts = load_file(file), json.loads(metadata["accelpatch"])
    facts["sites"][site] = "int4_weight_only"
    if f"{site}.scale" in tensors:
        tensors[f"{site}.scale"] = tensors[f"{site}.scale"][1:].clone()
        facts["sha256"][f"{site}.scale"] = digest_of(tensors[f"{site}.scale"])
    save_file(tensors, file, metadata | {"accelpatch": json.dumps(facts)})
    with pytest.raises(LoadError, match=message):
        api.export(tmp_path / "ours", "gptq")


def test_damage_leaves_nothing_behind(tmp_path: Path) -> None:
    source = saved(SYMMETRIC, tmp_path / "ours")
    file = source / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(LoadError, match="SHA-256 differs"):
        api.export(source, "gptq")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def _export_and_die(source: Path) -> None:
    stock = writing.Shard._write

    def kill(shard: Any, name: str, tensor: Any) -> None:
        stock(shard, name, tensor)
        if shard.path.parent.name.startswith(".ours-gptq") and "layers.1" in name:
            signal.raise_signal(signal.SIGKILL)

    writing.Shard._write = kill  # type: ignore[method-assign]
    api.export(source, "gptq")


def test_a_kill_leaves_the_source_and_the_next_export_goes_through(tmp_path: Path) -> None:
    source = saved(SYMMETRIC, tmp_path / "ours")
    before = digests(source)
    child = get_context("fork").Process(target=_export_and_die, args=(source,))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert digests(source) == before
    assert not (tmp_path / "ours-gptq").exists()
    made = api.export(source, "gptq")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "ours-gptq"]
    assert (made.folder / "model.safetensors").is_file()


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    source = saved(SYMMETRIC, tmp_path / "ours")
    monkeypatch.setattr(writing.Shard, "_write", full)
    with pytest.raises(SaveError, match="free some space"):
        api.export(source, "gptq")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
