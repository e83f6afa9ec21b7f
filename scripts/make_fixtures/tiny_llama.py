"""The float models that every tool of this folder quantises: seeded, untrained, in one of five shapes.

Weights and expected values are float32 throughout; a checkpoint's own dtype is what its tool is asked to write.
`small` is the common shape. `even` has outputs in multiples of 64, which AWQ's search of clipping asks for. `wide` has
inputs of 128, for groups of 128, and biases on q, k, v and o. `odd` has rows of 96 and 176, which blocks of 64 cross,
and more than 256 blocks in one weight. `superblocks` has rows of 256, which GGUF's K formats need.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOREIGN = Path(__file__).parents[2] / "tests/fixtures/foreign"
IDS = torch.tensor([[1, 17, 30, 5, 23, 29, 8, 11]])
SHOWN = "model.layers.0.self_attn.k_proj"  # the layer whose dequantised weight is stored
VOCABULARY = 32  # embeddings are not quantised: a larger one would be most of a fixture


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    heads: int
    head_dim: int = 32
    bias: bool = False


SHAPES = {
    "small": Shape(64, 96, 2),
    "even": Shape(64, 128, 2, head_dim=64),
    "wide": Shape(128, 128, 4, bias=True),
    "odd": Shape(96, 176, 3),
    "superblocks": Shape(256, 32, 2),
}


def tiny_llama(name: str = "small", dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """One layer, tied embeddings, weights of which some columns stand out as they do in trained models."""
    shape = SHAPES[name]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=1,
        num_attention_heads=shape.heads,
        num_key_value_heads=1,
        head_dim=shape.head_dim,
        max_position_embeddings=64,
        attention_bias=shape.bias,
        tie_word_embeddings=True,
        dtype=dtype,
    )
    torch.manual_seed(20_260_711)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(0.02, 0.5 / weight.shape[1] ** 0.5)
                weight[:, 5::16] *= 3
                weight[3].abs_()  # an asymmetric format's zero point is 0 here, and its largest code in row 9
                weight[9].abs_().neg_()
            else:
                weight.add_(torch.randn_like(weight) * 0.1)
            # Every value is one of bfloat16 and of float16, so that each tool starts from the same numbers. Rotary
            # frequencies are no parameters and stay in float32.
            weight.data = weight.data.bfloat16().to(dtype)
    return model


def word_tokenizer() -> PreTrainedTokenizerFast:
    """For tools that ask for a tokenizer and use none of it; no fixture keeps it."""
    words = {f"w{number}": number for number in range(VOCABULARY)}
    inner = Tokenizer(WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="w1", eos_token="w2", pad_token="w3", unk_token="w0"
    )


def calibration(rows: int = 16, length: int = 48) -> torch.Tensor:
    """Ids[rows, length] of no meaning."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator)


def logits_of(model: Any) -> torch.Tensor:
    """[tokens, vocabulary] in float32."""
    with torch.inference_mode():
        return model(input_ids=IDS).logits[0].float()


def save_expected(
    folder: Path,
    logits: torch.Tensor,
    weights: dict[str, torch.Tensor],
    made_by: dict[str, str],
    extra: dict[str, torch.Tensor] | None = None,
) -> None:
    """expected.safetensors beside the checkpoint.

    Args:
        logits: [tokens, vocabulary], from the checkpoint as the tool itself reads it.
        weights: module name -> dequantised weight[out, in] by the tool's own code, in the dtype it returned.
        made_by: package -> version, and under "logits" and "weights" the code that computed them.
        extra: More tensors, by the names that README.md gives them.
    """
    tensors = {"input_ids": IDS, "logits": logits, **{f"{name}.weight": weight for name, weight in weights.items()}}
    tensors |= extra or {}
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, folder / "expected.safetensors", {"made_by": json.dumps(made_by)})  # one key: their order varies
    print(folder.name, {path.name: path.stat().st_size for path in sorted(folder.iterdir())}, json.dumps(made_by))
