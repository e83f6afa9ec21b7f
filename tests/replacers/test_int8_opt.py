"""OPT in int8 from end to end: SmoothQuant's checkpoints beside its own arithmetic, float models, and bad input."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import StaticCache

import accelpatch
import accelpatch.models.load as loading
from accelpatch import api
from accelpatch.errors import LoadError
from accelpatch.kernels import dispatch
from accelpatch.modules.int8_opt import Int8OPTDecoderLayer, W8A8B8O8LinearReLU
from accelpatch.runtime.graphs.prefill import FUSED_PROMPT
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support import guide_opt
from tests.support.drafting import as_on_a_gpu
from tests.support.guide_opt import LAYERS, Tensors, float_opt, inputs

RECIPE = "smoothquant-opt"
LAYER = "model.decoder.layers.1"
GREEDY: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    model = float_opt()
    return guide_opt.checkpoint(model, inputs(8, 40))


def folder_of(path: Path, tensors: Tensors, **changes: Any) -> Path:
    return guide_opt.write(path / "int8", tensors, float_opt(**changes).config)


def same(one: Tensor, other: Tensor) -> None:
    """float32 apart from the order of additions; a rounding that falls on the other side would be seen."""
    torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-4)


def padded() -> tuple[Tensor, Tensor]:
    ids, mask = inputs(), torch.ones_like(inputs())
    mask[0, :6] = 0
    return ids, mask


@torch.no_grad()
def test_a_published_checkpoint_computes_what_its_own_classes_do(tensors: Tensors, tmp_path: Path) -> None:
    model: Any = api.load(str(folder_of(tmp_path, tensors))).model
    ran = dispatch.calls["int8_attention", "torch"]
    ids, mask = padded()
    same(model(inputs()).logits, guide_opt.logits(tensors, inputs()))
    assert dispatch.calls["int8_attention", "torch"] == ran + LAYERS
    made = model(ids, attention_mask=mask).logits
    same(made[mask.bool()], guide_opt.logits(tensors, ids, mask)[mask.bool()])


@torch.no_grad()
def test_generated_tokens_are_those_of_its_own_classes(tensors: Tensors, tmp_path: Path) -> None:
    model: Any = api.load(str(folder_of(tmp_path, tensors))).model
    ids = inputs(1)
    for _ in range(GREEDY["max_new_tokens"]):
        ids = torch.cat([ids, guide_opt.logits(tensors, ids)[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(inputs(1), **GREEDY), ids)
    cache = model(inputs(1), use_cache=True)[1]
    assert cache.layers[0].keys.dtype == torch.int8


def test_captured_steps_and_prompts_give_the_stock_tokens(
    tensors: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on_a_gpu(monkeypatch)
    ids, mask = padded()
    model: Any = float_opt().to(torch.bfloat16)
    accelpatch.patch(model, RECIPE, statistics=api.calibrate(model, None, samples=2, length=32))
    due = model.generate(ids, attention_mask=mask, num_beams=1, **GREEDY, use_cache=False)
    made = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(made, due)
    paths = model.accelpatch.report().paths
    assert paths[CAPTURED] == GREEDY["max_new_tokens"] - 1
    assert paths[FUSED_PROMPT] == 1
    assert torch.equal(model.generate(inputs(1), **GREEDY), model.generate(inputs(1), **GREEDY, use_cache=False))


@pytest.mark.parametrize("change", ["flat biases", "half factors", "a head of its own"])
def test_other_forms_of_the_same_tensors_load(change: str, tensors: Tensors, tmp_path: Path) -> None:
    given = dict(tensors)
    for name, tensor in tensors.items():
        if change == "flat biases" and name.endswith(".bias"):
            given[name] = tensor.view(-1)
        if change == "half factors" and name.endswith((".a", ".b")):
            given[name] = tensor.half()
    if change == "a head of its own":
        given["lm_head.weight"] = tensors["model.decoder.embed_tokens.weight"].clone()
    model: Any = api.load(str(folder_of(tmp_path, given))).model
    assert sum(isinstance(one, Int8OPTDecoderLayer) for one in model.modules()) == LAYERS


BAD: dict[str, tuple[str, Any, str]] = {
    "zero": (f"{LAYER}.fc1.a", torch.tensor(0.0), "fc1.a is 0.0"),
    "negative": (f"{LAYER}.fc2.a", torch.tensor(-1.0), "fc2.a is -1.0"),
    "nan": (f"{LAYER}.self_attn.qk_bmm.a", torch.tensor(float("nan")), "self_attn.qk_bmm.a is nan"),
    "inf": (f"{LAYER}.self_attn.q_proj.b", torch.tensor(float("inf")), "self_attn.q_proj.b is inf"),
    "norm": (f"{LAYER}.final_layer_norm.bias", torch.full((64,), float("nan")), "final_layer_norm.bias has NaN"),
    "missing-factor": (f"{LAYER}.self_attn.pv_bmm.a", None, "self_attn.pv_bmm.a is missing"),
    "missing-weight": (f"{LAYER}.fc2.weight", None, "fc2.weight is missing"),
    "missing-embedding": ("model.decoder.embed_positions.weight", None, "lacks model.decoder.embed_positions.weight"),
    "of-another-version": (f"{LAYER}.fc2.b", torch.tensor(1.0), "fc2.b is not in the layout"),
    "int32-bias": (f"{LAYER}.fc1.bias", torch.zeros(1, 256, dtype=torch.int32), "fc1.bias is torch.int32"),
    "float-weight": (f"{LAYER}.fc1.weight", torch.zeros(256, 64), "fc1.weight is torch.float32"),
    "narrow": (f"{LAYER}.self_attn.k_proj.weight", torch.zeros(32, 64, dtype=torch.int8), "k_proj.weight is [32, 64]"),
    "factors": (f"{LAYER}.fc1.a", torch.ones(2), "fc1.a is [2]"),
}


@pytest.mark.parametrize("name, value, message", BAD.values(), ids=BAD.keys())
def test_bad_tensors_are_named(name: str, value: Any, message: str, tensors: Tensors, tmp_path: Path) -> None:
    given = {key: tensor for key, tensor in tensors.items() if key != name} | ({} if value is None else {name: value})
    with pytest.raises(LoadError) as caught:
        api.load(str(folder_of(tmp_path, given)))
    assert message in str(caught.value)
    assert LAYER in str(caught.value) or "embed" in name


@pytest.mark.parametrize("heads, width", [(3, 64), (8, 128)], ids=["no-divisor", "other-width"])
def test_a_configuration_of_another_model_is_refused(heads: int, width: int, tensors: Tensors, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, tensors)
    facts = json.loads((folder / "config.json").read_text())
    facts |= {"num_attention_heads": heads, "hidden_size": width, "word_embed_proj_dim": width}
    (folder / "config.json").write_text(json.dumps(facts))
    with pytest.raises(LoadError):
        api.load(str(folder))


def test_it_needs_no_recipe_and_takes_none(tensors: Tensors, tmp_path: Path) -> None:
    folder = str(folder_of(tmp_path, tensors))
    assert api.is_patched(folder)
    with pytest.raises(LoadError, match="has its recipe"):
        api.load(folder, "int8")


class TestFromFloat:
    def test_near_the_original_and_undone_bit_for_bit(self) -> None:
        model, ids = float_opt(), inputs()
        before, due = {name: one.clone() for name, one in model.state_dict().items()}, model(ids).logits
        accelpatch.patch(model, RECIPE)
        report = model.accelpatch.report()
        assert sum(site.replacer == "int8_opt" for site in report.sites) == LAYERS
        assert "smoothed together: fc1 -> fc2 (3 times)" in report.notes
        apart = (model(ids).logits - due).norm() / due.norm()
        assert 0 < apart < 0.04
        assert len(model(ids, output_hidden_states=True).hidden_states) == LAYERS + 1
        accelpatch.unpatch(model)
        after = model.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(after[name], one) for name, one in before.items())

    def test_what_is_saved_is_the_published_layout_and_comes_back(self, tmp_path: Path) -> None:
        model, ids = float_opt(), inputs()
        accelpatch.patch(model, RECIPE)
        due = model(ids).logits
        model.save_pretrained(tmp_path / "saved")
        assert torch.equal(api.load(str(tmp_path / "saved")).model(ids).logits, due)
        facts = json.loads((tmp_path / "saved/config.json").read_text())
        del facts["quantization_config"]
        (tmp_path / "saved/config.json").write_text(json.dumps(facts))
        assert torch.equal(api.load(str(tmp_path / "saved")).model(ids).logits, due)  # as others' checkpoints are

    def test_casts_and_moves_keep_the_scales(self) -> None:
        model = accelpatch.patch(float_opt(), RECIPE)
        layer: Any = model.model.decoder.layers[0]
        a, weight = layer.fc1.a.clone(), layer.self_attn.q_proj.weight
        model.half().to(torch.float32)
        assert torch.equal(layer.fc1.a, a)
        assert layer.fc1.a.dtype == torch.float32
        assert layer.self_attn.q_proj.weight.data_ptr() == layer.self_attn.qkv.data_ptr()
        assert torch.equal(layer.self_attn.q_proj.weight, weight)

    def test_its_own_state_dict_is_taken_and_another_refused(self) -> None:
        model, other, ids = (accelpatch.patch(float_opt(seed), RECIPE) for seed in (0, 1)), float_opt(1), inputs()
        one, two = model
        due = one(ids).logits
        one.load_state_dict(one.state_dict())
        assert torch.equal(one(ids).logits, due)
        for given in (two, other):
            with pytest.raises(RuntimeError, match="unpatch first"):
                one.load_state_dict(given.state_dict(), strict=False)

    def test_copies_of_the_model_and_of_a_part_compute_the_same(self) -> None:
        model, ids = accelpatch.patch(float_opt(), RECIPE), inputs()
        due = model(ids).logits
        assert torch.equal(copy.deepcopy(model)(ids).logits, due)
        layers: Any = model.model.decoder.layers
        layers[0] = copy.deepcopy(layers[0])
        assert torch.equal(model(ids).logits, due)

    @pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "all-ones"])
    @torch.no_grad()
    def test_a_static_cache_in_two_chunks(self, masked: bool) -> None:
        model, ids = accelpatch.patch(float_opt(), RECIPE), inputs()
        due, cache = model(ids).logits, StaticCache(config=model.config, max_cache_len=40)
        masks = [torch.ones(2, end, dtype=torch.int64) if masked else None for end in (11, 19)]
        one = model(ids[:, :11], past_key_values=cache, attention_mask=masks[0]).logits
        two = model(ids[:, 11:], past_key_values=cache, attention_mask=masks[1]).logits
        same(torch.cat([one, two], 1), due)

    def test_a_cast_while_patched_is_the_originals_too(self) -> None:
        model = accelpatch.patch(float_opt(), RECIPE)
        accelpatch.unpatch(model.half())
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}

    def test_other_attention_implementations_are_refused(self) -> None:
        model = accelpatch.patch(float_opt(), RECIPE)
        model.set_attn_implementation("flex_attention")
        with pytest.raises(accelpatch.errors.KernelError, match="not of flex_attention"):
            model(inputs())
        plan = accelpatch.plan(float_opt(attn_implementation="flex_attention"), RECIPE)
        assert plan.report().replaced == 0 or all(entry.site.role != "layer" for entry in plan.replaced)

    def test_a_hook_inside_sees_the_parts(self) -> None:
        model = accelpatch.patch(float_opt(), RECIPE)
        due, seen = model(inputs()).logits, list[Any]()
        layer: Any = model.model.decoder.layers[0]
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        assert torch.equal(model(inputs()).logits, due)
        assert seen == [torch.int8]
        accelpatch.unpatch(model)(inputs())
        assert seen == [torch.int8, torch.float32]

    def test_the_plan_counts_every_byte(self) -> None:
        plan = api.plan_from_config("opt-13b", RECIPE, arch="sm_90")
        before, after = plan.report().resident_bytes
        assert 0.5 < after / before < 0.55
        assert before == sum(p.nbytes for p in loading.from_config("opt-13b").parameters())

    @pytest.mark.parametrize("changes, reason", [
        ({"activation_function": "gelu"}, "its activation is"),
        ({"do_layer_norm_before": False}, "its norms are behind"),
    ], ids=["gelu", "norms-behind"])  # fmt: skip
    def test_other_forms_stay_with_a_reason(self, changes: dict[str, Any], reason: str) -> None:
        plan = accelpatch.plan(float_opt(**changes), RECIPE)
        first = next(entry for entry in plan.entries if entry.site.role == "layer")
        assert str(first.reason).startswith(reason)

    def test_no_gradient_is_lost_in_silence(self) -> None:
        model = accelpatch.patch(float_opt(), RECIPE)
        model.model.decoder.embed_tokens.weight.requires_grad_(True)
        with pytest.raises(accelpatch.errors.KernelError):
            model(inputs()).logits.sum().backward()

    def test_adapters_find_no_linear_layer_inside(self) -> None:
        model = accelpatch.patch(float_opt(), RECIPE)
        inside = [one for one in model.model.decoder.layers.modules() if isinstance(one, nn.Linear)]
        assert inside == []
        assert isinstance(model.model.decoder.layers[0].fc1, W8A8B8O8LinearReLU)
