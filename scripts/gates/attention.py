"""flash_attention's Triton kernel in its forms, as the gate compiles them, with the tiles of each arch."""

from __future__ import annotations

import torch

from accelpatch.device import KNOWN
from accelpatch.kernels.triton import flash_attention
from accelpatch.kernels.triton.flash_tiles import chosen, padded

#: name -> what differs from plain attention of all keys, and the head sizes it is compiled for
FORMS: dict[str, tuple[dict[str, int], tuple[int, ...]]] = {
    "all keys": ({}, (128,)),
    "causal": ({"CAUSAL": True}, (64, 80, 128, 256)),
    "ranges": ({"CAUSAL": True, "RANGES": True}, (64, 128, 256)),
    "window, softcap and sinks": ({"CAUSAL": True, "WINDOW": True, "CAP": True, "SINKS": True}, (64, 128)),
    "boolean mask": ({"BIAS": flash_attention.SHOWS}, (128,)),
    "added bias": ({"CAUSAL": True, "BIAS": flash_attention.ADDS}, (64, 128)),
}
PROMPT = 4096
NONE = {"RANGES": False, "CAUSAL": False, "WINDOW": False, "BIAS": flash_attention.NO_BIAS, "SINKS": False,
        "CAP": False, "TMA": False}  # fmt: skip


def kernels_of_attention(arch: str) -> dict[str, tuple[object, ...]]:
    """Name -> arguments of a Build of the gate for an arch, its launch options last."""
    made: dict[str, tuple[object, ...]] = {}
    for name, size in ((name, size) for name, (_, sizes) in FORMS.items() for size in sizes):
        form = NONE | FORMS[name][0]
        plain = not (form["RANGES"] or form["WINDOW"] or form["BIAS"])
        masks = "bias" if form["BIAS"] else "ranges" if form["RANGES"] else ""
        tile = chosen(KNOWN[arch], size, torch.bfloat16, bool(form["CAUSAL"]), PROMPT, masks)
        bias = "*u8" if form["BIAS"] == flash_attention.SHOWS else "*bf16"
        form["TMA"] = plain and tile.tma
        held = f"tensordesc<bf16[1,1,{tile.n},{padded(size)}]>" if form["TMA"] else "*bf16"
        types = ("*bf16", held, held, "*i32", bias, *("*bf16",) * 2, *("i32",) * 7, "fp32", "fp32", *("i32",) * 13)
        tiled = {"SIZE": size, "WIDE": padded(size), "BLOCK_M": tile.m, "BLOCK_N": tile.n}
        made[f"flash_attention, heads of {size}, {name}"] = (
            flash_attention.attend, types, form | tiled, tile.warps, 100, (arch,), tile.options(),
        )  # fmt: skip
    return made
