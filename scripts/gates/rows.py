"""Triton kernels that hold a row in a program, as the gate compiles them, by its length."""

from __future__ import annotations

import itertools
from typing import Any

from accelpatch.kernels.triton import layernorm, quantize_rows, rmsnorm
from accelpatch.kernels.triton.launch import warps
from gates.builds import ARCHS

NORM = {"ADD": False, "AFTER": False, "ROWS": False, "STATIC": False, "NATIVE": False, "PLUS_ONE": False,
        "DEPENDENT": False, "BLOCK": 4096}  # fmt: skip
LAYER_NORM = {"ADD": True, "BIAS": True, "STATIC": False, "NATIVE": False, "DEPENDENT": False}
BLOCKS = (64, 1024, 2048, 32768)  # those of the triton_gate.py's table are between


def kernels_of_rows() -> dict[str, tuple[Any, ...]]:
    """Name -> arguments of a Build of the gate: the kernels that take the most registers, with 1 to 16 warps."""
    kernels: dict[str, tuple[Any, tuple[str, ...], dict[str, Any]]] = {
        "add_rmsnorm": (rmsnorm._row, ("*bf16",) * 5 + ("*fp32", "*fp32", "i32", "fp32"), NORM | {"ADD": True}),
        "rows of a gate": (quantize_rows._row, ("*bf16", "*fp32", "*i8", "*fp32", "i32", "i32"),
                           {"CODE": 0, "GATED": True, "STATIC": False, "NATIVE": False, "DEPENDENT": False}),
        "rows of an activation": (quantize_rows._row, ("*bf16", "*fp32", "*i8", "*fp32", "i32", "i32"),
                                  {"CODE": 1, "GATED": False, "STATIC": False, "NATIVE": False, "DEPENDENT": False}),
        "add_layernorm": (layernorm._row, ("*bf16",) * 6 + ("*fp32", "*fp32", "i32", "fp32"),
                          LAYER_NORM | {"ROWS": False, "NORMED": False}),
        "rows of a LayerNorm": (layernorm._row, ("*bf16",) * 4 + ("*i8", "*bf16", "*fp32", "*fp32", "i32", "fp32"),
                                LAYER_NORM | {"ROWS": True, "NORMED": True}),
    }  # fmt: skip
    return {
        f"{name}, {block} elements": (kernel, types, values | {"BLOCK": block}, warps(block), 0, ARCHS, {}, 0, True)
        for (name, (kernel, types, values)), block in itertools.product(kernels.items(), BLOCKS)
    }
