"""What a plan for a GPU gives to the GPU's own kernels, and why not where not; a layout that follows the module."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from torch import nn

import accelpatch
from accelpatch.device import KNOWN, Device, probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.kernels.layouts.row_major import Int4Rows
from accelpatch.kernels.ops.linear import float_linear, int8_linear, tiled_int4_linear
from accelpatch.kernels.spec import Spec
from accelpatch.modules.quantized_linear import Int4WeightOnlyLinear, quantized
from accelpatch.modules.replacement import copy_with_parts
from accelpatch.patching.replacer import Choice, Reason
from accelpatch.patching.site import Site
from accelpatch.quant import int4
from accelpatch.replacers import registry
from tests.support.tiles import with_tiles
from tests.support.tiny import CAUSAL

H200, MI300X = KNOWN["sm_90"], KNOWN["gfx942"]
CPU, OLD = probe("cpu"), Device("cuda", "nvidia", "sm_75", "a T4", 1 << 34, 32)


def site(module: nn.Module, k: int = 256) -> Site:
    weight = module._parameters["weight"]
    assert weight is not None
    return Site("at", module, "q_proj", ("Linear",), 48, k, 2 * weight.numel(), dtype=str(weight.dtype)[6:])


def linear(k: int = 256, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    return nn.Linear(k, 48, bias=False, dtype=dtype)


@pytest.mark.parametrize("device", [H200, MI300X], ids=lambda device: device.arch)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gemv", "int8_weight_only", "int4_weight_only"])
def test_native_kernels_are_planned(name: str, dtype: torch.dtype, device: Device) -> None:
    choice = registry()[name].propose(site(linear(dtype=dtype)), {}, device)
    assert isinstance(choice, Choice)
    assert (choice.kernel, choice.note) == ("hip", "")


@pytest.mark.parametrize(
    "device, module, reason",
    [
        (CPU, linear(), "torch's own GEMM is used on a CPU"),
        (H200, linear(dtype=torch.float32), "bfloat16 or float16, not torch.float32"),
        (OLD, linear(), "sm_80 and later, not for sm_75"),
        (H200, nn.Embedding(48, 256, dtype=torch.bfloat16), "Embedding is not known to be a plain linear layer"),
    ],
    ids=["cpu", "float32", "sm_75", "table"],
)
def test_why_a_product_stays(device: Device, module: nn.Module, reason: str) -> None:
    answer = registry()["gemv"].propose(site(module), {}, device)
    assert isinstance(answer, Reason)
    assert reason in answer.text


def test_the_first_group_size_that_the_kernels_take() -> None:
    wanted = {"group_size": [128, 64, None]}
    found = {
        device.arch: registry()["int8_weight_only"].propose(site(linear()), wanted, device) for device in (CPU, H200)
    }
    assert found["sm_90"].detail["group_size"] == 256
    assert found[CPU.arch].detail["group_size"] == 128


def test_another_kernel_says_why() -> None:
    choice = registry()["int8_weight_only"].propose(site(linear()), {"group_size": 128}, H200)
    assert isinstance(choice, Choice)
    assert choice.kernel == "torch"
    assert "one scale a row (group_size null), not groups of 128" in choice.note


def spec(group: int, scale: torch.dtype = torch.float16, dtype: torch.dtype = torch.bfloat16, k: int = 3072) -> Spec:
    return tiled_int4_linear.of_shape(48, k, dtype, group, "minimum", scale)


@pytest.mark.parametrize(
    "asked, reason",
    [
        (spec(32), None),
        (spec(1024), None),
        (spec(3072), None),
        (spec(66, k=66), None),
        (spec(96), "32, 64, 128 times a power of two, or whole rows, not 96"),
        (spec(384), "not 384"),
        (spec(128, torch.float32), "scales are float16 or bfloat16, not torch.float32"),
        (spec(128, dtype=torch.float64), "bfloat16 or float16, not torch.float64"),
        (spec(1 << 27, k=1 << 27), "2^27 or more"),
    ],
    ids=["32", "1024", "row", "short-row", "96", "384", "wide-scales", "float64", "long"],
)
def test_tiles_or_why_not(asked: Spec, reason: str | None) -> None:
    assert str(reason) in str(tiled_int4_linear.why_not(asked, H200))
    assert tiled_int4_linear.why_not(asked, CPU) is not None


def test_sizes_out_of_range_and_a_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "2^31 or more" in str(float_linear.why_not(float_linear.of_shape(1 << 31, 64, torch.bfloat16), H200))
    asked = Spec("int8_linear", {"M": 1, "N": 8, "K": 64}, torch.bfloat16, torch.float32, 64)
    assert int8_linear.why_not(asked, MI300X) is None
    monkeypatch.setattr("accelpatch.kernels.compiling.targets.compilers", dict)
    for name in ("HIPCC", "ACCELPATCH_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    here = dataclasses.replace(MI300X, index=0)
    assert "no compiler for gfx942" in str(int8_linear.why_not(asked, here))
    assert dispatch.choose("int8_linear", asked, here) == "torch"


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that are not packed for a CPU hold what they would hold on a GPU."""
    with_tiles(monkeypatch)


