"""flash_attention's Triton kernel in its forms, as the gate compiles them, with the tiles of each arch."""

from __future__ import annotations

import itertools

import torch

from accelpatch.device import KNOWN
from accelpatch.kernels.triton import flash_attention, int8_attention, paged_attention
from accelpatch.kernels.triton.flash_tiles import chosen, padded
from gates.builds import ARCHS

#: name -> what differs from plain attention of all keys, and the head sizes it is compiled for
FORMS: dict[str, tuple[dict[str, int], tuple[int, ...]]] = {
    "all keys": ({}, (128,)),
    "causal": ({"CAUSAL": True}, (64, 80, 128, 256)),
    "softcap": ({"CAUSAL": True, "CAP": True}, (64, 128)),
    "ranges": ({"CAUSAL": True, "RANGES": True}, (64, 128, 256)),
    "window, softcap and sinks": ({"CAUSAL": True, "WINDOW": True, "CAP": True, "SINKS": True}, (64, 128)),
    "boolean mask": ({"BIAS": flash_attention.SHOWS}, (128,)),
    "added bias": ({"CAUSAL": True, "BIAS": flash_attention.ADDS}, (64, 128)),
}
WIDE = ("causal", "window, softcap and sinks")  # compiled in float32 too, which has a tile of its own
PROMPT = 4096
QUERIES = (8, 40, PROMPT)  # with few queries tiles are others
NONE = {"RANGES": False, "CAUSAL": False, "WINDOW": False, "BIAS": flash_attention.NO_BIAS, "SINKS": False,
        "CAP": False, "TMA": False}  # fmt: skip
Arguments = tuple[object, ...]


def kernels_of_attention(arch: str, queries: tuple[int, ...] = QUERIES) -> dict[str, Arguments]:
    """Name -> arguments of a Build of the gate for an arch, its launch options last; each tile once, with the fewest
    queries that have it."""
    made: dict[Arguments, tuple[str, Arguments]] = {}
    for name, (changes, sizes) in FORMS.items():
        for size, length in itertools.product(sizes, queries):
            given = _arguments(arch, changes, size, length, torch.bfloat16)
            made.setdefault((name, size, str(given)), (f"heads of {size}, {length} queries, {name}", given))
    for name, size in itertools.product(WIDE if len(queries) > 1 else (), (64, 128)):
        given = _arguments(arch, FORMS[name][0], size, PROMPT, torch.float32)
        made[name, size, "float32"] = f"heads of {size}, float32, {name}", given
    return {f"flash_attention, {label}": given for label, given in made.values()}


def _arguments(arch: str, changes: dict[str, int], size: int, length: int, dtype: torch.dtype) -> Arguments:
    form, one = NONE | changes, "*fp32" if dtype == torch.float32 else "*bf16"
    plain = not (form["RANGES"] or form["WINDOW"] or form["BIAS"])
    masks = "bias" if form["BIAS"] else "ranges" if form["RANGES"] else ""
    tile = chosen(KNOWN[arch], size, dtype, bool(form["CAUSAL"]), length, masks)
    bias = "*u8" if form["BIAS"] == flash_attention.SHOWS else one
    form["TMA"] = plain and tile.tma
    held = f"tensordesc<bf16[1,1,{tile.n},{padded(size)}]>" if form["TMA"] else one
    types = (one, held, held, "*i32", bias, one, one, *("i32",) * 7, "fp32", "fp32", *("i32",) * 13)
    tiled = {"SIZE": size, "WIDE": padded(size), "BLOCK_M": tile.m, "BLOCK_N": tile.n}
    return flash_attention.attend, types, form | tiled, tile.warps, 100, (arch,), tile.options()


def kernels_of_int8_attention() -> dict[str, Arguments]:
    """Name -> arguments of a Build of the gate: both tiles with and without a mask, and by head size."""
    types = (*("*i8",) * 3, "*fp32", "*i8", "*i8", *("i32",) * 16)
    made: dict[str, Arguments] = {}
    for block, (size, masked) in itertools.product(
        int8_attention.AMD, ((128, False), (128, True), (64, False), (256, False))
    ):
        form = {"MASKED": masked, "CAUSAL": not masked, "SIZE": size, "WIDE": size}
        label = f"int8 attention, {block.m} queries, heads of {size}{', a mask' if masked else ''}"
        tiled = form | {"BLOCK_M": block.m, "BLOCK_N": block.n}
        made[label] = int8_attention.attend, types, tiled, block.warps, 100, ARCHS, {}, 1
    return made


def kernels_of_pages() -> dict[str, Arguments]:
    """Name -> arguments of a Build of the gate: attention over pages, of one token a text and of prompts. The loads of
    an index take scalar registers."""
    made: dict[str, Arguments] = {}
    forms = {"": {}, ", window, softcap and sinks": {"WINDOW": True, "CAP": True, "SINKS": True}}
    for (name, changes), size, tokens in itertools.product(forms.items(), (64, 128), (1, paged_attention.MANY_TOKENS)):
        rows = max(paged_attention.LEAST_ROWS, 4 * tokens)
        form = {"INDEXED": True, "WINDOW": False, "CAP": False, "SINKS": False, **changes}
        tiled = {"GROUP": 4, "SIZE": size, "WIDE": size, "BLOCK_Q": tokens, "ROWS": rows,
                 "BLOCK_N": paged_attention.KEYS}  # fmt: skip
        types = (*("*bf16",) * 5, "*i32", "*i32", "*i64", "*bf16", "*bf16", *("i32",) * 3, "fp32", "fp32",
                 *("i32",) * 6)  # fmt: skip
        label = f"attention over pages, heads of {size}, {tokens} tokens{name}"
        warps = 4 if rows > paged_attention.LEAST_ROWS else 2
        made[label] = paged_attention.attend, types, form | tiled, warps, 400, ARCHS, {"num_stages": 2}
    return made


def kernels_of_other_attention() -> dict[str, Arguments]:
    """Attention in int8, and over pages."""
    return kernels_of_int8_attention() | kernels_of_pages()
