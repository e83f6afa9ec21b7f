"""The Triton kernels of GGUF's blocks, as the gate compiles them."""

from __future__ import annotations

import itertools
from typing import Any

from accelpatch.kernels.triton import block_linear


def kernels_of_blocks() -> dict[str, tuple[Any, ...]]:
    """Name -> arguments of a Build of the gate, for each form."""
    types = ("*bf16", "*u8", "*bf16", "*bf16", "*fp32", *("i32",) * 6)
    made: dict[str, tuple[Any, ...]] = {}
    for block, form in itertools.product(block_linear.BLOCKS.of, ("Q4_K", "Q6_K")):
        sizes = {"TOKENS": block.tokens, "ROWS": block.rows, "COLUMNS": block.columns}
        made[f"block_linear, {form}, {block.tokens} tokens"] = (
            block_linear._block_gemm, types,
            {"FORM": block_linear.FORMS[form], "EVEN": True, "BIAS": True, "CUT": True} | sizes, block.warps, 200,
        )  # fmt: skip
    for form, number in block_linear.FORMS.items():
        rows = {"FORM": number, "ROWS": 16, "COLUMNS": 256}
        made[f"blocks as floats, {form}"] = (block_linear._block_rows, ("*u8", "*bf16", *("i32",) * 3), rows, 4, 200)
    return made
