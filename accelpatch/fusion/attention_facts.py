"""Facts about a replaced layer's attention, read off transformers' modules: windows, softcaps, unsupported features.

Used by the fused layers on a GPU and by the native step on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import transformers
from torch import Tensor, nn

from accelpatch.fusion import layer_facts
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.kernels.cpu.decode_step import Sizes, why_not_layer
from accelpatch.models.family import STATIC_ROPE, Family, Rotary, family_of_class, form_of, has_layer_norms
from accelpatch.modules.attention import FlashAttention
from accelpatch.modules.attention_settings import NAME, original_name, was_eager
from accelpatch.modules.rotary import FusedRotaryEmbedding

CAPPED = ("eager", NAME)  # implementations that apply a softcap of the scores
IMPLEMENTATIONS = ("eager", "sdpa", NAME, None)
LONGROPE = "longrope"
UNKNOWN = Family("", {})
IN_PLACE = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)  # writes of longrope's frequencies


def why_not(attention: Any) -> str | None:
    """Why an attention module may compute something that a fused or native step does not; None where it does not."""
    own, family = _own(attention), family_of_class(attention, "Attention")
    if family is None or family.layer is None or not own.__module__.startswith("transformers."):
        return f"its attention is {own.__name__}"
    if not getattr(attention, "is_causal", True):
        return "its attention is not causal"
    if getattr(attention.config, "clip_qkv", None) is not None:
        return "its q, k and v are clipped"
    used = attention.config._attn_implementation
    return None if used in IMPLEMENTATIONS else f"the attention implementation is {used}"


def _own(attention: Any) -> type:
    """The class of an attention module; of a FlashAttention, which has its forward, the one that it replaced."""
    own: Any = type(attention)
    return own.replaced_class if isinstance(attention, FlashAttention) else own


def runs_eager(attention: Any) -> bool:
    """Whether the implementation of transformers that runs, or that ours stands for, is `eager`, which None is too."""
    name = attention.config._attn_implementation
    if name == NAME and (name := original_name(attention)) is None:
        return was_eager(attention)
    return name in ("eager", None)


def window(attention: Any) -> int:
    """Sliding window of a layer in tokens, the current one included; 0 for none.

    The length is the configuration's, from which masks are made; a layer's attribute says whether it has a window.
    """
    if hasattr(attention, "sliding_window") and not attention.sliding_window:
        return 0
    return int(getattr(attention.config, "sliding_window", None) or 0)


def rotary_why_not(rotary: Any) -> str | None:
    """Why a model's rotary embedding is not one that fused layers apply; None where it is."""
    if isinstance(rotary, FusedRotaryEmbedding):
        return None
    if by_length(rotary):
        return None if IN_PLACE else "transformers before 5.23 puts other frequencies into its rotary embedding"
    form = _family(rotary, "RotaryEmbedding").rotary
    if form is None or not form.tables:
        return "its rotary embedding was not replaced"
    kind = getattr(rotary, "rope_type", None)
    return None if kind in STATIC_ROPE else f"its rope type is {kind}"


def by_length(rotary: Any) -> bool:
    """Whether a rotary embedding of a known family chooses between two sets of frequencies by the length (longrope)."""
    known = family_of_class(rotary, "RotaryEmbedding") is not None
    return known and getattr(rotary, "rope_type", None) == LONGROPE


def _family(module: Any, ending: str = "Attention") -> Family:
    """As family_of_class; one with nothing of its own for a class that is not known."""
    return family_of_class(module, ending) or UNKNOWN


def form_of_rotary(attention: Any) -> Rotary:
    """The rotary embedding of an attention layer's family."""
    return _family(attention).rotary or Rotary()


def applies_rotary(attention: Any) -> bool:
    """Whether a layer applies the rotary embedding at all."""
    rotary = _family(attention).rotary
    return rotary is not None and (rotary.without is None or bool(getattr(attention, rotary.without)))


