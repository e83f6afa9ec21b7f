"""The table of fused families in docs/decoding.md is that of models/families.py."""

from __future__ import annotations

from pathlib import Path

from accelpatch.models.family import FAMILIES, Family

DOC = Path(__file__).parents[2] / "docs" / "decoding.md"


def row(family: Family) -> str:
    """A family's line of the table."""
    layer, norm, rotary = family.layer, family.norm, family.rotary
    assert layer is not None
    assert norm is not None
    places = [
        "before attention and MLP" if layer.attention_norm else "",
        "after both" if layer.after_attention else "",
        "LayerNorm" if norm.layer else "",
        "times 1 + weight" if norm.plus_one else "",
        "over all heads of q and of k" if family.q_k_norm == "all" else "",
    ]
    turns = [
        "" if rotary is None else "interleaved" if rotary.interleaved else "in halves",
        f"{rotary.tables} tables" if rotary and rotary.tables else "",
        f"where `{rotary.without}`" if rotary and rotary.without else "",
        f"learned, from row {family.decoder.offset} on" if family.decoder.positions else "",
    ]
    more = [
        f"`{layer.multiplier}`" if layer.multiplier else "",
        f"`{family.embedding_multiplier}`" if family.embedding_multiplier else "",
        f"`{family.logit_divisor}`" if family.logit_divisor else "",
        f"parallel where `{layer.parallel}`" if isinstance(layer.parallel, str) else "parallel" * layer.parallel,
        f"`{family.logit_multiplier}`" if family.logit_multiplier else "",
        "MLP without a gate" if "fc1" in family.roles.values() else "",
        "q, k and v head by head" if family.by_head else "",
        f"where `{layer.where}`" if layer.where else "",
        "softcap of scores" if family.capped_scores else "",
        "softcap of logits" if family.capped_logits else "",
        "experts" if family.sparse is not None else "",
    ]
    cells = (family.name, *("; ".join(filter(None, texts)) for texts in (places, turns, more)))
    return "| " + " | ".join(cells) + " |"


def test_the_page_has_every_family_that_is_fused() -> None:
    rows = [row(family) for family in FAMILIES if family.layer is not None and family.unfused is None]
    print("\n".join(rows))
    assert len(rows) >= 16
    assert "\n".join(["| --- | --- | --- | --- |", *rows, ""]) in DOC.read_text()
