"""Multimodal models that answer in text: their language model, and which arguments of a call concern the prompt alone.

Each has towers for pictures or sounds, whose outputs take the places of tokens in a prompt. Every later step runs the
language model and the head alone, as in a causal language model.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any, get_args

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import ModelOutput

from accelpatch import own_code

# Classes whose steps are those of the language model, with the positions that the call has, and the head.
CLASSES = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        "AyaVision", "Gemma3", "Gemma4", "Idefics3", "InternVL", "Llava", "LlavaNext", "LlavaOnevision", "Mistral3",
        "PaliGemma", "Qwen2Audio", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "SmolVLM", "Voxtral",
    )
)  # fmt: skip
# Arguments that mark the tokens of pictures: Gemma's, which see each other, and Qwen's, whose positions have axes.
TOKEN_TYPES, MODALITIES = "token_type_ids", "mm_token_type_ids"
# Arguments with pictures or sounds, or what a tower made of them: they fill a prompt, and no later step reads them.
MEDIA = frozenset(
    {
        "pixel_values", "pixel_values_videos", "pixel_attention_mask", "image_hidden_states", "input_features",
        "mm_encoder_outputs", "per_layer_inputs",
    }
)  # fmt: skip
# Arguments that say where these lie and how large they are. A step that is given its positions does not use them.
PLACES = frozenset(
    {
        "image_sizes", "image_sizes_videos", "image_grid_thw", "video_grid_thw", "second_per_grid_ts",
        MODALITIES, "feature_attention_mask", "batch_num_images", "vision_feature_layer",
        "vision_feature_select_strategy", "image_position_ids", "video_position_ids", "num_frames_per_video",
        "input_features_mask",
    }
)  # fmt: skip
# Arguments of towers: the sizes of their pictures, which they read on the host.
SIZES = frozenset({"grid_thw", "image_sizes"})
# By how much the pictures of the last prompt move positions: Qwen-VL models return it until transformers 5.23.
DELTAS = "rope_deltas"
# Its positions begin at 1, and its steps too are given token types, which mark the prefix of the prompt.
PREFIXED = "PaliGemmaForConditionalGeneration"
SOFTCAP = "final_logit_softcapping"
NONE: frozenset[str] = frozenset()


def language_model(model: Any) -> tuple[str, Any] | None:
    """(dotted path, module) of the language model in a model of CLASSES; None for any other model."""
    if not is_multimodal(model):
        return None
    decoder = model.get_decoder()
    return next(((name, one) for name, one in model.named_modules() if one is decoder and name), None)


def is_multimodal(model: Any) -> bool:
    """Whether a model, patched or not, is one of CLASSES."""
    cls: Any = type(model)
    return _of_class(cls)


def configs_of_call(model: Any) -> tuple[Any, ...]:
    """The configurations that decide what the arguments of a call leave open: the model's, and its language model's."""
    return (model.config, model.get_decoder().config) if is_multimodal(model) else (model.config,)


@functools.lru_cache
def _of_class(cls: Any) -> bool:
    return own_code.base_of(cls).__name__ in CLASSES


def prompt_arguments(model: Any) -> frozenset[str]:
    """Names of the arguments of generate() that concern the prompt alone."""
    return MEDIA | PLACES | {TOKEN_TYPES} if is_multimodal(model) else NONE


def unused_by_steps(model: Any) -> frozenset[str]:
    """Names of arguments that change nothing in a call for one more token whose positions are given."""
    if not is_multimodal(model):
        return NONE
    return PLACES | {TOKEN_TYPES} if first_position(model) else PLACES


def first_position(model: Any) -> int:
    """The position of the first token of a text."""
    return int(own_code.base_of(type(model)).__name__ == PREFIXED)


def logit_cap(model: Any) -> float:
    """The softcap of logits that the forward of one of CLASSES applies, 0 for none: not all, nor all versions, do."""
    cls: Any = type(model)
    return float(getattr(model.get_decoder().config, SOFTCAP, None) or 0) if _caps(cls) else 0.0


@functools.lru_cache
def _caps(cls: Any) -> bool:
    forward: Any = own_code.base_of(cls).forward  # type: ignore[attr-defined]
    code = inspect.unwrap(forward).__code__
    return SOFTCAP in (*code.co_names, *code.co_consts)


def shows_media(given: Mapping[str, Any]) -> bool:
    """Whether the arguments of a prompt hold pictures or sounds, or mark tokens as theirs."""
    values = (given.get(name) for name in MEDIA)
    if any(value is not None and value != {} for value in values if not isinstance(value, Tensor)):
        return True
    if any(isinstance(given.get(name), Tensor) for name in MEDIA):
        return True
    marks = (given.get(name) for name in (TOKEN_TYPES, MODALITIES))
    return any(mark is not None and bool(mark.any()) for mark in marks)


def outputs_of(model: Any, **made: Any) -> Any:
    """Outputs with these fields, of the class that the model's forward is annotated to return."""
    cls: Any = type(model)
    outputs = _outputs_class(cls)
    if DELTAS in outputs.__dataclass_fields__:
        made[DELTAS] = model.model.rope_deltas
    return outputs(**made)


@functools.lru_cache
def _outputs_class(cls: Any) -> Any:
    if not _of_class(cls):
        return CausalLMOutputWithPast
    base: Any = own_code.base_of(cls)
    said = inspect.signature(base.forward).return_annotation
    if isinstance(said, str):
        names = [name.strip() for name in said.split("|")]
        module = inspect.getmodule(base)
        classes = [getattr(module, name, None) for name in names]
    else:
        classes = [said, *get_args(said)]
    made = (one for one in classes if isinstance(one, type) and issubclass(one, ModelOutput))
    return next(made, CausalLMOutputWithPast)