def normed_over_all(attention: Any) -> bool:
    """Whether q_norm and k_norm are over all heads of a token, not over each."""
    return _family(attention).q_k_norm == "all" and hasattr(attention, "q_norm")


def head_size(attention: Any) -> int:
    """Columns of each head of an attention layer."""
    config = attention.config
    return int(getattr(attention, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def heads_of(attention: Any, rows: Sequence[int]) -> tuple[int, int, int]:
    """(query heads, heads of the cache, head size) of an attention layer.

    rows: of its linear layers q, k and v, whose number of heads may be another than the configuration's (pruned heads),
    or of the one that makes all three. Raises CannotFuse where they are no heads.
    """
    size, config = head_size(attention), attention.config
    if len(rows) == 1:
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        due = [(heads + 2 * kv_heads) * size]
    else:
        heads, kv_heads = rows[0] // size, rows[1] // size
        due = [heads * size, kv_heads * size, kv_heads * size]
    if list(rows) != due or not kv_heads or heads % kv_heads:
        raise CannotFuse(f"{' + '.join(map(str, rows))} rows of q, k and v are no heads of {size} columns")
    if reason := _groups_why_not(attention, heads // kv_heads):
        raise CannotFuse(reason)
    return heads, kv_heads, size


def _groups_why_not(attention: Any, group: int) -> str | None:
    said = getattr(attention, "num_key_value_groups", group)
    return None if said == group else f"it has {group} query heads a key head, and its num_key_value_groups is {said}"


def native_sizes_why_not(attention: Any, hidden: int, rotated: int, sizes: Sizes) -> str | None:
    """Why a layer with linear layers of these sizes is none of a native step; None where it is.

    rotated: columns of a head that the rotary frequencies cover.
    """
    if (size := head_size(attention)) != rotated:
        return f"its rotary embedding covers {rotated} columns, and each head has {size}"
    if reason := why_not_layer(hidden, size, sizes):
        return reason
    return _groups_why_not(attention, sizes["q"][0] // sizes["k"][0])


def native_why_not(layer: Any, model: Any) -> str | None:
    """Why a layer has a form that the native step does not compute; None where it has none."""
    form, attention = form_of(layer), layer_facts.attention_of(layer)
    if form is None or form.attention_norm is None or form.mlp_norm is None or form.multiplier is not None:
        return "its norms or its residual additions have another form than those of the native step"
    if form.parallel or has_layer_norms(layer) or layer_facts.has_plain_mlp(layer):
        return "the native step has no LayerNorm, no parallel attention and MLP, and no MLP without a gate"
    if form_of_rotary(attention).interleaved or not applies_rotary(attention) or normed_over_all(attention):
        return "its rotary embedding or the norms of q and k have another form than those of the native step"
    if (embedding_multiplier(model), logit_divisor(model)) != (1.0, 1.0):
        return "the native step has no multiplier of embeddings or logits"
    return None


def embedding_multiplier(model: Any) -> float:
    """By what the model's decoder multiplies its embeddings."""
    name = _family(model, "ForCausalLM").embedding_multiplier
    return 1.0 if name is None else float(getattr(model.model, name))


def logit_divisor(model: Any) -> float:
    """By what the model divides its logits."""
    family = _family(model, "ForCausalLM")
    if family.logit_multiplier is not None:
        return 1.0 / float(getattr(model.config, family.logit_multiplier))
    return 1.0 if family.logit_divisor is None else float(getattr(model.config, family.logit_divisor))


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


def score_cap(attention: Any) -> float:
    """Softcap of the attention scores, 0 for none; transformers' sdpa does not apply it."""
    capped = _family(attention).capped_scores and attention.config._attn_implementation in CAPPED
    return float((attention.attn_logit_softcapping if capped else None) or 0.0)


def logit_cap(model: Any) -> float:
    """Softcap of the logits, 0 for none."""
    capped = _family(model, "ForCausalLM").capped_logits
    return float((getattr(model.config, "final_logit_softcapping", None) if capped else None) or 0.0)
