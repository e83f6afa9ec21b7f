"""A tiny gpt-oss with experts in MXFP4 as transformers stores them, and what transformers makes of it.

    python -m venv venv
    venv/bin/pip install torch==2.13.0 transformers==5.17.0 accelerate==1.15.0 safetensors==0.8.0
    venv/bin/python scripts/make_fixtures/make_gpt_oss.py

transformers quantises to MXFP4 on a GPU alone, so that the blocks and scales are random bytes here. The expected values
are of the folder as transformers loads it with Mxfp4Config(dequantize=True).
"""

from __future__ import annotations

import json
import shutil

import torch
import transformers
from safetensors.torch import save_file
from tiny_llama import FOREIGN, VOCABULARY, logits_of, save_expected
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config

NAME, SHOWN = "gpt-oss-mxfp4", "model.layers.0.mlp.experts.gate_up_proj"
CONFIG = GptOssConfig(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_local_experts=2,
    num_experts_per_tok=1, num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
    layer_types=["full_attention"], rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    tie_word_embeddings=False, pad_token_id=0, eos_token_id=2, dtype=torch.bfloat16,
)  # fmt: skip
FLOAT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def write() -> None:
    torch.manual_seed(0)
    tensors = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).state_dict()
    for name in [one for one in tensors if one.endswith(("gate_up_proj", "down_proj"))]:
        experts, k, n = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 125, (experts, n, k // 32), dtype=torch.uint8)
    for name in [one for one in tensors if one.endswith(("_bias", ".sinks"))]:
        tensors[name] = torch.randn_like(tensors[name]) / 8
    folder = FOREIGN / NAME
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    CONFIG.architectures = ["GptOssForCausalLM"]
    config = json.loads(CONFIG.to_json_string(use_diff=True))
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": FLOAT}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def expect() -> None:
    folder = FOREIGN / NAME
    config = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16).eval()
    torch.nn.Module.float(model)  # it is dequantised to bfloat16, exactly; the logits are of those weights in float32
    module, _, name = SHOWN.rpartition(".")
    made_by = {"transformers": transformers.__version__, "weights": "of expert 1, as transformers dequantises it"}
    shown = getattr(model.get_submodule(module), name).data[1].bfloat16()
    save_expected(folder, logits_of(model), {SHOWN: shown}, made_by)


if __name__ == "__main__":
    write()
    expect()
