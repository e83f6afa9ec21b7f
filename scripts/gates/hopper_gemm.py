"""Products of int8, e4m3 and int4 weights as the gate of Triton's kernels compiles them for Hopper alone."""

from __future__ import annotations

from typing import Any

from accelpatch.kernels.triton import hopper_gemm, hopper_gemm_kernels

FLAGS = {"BIAS": True, "CUT": True, "ASM": True, "DEPENDENT": True}
TABLES = {8: "*fp32", 4: "*fp16"}  # scales, and what lies beside them


def kernels_of_hopper_gemm() -> dict[str, tuple[Any, ...]]:
    """Each tile of int8, e4m3 (kind 3) and int4 weights; int4 without and with a minimum, interleaved rows; both dtypes
    of x."""
    made: dict[str, tuple[Any, ...]] = {}
    for bits, kind, part, dtype in ((8, 0, 0, "bf16"), (8, 0, 0, "fp16"), (8, 3, 0, "bf16"), (8, 3, 0, "fp16"),
                                    (4, 0, 0, "bf16"), (4, 2, 0, "bf16"),
                                    (4, 2, 0, "fp16"), (4, 2, 1, "bf16")):  # fmt: skip
        for tile in hopper_gemm.TILES[bits]:
            one, table = f"*{dtype}", TABLES[bits]
            x = f"tensordesc<{dtype}[{tile.tokens},128]>" if tile.tma else one
            types = (x, one, "*fp32", "*i16", table, table, one, one, "*fp32")
            form = {"BITS": bits, "KIND": kind, "PART": part, "SCALES": bits == 4 or kind == 3, "TMA": tile.tma}
            sizes = {"TOKENS": tile.tokens, "ROWS": tile.rows, "PAIR": tile.pair}
            name = f"int{bits} by wgmma, {tile.tokens} tokens, kind {kind}, part {part}, {dtype}"
            given = hopper_gemm_kernels.product, (*types, *("i32",) * 8), form | FLAGS | sizes, tile.warps
            options = {name: value for name, value in tile.options().items() if name != "num_warps"}
            made[name] = (*given, 0, ("sm_90",), options)
    return made
