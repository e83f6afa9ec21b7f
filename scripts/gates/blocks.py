"""The Triton kernels of GGUF's blocks, as the gate compiles them."""

from __future__ import annotations

from typing import Any

from accelpatch.kernels.triton import block_linear


def kernels_of_blocks() -> dict[str, tuple[Any, ...]]:
    """Name -> arguments of a Build of the gate, for each form."""
    block = block_linear.BLOCKS.of[2]
    sizes = {"BIAS": True, "CUT": True, "TOKENS": block.tokens, "ROWS": block.rows, "COLUMNS": block.columns}
    types = ("*bf16", "*u8", "*bf16", "*bf16", "*fp32", *("i32",) * 6)
    made: dict[str, tuple[Any, ...]] = {
        f"block_linear, {form}": (block_linear._block_gemm, types, sizes | {"SIX": form == "Q6_K"}, block.warps, 200)
        for form in ("Q4_K", "Q6_K")
    }
    rows = {"SIX": True, "ROWS": 16, "COLUMNS": 256}
    made["blocks as floats"] = (block_linear._block_rows, ("*u8", "*bf16", *("i32",) * 3), rows)
    return made
