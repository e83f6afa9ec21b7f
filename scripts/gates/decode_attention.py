"""decode_attention's Triton kernel in its forms, as the gate compiles them: by head size, and by the cache's format."""

from __future__ import annotations

from accelpatch.kernels.triton import decode_attention

ATTENTION = ("*bf16", *("*i64",) * 3, *("*bf16",) * 4, "*fp32", *("*bf16",) * 2, "*fp32", "*bf16", "*fp32",
             "*fp32", "*i32",
             *("i32",) * 4, *("fp32",) * 4)  # fmt: skip
OF_CODES = (*ATTENTION[:4], "*i8", "*i8", *ATTENTION[6:])  # a cache in 8 bits
SHAPE = {
    "GROUP": 4, "NORM": False, "PLUS_ONE": False, "CAP": False, "SIZE": 128, "WIDE": 128, "ROTARY_DIM": 128,
    "RUN": decode_attention.RUN, "SLOTS": decode_attention.SLOTS, "ROWS": decode_attention.ROWS,
    "SOME": 4, "MAX_NEW_TOKENS": decode_attention.MAX_NEW_TOKENS, "ROOM": decode_attention.ROOM,
    "AHEAD": decode_attention.AHEAD,
    "STAGES": decode_attention.STAGES, "DEPENDENT": False, "FORM": 0, "SINKS": False,
}  # fmt: skip
SHAPES = {
    "128": {},
    "128 with norms": {"NORM": True},
    "64, groups of 16": {"SIZE": 64, "WIDE": 64, "ROTARY_DIM": 64, "GROUP": 16, "SOME": 16},
    "64 with sinks": {"SIZE": 64, "WIDE": 64, "ROTARY_DIM": 64, "GROUP": 8, "SOME": 8, "SINKS": True},
    "80": {"SIZE": 80, "ROTARY_DIM": 32},
    "256 with all": {"SIZE": 256, "WIDE": 256, "SLOTS": decode_attention.SLOTS // 2, "ROTARY_DIM": 256, "NORM": True,
                     "PLUS_ONE": True, "CAP": True},
}  # fmt: skip
CODES = {"128 over int8": 1, "128 over fp8": 2}  # formats of the cache
TYPES = (ATTENTION, OF_CODES)
Arguments = tuple[object, ...]


def kernels_of_decode_attention() -> dict[str, Arguments]:
    """Name -> arguments of a Build of the gate; of its scalar registers so many may spill."""
    attend, warps = decode_attention._attend, decode_attention.WARPS
    floats = {name: (attend, ATTENTION, SHAPE | changes, warps, 176) for name, changes in SHAPES.items()}
    codes = {name: (attend, OF_CODES, SHAPE | {"FORM": form}, warps, 336) for name, form in CODES.items()}
    return {f"decode_attention {name}": given for name, given in (floats | codes).items()}
