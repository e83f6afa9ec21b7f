"""Tiny models that hold other models: of pictures and text, and encoders with decoders; with inputs for one call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import CLIPVisionConfig, Gemma3TextConfig, LlamaConfig, SiglipVisionConfig

from tests.support.tiny import make

PICTURE = 159  # the id of a token that stands for a part of a picture
_TEXT = {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "intermediate_size": 96, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": None}  # fmt: skip
_HEADS = {"head_dim": 16, "num_key_value_heads": 2, "sliding_window": 5}
_VISION = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
           "image_size": 16, "patch_size": 8}  # fmt: skip
_SEQUENCES = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "encoder_layers": 2,
              "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96,
              "decoder_ffn_dim": 96, "vocab_size": 160, "pad_token_id": 0, "decoder_start_token_id": 0,
              "eos_token_id": 2, "bos_token_id": 1, "forced_eos_token_id": None}  # fmt: skip


def llava() -> Any:
    """LLaVA, a CLIP tower before a Llama."""
    parts = {"vision_config": CLIPVisionConfig(**_VISION), "text_config": LlamaConfig(**_TEXT)}
    return make("Llava", suffix="ForConditionalGeneration", image_token_id=PICTURE, **parts)


def gemma3() -> Any:
    """Gemma 3 with a SigLIP tower; a picture's tokens see each other both ways."""
    parts = {"vision_config": SiglipVisionConfig(**_VISION), "text_config": Gemma3TextConfig(**_TEXT, **_HEADS)}
    sizes = {"image_token_id": PICTURE, "mm_tokens_per_image": 4}
    return make("Gemma3", suffix="ForConditionalGeneration", **sizes, **parts)


def bart() -> Any:
    """BART: an encoder and a decoder with cross attention."""
    return make("Bart", suffix="ForConditionalGeneration", **_SEQUENCES)


def t5() -> Any:
    """T5, whose relative bias is added to the scores."""
    return make("T5", suffix="ForConditionalGeneration", **_SEQUENCES)


def with_picture() -> dict[str, Tensor]:
    """A prompt with a picture of four tokens in it."""
    ids = torch.tensor([[5, *[PICTURE] * 4, 7, 9]])
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "pixel_values": pixels, "attention_mask": torch.ones_like(ids)}


def with_typed_picture() -> dict[str, Tensor]:
    """The same with the types of the tokens, which Gemma 3 takes."""
    batch = with_picture()
    return batch | {"token_type_ids": (batch["input_ids"] == PICTURE).long()}


def two_texts() -> dict[str, Tensor]:
    """A text for the encoder, the start of one for the decoder."""
    generator = torch.Generator().manual_seed(1)
    ids, more = (torch.randint(3, 160, (2, length), generator=generator) for length in (9, 4))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": more}
