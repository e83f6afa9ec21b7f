"""Models that the libraries themselves quantised or loaded, where they are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import accelpatch
from tests.support.lora import adapted
from tests.support.stored import ROOT, expected, state
from tests.support.tiny import CAUSAL, full_batch

BITS = {
    "int8": ({"load_in_8bit": True}, "int8_weight_only", "LLM.int8()"),
    "nf4": ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4_weight_only", "bitsandbytes nf4, blocks of 64"),
    "fp4-double": (
        {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
        "fp4_weight_only",
        "bitsandbytes fp4, blocks of 64, nested",
    ),
}
COMPRESSED = ("ct-pack-w4a16-g32", "ct-int-w8a8", "ct-float-fp8")


def loaded(folder: Path, options: dict[str, Any]) -> Any:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    CAUSAL["qwen3"].make(hidden_size=128, intermediate_size=192).save_pretrained(folder)
    config = BitsAndBytesConfig(**options)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, device_map="cpu"
    ).eval()


def bits(model: Any) -> dict[str, Any]:
    return {name: one.clone() for name, one in model.state_dict().items()}


@pytest.mark.parametrize("options, replacer, words", BITS.values(), ids=BITS.keys())
@torch.no_grad()
def test_bitsandbytes_by_transformers(options: Any, replacer: str, words: str, tmp_path: Path) -> None:
    model = loaded(tmp_path, options)
    modules, before, config = {name: id(m) for name, m in model.named_modules()}, bits(model), model.config.to_dict()
    accelpatch.patch(model, "int8")
    report = model.accelpatch.report()
    taken = [site for site in report.sites if site.stored == words]
    assert len(taken) == 14
    assert {site.replacer for site in taken} == {replacer}
    assert report.verification.failures == []
    assert report.verification.kl < 1e-2
    assert model.generate(**full_batch(), max_new_tokens=3, do_sample=False).shape == (3, 12)
    accelpatch.unpatch(model)
    assert {name: id(m) for name, m in model.named_modules()} == modules
    after = bits(model)
    assert all(torch.equal(after[name], one) for name, one in before.items())
    assert (model.is_quantized, model.config.to_dict()) == (True, config)
    assert model.hf_quantizer is not None
    model(**full_batch())


@pytest.mark.parametrize("name", ["int8", "nf4"])
@torch.no_grad()
def test_pefts_own_layers_around_bitsandbytes(name: str, tmp_path: Path) -> None:
    given = full_batch()
    first = adapted(loaded(tmp_path, BITS[name][0]))
    assert any(type(module).__module__ == "peft.tuners.lora.bnb" for module in first.modules())
    last = adapted(accelpatch.patch(loaded(tmp_path, BITS[name][0]), "exact"))
    accelpatch.patch(first, "exact")
    assert first.accelpatch.report().verification.failures == []
    torch.testing.assert_close(first(**given).logits, last(**given).logits, rtol=1e-5, atol=1e-5)
    due = first(**given).logits
    with pytest.raises(Exception, match=r"call accelpatch\.unpatch\(model\)"):
        first.merge_adapter()
    assert torch.equal(first(**given).logits, due)
    accelpatch.unpatch(first)
    accelpatch.unpatch(last)


@pytest.mark.parametrize("name", COMPRESSED)
@torch.no_grad()
def test_compressed_tensors_by_transformers(name: str) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    model: Any = AutoModelForCausalLM.from_pretrained(ROOT / name, dtype=torch.float32, device_map="cpu").eval()
    before, due = state(model), expected(name)
    accelpatch.patch(model, "exact")
    assert model.accelpatch.report().verification.failures == []
    assert sum(site.stored is not None and site.replacer is not None for site in model.accelpatch.report().sites) == 7
    torch.testing.assert_close(model(due["input_ids"]).logits[0], due["logits"], rtol=0, atol=0.05)
    accelpatch.unpatch(model)
    assert state(model) == before
    model(due["input_ids"])  # its library unpacks it now
