"""What becomes of each key that a GGUF file has under its architecture's prefix, as data.

The names are those of gguf-py's constants and of llama.cpp's src/llama-arch.cpp; their meaning is that of docs/gguf.md
(https://github.com/ggml-org/ggml) and of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Key:
    """neutral: values with which the key changes nothing. of: architectures whose configuration holds it, whatever the
    value. attribute: its name there, set where it differs; "" where transformers has read it. read: whether it needs
    no such look: it changes nothing, or a function of its own reads it."""

    neutral: tuple[Any, ...] = (0, "", "none")  # 0 is 0.0 and false too
    of: str = ""
    attribute: str = ""
    read: bool = False


EXPERTS = "qwen2moe qwen3moe minimax-m2 gpt-oss gemma4 qwen35moe"
OWN = "qwen35 qwen35moe lfm2"  # architectures whose metadata transformers reads as a whole
HEADS = "llama qwen2 qwen2moe qwen3 qwen3moe gemma2 gemma3 phi3 nemotron minimax-m2 gpt-oss starcoder2"  # any width
OWN_HEADS = f"{OWN} gemma4 t5 umt5"  # architectures whose heads transformers reads
PARTIAL = "phi3 stablelm nemotron minimax-m2"  # architectures that rotate a part of each head
TIED = "falcon bloom"  # architectures that transformers ties though their files have an output.weight
OF_FAMILY = "gemma4"  # architectures whose own configuration says what rope_freqs holds

#: Sizes, which transformers reads and the tensors' shapes show, and what is of no bearing on a model's logits.
IRRELEVANT = (
    "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.value_length", "decoder_start_token_id", "decoder_block_count",
    "shortconv.l_cache", "ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank",
    "dense_2_feat_in", "dense_2_feat_out", "dense_3_feat_in", "dense_3_feat_out", "rope.scaling.finetuned",
    "name", "version", "description", "comment", "author", "license", "url",
)  # fmt: skip
#: Read by functions of gguf_metadata.py and gguf_rotary.py.
READ = (
    "attention.key_length", "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon",
    "attention.sliding_window_pattern", "rope.dimension_count", "rope.freq_base", "rope.freq_base_swa",
    "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length",
    "rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_log_multiplier",
)  # fmt: skip
#: Of architectures, or of parts of a model, that transformers makes of none of these files.
REFUSED = (
    "embedding_length_out", "features_length", "leading_dense_block_count", "expert_chunk_feed_forward_length",
    "expert_shared_count", "expert_group_scale", "experts_per_group", "moe_latent_size", "n_deepstack_layers",
    "deepstack_mapping", "hidden_activation", "router_logit_softcapping", "swin_norm", "rescale_every_n_layers",
    "time_mix_extra_dim", "time_decay_extra_dim", "token_shift_count", "activation_sparsity_scale", "altup.active_idx",
    "altup.num_inputs", "swiglu_clamp_exp", "swiglu_clamp_shexp", "attention.clamp_kqv", "attention.scale",
    "attention.group_norm_epsilon", "attention.group_norm_groups", "attention.q_lora_rank", "attention.kv_lora_rank",
    "attention.decay_lora_rank", "attention.iclr_lora_rank", "attention.value_residual_mix_lora_rank",
    "attention.gate_lora_rank", "attention.temperature_length", "attention.temperature_scale",
    "attention.key_length_mla", "attention.value_length_mla", "attention.indexer.head_count",
    "attention.indexer.key_length", "attention.indexer.top_k", "rope.scaling.alpha", "ssm.dt_b_c_rms", "kda.head_dim",
    "wkv.head_size", "posnet.embedding_length", "posnet.block_count", "convnext.embedding_length",
    "convnext.block_count", "classifier.output_labels",
)  # fmt: skip
SCALES = (
    "logit_scale", "residual_scale", "embedding_scale", "attention.output_scale", "attention.value_scale",
    "expert_weights_scale", "moe_every_n_layers", "interleave_moe_layer_step", "expert_group_count",
    "expert_group_used_count",
)  # fmt: skip
WHOLE = ("rope.dimension_sections", "full_attention_interval", "ssm.group_count", "nextn_predict_layers")
WINDOWED = ("rope.dimension_count_swa", "attention.key_length_swa", "attention.value_length_swa")
KEYS: Mapping[str, Key] = {
    **dict.fromkeys((*IRRELEVANT, *READ), Key(read=True)),
    **dict.fromkeys(REFUSED, Key()),
    **dict.fromkeys(SCALES, Key((0, 1))),
    **dict.fromkeys(WHOLE, Key(of=OWN)),
    **dict.fromkeys(WINDOWED, Key(of="gemma4")),
    "vocab_size": Key(of="starcoder2 gpt2", attribute="vocab_size", read=True),
    "expert_count": Key(of=EXPERTS),
    "expert_used_count": Key(of=EXPERTS, attribute="num_experts_per_tok"),
    "expert_feed_forward_length": Key(of=EXPERTS, attribute="moe_intermediate_size"),
    "expert_shared_feed_forward_length": Key(of="qwen2moe qwen35moe", attribute="shared_expert_intermediate_size"),
    "expert_weights_norm": Key(of="qwen2moe qwen3moe minimax-m2", attribute="norm_topk_prob"),
    "expert_gating_func": Key((0, 1), of="minimax-m2 gpt-oss"),  # 1: softmax
    "attn_logit_softcapping": Key(of="gemma2", attribute="attn_logit_softcapping"),
    "final_logit_softcapping": Key(of="gemma2 gemma3 gemma4", attribute="final_logit_softcapping"),
    "attention.sliding_window": Key(of="gemma2 gemma3 gemma4 phi3 gpt-oss", attribute="sliding_window"),
    "attention.shared_kv_layers": Key(of="gemma4", attribute="num_kv_shared_layers"),
    "embedding_length_per_layer_input": Key(of="gemma4", attribute="hidden_size_per_layer_input"),
    "attention.relative_buckets_count": Key(of="t5 umt5"),
    "attention.max_alibi_bias": Key(of="bloom"),
    "attention.causal": Key((1,)),
    "use_parallel_residual": Key(of="stablelm"),  # where the tensors show it
    "tensor_data_layout": Key(("", "reference", "Meta AI original pth"), of="falcon"),
    "pooling_type": Key((0, 1, 2, 3, 2**32 - 1)),  # what embeddings are made of; 4 is a classifier
}
#: Attributes that others are derived from when a configuration is made: they cannot be set afterwards.
OPTIONAL = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")  # None where a file says 0
DERIVED = ("num_kv_shared_layers", "hidden_size_per_layer_input")
EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # whose attention is scaled by another width, as llama.cpp knows them
