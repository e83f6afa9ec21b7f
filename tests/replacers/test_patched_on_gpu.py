"""A model on the GPU that is here: patched by each recipe, through the HIP kernels, moved, and given back."""

from __future__ import annotations

import pytest
import torch

import accelpatch
from accelpatch.kernels import dispatch
from accelpatch.kernels.layouts.int4_tiles import Tiles
from accelpatch.modules.quantized_linear import Int4WeightOnlyLinear
from tests.support.tiny import CAUSAL, VOCABULARY

HERE = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a GPU that torch can use")]
OPS = {"exact": {"float_linear"}, "int8": {"int8_linear"}, "int4": {"int8_linear", "tiled_int4_linear"}}
FUSED = {"fused_linear", "decode_attention"}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", OPS)
def test_every_product_runs_on_the_kernels(recipe: str, dtype: torch.dtype) -> None:
    model = CAUSAL["llama"].make(dtype, **SIZES).cuda()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    ran = dispatch.calls.copy()
    accelpatch.patch(model, recipe)
    report = model.accelpatch.report()
    assert report.verification.failures == []
    products = [site for site in report.sites if site.replacer in ("gemv", "int8_weight_only", "int4_weight_only")]
    assert (len(products), {site.kernel for site in products}) == (15, {"hip"})
    ids = torch.randint(2, VOCABULARY, (1, 9), device="cuda")
    answer = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert answer.shape == (1, 17)
    assert {op for op, name in dispatch.calls - ran if name == "hip"} == OPS[recipe] | FUSED
    accelpatch.unpatch(model)
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_int4_moves_to_the_cpu_and_back_bit_for_bit() -> None:
    model = CAUSAL["llama"].make(torch.bfloat16, **SIZES).cuda()
    accelpatch.patch(model, "int4", verify=False)
    layer = model.model.layers[0].mlp.down_proj
    assert isinstance(layer, Int4WeightOnlyLinear)
    assert isinstance(layer.layout, Tiles)
    state = {key: value.cpu() for key, value in model.state_dict().items()}
    model.cpu()
    assert not isinstance(layer.layout, Tiles)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    model.cuda()
    assert isinstance(layer.layout, Tiles)
    assert all(torch.equal(value.cpu(), state[key]) for key, value in model.state_dict().items())
