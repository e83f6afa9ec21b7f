"""Tiny seeded models of many families, made from configurations alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY, HIDDEN, INNER, LAYERS = 160, 64, 96, 2

_ROPE = {"max_position_embeddings": 128, "tie_word_embeddings": False}
_BASE = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_LLAMA = _BASE | _ROPE | {"intermediate_size": INNER, "num_key_value_heads": 2}
_HEADS = _LLAMA | {"head_dim": 16}
_MOE = _HEADS | {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT = {
    "vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
# q, k, v, o and gate, up, down of each layer, all norms around them
_GATED = {"q_proj": 2, "k_proj": 2, "v_proj": 2, "o_proj": 2, "gate_proj": 2, "up_proj": 2, "down_proj": 2}
_FUSED = {"qkv_proj": 2, "o_proj": 2, "fc1": 2, "fc2": 2}


@dataclass(frozen=True)
class Tiny:
    """prefix: of `{prefix}Config` and of the model's class. linears: roles of the inner linear layers -> how many.

    fused: replacements by the recipe `exact`, replacer -> how many. experts: modules with 3-D weights.
    """

    prefix: str
    config: Mapping[str, Any]
    linears: Mapping[str, int]
    fused: Mapping[str, int] = field(default_factory=dict)
    experts: int = 0
    tied: bool = False
    suffix: str = "ForCausalLM"

    def make(self, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
        """The model in evaluation mode, always the same weights for the same configuration."""
        return make(self.prefix, dtype, suffix=self.suffix, **{**self.config, **changes})


def make(prefix: str, dtype: torch.dtype = torch.float32, *, suffix: str = "ForCausalLM", **config: Any) -> nn.Module:
    """`{prefix}{suffix}` with seeded weights, none of them zero: a bias that is dropped or a norm's weight counts."""
    torch.manual_seed(0)
    family = prefix.removesuffix("Text")
    model = getattr(transformers, f"{family}{suffix}")(getattr(transformers, f"{prefix}Config")(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            width = 0.2 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.mul_(0 if parameter.dim() > 1 else 1).add_(width * torch.randn_like(parameter))
    return model.to(dtype).eval()


def norms(norm: int, layer: int = 0, rotary: int = 1, mlp: int = LAYERS) -> dict[str, int]:
    """What `exact` replaces in a model with so many known norms and layers."""
    found = {"rmsnorm": norm, "fused_layer": layer, "rotary_embedding": rotary, "gated_mlp": mlp}
    return {name: count for name, count in found.items() if count}


_SLIDING = {"sliding_window": 5}
_LAYER_TYPES = {"layer_types": ["sliding_attention", "full_attention"]}
_MULTIPLIERS = {"residual_multiplier": 0.3, "embedding_multiplier": 5.0, "attention_multiplier": 0.2,
                "logits_scaling": 2.0}  # fmt: skip
_HALF = {"partial_rotary_factor": 0.5, "attention_bias": True}
_GATE_UP = {"q_proj": 2, "k_proj": 2, "v_proj": 2, "o_proj": 2, "gate_up_proj": 2, "down_proj": 2}
_TIED = {"tie_word_embeddings": True}
_BLOOM = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": 4, "pad_token_id": 0,
          "bos_token_id": 1, "eos_token_id": None}  # fmt: skip
_PLAIN = {"fc1": 2, "fc2": 2}
_QUARTER = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.25}}
_ATTENTION = {"q_proj": 2, "k_proj": 2, "v_proj": 2, "o_proj": 2}

