"""w8a8_fp8: planned by the arch's form, patched, verified, written to, saved and undone; weights of another form are
refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import accelpatch
from accelpatch.checkpoints.saved import digest_of
from accelpatch.device import KNOWN, Device, probe
from accelpatch.errors import KernelError, LoadError
from accelpatch.hf import AccelpatchConfig
from accelpatch.kernels import dispatch
from accelpatch.kernels.hip import binding
from accelpatch.kernels.layouts.row_major import FP8, fp8_name
from accelpatch.kernels.triton import launch
from accelpatch.modules.quantized_linear import Fp8Linear
from accelpatch.patching.replacer import Choice, Reason
from accelpatch.patching.site import Site
from accelpatch.quant import fp8
from accelpatch.replacers import registry
from tests.support.checkpoints import header, logits, opened, saved, weights
from tests.support.packed import replacements
from tests.support.simulated import greedy
from tests.support.spread import spread
from tests.support.tiny import CAUSAL, Tiny, padded_batch, snapshot

FP8_OF = {"sm_90": "e4m3fn", "gfx950": "e4m3fn", "gfx942": "e4m3fnuz"}
REPLACER = registry()["w8a8_fp8"]


def site(module: nn.Module, k: int = 256) -> Site:
    return Site("at", module, "q_proj", ("Linear",), 48, k, 48 * k * 2, 48 * k * 2, "bfloat16")


def linear() -> nn.Linear:
    return nn.Linear(256, 48, False, dtype=torch.bfloat16)


def proposed(device: Device) -> Choice:
    choice = REPLACER.propose(site(linear()), {}, device)
    assert isinstance(choice, Choice)
    return choice


@pytest.mark.parametrize("arch, form", FP8_OF.items())
def test_planned_in_the_form_of_the_arch(arch: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_installed", lambda: True)
    monkeypatch.setattr(binding, "why_not", lambda *_: "not in this test")
    choice = proposed(KNOWN[arch])
    assert choice.kernel == "triton"
    assert choice.note == f"8-bit floats are {form}, as {arch} takes them; few rows not by the HIP kernels: " + (
        "not in this test"
    )
    assert choice.resident_after == 48 * 256 + 48 * 4
    built = REPLACER.build(site(linear()), choice)
    assert isinstance(built, Fp8Linear)
    assert fp8_name(built.layout.w.dtype) == form


def test_planned_for_a_cpu() -> None:
    choice = proposed(probe("cpu"))
    assert (choice.kernel, choice.note) == ("operations", "8-bit floats are e4m3fn, as a CPU takes them")


@pytest.mark.parametrize("arch", ["gfx90a", "sm_80"])
def test_an_arch_without_a_unit_says_so_and_what_runs_there(arch: str) -> None:
    answer = REPLACER.propose(site(linear()), {}, KNOWN[arch])
    assert isinstance(answer, Reason)
    assert answer.text.startswith(f"its matrix unit has no 8-bit floats ({arch}); int8 activations (w8a8, ")
    plan = str(accelpatch.plan_from_config("llama2-7b", "fp8", arch=arch))
    assert plan.count("recipe smoothquant) run there") == 7


def test_a_table_has_no_such_form() -> None:
    answer = REPLACER.propose(site(nn.Embedding(48, 256, dtype=torch.bfloat16)), {}, KNOWN["sm_90"])
    assert isinstance(answer, Reason)
    assert "int8_weight_only" in answer.text


@pytest.mark.parametrize("name", ["w8a8_fp8", "fp8_weight_only"])
@pytest.mark.parametrize("arch", [*FP8_OF, "cpu"])
def test_bits_of_the_other_form_are_refused_by_name(arch: str, name: str) -> None:
    device = probe("cpu") if arch == "cpu" else KNOWN[arch]
    choice = registry()[name].propose(site(linear()), {}, device)
    assert isinstance(choice, Choice)
    fnuz = device.fp8 == "e4m3fnuz"
    planted = fp8.quantize(torch.randn(48, 256), fnuz=not fnuz)
    here = "a CPU" if arch == "cpu" else arch
    with pytest.raises(KernelError, match=rf"q is {fp8_name(FP8[not fnuz])}, and {here} takes {fp8_name(FP8[fnuz])}"):
        registry()[name].restore(site(linear()), choice, planted)
    assert registry()[name].restore(site(linear()), choice, fp8.quantize(torch.randn(48, 256), fnuz=fnuz)) is not None


@pytest.mark.each_value
@spread("tiny, dtype", CAUSAL, [torch.float32, torch.bfloat16])
def test_every_family_and_the_way_back(tiny: Tiny, dtype: torch.dtype) -> None:
    model: Any = tiny.make(dtype)
    before, due = snapshot(model), logits(model)
    ran = dispatch.calls["gemm_fp8", "torch"]
    accelpatch.patch(model, "fp8")
    report = model.accelpatch.report()
    assert report.verification.failures == []
    taken = [site for site in report.sites if site.replacer == "w8a8_fp8"]
    assert len(taken) == sum(tiny.linears.values())
    assert {site.kernel for site in taken} == {"operations"}
    assert dispatch.calls["gemm_fp8", "torch"] > ran
    found = logits(model)
    assert not found.equal(due)
    assert found.sub(due).norm() < 0.4 * due.norm()
    greedy(model, padded_batch())
    accelpatch.unpatch(model)
    assert snapshot(model) == before
    assert logits(model).equal(due)


FAMILIES = ("llama", "gemma3", "gpt2", "bloom", "opt", "phi3", "qwen3_moe")


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_saved_comes_back(name: str, tmp_path: Path) -> None:
    model: Any = CAUSAL[name].make()
    model.save_pretrained(tmp_path / "floats")
    due = logits(saved(model, "fp8", tmp_path / "patched"))
    loaded = [opened(tmp_path / "patched"), accelpatch.load(str(tmp_path / "patched")).model]
    loaded.append(opened(tmp_path / "floats", quantization_config=AccelpatchConfig("fp8")))
    for one in loaded:
        assert replacements(one) == replacements(model)
        assert torch.equal(logits(one), due)
    loaded[0].save_pretrained(tmp_path / "again")
    assert weights(tmp_path / "again") == weights(tmp_path / "patched")


def test_a_checkpoint_in_the_form_of_gfx942_is_refused_here(tmp_path: Path) -> None:
    """One whose codes are right, and one whose e4m3fn bits are called e4m3fnuz: neither is read as something else."""
    saved(CAUSAL["llama"].make(), "fp8", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, facts = load_file(file), header(file)[0]["__metadata__"]
    codes = [name for name, one in tensors.items() if one.dtype == FP8[0]]
    assert len(codes) == 14
    made = {name: (tensors[name].float() / 2).to(FP8[1]) for name in codes}
    relabelled = {name: tensors[name].view(FP8[1]) for name in codes}
    for planted in (made, relabelled):
        save_file(tensors | planted, file, metadata=as_written(facts, tensors | planted))
        with pytest.raises(LoadError, match=r"q is e4m3fnuz, and a CPU takes e4m3fn, .*quantise the float weights"):
            opened(tmp_path)


def as_written(facts: dict[str, str], tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """The header's facts with the digests of other tensors."""
    held = json.loads(facts["accelpatch"])
    return facts | {"accelpatch": json.dumps(held | {"sha256": {key: digest_of(one) for key, one in tensors.items()}})}


def test_a_state_dict_in_the_other_form_is_refused() -> None:
    model: Any = accelpatch.patch(CAUSAL["llama"].make(), "fp8", verify=False)
    state, due = model.state_dict(), logits(model)
    other = {key: one.view(FP8[1]) if one.dtype == FP8[0] else one for key, one in state.items()}
    with pytest.raises(RuntimeError, match=r"q is torch.float8_e4m3fnuz, and torch.float8_e4m3fn is packed here"):
        model.load_state_dict(other)
    assert torch.equal(logits(model), due)
    model.load_state_dict(state)
    assert torch.equal(logits(model), due)


def test_written_cast_and_moved() -> None:
    model: Any = accelpatch.patch(CAUSAL["llama"].make(), "fp8", verify=False)
    layer = model.model.layers[0].mlp.up_proj
    weight = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        layer.weight.copy_(weight)
    due = fp8.quantize(weight)
    assert torch.equal(layer.layout.w.float(), due.w.float())
    model.half()
    assert (layer.layout.w.dtype, layer.layout.scale.dtype) == (FP8[0], torch.float32)
    assert logits(model).isfinite().all()
    with torch.inference_mode():
        assert layer(torch.randn(2, 3, 64, dtype=torch.float16)).dtype == torch.float16
