"""Checkpoints that others' tools wrote: weights and logits beside theirs, what is refused, and damage of every kind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from accelpatch import api
from accelpatch.checkpoints import foreign
from accelpatch.errors import KernelError, LoadError
from accelpatch.models.foreign_layouts import LAYOUTS
from accelpatch.modules.quantized_module import QuantizedModule
from accelpatch.quant import packed_formats
from tests.support.foreign import K_PROJ, READ, ROOT, expected

REFUSED = {
    "ct-int-w8a8-static": "q_proj.input_zero_point: asymmetric activations are not read",
}


@pytest.mark.parametrize("name", READ)
@torch.no_grad()
def test_weights_and_logits_are_those_of_their_writer(name: str) -> None:
    due, (replacer, apart) = expected(name), READ[name]
    model: Any = api.load(str(ROOT / name), dtype=torch.float32).model
    sites = {site.path: site.replacer for site in model.accelpatch.report().sites}
    assert sites[K_PROJ] == replacer
    weight = model.get_submodule(K_PROJ).weight
    wanted = due[f"{K_PROJ}.weight"]
    if name == "bnb-int8":  # its code multiplies by a rounded 1 / 127
        torch.testing.assert_close(torch.as_tensor(weight), wanted.float(), rtol=2.0**-22, atol=0)
    else:
        assert torch.equal(torch.as_tensor(weight).to(wanted.dtype), wanted)
    torch.testing.assert_close(model(due["input_ids"]).logits[0], due["logits"], rtol=0, atol=apart)


@pytest.mark.parametrize("name", [name for name in READ if name not in ("bnb-nf4-double", "bnb-fp4-double")])
def test_a_weight_takes_no_more_memory_than_in_the_file(name: str) -> None:
    """Of double quantisation the scales are unpacked: 1.09 where blocks end with rows."""
    held, model = load_file(ROOT / name / "model.safetensors"), api.load(str(ROOT / name), dtype=torch.float32).model
    layout = foreign.layout_of(str(ROOT / name))
    assert layout is not None
    parts = [part for part in LAYOUTS[layout["name"]].parts if "quant_" not in part]
    stored = ours = 0
    for path, module in model.named_modules():
        if isinstance(module, QuantizedModule):
            stored += sum(held[key].nbytes for part in parts if (key := f"{path}.{part}") in held)
            order = module.layout.order
            ours += module.layout.nbytes - (0 if order is None else order.nbytes)
            ours -= 8 * module.layout.n if "nvfp4" in name else 0  # a factor a row, much beside rows this short
    assert 0 < ours <= (1.06 if name == "ct-mxfp4" else 1.05) * stored  # its scales have 16 bits in the CPU's packs


@pytest.mark.parametrize("name", ["ct-int-w8a8", "ct-float-fp8"])
@torch.no_grad()
def test_rounded_activations_come_near_their_writers(name: str) -> None:
    due = expected(name)
    model: Any = api.load(str(ROOT / name), dtype=torch.float32).model
    away = (model(due["input_ids"]).logits[0] - due["logits_quantised"]).abs().max()
    assert away < 3 * (due["logits"] - due["logits_quantised"]).abs().max()


@pytest.mark.parametrize("name, message", REFUSED.items())
def test_what_is_not_read_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(LoadError) as caught:
        api.load(str(ROOT / name))
    assert message in str(caught.value)
    assert name in str(caught.value)


def test_it_comes_with_its_recipe_and_is_saved_as_ours(tmp_path: Path) -> None:
    folder, ids = str(ROOT / "awq-gemm-4bit-g32"), expected("awq-gemm-4bit-g32")["input_ids"]
    assert api.is_patched(folder)
    with pytest.raises(LoadError, match="has its recipe"):
        api.load(folder, "int8")
    model: Any = api.load(folder, dtype=torch.float32).model
    model.save_pretrained(tmp_path / "ours")
    again: Any = api.load(str(tmp_path / "ours"), dtype=torch.float32).model
    assert torch.equal(again(ids).logits, model(ids).logits)


def copied(name: str, folder: Path, config: Any = None, tensors: Any = None) -> Path:
    """A fixture with changes: of its quantization_config, and of the tensors of k_proj (None: without it)."""
    shutil.copytree(ROOT / name, folder)
    facts = json.loads((folder / "config.json").read_text())
    facts["quantization_config"] |= config or {}
    (folder / "config.json").write_text(json.dumps(facts))
    held = load_file(folder / "model.safetensors")
    for part, value in (tensors or {}).items():
        held.pop(f"{K_PROJ}.{part}", None)
        if value is not None:
            held[f"{K_PROJ}.{part}"] = value
    save_file(held, folder / "model.safetensors")
    return folder


def text(state: dict[str, Any]) -> Tensor:
    """A state of bitsandbytes as it stands in a file."""
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


GPTQ, AWQ, PACKED = "gptq-4bit-g32", "awq-gemm-4bit-g32", "ct-pack-w4a16-g32"
NF4, NESTED, INT8 = "bnb-nf4", "bnb-nf4-double", "bnb-int8"
STATE = "weight.quant_state.bitsandbytes__nf4"
OF_K = load_file(ROOT / GPTQ / "model.safetensors")
SCALES = OF_K[f"{K_PROJ}.scales"]
BAD: dict[str, tuple[str, Any, Any, str]] = {
    "bits-2": (GPTQ, {"bits": 2}, None, "bits 2"),
    "bits-text": (GPTQ, {"bits": "4"}, None, "bits '4'"),
    "group-0": (GPTQ, {"group_size": 0}, None, "group_size 0"),
    "group-no-divisor": (AWQ, {"group_size": 48}, None, "it cannot be here"),
    "dynamic": (GPTQ, {"dynamic": {"+:.*k_proj": {"bits": 8}}}, None, "dynamic"),
    "version": (AWQ, {"version": "marlin"}, None, "version 'marlin'"),
    "v1-as-v2": (GPTQ, {"checkpoint_format": "gptq_v2", "format": "gptq_v2"}, None, "is it v1 or v2?"),
    "format-unknown": (GPTQ, {"checkpoint_format": "marlin"}, {}, "q_proj.qweight: GPTQ's format 'marlin' is not read"),
    "g_idx-range": (GPTQ, None, {"g_idx": torch.full((64,), 9, dtype=torch.int32)}, "k_proj.g_idx names groups"),
    "g_idx-negative": (GPTQ, None, {"g_idx": torch.full((64,), -1, dtype=torch.int32)}, "k_proj.g_idx names groups"),
    "g_idx-sizes": (GPTQ, None, {"g_idx": torch.arange(64, dtype=torch.int32) // 33}, "has groups of 31 to 33 inputs"),
    "no-zeros": (GPTQ, None, {"qzeros": None}, "k_proj.qzeros is missing"),
    "no-scales": (GPTQ, None, {"scales": None}, "k_proj.scales is missing"),
    "zero-scale": (GPTQ, None, {"scales": SCALES * 0}, "k_proj.scales has zero, NaN or infinity"),
    "nan-scale": (GPTQ, None, {"scales": SCALES * float("nan")}, "k_proj.scales has zero, NaN or infinity"),
    "narrow": (GPTQ, None, {"qweight": OF_K[f"{K_PROJ}.qweight"][:, :8].clone()}, "k_proj.qweight is [8, 8]"),
    "floats": (GPTQ, None, {"qweight": OF_K[f"{K_PROJ}.qweight"].float()}, "k_proj.qweight is torch.float32"),
    "shape": (PACKED, None, {"weight_shape": torch.tensor([1, 1])}, "k_proj.weight_shape is [1, 1]"),
    "nf4-blocks": (NF4, None, {STATE: text({"blocksize": 0, "shape": [32, 64], "quant_type": "nf4"})}, "blocks of 0"),
    "nf4-shape": (NF4, None, {STATE: text({"blocksize": 64, "shape": [64, 32], "quant_type": "nf4"})}, "[64, 32]"),
    "nf4-type": (NF4, None, {STATE: text({"blocksize": 64, "shape": [32, 64], "quant_type": "fp4"})}, "says fp4"),
    "nf4-shape-number": (
        NF4,
        None,
        {STATE: text({"blocksize": 64, "shape": 5, "quant_type": "nf4"})},
        f"k_proj.{STATE}",
    ),
    "nf4-blocks-vast": (
        NF4,
        None,
        {STATE: text({"blocksize": 2**70, "shape": [32, 64], "quant_type": "nf4"})},
        f"k_proj.{STATE}",
    ),
    "nf4-nested-vast": (
        NESTED,
        None,
        {STATE: text({"blocksize": 64, "shape": [32, 96], "nested_offset": 10**400})},
        f"k_proj.{STATE}",
    ),
    "nf4-json": (NF4, None, {STATE: torch.full((9,), 255, dtype=torch.uint8)}, "is not bitsandbytes' JSON"),
    "nf4-absmax": (NF4, None, {"weight.absmax": torch.ones(31)}, "k_proj.weight.absmax is torch.float32 [31]"),
    "nf4-nan": (NF4, None, {"weight.absmax": torch.full((32,), torch.nan)}, "weight.absmax has NaN"),
    "nf4-book": (NF4, None, {"weight.quant_map": torch.zeros(16)}, "weight.quant_map is another one than nf4's"),
    "nf4-nested": (NESTED, None, {"weight.nested_absmax": torch.ones(7)}, "256 levels and 7 scales"),
    "nf4-flat": (NF4, None, {"weight": torch.zeros(5, dtype=torch.uint8)}, "k_proj.weight has 5 bytes"),
    "bnb-config": (NF4, {"load_in_4bit": False}, None, "bitsandbytes is read with load_in_4bit"),
    "int8-order": (INT8, None, {"weight_format": torch.tensor(1, dtype=torch.uint8)}, "k_proj.weight_format"),
    "int8-nan": (INT8, None, {"SCB": torch.full((32,), torch.nan)}, "k_proj.SCB has NaN"),
    "format": (PACKED, {"format": "marlin-24"}, None, "'marlin-24'"),
}


@pytest.mark.parametrize("name, config, tensors, message", BAD.values(), ids=BAD.keys())
def test_bad_input_names_file_and_tensor(name: str, config: Any, tensors: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError) as caught:
        api.load(str(copied(name, tmp_path / "bad", config, tensors)))
    assert message in str(caught.value)
    assert tensors is None or "model.safetensors" in str(caught.value)


def test_a_quantised_head_is_refused_by_name(tmp_path: Path) -> None:
    folder = copied(GPTQ, tmp_path / "head")
    facts = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(facts))
    held = load_file(folder / "model.safetensors")
    parts = {name.replace(K_PROJ, "lm_head"): one.clone() for name, one in held.items() if name.startswith(K_PROJ)}
    save_file(held | parts, folder / "model.safetensors")
    with pytest.raises(LoadError, match=r"lm_head was saved as int4_weight_only.*heads of others are read in float"):
        api.load(str(folder))


def test_truncated_and_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = copied(GPTQ, tmp_path / "short")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LoadError, match="truncated or damaged"):
        api.load(str(folder))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(LoadError, match="pickled"):
        api.load(str(folder))


def test_awqs_order_of_columns_is_its_own_inverse_of_the_writers() -> None:
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # field i of a word is this column
    assert [order[field] for field in packed_formats.AWQ_ORDER] == list(range(8))


def test_a_float_checkpoint_under_anothers_name_is_refused(tmp_path: Path) -> None:
    folder = copied(GPTQ, tmp_path / "floats")
    held = {name: one for name, one in load_file(folder / "model.safetensors").items() if "proj" not in name}
    save_file(held, folder / "model.safetensors")
    with pytest.raises(LoadError, match="there is no qweight"):
        api.load(str(folder))


ODD: dict[str, tuple[Any, dict[str, Any], tuple[int, int], str]] = {
    "gptq-n": (packed_formats.gptq, {"bits": 4}, (12, 64), "qweight: N = 12 is no multiple of the 8 codes"),
    "gptq-k": (packed_formats.gptq, {"bits": 8}, (16, 62), "qweight: K = 62 is no multiple of the 4 codes"),
    "awq-n": (packed_formats.awq, {"bits": 4, "group_size": 32}, (12, 64), "qweight: N = 12 is no multiple"),
    "gemv-k": (
        packed_formats.awq, {"bits": 4, "group_size": 30, "version": "gemv"}, (16, 60), "qweight: K = 60 is no multiple"
    ),
    "packed-k": (packed_formats.packed, {"bits": 4}, (16, 61), "weight_packed: K = 61 is odd"),
}  # fmt: skip


@pytest.mark.parametrize("read, config, size, message", ODD.values(), ids=ODD.keys())
def test_sizes_that_fill_no_words_are_refused(read: Any, config: Any, size: tuple[int, int], message: str) -> None:
    n, k = size
    tensors = {"weight_packed": torch.zeros(n, -(-k // 8), dtype=torch.int32)}
    with pytest.raises(KernelError, match=message):
        read(tensors, config, n, k)


@pytest.mark.parametrize("name", ["gptq-v2-4bit-g32-asym", "gptq-4bit-g32-asym-actorder"])
def test_a_format_that_is_null_is_the_other_key_or_v1(name: str, tmp_path: Path) -> None:
    given = {"checkpoint_format": None, "format": "gptq_v2" if "v2" in name else None}
    model: Any = api.load(str(copied(name, tmp_path / "null", given))).model
    weight = torch.as_tensor(model.get_submodule(K_PROJ).weight)
    assert torch.equal(weight.float(), expected(name)[f"{K_PROJ}.weight"].float())
