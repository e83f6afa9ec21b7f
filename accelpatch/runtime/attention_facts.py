"""What the attention of a replaced layer computes beyond its products, read off transformers' modules.

One place for both runtimes: the fused layers of a GPU and the native step of a CPU.
"""

from __future__ import annotations

from typing import Any

# transformers' attention classes whose arithmetic is the one written here
ATTENTION = frozenset(
    f"{family}Attention" for family in ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Gemma2", "Gemma3")
)
CAPPED_SCORES = frozenset({"Gemma2Attention"})  # Gemma 3 has the attribute and does not use it
CAPPED_LOGITS = frozenset({"Gemma2ForCausalLM", "Gemma3ForCausalLM"})
IMPLEMENTATIONS = ("eager", "sdpa", None)


def why_not(attention: Any) -> str | None:
    """Why an attention module may compute something else than a step; None where it does not."""
    own = type(attention)
    if own.__name__ not in ATTENTION or not own.__module__.startswith("transformers."):
        return f"its attention is {own.__name__}"
    if not getattr(attention, "is_causal", True):
        return "its attention looks ahead"
    used = attention.config._attn_implementation
    return None if used in IMPLEMENTATIONS else f"the attention implementation is {used}"


def window(attention: Any) -> int:
    """How many tokens a layer looks back, itself included; 0 for all.

    The length stands in the configuration, which masks are made from; a layer's attribute says whether it has a window.
    """
    if hasattr(attention, "sliding_window") and not attention.sliding_window:
        return 0
    return int(getattr(attention.config, "sliding_window", None) or 0)


def score_cap(attention: Any) -> float:
    """The cap of the scores, 0 for none: only transformers' eager attention applies it."""
    capped = type(attention).__name__ in CAPPED_SCORES and attention.config._attn_implementation == "eager"
    return float((attention.attn_logit_softcapping if capped else None) or 0.0)


def logit_cap(model: Any) -> float:
    """The cap of the logits, 0 for none."""
    capped = type(model).__name__ in CAPPED_LOGITS
    return float((getattr(model.config, "final_logit_softcapping", None) if capped else None) or 0.0)


def model_why_not(*models: Any) -> str | None:
    """Why a model, or the decoder in it, may not call its layers one after the other; None where they do."""
    for one in models:
        if not type(one).forward.__module__.startswith("transformers."):
            return f"{type(one).__name__} has a forward of its own"
    decoder = models[-1]
    count = decoder.config.num_hidden_layers
    places = [getattr(layer.self_attn, "layer_idx", None) for layer in decoder.layers]
    return None if places == list(range(count)) else f"its layers have the numbers {places}, of {count}"