CAUSAL: Mapping[str, Tiny] = {
    "llama": Tiny("Llama", _LLAMA | _TIED, _GATED, norms(5, 2), tied=True),
    "mistral": Tiny("Mistral", _LLAMA | _SLIDING, _GATED, norms(5, 2)),
    "qwen2": Tiny("Qwen2", _LLAMA, _GATED, norms(5, 2)),
    "qwen3": Tiny("Qwen3", _HEADS, _GATED, norms(9, 2)),
    "gemma2": Tiny("Gemma2", _HEADS | _SLIDING | _TIED, _GATED, norms(9, 2), tied=True),
    "gemma3": Tiny(
        "Gemma3Text",
        _HEADS | _SLIDING | _TIED | _LAYER_TYPES,
        _GATED,
        norms(13, 2),
        tied=True,
        suffix="ForCausalLM",
    ),
    "gemma": Tiny("Gemma", _HEADS | _TIED, _GATED, norms(5, 2), tied=True),
    "ministral": Tiny("Ministral", _HEADS | _SLIDING | _LAYER_TYPES, _GATED, norms(5, 2)),
    "smollm3": Tiny("SmolLM3", _LLAMA | {"no_rope_layers": [1, 0]}, _GATED, norms(5, 2)),
    "granite": Tiny("Granite", _LLAMA | _MULTIPLIERS, _GATED, norms(5, 2)),
    "helium": Tiny("Helium", _HEADS, _GATED, norms(5, 2)),
    "ernie4_5": Tiny("Ernie4_5", _HEADS, _GATED, norms(5, 2, rotary=0)),
    "olmo2": Tiny("Olmo2", _LLAMA, _GATED, norms(9, 2, rotary=0)),
    "glm": Tiny("Glm", _HEADS | _HALF, _GATE_UP, norms(5, 2)),
    "glm4": Tiny("Glm4", _HEADS | _HALF, _GATE_UP, norms(9, 2)),
    "stablelm": Tiny("StableLm", _LLAMA | {"use_qkv_bias": True}, _GATED, norms(0, 2)),
    "cohere": Tiny("Cohere", _LLAMA | _TIED | {"logit_scale": 0.3}, _GATED, norms(0, 2, rotary=0), tied=True),
    "cohere2": Tiny(
        "Cohere2",
        _HEADS | _SLIDING | _LAYER_TYPES | {"logit_scale": 0.3, "attention_bias": True},
        _GATED,
        norms(0, 2, rotary=0),
    ),
    "phi3": Tiny("Phi3", _LLAMA, {"qkv_proj": 2, "o_proj": 2, "gate_up_proj": 2, "down_proj": 2}, norms(5, 2)),
    "opt": Tiny(
        "OPT",
        _BASE | {"ffn_dim": INNER, "max_position_embeddings": 128, "word_embed_proj_dim": 32},
        _ATTENTION | _PLAIN | {"linear": 2},
        norms(0, 2, rotary=0, mlp=0),
        tied=True,
    ),
    "gpt2": Tiny("GPT2", _GPT, _FUSED, norms(0, 2, rotary=0, mlp=0), tied=True, suffix="LMHeadModel"),
    "gpt_neox": Tiny("GPTNeoX", _BASE | _ROPE | _QUARTER | {"intermediate_size": INNER}, _FUSED, norms(0, 2, mlp=0)),
    "phi": Tiny("Phi", _LLAMA, _ATTENTION | _PLAIN, norms(0, 2, mlp=0)),
    "starcoder2": Tiny("Starcoder2", _LLAMA | _SLIDING, _ATTENTION | _PLAIN, norms(0, 2, mlp=0)),
    "bloom": Tiny("Bloom", _BLOOM, _FUSED, tied=True),
    "falcon": Tiny("Falcon", _BASE | {"ffn_hidden_size": INNER}, _FUSED, norms(0, mlp=0), tied=True),
    "mixtral": Tiny(
        "Mixtral",
        _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
        _ATTENTION,
        norms(5, 2, mlp=0),
        experts=2,
    ),
    "qwen3_moe": Tiny(
        "Qwen3Moe",
        _MOE | {"num_experts": 4, "mlp_only_layers": [1]},
        _ATTENTION | {"gate_proj": 1, "up_proj": 1, "down_proj": 1},
        norms(9, 2, mlp=1),
        experts=1,
    ),
    # of no family in the table: class rules alone
    "gptj": Tiny("GPTJ", _GPT | {"rotary_dim": 8, "tie_word_embeddings": False}, {"linear": 12}),
    "gpt_bigcode": Tiny("GPTBigCode", _GPT, {"linear": 8}, tied=True),
}

#: models with experts: those above, and others whose layers are not fused
EXPERTS: Mapping[str, Tiny] = {
    "mixtral": CAUSAL["mixtral"],
    "qwen3_moe": CAUSAL["qwen3_moe"],
    "olmoe": Tiny("Olmoe", _LLAMA | {"num_experts": 4, "num_experts_per_tok": 2}, _ATTENTION, experts=2),
    "gpt_oss": Tiny(
        "GptOss",
        _HEADS | _LAYER_TYPES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        _ATTENTION,
        experts=2,
    ),
    "deepseek_v3": Tiny(
        "DeepseekV3",
        _LLAMA
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16}
        | {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16},
        {"gate_proj": 2, "up_proj": 2, "down_proj": 2},
        experts=1,
    ),
}


def full_batch(length: int = 9) -> dict[str, Tensor]:
    """Three prompts of one length: input_ids[3, length] and a mask of ones."""
    ids = torch.randint(2, VOCABULARY, (3, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def padded_batch(length: int = 9) -> dict[str, Tensor]:
    """The same, the second prompt shorter and padded on the left."""
    batch = full_batch(length)
    for tensor in batch.values():
        tensor[1, :4] = 0
    return batch


def unique_bytes(model: nn.Module) -> int:
    """Bytes of the model's parameters, each once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def snapshot(model: nn.Module, places: bool = True) -> dict[str, Any]:
    """All that a patch could change: module identities, classes, instance attributes, hooks, and weights by value.

    places: where weights lie too; those that fused layers concatenated stay so after a patch, with the same bits.
    """
    facts: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        hooks = [key for table, value in vars(module).items() if table.endswith("_hooks") and value for key in value]
        facts[f"{path}:module"] = (id(module), type(module), tuple(sorted(vars(module))), tuple(hooks))
        facts[f"{path}:children"] = tuple((name, id(child)) for name, child in module._modules.items())
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        facts[name] = (
            id(tensor),
            tensor.data_ptr() if places else 0,
            tensor.dtype,
            tensor.requires_grad,
            _bits(tensor),
        )
    facts["state_dict"] = tuple(model.state_dict())
    return facts


def _bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def duplicate(model: nn.Module) -> nn.Module:
    """A copy that shares nothing."""
    return copy.deepcopy(model)
