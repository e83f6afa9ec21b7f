"""Fused layers over weights that another library quantised, and AutoGPTQ's layers, which have names of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accelpatch
from accelpatch.device import KNOWN
from accelpatch.replacers.stored import stored_of
from tests.support import stored
from tests.support.stored import K_PROJ, Buffers, expected, fields, model_of

ORDERED = "gptq-4bit-g32-asym-actorder"
LAYER = "model.layers.0"


# compressed-tensors' scales are parameters in bfloat16 here, of a model in float32
@pytest.mark.parametrize("name", ["gptq-4bit-g32", ORDERED, "ct-pack-w4a16-g32", "ct-pack-w4a16-g32-actorder"])
@torch.no_grad()
def test_a_native_step_runs_as_planned(name: str) -> None:
    model, ids = model_of(name), expected(name)["input_ids"]
    planned = next(one for one in accelpatch.plan(model, "exact").replaced if one.site.path == LAYER)
    assert planned.choice is not None
    accelpatch.patch(model, "exact")
    made = next(site for site in model.accelpatch.report().sites if site.path == LAYER)
    assert (planned.choice.kernel, made.kernel, made.fused) == ("native step", "native step", True)
    found = model.generate(
        ids[:, :4], max_new_tokens=6, min_new_tokens=6, do_sample=False, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    steps, whole = torch.cat(found.logits), model(found.sequences).logits[0, 3:-1]
    torch.testing.assert_close(steps, whole, rtol=0, atol=1e-5)


class QuantLinear(Buffers):
    """AutoGPTQ's plain kernel: zero points less one, and no word of whether they are the middle."""

    QUANT_TYPE = "cuda"

    def hold(self, parts: stored.Parts, bits: int = 4, **_: Any) -> None:
        super().hold(parts)
        self.bits, self.infeatures, self.outfeatures = bits, self.in_features, self.out_features
        del self.in_features, self.out_features

    def floats(self) -> Tensor:
        more = 0x11111111 if self.bits == 4 else 0x01010101
        codes, zeros = fields(self.qweight.t(), self.bits).t(), fields(self.qzeros.long() + more, self.bits)
        group = self.g_idx.long()
        return (self.scales.float()[group] * (codes - zeros[group])).t()


@pytest.mark.parametrize("name", ["gptq-4bit-g32", ORDERED, "gptq-8bit-channel"])
@torch.no_grad()
def test_layers_of_autogptq(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stored.CLASSES, "gptq", QuantLinear)
    model, due = model_of(name), expected(name)
    accelpatch.patch(model, "exact")
    report = model.accelpatch.report()
    site = next(site for site in report.sites if site.path == K_PROJ)
    assert report.verification.failures == []
    assert site.replacer == ("int8_weight_only" if "8bit" in name else "int4_weight_only")
    torch.testing.assert_close(model(due["input_ids"]).logits[0], due["logits"], rtol=0, atol=1e-5)


def test_codes_that_autogptq_shuffled_in_their_place_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(stored.CLASSES, "gptq", QuantLinear)
    monkeypatch.setattr(QuantLinear, "QUANT_TYPE", "exllamav2")
    entry = next(one for one in accelpatch.plan(model_of(ORDERED), "exact").entries if one.site.path == K_PROJ)
    assert entry.replacer is None
    assert "in the packing of AutoGPTQ's exllamav2" in str(entry.reason)


@pytest.mark.parametrize("name", ["bnb-nf4", "bnb-fp4", "gptq-8bit-channel", ORDERED])
@pytest.mark.parametrize("arch", KNOWN)
def test_every_arch_has_a_plan(name: str, arch: str) -> None:
    plan = accelpatch.plan(model_of(name, dtype=torch.bfloat16), "exact", device=KNOWN[arch])
    kernels = {entry.site.path: str(entry.choice and entry.choice.kernel) for entry in plan.replaced if entry.as_stored}
    assert len(kernels) == 7


def test_long_blocks_are_planned_in_the_groups_that_they_become() -> None:
    model = model_of("bnb-nf4")
    module: Any = model.get_submodule(K_PROJ)
    module.in_features, module.out_features = 1024, 512
    weight: Any = nn.Parameter(torch.zeros(512 * 512, 1, dtype=torch.uint8), requires_grad=False)
    state = module.weight.quant_state
    state.blocksize, state.shape, state.absmax = 256, torch.Size((512, 1024)), torch.ones(512 * 1024 // 256)
    weight.quant_state, module.weight = state, weight
    found = stored_of(module)
    assert found is not None
    assert (found.format_name, found.options) == ("bitsandbytes nf4, blocks of 256", {"group_size": 64})
    assert found.weight(module).scale.shape == (512, 1024 // 64)
