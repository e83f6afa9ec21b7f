"""As test_padding.py, on a GPU, where torch's attention gives tokens that see no key something else than zeros."""

from __future__ import annotations

import pytest
import torch

import accelpatch
from tests.support.tiny import CAUSAL, padded_batch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("recipe", ["exact", "flash", "int8"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt2"])
@torch.no_grad()
def test_every_place_on_a_gpu(name: str, recipe: str, implementation: str) -> None:
    sizes = {} if name == "gpt2" else {"hidden_size": 256, "intermediate_size": 512}
    plain, model = (CAUSAL[name].make(torch.bfloat16, **sizes).cuda() for _ in range(2))
    for one in (plain, model):
        one.set_attn_implementation(implementation)
    accelpatch.patch(model, recipe, verify=False)
    given = {key: one.cuda() for key, one in padded_batch().items()}
    found, due = (one(**given).logits.float() for one in (model, plain))
    for place in (given["attention_mask"] == 0, given["attention_mask"] == 1):
        assert (found - due)[place].norm() < 0.06 * due[place].norm()
