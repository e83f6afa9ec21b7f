"""Layers that another library quantised, on a GPU: taken over, originals in host memory, and back on the GPU."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from accelpatch.patching.stored import move_, tensor_entries
from tests.support.stored import K_PROJ, expected, model_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
NAMES = (
    "gptq-4bit-g32", "gptq-4bit-g32-asym-actorder", "gptq-4bit-g128-bias", "gptq-8bit-channel", "awq-gemm-4bit-g32",
    "bnb-int8", "bnb-nf4-double", "bnb-fp4", "ct-pack-w4a16-g32-asym", "ct-int-w8a8",
)  # fmt: skip


def on_gpu(name: str) -> Any:
    """A fixture's model in bfloat16, all tensors of its libraries' modules moved too."""
    model = model_of(name, dtype=torch.bfloat16).to("cuda")
    for module in model.modules():
        if hasattr(module, "in_features"):
            move_(module, "cuda")
    return model


@torch.no_grad()
def logits(model: Any, name: str) -> Tensor:
    found: Tensor = model(expected(name)["input_ids"].cuda()).logits[0]
    return found.float().cpu()


def devices(module: Any, but: Any = None) -> set[str]:
    """Of a module's tensors; those that another holds too stay where it is."""
    shared = set() if but is None else {id(tensor) for _, _, tensor in tensor_entries(but)}
    return {tensor.device.type for _, _, tensor in tensor_entries(module) if id(tensor) not in shared}


@pytest.mark.parametrize("name", NAMES)
def test_it_runs_and_comes_back_to_the_gpu(name: str) -> None:
    model = on_gpu(name)
    original = model.get_submodule(K_PROJ)
    held = {
        id(tensor): tensor.clone()
        for _, _, tensor in tensor_entries(original)
        if isinstance(tensor, torch.nn.Parameter)
    }
    accelpatch.patch(model, "exact")
    assert model.accelpatch.report().verification.failures == []
    assert devices(original, model.get_submodule(K_PROJ)) <= {"cpu"}
    assert model.get_submodule(K_PROJ) is not original
    torch.testing.assert_close(logits(model, name), expected(name)["logits"], rtol=0, atol=0.15)
    ids = expected(name)["input_ids"].cuda()
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape == (1, ids.shape[1] + 4)
    accelpatch.unpatch(model)
    assert model.get_submodule(K_PROJ) is original
    assert devices(original) == {"cuda"}
    after = {id(tensor): tensor for _, _, tensor in tensor_entries(original)}
    assert all(torch.equal(after[key], tensor) for key, tensor in held.items())
    torch.testing.assert_close(logits(model, name), expected(name)["logits"], rtol=0, atol=0.15)


def test_a_patched_model_that_moved_is_unpatched_where_it_is() -> None:
    model = model_of("bnb-int8")
    accelpatch.patch(model, "exact")
    model.to("cuda")
    accelpatch.unpatch(model)
    original: Any = model.get_submodule(K_PROJ)
    assert devices(original) == {"cuda"}
    assert torch.isfinite(logits(model, "bnb-int8")).all()


@pytest.mark.parametrize("name", ["bnb-int8", "bnb-nf4-double", "gptq-4bit-g32", "awq-gemm-4bit-g32"])
def test_freed_originals_leave_their_memory(name: str) -> None:
    model = on_gpu(name)
    library = type(model.get_submodule(K_PROJ))
    originals = [module for module in model.modules() if isinstance(module, library)]
    layers = [weakref.ref(module) for module in originals]
    tensors = [weakref.ref(tensor) for module in originals for _, _, tensor in tensor_entries(module)]
    del originals
    accelpatch.patch(model, "exact", keep_original="none")
    gc.collect()
    assert [layer() for layer in layers] == [None] * 7
    # codes that serve as they are stay
    taken = {id(tensor) for module in model.modules() for _, _, tensor in tensor_entries(module)}
    assert all(tensor() is None or id(tensor()) in taken for tensor in tensors)
    assert devices(model.get_submodule(K_PROJ)) == {"cuda"}
    assert not any(isinstance(module, library) for module in model.modules())
