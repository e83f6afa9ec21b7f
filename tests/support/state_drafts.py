"""Tiny models whose drafts are made from hidden states: a checkpoint with MTP heads, and a DFlash assistant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

LAYERS = 2
_SIZES = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_shared_experts": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_group": 1, "topk_group": 1, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_PARTS = ("gate_proj", "up_proj", "down_proj")


def write_mtp_heads(folder: Path, heads: int) -> None:
    """A checkpoint of DeepSeek V3 with so many MTP heads. Its next token hangs on the last one almost alone, and so do
    theirs: the heads are often right."""
    from transformers.modeling_layers import MtpModel

    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**_SIZES, first_k_dense_replace=LAYERS, num_mtp_layers=heads)
    config._experts_implementation = "eager"
    model: Any = transformers.DeepseekV3ForCausalLM(config).eval()
    _weaken(model.model.layers)
    model.save_pretrained(folder)
    made = MtpModel(model, heads)
    made.apply(model._init_weights)  # routers and experts are made of memory as it is
    _weaken([layer.mtp_block for layer in made.layers])
    with torch.no_grad():
        for layer in made.layers:
            layer.eh_proj.weight.copy_(torch.eye(64, 128))  # the embedding alone
    weights = load_file(folder / "model.safetensors")
    for name, tensor in made.state_dict().items():
        if name.startswith("layers."):
            weights.update(_stored(name, tensor))
    save_file(
        {name: one.contiguous().clone() for name, one in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


def with_mtp_heads(folder: Path, heads: int) -> Any:
    """The model of such a checkpoint."""
    patterns = {rf"model\.layers\.{LAYERS + head}\." for head in range(heads)}
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    loaded._keys_to_ignore_on_load_unexpected = patterns
    return loaded


def _weaken(layers: Any) -> None:
    """What layers add to their input is little."""
    with torch.no_grad():
        for layer in layers:
            for name, parameter in layer.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                    parameter.mul_(0.02)


def _stored(name: str, tensor: Any) -> dict[str, Any]:
    """A weight of the heads as DeepSeek's checkpoints name it."""
    _, head, rest = name.split(".", 2)
    prefix, rest = f"model.layers.{LAYERS + int(head)}.", rest.removeprefix("mtp_block.")
    if rest == "post_norm.weight":
        return {f"{prefix}shared_head.norm.weight": tensor}
    if rest == "mlp.experts.gate_up_proj":
        halves = [one.chunk(2) for one in tensor]
        return {f"{prefix}mlp.experts.{place}.{part}.weight": one
                for place, both in enumerate(halves) for part, one in zip(_PARTS, both, strict=False)}  # fmt: skip
    if rest == "mlp.experts.down_proj":
        return {f"{prefix}mlp.experts.{place}.down_proj.weight": one for place, one in enumerate(tensor)}
    return {prefix + rest: tensor}


def dflash_assistant(config: Any, block: int = 6) -> Any:
    """An assistant for a target of this configuration, which reads the outputs of its first layer and of its last."""
    sizes = {"hidden_size": config.hidden_size, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": config.vocab_size}  # fmt: skip
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "mask_token_id": 3}
    last = config.num_hidden_layers - 1
    made = transformers.MuseGlimmerAssistantConfig(
        **sizes, **ids, block_size=block, target_layer_ids=[0, last], sliding_window=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.MuseGlimmerAssistantModel(made).eval()
    return model
