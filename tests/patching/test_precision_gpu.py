"""On a GPU in 16 bits: whatever the random initialisation, no site is over its bound and the fused step is kept."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import accelpatch
from accelpatch.fusion.fused_model import FUSED

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
#: widths of Llama-2-7B and Llama-3-8B: (key heads, intermediate size)
WIDTHS = ((32, 11008), (8, 14336))


@pytest.mark.parametrize("recipe", ["exact", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ten_initialisations_lose_no_site(dtype: torch.dtype, recipe: str) -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        kv_heads, inner = WIDTHS[seed % 2]
        config = LlamaConfig(
            vocab_size=2000, hidden_size=4096, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=32,
            num_key_value_heads=kv_heads, eos_token_id=None,
        )  # fmt: skip
        with torch.device("cuda"):
            model = LlamaForCausalLM._from_config(config, dtype=dtype).eval()
        accelpatch.patch(model, recipe)
        assert model.accelpatch.report().verification.failures == []
        model.generate(torch.randint(2, 1000, (1, 9)).cuda(), max_new_tokens=4, min_new_tokens=4, do_sample=False)
        assert model.accelpatch.report().paths[FUSED] > 0
