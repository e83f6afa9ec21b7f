"""How tensor parallel splits a decoder's weights among ranks: data by role, the same for every family of the table.

A linear layer whose outputs are split (by columns, of x @ w^T) keeps some rows of its weight [N, K]; one whose inputs
are split (by rows) keeps the same columns of its own, and what the ranks compute is added up. Both together need one
all-reduce. A family that cannot be split so says why in its row (`Family.unsharded`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

HEADS, KV_HEADS, INNER = "query heads", "key and value heads", "inner columns"


@dataclass(frozen=True)
class Split:
    """How the weight of one role is split. parts: what its rows are of, one part after the other. columns: what its
    columns are of, for a layer whose outputs are added up over the ranks; then `parts` is empty."""

    parts: tuple[str, ...] = ()
    columns: str | None = None


SPLITS: Mapping[str, Split] = MappingProxyType(
    {
        "q_proj": Split((HEADS,)),
        "k_proj": Split((KV_HEADS,)),
        "v_proj": Split((KV_HEADS,)),
        "qkv_proj": Split((HEADS, KV_HEADS, KV_HEADS)),  # of a family `by_head`: q, k and v of one head after the other
        "gate_proj": Split((INNER,)),
        "up_proj": Split((INNER,)),
        "gate_up_proj": Split((INNER, INNER)),
        "fc1": Split((INNER,)),
        "o_proj": Split(columns=HEADS),
        "down_proj": Split(columns=INNER),
        "fc2": Split(columns=INNER),
    }
)

# Attributes of attention modules that count what a rank has a part of: name -> of what; "columns" is heads x head size,
# "groups" query heads a key head.
COUNTS: Mapping[str, str] = MappingProxyType(
    {
        "num_heads": HEADS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "num_key_value_groups": "groups",
        "embed_dim": "columns",
        "split_size": "columns",
        "hidden_size": "columns",
    }
)
# Modules in attention that work on all heads at once, and so cannot be split: name -> why.
WHOLE_HEADS: Mapping[str, str] = MappingProxyType(
    {
        "q_layernorm": "its queries have a norm for each head",
    }
)
# Group sizes of quantised weights along K, the largest first: parts of K are whole groups where that is possible.
UNITS = (128, 64, 32, 16, 8, 4, 2, 1)
