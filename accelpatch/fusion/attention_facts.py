"""Facts about a replaced layer's attention, read off transformers' modules: windows, softcaps, unsupported features.

Used by the fused layers on a GPU and by the native step on a CPU.
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
    """Why an attention module may compute something that a fused or native step does not; None where it does not."""
    own = type(attention)
    if own.__name__ not in ATTENTION or not own.__module__.startswith("transformers."):
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


def score_cap(attention: Any) -> float:
    """Softcap of the attention scores, 0 for none; only transformers' eager attention applies it."""
    capped = type(attention).__name__ in CAPPED_SCORES and attention.config._attn_implementation == "eager"
    return float((attention.attn_logit_softcapping if capped else None) or 0.0)


def logit_cap(model: Any) -> float:
    """Softcap of the logits, 0 for none."""
    capped = type(model).__name__ in CAPPED_LOGITS
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
