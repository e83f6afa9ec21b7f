"""GGUF files held as they are stored: values and logits beside llama.cpp's, bytes, saving, and what is refused."""

from __future__ import annotations

import random
import resource
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from accelpatch import api
from accelpatch.checkpoints import as_stored
from accelpatch.checkpoints.gguf_tensors import GGUF, GgufFile, open_gguf
from accelpatch.errors import KernelError, LoadError, PlanError
from accelpatch.kernels.layouts.gguf_blocks import FORMS, GgufBlocks
from accelpatch.models.gguf_header import TYPES
from accelpatch.modules.quantized_module import QuantizedModule
from accelpatch.quant.formats import dequantize
from accelpatch.recipe import recipe as recipes
from tests.support.packed import plain

ROOT = Path(__file__).parents[1] / "fixtures/foreign"
OLD, K_M = ROOT / "gguf-q4_0-q4_1-q8_0/model.gguf", ROOT / "gguf-q4_k_m/model.gguf"
FILES = {"old": OLD, "k_m": K_M}
both = pytest.mark.parametrize("file", FILES.values(), ids=FILES.keys())


def expected(file: Path) -> dict[str, Tensor]:
    return load_file(file.parent / "expected.safetensors")


def loaded(place: Path | str, recipe: str | None = "gguf") -> Any:
    return api.load(str(place), recipe, dtype=torch.float32).model


@both
@torch.no_grad()
def test_logits_are_those_of_llama_cpps_weights(file: Path) -> None:
    due = expected(file)
    torch.testing.assert_close(loaded(file)(due["input_ids"]).logits[0], due["logits"], rtol=0, atol=1e-5)