def module(offset: str, k: int = 192) -> tuple[Int4WeightOnlyLinear, Int4Rows]:
    torch.manual_seed(1)
    original = nn.Linear(k, 37)
    weight = int4.quantize(original.weight, group_size=64, symmetric=offset == "none")
    if offset == "zero_point":
        weight = weight.replace(offset=torch.randint(0, 16, weight.scale.shape, dtype=torch.int8))
    return quantized(Int4WeightOnlyLinear, original, weight), weight


def equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    same = one.keys() == other.keys() and all(one[name].dtype == other[name].dtype for name in one)
    return same and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("offset", ["none", "minimum", "zero_point"])
def test_a_module_holds_tiles_and_gives_the_canonical_weight(offset: str) -> None:
    tiled, canonical = module(offset)
    assert isinstance(tiled.layout, Tiles)
    assert equal(tiled.canonical().tensors(), canonical.tensors())
    state = tiled.state_dict()
    assert equal({name: one for name, one in state.items() if name != "bias"}, canonical.tensors())
    again, _ = module(offset)
    again.load_state_dict({name: value.clone() for name, value in state.items()})
    assert isinstance(again.layout, Tiles)
    for one in (again, copy_with_parts(tiled, {}), tiled.to(torch.float16)):
        assert equal(one.canonical().tensors(), canonical.tensors())
    ran = dispatch.calls["tiled_int4_linear", "torch"]
    x = torch.randn(3, 192)
    due = dispatch.kernel("int4_linear").reference(x, *canonical.arguments(), again.bias)
    torch.testing.assert_close(again(x), due, rtol=1e-4, atol=1e-5)
    assert dispatch.calls["tiled_int4_linear", "torch"] == ran + 1


def test_a_module_that_moves_leaves_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    with_tiles(monkeypatch)
    tiled, canonical = module("minimum")
    with_tiles(monkeypatch, lambda rows, dtype: None)
    moved = tiled.to("meta")
    assert isinstance(moved.layout, Int4Rows)
    found, due = moved.layout.tensors(), canonical.tensors()
    assert {name: one.shape for name, one in found.items()} == {name: one.shape for name, one in due.items()}
    assert moved.layout.w.device.type == "meta"


def test_the_exact_recipe_on_a_cpu_says_why_its_products_stay() -> None:
    report = accelpatch.plan(CAUSAL["llama"].make(), "exact").report()
    reasons = {entry.reason for entry in report.sites if entry.role in ("q_proj", "head")}
    assert reasons == {"torch's own GEMM is used on a CPU"}


def test_the_exact_recipe_takes_a_head_with_its_tied_embedding() -> None:
    model = CAUSAL["qwen2"].make(torch.bfloat16)
    model.config.tie_word_embeddings = True
    model.lm_head.weight = model.model.embed_tokens.weight
    plan = accelpatch.plan(model, "exact", device=H200)
    [head] = [entry for entry in plan.replaced if entry.site.role == "head"]
    replacer, choice = head.replacer, head.choice
    assert replacer is not None
    assert choice is not None
    built = replacer.build(head.site, choice)
    table = replacer.build_tied(head.site, head.site.tied[0], built)
    assert isinstance(built, nn.Linear)
    assert isinstance(table, nn.Embedding)
    assert built.weight is table.weight is model.model.embed_tokens.weight
    assert table is not model.model.embed_tokens
