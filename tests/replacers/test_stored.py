"""Models whose layers another library quantised: taken over as they are stored, verified, undone, and saved."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelpatch
from accelpatch import api
from accelpatch.errors import KernelError, PatchError
from accelpatch.modules.quantized_module import QuantizedModule
from accelpatch.patching import formula
from accelpatch.patching.stored import like_float, move_
from accelpatch.recipe.recipe import parse
from tests.support.stored import K_PROJ, Buffers, Linear8bitLt, expected, floats_of, model_of, state

#: fixture -> (what takes its layers over, its format in a plan, how far logits may be from the library's own)
TAKEN = {
    "gptq-4bit-g32": ("int4_weight_only", "GPTQ 4 bits, groups of 32", 1e-5),
    "gptq-4bit-g32-asym-actorder": ("int4_weight_only", "GPTQ 4 bits, groups of 32", 1e-5),
    "gptq-4bit-g128-bias": ("int4_weight_only", "GPTQ 4 bits, one scale a row", 1e-5),
    "gptq-8bit-channel": ("int8_weight_only", "GPTQ 8 bits, one scale a row", 1e-5),
    "gptq-v2-4bit-g32-asym": ("int4_weight_only", "GPTQ 4 bits, groups of 32", 1e-5),
    "awq-gemm-4bit-g32": ("int4_weight_only", "AWQ 4 bits, groups of 32", 1e-5),
    "awq-gemv-4bit-g32": ("int4_weight_only", "AWQ 4 bits, groups of 32", 1e-3),  # its own code rounds to float16
    "bnb-int8": ("int8_weight_only", "LLM.int8()", 1e-5),
    "bnb-nf4": ("nf4_weight_only", "bitsandbytes nf4, blocks of 64", 1e-5),
    "bnb-nf4-double": ("nf4_weight_only", "bitsandbytes nf4, blocks of 64, nested", 1e-5),
    "bnb-fp4": ("fp4_weight_only", "bitsandbytes fp4, blocks of 64", 1e-5),
    "bnb-fp4-double": ("fp4_weight_only", "bitsandbytes fp4, blocks of 64, nested", 1e-5),
    "ct-pack-w4a16-g32": ("int4_weight_only", "compressed-tensors 4 bits, groups of 32", 1e-5),
    "ct-pack-w4a16-g32-asym": ("int4_weight_only", "compressed-tensors 4 bits, groups of 32", 1e-5),
    "ct-pack-w4a16-g32-actorder": ("int4_weight_only", "compressed-tensors 4 bits, groups of 32", 1e-5),
    "ct-int-w8a8": ("w8a8", "compressed-tensors int8 weights and activations", 0.05),  # activations are rounded
    "ct-float-fp8": ("w8a8_fp8", "compressed-tensors 8-bit float weights and activations", 0.05),
}
fixtures = pytest.mark.parametrize("name", TAKEN)
GPTQ, INT8, COMPRESSED = "gptq-4bit-g32", "bnb-int8", "ct-pack-w4a16-g32"
LAYERS = 7  # linear layers of a fixture


@torch.no_grad()
def logits(model: Any, name: str) -> Tensor:
    found: Tensor = model(expected(name)["input_ids"]).logits[0]
    return found


def sites(model: Any) -> dict[str, Any]:
    return {site.path: site for site in model.accelpatch.report().sites}


@fixtures
def test_it_runs_as_its_library_would_and_comes_back(name: str) -> None:
    model, (replacer, words, apart) = model_of(name), TAKEN[name]
    before = state(model)
    accelpatch.patch(model, "exact")
    site, report = sites(model)[K_PROJ], model.accelpatch.report()
    assert (site.replacer, site.stored, site.role) == (replacer, words, "k_proj")
    assert report.verification.failures == []
    assert site.kernel_error is not None
    assert site.kernel_error <= site.kernel_bound
    assert site.format_error is not None
    assert site.format_error < 0.05
    torch.testing.assert_close(logits(model, name), expected(name)["logits"], rtol=0, atol=apart)
    accelpatch.unpatch(model)
    assert state(model) == before


@fixtures
def test_codes_are_never_rounded_again(name: str) -> None:
    model = model_of(name)
    due = floats_of(model.get_submodule(K_PROJ))
    accelpatch.patch(model, "int8", verify=False)
    weight = torch.as_tensor(model.get_submodule(K_PROJ).weight)
    torch.testing.assert_close(weight, due, rtol=2e-7, atol=0)


@pytest.mark.parametrize("recipe", ["exact", "int8", "int4", "fp8", "smoothquant"])
def test_any_recipe_takes_a_weight_over_in_its_own_format(recipe: str) -> None:
    plan = accelpatch.plan(model_of(GPTQ), recipe)
    rows = [line for line in str(plan).splitlines() if line.startswith("model.") and "_proj" in line]
    assert len(rows) == LAYERS
    assert all("int4_weight_only (GPTQ 4 bits, groups of 32: as stored)" in row for row in rows)
    assert not plan.calibrates


def test_the_rest_is_patched_as_ever() -> None:
    model = model_of(INT8)
    accelpatch.patch(model, "int8")
    kinds = {site.path: site.replacer for site in sites(model).values()}
    assert kinds["model.norm"] == "rmsnorm"
    assert kinds["model.rotary_emb"] == "rotary_embedding"
    assert kinds["model.layers.0.mlp"] == "gated_mlp"
    assert kinds["lm_head"] == "int8_weight_only"
    assert sites(model)["model.layers.0"].fused
    assert model.generate(expected(INT8)["input_ids"], max_new_tokens=4, do_sample=False).shape == (1, 12)


def test_half_of_a_model_may_be_float() -> None:
    model = model_of(GPTQ, plain=("k_proj", "down_proj"))
    accelpatch.patch(model, "int8")
    found = sites(model)
    assert (found[K_PROJ].replacer, found[K_PROJ].stored) == ("int8_weight_only", None)
    assert found["model.layers.0.self_attn.q_proj"].stored == "GPTQ 4 bits, groups of 32"
    assert model.accelpatch.report().verification.failures == []
    torch.testing.assert_close(logits(model, GPTQ), expected(GPTQ)["logits"], rtol=0, atol=0.1)


def test_smoothing_leaves_groups_with_a_stored_weight() -> None:
    plan = accelpatch.plan(model_of(GPTQ, plain=("k_proj", "gate_proj", "up_proj")), "smoothquant")
    kinds = {entry.site.path: entry.replacer.name for entry in plan.replaced if entry.replacer}
    assert kinds[K_PROJ] == "w8a8"
    assert [group.kind for group in plan.groups] == ["post_attention_layernorm -> gate_proj, up_proj"]
    assert "input_layernorm -> q_proj, k_proj, v_proj, of which a weight is quantised already" in str(plan)


def test_a_rule_that_keeps_it_keeps_it() -> None:
    text = "extends: int8\nrules:\n  - name: k\n    match: {role: k_proj}\n    replace: keep\n"
    model = model_of(INT8)
    original = model.get_submodule(K_PROJ)
    accelpatch.patch(model, parse(text))
    assert model.get_submodule(K_PROJ) is original
    assert sites(model)[K_PROJ].reason == "kept by the recipe"
    assert sites(model)["model.layers.0.self_attn.q_proj"].replacer == "int8_weight_only"


def test_without_the_originals_there_is_no_way_back() -> None:
    model = model_of(INT8)
    held = weakref.ref(model.get_submodule(K_PROJ))
    accelpatch.patch(model, "int8", keep_original="none")
    gc.collect()
    assert held() is None
    with pytest.raises(PatchError, match="the originals were freed"):
        accelpatch.unpatch(model)


@pytest.mark.parametrize("name", [GPTQ, INT8, "bnb-fp4-double", "ct-int-w8a8"])
def test_it_is_saved_as_ours(name: str, tmp_path: Path) -> None:
    model = model_of(name, plain=("v_proj",))
    accelpatch.patch(model, "int8")
    model.save_pretrained(tmp_path / "ours")
    again: Any = api.load(str(tmp_path / "ours"), dtype=torch.float32).model
    assert torch.equal(logits(again, name), logits(model, name))
    assert sites(again)[K_PROJ].replacer == TAKEN[name][0]
    assert sites(again)["model.layers.0.self_attn.v_proj"].replacer == "int8_weight_only"


def test_its_weight_cannot_be_written() -> None:
    model = model_of(GPTQ)
    accelpatch.patch(model, "int8", verify=False)
    module: Any = model.get_submodule(K_PROJ)
    before = logits(model, GPTQ)
    with pytest.raises(KernelError, match="GPTQ 4 bits, groups of 32 as stored"):
        module.weight.data.mul_(2)
    with pytest.raises(RuntimeError, match="as stored"):
        module.load_state_dict({"weight": torch.zeros(32, 64)})
    assert torch.equal(logits(model, GPTQ), before)
    accelpatch.unpatch(model)


def test_hooks_and_a_device_map_go_along() -> None:
    from accelerate import dispatch_model

    model = model_of(INT8)
    seen: list[int] = []
    model.get_submodule(K_PROJ).register_forward_hook(lambda *given: seen.append(1))
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    accelpatch.patch(model, "int8")
    seen.clear()
    logits(model, INT8)
    assert seen == [1]
    accelpatch.unpatch(model)
    logits(model, INT8)
    assert seen == [1, 1]
    torch.testing.assert_close(logits(model, INT8), expected(INT8)["logits"], rtol=0, atol=1e-5)


# --- modules whose own forward must not, or cannot, run


def test_a_hook_that_would_unpack_it_waits() -> None:
    model = model_of(COMPRESSED)
    hook = dict(model._forward_pre_hooks)
    accelpatch.patch(model, "int8")
    assert not model._forward_pre_hooks
    assert "compared by its formula: compressed-tensors 4 bits, groups of 32 (7 times)" in str(
        model.accelpatch.report()
    )
    accelpatch.unpatch(model)
    assert dict(model._forward_pre_hooks) == hook
    torch.testing.assert_close(logits(model, COMPRESSED), expected(COMPRESSED)["logits"], rtol=0, atol=1e-5)
    assert not model._forward_pre_hooks  # it has unpacked the originals


def test_a_hook_that_unpacks_all_does_not_go_with_a_part() -> None:
    model = model_of(COMPRESSED)
    text = "extends: int8\nrules:\n  - name: k\n    match: {role: k_proj}\n    replace: keep\n"
    before = state(model)
    with pytest.raises(PatchError, match=r"k_proj would stay \(kept by the recipe\)"):
        accelpatch.patch(model, parse(text))
    assert state(model) == before
    assert model._forward_pre_hooks


def test_a_failed_patch_gives_the_hook_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(COMPRESSED)
    before = state(model)

    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("accelpatch.pipeline.whole_model", fails)
    with pytest.raises(KeyboardInterrupt):
        accelpatch.patch(model, "int8")
    assert state(model) == before
    assert model._forward_pre_hooks
    assert "forward" in vars(model.get_submodule(K_PROJ))  # compressed-tensors' own


def test_an_own_forward_that_does_not_run_here_is_replaced_by_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: Any, x: Tensor) -> Tensor:
        raise RuntimeError("needs a GPU of another make")

    monkeypatch.setattr(Buffers, "forward", refuses)
    model = model_of(GPTQ)
    accelpatch.patch(model, "exact")
    said = "for its own kernel does not run here (RuntimeError: needs a GPU of another make)"
    assert said in str(model.accelpatch.report())
    assert model.accelpatch.report().verification.failures == []
    torch.testing.assert_close(logits(model, GPTQ), expected(GPTQ)["logits"], rtol=0, atol=1e-5)
    accelpatch.unpatch(model)
    assert "forward" not in vars(model.get_submodule(K_PROJ))


def test_a_wrong_reading_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.stored.TorchLinear.REQUIRES_FORMAT_V2", False)
    model = model_of("gptq-v2-4bit-g32-asym")
    for module in model.modules():
        if hasattr(module, "_qzeros_format"):
            module.format, module._qzeros_format = "gptq", 1  # zero points one off
    accelpatch.patch(model, "int8")
    assert len(model.accelpatch.report().verification.failures) >= LAYERS
    assert not isinstance(model.get_submodule(K_PROJ), QuantizedModule)


# --- parts


def test_a_float_layer_stands_for_it_without_its_librarys_tensors() -> None:
    module: Any = model_of(INT8).get_submodule(K_PROJ)
    new = like_float(module, 32, 64, torch.bfloat16, torch.device("cpu"))
    assert type(new) is nn.Linear
    assert (new.in_features, new.out_features, new.weight.numel()) == (64, 32, 0)
    assert new._forward_hooks is module._forward_hooks
    assert "state" not in vars(new)


def test_all_its_tensors_move_and_shared_ones_stay_shared() -> None:
    module: Any = model_of(INT8).get_submodule(K_PROJ)
    module(torch.zeros(1, 64))  # SCB goes to the state
    data, kept = module.weight.data_ptr(), module.state.SCB
    move_(module, "cpu")
    assert (module.weight.data_ptr(), module.state.SCB) == (data, kept)
    assert module.state.CB.data_ptr() == data


def test_reasons_call_one_module_of_each_kind() -> None:
    model, calls = model_of(INT8), []
    for module in model.modules():
        if isinstance(module, Linear8bitLt):
            module.register_forward_pre_hook(lambda *given: calls.append(given))
    plan = accelpatch.plan(model, "int8")
    assert formula.formula_reasons(formula.stored_sites(plan)) == {}
    assert calls == []  # without the user's hooks
    moved = [module for module in model.modules() if isinstance(module, Linear8bitLt) and module.weight.SCB is None]
    assert len(moved) == len({(m.out_features, m.in_features) for m in model.modules() if isinstance(m, Linear8bitLt)})
