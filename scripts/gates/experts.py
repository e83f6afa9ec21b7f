"""The Triton kernels of experts, as the gate compiles them."""

from __future__ import annotations

import itertools
from typing import Any

from accelpatch.kernels.triton import choose_experts, experts, grouped_experts


def kernels_of_experts() -> dict[str, tuple[Any, ...]]:
    """Name -> arguments of a Build of the gate, for each kind of weight, of Mixtral's shapes."""
    kinds = {"floats": (experts.FLOAT, "*bf16", False), "int8": (experts.INT8, "*i8", False),
             "4 bits": (experts.INT4, "*i32", True)}  # fmt: skip
    made: dict[str, tuple[Any, ...]] = {}
    for name, (kind, w, minimum) in kinds.items():
        held = (w, *("*fp16" if kind == experts.INT4 else "*fp32",) * 2, "*bf16")
        form = {"KIND": kind, "MINIMUM": minimum, "GROUP": 128, "BIAS": False}
        columns = experts.shape(experts.DOWN[kind], kind, 4096)["COLUMNS"]
        for code in (0, experts.CLAMPED) if kind == experts.INT4 else (0,):
            tile = experts.GATE_UP[kind]
            made[f"experts' gate and up, {name}, activation {code}"] = (
                experts._gate_up, ("*bf16", "*i64", *held, "*bf16", *("i32",) * 7, "fp32", "fp32"),
                form | {"CODE": code, "DEPENDENT": False, "ROWS": tile.rows, "COLUMNS": columns}, tile.warps,
            )  # fmt: skip
        tile = experts.DOWN[kind]
        made[f"experts' down, {name}"] = (
            experts._down, ("*bf16", "*i64", "*bf16", *held, "*bf16", "*bf16", *("i32",) * 6),
            form | {"RESIDUAL": True, "DEPENDENT": False, "ROWS": tile.rows, "COLUMNS": columns}, tile.warps,
        )  # fmt: skip
        for block, tiled in itertools.product(grouped_experts.AMD_TILES, (False, True)[: 1 + minimum]):
            sizes = {"PRECISION": "ieee", "EXPERTS": 8, "ROWS": block.rows, "TOKENS": block.tokens,
                     "COLUMNS": block.columns, "TILED": tiled}  # fmt: skip
            label = f"{name} in tiles" if tiled else name
            made[f"{block.tokens} tokens' gate and up, {label}"] = (
                grouped_experts._gate_up, ("*bf16", "*i64", "*i32", *held, "*bf16", *("i32",) * 6, "fp32", "fp32"),
                form | {"CODE": 0} | sizes, block.warps, 96,
            )  # fmt: skip
            made[f"{block.tokens} tokens' down, {label}"] = (
                grouped_experts._down, ("*bf16", "*i64", "*i32", "*bf16", *held, "*bf16", *("i32",) * 5), form | sizes,
                block.warps, 96,
            )  # fmt: skip
    made["choice of experts"] = (
        choose_experts._token, ("*bf16", "*i64", "*bf16", "i32", "i32"),
        {"NORMALISE": True, "DEPENDENT": False, "EXPERTS": 128, "CHOSEN": 8}, 1,
    )  # fmt: skip
    return made
