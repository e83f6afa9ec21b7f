"""Describes what an attention module of a decoder layer computes: read off the module, by the table of families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.models.family import Family, family_of_class
from accelpatch.modules.attention import FlashAttention
from accelpatch.modules.attention_settings import NAME, original_name, was_eager
from accelpatch.modules.paged_setting import implementation

CAPPED = ("eager", NAME)  # implementations that apply a softcap of the scores
IMPLEMENTATIONS = ("eager", "sdpa", NAME, None)
UNKNOWN = Family("", {})


def both_ways(config: Any) -> bool:
    """Whether a configuration of transformers says that attention in a prompt is bidirectional, as PaliGemma's does.

    A decode step of one token attends to all tokens before it either way.
    """
    return bool(getattr(config, "use_bidirectional_attention", False))


class AttentionDescription:
    """An attention module of a layer, original or replaced."""

    def __init__(self, module: Any):
        self.module = module
        self.family = family_of_class(module, "Attention") or UNKNOWN

    @property
    def window(self) -> int:
        """Sliding window in tokens, the current one included; 0 for none.

        The length is the configuration's, from which masks are made; an attribute says whether there is a window.
        """
        if hasattr(self.module, "sliding_window") and not self.module.sliding_window:
            return 0
        return int(getattr(self.module.config, "sliding_window", None) or 0)

    @property
    def score_cap(self) -> float:
        """Softcap of the scores, 0 for none; transformers' sdpa does not apply it."""
        capped = self.family.capped_scores and implementation(self.module.config) in CAPPED
        return float((self.module.attn_logit_softcapping if capped else None) or 0.0)

    @property
    def sinks(self) -> Tensor | None:
        """[Hq]: attention sinks, a score of each head that has no key but is part of the softmax; None for none."""
        sinks: Tensor | None = getattr(self.module, "sinks", None)
        return sinks

    @property
    def scaling(self) -> float:
        """The factor of the scores."""
        return float(self.module.scaling)

    @property
    def head_size(self) -> int:
        """Columns of each head."""
        config = self.module.config
        return int(getattr(self.module, "head_dim", None) or config.hidden_size // config.num_attention_heads)

    @property
    def layer_type(self) -> str:
        """`sliding_attention` or `full_attention`, which chooses among a model's rotary frequencies; "" for none."""
        return str(getattr(self.module, "layer_type", None) or "")

    @property
    def rotates(self) -> bool:
        """Whether the rotary embedding is applied at all."""
        rotary = self.family.rotary
        return rotary is not None and (rotary.without is None or bool(getattr(self.module, rotary.without)))

    @property
    def interleaved(self) -> bool:
        """Whether the rotary embedding is applied to pairs of neighbouring columns."""
        return self.rotates and self.family.rotary is not None and self.family.rotary.interleaved

    @property
    def normed(self) -> bool:
        """Whether queries and keys are normalised."""
        return hasattr(self.module, "q_norm")

    @property
    def normed_over_all(self) -> bool:
        """Whether queries and keys are normalised over all heads of a token, not over each head."""
        return self.normed and self.family.q_k_norm == "all"

    @property
    def eager(self) -> bool:
        """Whether transformers' attention implementation, or the one that ours has replaced, is `eager`; None counts as
        it."""
        name = implementation(self.module.config)
        if name == NAME and (name := original_name(self.module)) is None:
            return was_eager(self.module)
        return name in ("eager", None)

    def unknown(self) -> str | None:
        """Why the module may compute something that no fast path does; None where it does not."""
        own: Any = type(self.module)
        if isinstance(self.module, FlashAttention):
            own = own.replaced_class
        if self.family.layer is None or not own.__module__.startswith("transformers."):
            return f"its attention is {own.__name__}"
        if not getattr(self.module, "is_causal", True) and not both_ways(self.module.config):
            return "its attention is not causal"
        if getattr(self.module.config, "clip_qkv", None) is not None:
            return "its q, k and v are clipped"
        used = implementation(self.module.config)
        return None if used in IMPLEMENTATIONS else f"the attention implementation is {used}"

    def heads(self, rows: Sequence[int]) -> tuple[int, int, int]:
        """(query heads, heads of the cache, head size).

        rows: of its linear layers q, k and v, whose number of heads may be another than the configuration's (pruned
        heads), or of the one that makes all three. Raises CannotFuse where they are no heads.
        """
        size, config = self.head_size, self.module.config
        if len(rows) == 1:
            heads = int(config.num_attention_heads)
            kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
            due = [(heads + 2 * kv_heads) * size]
        else:
            heads, kv_heads = rows[0] // size, rows[1] // size
            due = [heads * size, kv_heads * size, kv_heads * size]
        if list(rows) != due or not kv_heads or heads % kv_heads:
            raise CannotFuse(f"{' + '.join(map(str, rows))} rows of q, k and v are no heads of {size} columns")
        if reason := self.why_not_groups(heads // kv_heads):
            raise CannotFuse(reason)
        return heads, kv_heads, size

    def why_not_groups(self, group: int) -> str | None:
        """Why so many query heads share no key head; None where they do."""
        said = getattr(self.module, "num_key_value_groups", group)
        return (
            None if said == group else f"it has {group} query heads a key head, and its num_key_value_groups is {said}"
        )
