"""Facts about a replaced layer's attention, read off transformers' modules: windows, softcaps, unsupported features.

Used by the fused layers on a GPU and by the native step on a CPU.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.models.family import family_of_class

IMPLEMENTATIONS = ("eager", "sdpa", None)


def why_not(attention: Any) -> str | None:
    """Why an attention module may compute something that a fused or native step does not; None where it does not."""
    own, family = type(attention), family_of_class(attention, "Attention")
    if family is None or family.layer is None or not own.__module__.startswith("transformers."):
        return f"its attention is {own.__name__}"
    if not getattr(attention, "is_causal", True):
        return "its attention is not causal"
    used = attention.config._attn_implementation
    return None if used in IMPLEMENTATIONS else f"the attention implementation is {used}"


def window(attention: Any) -> int:
    """Sliding window of a layer in tokens, the current one included; 0 for none.

    The length is the configuration's, from which masks are made; a layer's attribute says whether it has a window.
    """
    if hasattr(attention, "sliding_window") and not attention.sliding_window:
        return 0
    return int(getattr(attention.config, "sliding_window", None) or 0)


def layer_type(attention: Any) -> str:
    """`sliding_attention` or `full_attention`, which chooses among a model's rotary frequencies; "" for none."""
    return str(getattr(attention, "layer_type", None) or "")


def rope(rotary: nn.Module, kind: str) -> tuple[Tensor, float]:
    """(inv_freq, attention scaling) of a replaced rotary embedding for layers of a type. Raises CannotFuse."""
    prefix = "" if one_rope(rotary) else f"{kind}_"
    frequencies = getattr(rotary, f"{prefix}inv_freq", None)
    if frequencies is None:
        raise CannotFuse(f"its rotary embedding has no {prefix}inv_freq")
    return frequencies, float(getattr(rotary, f"{prefix}attention_scaling"))


def one_rope(rotary: nn.Module) -> bool:
    """Whether all layers share one set of rotary frequencies."""
    return hasattr(rotary, "inv_freq")


def rope_arguments(rotary: nn.Module, attention: Any) -> tuple[str, ...]:
    """What a layer's rotary embedding takes besides hidden states and positions: the layer's type, if there are
    several sets of frequencies."""
    return () if one_rope(rotary) else (layer_type(attention),)


def score_cap(attention: Any) -> float:
    """Softcap of the attention scores, 0 for none; only transformers' eager attention applies it."""
    family = family_of_class(attention, "Attention")
    capped = family is not None and family.capped_scores and attention.config._attn_implementation == "eager"
    return float((attention.attn_logit_softcapping if capped else None) or 0.0)


def logit_cap(model: Any) -> float:
    """Softcap of the logits, 0 for none."""
    family = family_of_class(model, "ForCausalLM")
    capped = family is not None and family.capped_logits
    return float((getattr(model.config, "final_logit_softcapping", None) if capped else None) or 0.0)


def model_why_not(*models: Any) -> str | None:
    """Why a model, or the decoder in it, may not simply call its layers one after the other; None where they do."""
    for one in models:
        if not type(one).forward.__module__.startswith("transformers."):
            return f"{type(one).__name__} has a forward of its own"
    decoder = models[-1]
    count = decoder.config.num_hidden_layers
    places = [getattr(layer.self_attn, "layer_idx", None) for layer in decoder.layers]
    return None if places == list(range(count)) else f"its layers have the indices {places}, of {count}"
