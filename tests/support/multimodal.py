"""Tiny multimodal models, one of each family, and inputs for them: a picture or a sound with a short text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

TEXT: dict[str, Any] = {
    "vocab_size": 120, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
PICTURE, VIDEO, BEGIN, END, SOUND = 110, 111, 112, 113, 114  # ids
TOKENS = {"image_token_id": PICTURE, "image_token_index": PICTURE}


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _ids(batch: int, places: int, token: int = PICTURE, length: int = 9) -> Tensor:
    """Text [batch, length] of ordinary ids with `places` tokens of a picture behind the third."""
    text = torch.randint(5, 100, (batch, length), generator=_generator(batch))
    return torch.cat([text[:, :3], torch.full((batch, places), token), text[:, 3:]], dim=1)


def _pixels(batch: int, size: int = 16) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=_generator(3))


def _inputs(ids: Tensor, **more: Any) -> dict[str, Any]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


def _made(prefix: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> Any:
    config_class = getattr(transformers, f"{prefix}Config")
    config = config_class(text_config=text, **({"vision_config": vision} if vision else {}), **more)
    torch.manual_seed(0)
    return getattr(transformers, f"{prefix}ForConditionalGeneration")(config).eval()


def llava(prefix: str = "Llava", text: str = "llama") -> Any:
    tower = {"model_type": "clip_vision_model", "projection_dim": 32, **VISION}
    return _made(prefix, {"model_type": text, **TEXT}, tower, image_seq_length=16, **TOKENS)


def llava_next() -> Any:
    tower = {"model_type": "clip_vision_model", "projection_dim": 32, **VISION}
    grid = [[16, 32], [32, 16], [32, 32]]
    return _made("LlavaNext", {"model_type": "mistral", **TEXT}, tower, image_grid_pinpoints=grid, **TOKENS)


def llava_next_inputs(batch: int) -> dict[str, Any]:
    pixels = torch.randn(batch, 5, 3, 16, 16, generator=_generator(3))
    sizes = torch.tensor([[32, 32]] * batch)
    return _inputs(_ids(batch, 16 + 8 * 9), pixel_values=pixels, image_sizes=sizes)


def gemma3() -> Any:
    text = {"model_type": "gemma3_text", **TEXT, "sliding_window": 8, "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}  # fmt: skip
    return _made("Gemma3", text, {"model_type": "siglip_vision_model", **VISION}, mm_tokens_per_image=4,
                 boi_token_index=BEGIN, eoi_token_index=END, **TOKENS)  # fmt: skip


def gemma3_inputs(batch: int) -> dict[str, Any]:
    ids = _ids(batch, 4)
    return _inputs(ids, pixel_values=_pixels(batch), token_type_ids=(ids == PICTURE).long())


def idefics3(prefix: str = "Idefics3") -> Any:
    return _made(prefix, {"model_type": "llama", **TEXT}, VISION, scale_factor=2, **TOKENS)


def idefics3_inputs(batch: int) -> dict[str, Any]:
    pixels = _pixels(batch)[:, None]
    return _inputs(_ids(batch, 4), pixel_values=pixels, pixel_attention_mask=torch.ones(batch, 1, 16, 16).long())


def internvl() -> Any:
    vision = {**VISION, "image_size": [16, 16], "patch_size": [4, 4]}
    return _made("InternVL", {"model_type": "qwen2", **TEXT}, vision, image_seq_length=4, downsample_ratio=0.5,
                 **TOKENS)  # fmt: skip


def mistral3() -> Any:
    vision = {"model_type": "pixtral", **VISION, "head_dim": 8}
    return _made("Mistral3", {"model_type": "mistral", **TEXT}, vision, spatial_merge_size=2, **TOKENS)


def mistral3_inputs(batch: int) -> dict[str, Any]:
    return _inputs(_ids(batch, 4), pixel_values=_pixels(batch), image_sizes=torch.tensor([[16, 16]] * batch))


_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_QWEN_TOKENS = {"image_token_id": PICTURE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN,
                "vision_end_token_id": END}  # fmt: skip


def qwen_vl(prefix: str) -> Any:
    text = {**TEXT, "rope_parameters": dict(_SECTIONS)}
    vision: dict[str, Any] = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "in_channels": 3}
    if prefix == "Qwen2VL":
        vision |= {"hidden_size": 64, "embed_dim": 32, "mlp_ratio": 2}
    elif prefix == "Qwen2_5_VL":
        vision |= {"intermediate_size": 48, "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1]}
    else:
        text["rope_parameters"]["mrope_interleaved"] = True
        vision |= {"intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 16,
                   "deepstack_visual_indexes": [0, 1]}  # fmt: skip
    return _made(prefix, text, vision, **_QWEN_TOKENS)


def qwen_inputs(batch: int) -> dict[str, Any]:
    """A picture of 4 x 4 patches, of which 4 tokens are left, a row."""
    ids = _ids(batch, 6)
    ids[:, 3], ids[:, 8] = BEGIN, END
    pixels = torch.randn(batch * 16, 3 * 2 * 4 * 4, generator=_generator(3))
    grid = torch.tensor([[1, 4, 4]] * batch)
    return _inputs(ids, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=(ids == PICTURE).int())


def audio(prefix: str) -> Any:
    sound = {"num_mel_bins": 8, "max_source_positions": 16, "num_hidden_layers": 2, "intermediate_size": 64}
    if prefix == "Voxtral":
        heads = {"hidden_size": 32, "num_attention_heads": 4}
    else:
        heads = {"model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 2, "encoder_ffn_dim": 64,
                 "encoder_attention_heads": 4}  # fmt: skip
    kind = "qwen2" if prefix == "Qwen2Audio" else "llama"
    return _made(prefix, {"model_type": kind, **TEXT}, {}, audio_config={**sound, **heads},
                 **({"audio_token_id": SOUND} if prefix == "Voxtral" else {"audio_token_index": SOUND}))  # fmt: skip


def audio_inputs(batch: int, places: int, mask: bool) -> dict[str, Any]:
    features = torch.randn(batch, 8, 32, generator=_generator(3))
    more = {"feature_attention_mask": torch.ones(batch, 32).long()} if mask else {}
    return _inputs(_ids(batch, places, SOUND), input_features=features, **more)


def aya() -> Any:
    return _made("AyaVision", {"model_type": "cohere2", **TEXT}, {"model_type": "siglip_vision_model", **VISION},
                 downsample_factor=2, **TOKENS)  # fmt: skip


def onevision() -> Any:
    return _made("LlavaOnevision", {"model_type": "qwen2", **TEXT}, {"model_type": "siglip_vision_model", **VISION},
                 image_grid_pinpoints=[[16, 16]], vision_aspect_ratio="anyres_max_9", **TOKENS)  # fmt: skip


def onevision_inputs(batch: int) -> dict[str, Any]:
    pixels = torch.randn(batch, 2, 3, 16, 16, generator=_generator(3))
    return _inputs(_ids(batch, 16 + 4 * 5), pixel_values=pixels, image_sizes=torch.tensor([[16, 16]] * batch))


def paligemma(text: str = "gemma") -> Any:
    tower = {"model_type": "siglip_vision_model", "projection_dim": 64, **VISION}
    return _made("PaliGemma", {"model_type": text, **TEXT, "tie_word_embeddings": True, "query_pre_attn_scalar": 16},
                 tower, projection_dim=64, **TOKENS)  # fmt: skip


def paligemma_inputs(batch: int) -> dict[str, Any]:
    """All of it a prefix, whose tokens see each other."""
    ids = _ids(batch, 16)
    return _inputs(ids, pixel_values=_pixels(batch), token_type_ids=torch.zeros_like(ids))


def gemma4() -> Any:
    """As the small ones are: embeddings for each layer, a last layer that reads the keys of another, two head sizes."""
    text = {"model_type": "gemma4_text", **TEXT, "sliding_window": 8, "global_head_dim": 32, "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 120}  # fmt: skip
    vision = {
        **VISION,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "pooling_kernel_size": 2,
        "position_embedding_size": 16,
    }
    return _made("Gemma4", text, vision, boi_token_id=BEGIN, eoi_token_id=END, **TOKENS)


def gemma4_inputs(batch: int) -> dict[str, Any]:
    """A picture of 4 x 4 patches, of which 4 tokens are left, a row."""
    ids = _ids(batch, 4)
    places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(batch, 16, 2)
    patches = torch.rand(batch, 16, 48, generator=_generator(3))
    return _inputs(ids, pixel_values=patches, image_position_ids=places, mm_token_type_ids=(ids == PICTURE).int())


def inputs_of(places: int) -> Callable[[int], dict[str, Any]]:
    """A picture of 16 x 16 for each row, as so many tokens."""
    return lambda batch: _inputs(_ids(batch, places), pixel_values=_pixels(batch))


#: whose language model has no fused layers: its modules are in the captured step
BY_MODULES = {"gemma4"}
#: name -> (makes the model, makes the inputs of so many rows)
MODELS: dict[str, tuple[Callable[[], Any], Callable[[int], dict[str, Any]]]] = {
    "llava": (llava, inputs_of(16)),
    "aya-vision": (aya, inputs_of(4)),
    "llava-onevision": (onevision, onevision_inputs),
    "llava-next": (llava_next, llava_next_inputs),
    "gemma3": (gemma3, gemma3_inputs),
    "idefics3": (idefics3, idefics3_inputs),
    "smolvlm": (lambda: idefics3("SmolVLM"), idefics3_inputs),
    "internvl": (internvl, inputs_of(4)),
    "gemma4": (gemma4, gemma4_inputs),
    "paligemma": (paligemma, paligemma_inputs),
    "paligemma2": (lambda: paligemma("gemma2"), inputs_of(16)),
    "mistral3": (mistral3, mistral3_inputs),
    "qwen2-vl": (lambda: qwen_vl("Qwen2VL"), qwen_inputs),
    "qwen2.5-vl": (lambda: qwen_vl("Qwen2_5_VL"), qwen_inputs),
    "qwen3-vl": (lambda: qwen_vl("Qwen3VL"), qwen_inputs),
    "qwen2-audio": (lambda: audio("Qwen2Audio"), lambda batch: audio_inputs(batch, 8, True)),
    "voxtral": (lambda: audio("Voxtral"), lambda batch: audio_inputs(batch, 8, False)),
}