@both
def test_values_are_the_files_bit_for_bit(file: Path) -> None:
    model, held = loaded(file), open_gguf(file)
    names = {placed.name: name.rpartition(".")[0] for name, placed in held.tensors.items()}
    for tensor in gguf.GGUFReader(file).tensors:
        due = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            heads = 2 if ".attn_q." in tensor.name else 1
            due = due.view(heads, len(due) // heads // 2, 2, -1).transpose(1, 2).reshape(due.shape)
        assert torch.equal(torch.as_tensor(model.get_submodule(names[tensor.name]).weight), due), tensor.name


@both
def test_rows_of_each_type_are_those_that_its_writer_gives(file: Path) -> None:
    for name, due in expected(file).items():
        if name.endswith(".weight"):
            placed = next(one for one in open_gguf(file).tensors.values() if one.name == name)
            raw = open_gguf(file).raw(placed).view(placed.shape[0], -1)
            assert torch.equal(dequantize(GgufBlocks(raw[:4], placed.form)), due), name


@both
def test_replacers_are_those_of_the_types(file: Path) -> None:
    report = loaded(file).accelpatch.report()
    made = {site.path: site.replacer for site in report.sites if "proj" in site.path or site.path == "lm_head"}
    assert made == {path: replacer for path, (replacer, _) in open_gguf(file).sites.items()}
    assert report.recipe == "gguf"


def owned(module: Any) -> int:
    """Bytes of a quantised module's weight in the layout that it has here."""
    if module.source is not None:
        return 0
    return int(module.layout.nbytes)


@both
def test_memory_holds_what_the_file_does(file: Path) -> None:
    model = loaded(file)
    held = sum(owned(one) for one in model.modules() if isinstance(one, QuantizedModule))
    floats = sum(parameter.nbytes for parameter in model.parameters())
    assert held + floats <= 1.05 * sum(placed.size for placed in open_gguf(file).tensors.values())
    report = model.accelpatch.report()
    assert report.resident_bytes[1] <= 1.05 * sum(placed.size for placed in open_gguf(file).tensors.values())


@both
@torch.no_grad()
def test_it_is_saved_and_comes_back_the_same(file: Path, tmp_path: Path) -> None:
    model, ids = loaded(file), expected(file)["input_ids"]
    model.save_pretrained(tmp_path / "saved")
    again = loaded(tmp_path / "saved", None)
    assert torch.equal(again(ids).logits, model(ids).logits)
    kinds = {site.path: site.replacer for site in model.accelpatch.report().sites}
    assert {site.path: site.replacer for site in again.accelpatch.report().sites} == kinds
    held = again.get_submodule("model.layers.0.mlp.gate_proj").canonical().tensors()
    before = model.get_submodule("model.layers.0.mlp.gate_proj").canonical().tensors()
    assert held.keys() == before.keys()
    assert all(torch.equal(one, before[name]) for name, one in held.items())


@both
def test_a_plan_says_what_is_held_how(file: Path) -> None:
    planned = api.plan_from_config(str(file), "gguf")
    made = {entry.site.path: entry.replacer.name for entry in planned.entries if entry.replacer is not None}
    assert {path: made[path] for path in open_gguf(file).sites} == {p: r for p, (r, _) in open_gguf(file).sites.items()}
    assert any(site.by_modules for site in api.plan_from_config(str(file), "gguf", arch="sm_90").report().sites)


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    shutil.copy(K_M, tmp_path / "a.gguf")
    assert loaded(tmp_path).accelpatch.report().recipe == "gguf"
    shutil.copy(K_M, tmp_path / "b.gguf")
    with pytest.raises(LoadError, match=r"give a \.gguf file"):
        loaded(tmp_path)


def test_another_recipe_unpacks_the_file() -> None:
    model = api.load(str(OLD), "int8", dtype=torch.float32)
    assert model.model.accelpatch.report().recipe == "int8"


def test_float_weights_are_refused_by_the_recipe() -> None:
    model = plain("llama", num_hidden_layers=1)
    with pytest.raises(PlanError, match=r"its weight is float.*give a \.gguf file"):
        api.patch(model, "gguf")
    assert not hasattr(model, "accelpatch")


def test_rules_of_a_recipe_choose_what_is_stored() -> None:
    text = "extends: exact\nrules:\n- {name: mine, match: {role: linear, name: '*proj'}, replace: as_stored}\n"
    made = as_stored.recipe_of(recipes.parse(text), open_gguf(K_M))
    assert {rule.name for rule in made.rules} >= {"mine-q4_k-blocks", "mine-q6_k-blocks", "mine-q8_0", "mine-q4_0"}
    assert not any("lm_head" in rule.match.name for rule in made.rules)
    assert recipes.parse(recipes.dump(made)) == made


def test_layers_of_two_types_are_named_one_by_one() -> None:
    names = [f"model.layers.{layer}.mlp.{name}" for layer in range(4) for name in ("up_proj", "down_proj")]
    sites = {name: ("gguf_blocks", "Q6_K" if name.endswith(("1.mlp.down_proj", "3.mlp.down_proj")) else "Q4_K")
             for name in names}  # fmt: skip
    assert as_stored._globs(sites, sites) == {
        "model.layers.*.mlp.up_proj": ("gguf_blocks", "Q4_K"),
        **{path: held for path, held in sites.items() if "down" in path},
    }


# --- damage


def patched(tmp_path: Path, source: Path, change: Any) -> Path:
    data = bytearray(source.read_bytes())
    change(data)
    (tmp_path / "bad.gguf").write_bytes(data)
    return tmp_path / "bad.gguf"


def entry_of(data: bytes, name: str) -> int:
    """Where the entry of a tensor in the header goes on behind its name."""
    return data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


def put(name: str, place: int, code: str, value: int) -> Any:
    """A change of a field of a tensor's entry with two dimensions."""

    def change(data: bytearray) -> None:
        struct.pack_into(f"<{code}", data, entry_of(data, name) + place, value)

    return change


def scale_of(name: str, value: float) -> Any:
    def change(data: bytearray) -> None:
        placed = next(one for one in open_gguf(K_M).tensors.values() if one.name == name)
        at = placed.start + FORMS[placed.form].floats[0]
        data[at : at + 2] = torch.tensor([value]).half().view(torch.uint8).numpy().tobytes()

    return change


def renamed(old: bytes, new: bytes) -> Any:
    def change(data: bytearray) -> None:
        at = data.index(old)
        data[at : at + len(old)] = new

    return change


UP, DOWN = "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"
BAD: dict[str, tuple[Any, str]] = {
    "truncated": (lambda data: data.__delitem__(slice(len(data) - 4000, None)), "is truncated"),
    "nan-scale": (scale_of(UP, float("nan")), f"{UP}: the scale of block [0, 0] is NaN or infinite"),
    "inf-scale": (scale_of("blk.0.attn_v.weight", float("inf")), "attn_v.weight: the scale of block [0, 0]"),
    "type-not-read": (
        put(UP, 20, "I", 15),
        f"{UP} is Q8_K, and Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q5_K",
    ),
    "type-unknown": (put(UP, 20, "I", 999), f"{UP} is type 999"),
    "offset-beyond": (put(UP, 24, "Q", 2**63), f"{UP} ends at byte"),
    "columns-overflow": (put(UP, 4, "Q", 2**63), f"{UP} ends at byte"),
    "rows-overflow": (put(UP, 12, "Q", 2**40), f"{UP} ends at byte"),
    "rows-fewer": (put(UP, 12, "Q", 16), "up_proj.weight is [16, 256], and [32, 256] belongs here"),
    "no-whole-blocks": (put(UP, 4, "Q", 255), f"{UP} has rows of 255"),
    "no-rows": (put(UP, 12, "Q", 0), f"{UP} has the shape [0, 256]"),
    "missing": (renamed(UP.encode(), b"blk.7.ffn_up.weight"), "layers.7.mlp.up_proj"),
    "another-name": (renamed(UP.encode(), b"blk.0.ffn_xx.weight"), "blk.0.ffn_xx.weight is no tensor"),
    "twice": (renamed(b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"), "two tensors of one name"),
    "heads": (renamed(b"llama.attention.head_count\4\0\0\0\2", b"llama.attention.head_count\4\0\0\0\5"), "for 5 heads"),
    "architecture": (renamed(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0mamba"), "the architecture 'mamba'"),
}


@pytest.mark.parametrize("change, message", BAD.values(), ids=BAD.keys())
def test_bad_input_names_file_and_tensor(change: Any, message: str, tmp_path: Path) -> None:
    file = patched(tmp_path, K_M, change)
    with pytest.raises(LoadError) as caught:
        loaded(file)
    assert message in str(caught.value)
    assert "bad.gguf" in str(caught.value)


def read_all(file: Path) -> GgufFile:
    """Every tensor, as loading takes it: floats, or a weight in its format."""
    held = open_gguf(file)
    for name, placed in held.tensors.items():
        tensor = held.get_tensor(name)
        if placed.form in FORMS:
            n, k = placed.shape
            made = GGUF.weight({part: tensor if name.endswith(f".{part}") else None for part in GGUF.parts}, {}, n, k)
            assert len(made.w) == n
            assert isinstance(made, GgufBlocks) or made.scale.dtype == torch.float16
    as_stored.recipe_of(recipes.load("gguf"), held)
    return held


def mutated(rng: random.Random, good: bytes, header: int) -> bytes:
    data = bytearray(good)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(header if rng.random() < 0.8 else len(data))
        piece = rng.choice((b"\0", b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\0\x7c", b"\0\x7e", rng.randbytes(4),
                            struct.pack("<Q", rng.choice((0, 1, 255, 2**32, 2**40, 2**61)))))  # fmt: skip
        data[at : at + len(piece)] = piece
    if rng.random() < 0.1:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


def check_mutations(count: int, folder: Path) -> None:
    rng, file = random.Random(3), folder / "mutated.gguf"
    good = {path: (path.read_bytes(), open_gguf(path).header.start) for path in (OLD, K_M)}
    before, outcomes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, set()
    for _ in range(count):
        file.write_bytes(mutated(rng, *good[rng.choice((OLD, K_M))]))
        start = time.process_time()
        try:
            read_all(file)
            outcomes.add("read")
        except (LoadError, KernelError) as error:
            outcomes.add("refused")
            assert isinstance(error, KernelError) or str(file) in str(error)  # noqa: PT017
        assert time.process_time() - start < 2
    assert outcomes == {"read", "refused"}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # kB


def test_300_mutations_are_read_or_refused(tmp_path: Path) -> None:
    check_mutations(300, tmp_path)


@pytest.mark.nightly
def test_10_000_mutations_are_read_or_refused(tmp_path: Path) -> None:
    check_mutations(10_000, tmp_path)


def test_the_table_of_types_has_the_sizes_of_the_blocks() -> None:
    assert {name: form[:2] for name, form in FORMS.items()} == {
        name: (values, size) for name, values, size in TYPES.values() if name in FORMS
    }
