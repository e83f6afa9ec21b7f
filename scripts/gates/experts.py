"""The Triton kernels of experts, as the gate compiles them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from accelpatch.kernels.triton import choose_experts, experts, grouped_experts
from gates.builds import ARCHS

Named = tuple[str, tuple[Any, ...]]
#: name -> (kind of weight, its type with activations of one, what stands beside the codes, columns of which rows have
#: fewer warps)
KINDS = {
    "floats": (experts.FLOAT, "*{}", experts.NONE, (512, 256)),
    "int8": (experts.INT8, "*i8", experts.NONE, (512, 256)),
    "4 bits": (experts.INT4, "*i32", experts.MINIMUM, (2048, 1024)),
    "e2m1": (experts.INT4, "*i32", experts.E2M1, (2048,)),
    "nvfp4": (experts.INT4, "*i32", experts.NV, (2048,)),
    "fp8 in blocks": (experts.FP8, "*i8", experts.NONE, (512, 256)),
}
GROUPS = {experts.E2M1: 32, experts.NV: 16}
WIDTH = 4096  # of Mixtral


def kernels_of_experts() -> dict[str, tuple[Any, ...]]:
    """Name -> arguments of a Build of the gate, for each kind of weight and each tile."""
    made = dict(itertools.chain.from_iterable((*_few(name), *_many(name)) for name in KINDS))
    made["choice of experts"] = (
        choose_experts._token, ("*bf16", "*i64", "*bf16", "i32", "i32"),
        {"NORMALISE": True, "DEPENDENT": False, "EXPERTS": 128, "CHOSEN": 8}, 1,
    )  # fmt: skip
    return made


def _held(name: str, x: str, tiled: bool = False) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Types of a stack's tensors for activations of a type, and its compile-time values."""
    kind, w, offset, _ = KINDS[name]
    form = {"KIND": kind, "OFFSET": offset, "GROUP": GROUPS.get(offset, 128), "BIAS": False}
    scale = "*fp16" if kind == experts.INT4 else "*fp32"
    if offset in GROUPS:
        scale = "*i16" if tiled else "*u8"
    return (w.format(x), scale, "*fp64" if offset == experts.NV else scale, f"*{x}"), form


def _few(name: str) -> Iterator[Named]:
    """Each expert of each token for itself."""
    (held, form), (kind, _, offset, short) = _held(name, "bf16"), KINDS[name]
    for k in (WIDTH, *short):
        tile = experts.shape(experts.DOWN[kind], kind, k)
        warps = tile.pop("num_warps")
        rows = (experts.OF_E2M1 if offset in GROUPS else experts.GATE_UP[kind]).rows
        label = f"{name}, {warps} warps"
        values = form | {"DEPENDENT": False, "COLUMNS": tile["COLUMNS"]}
        for code in (0, experts.CLAMPED) if kind == experts.INT4 and k == WIDTH else (0,):
            yield f"experts' gate and up, {label}, activation {code}", (
                experts._gate_up, ("*bf16", "*i64", *held, "*bf16", *("i32",) * 7, "fp32", "fp32"),
                values | {"CODE": code, "ROWS": rows}, warps, 0, ARCHS, {}, 1, k < WIDTH,
            )  # fmt: skip
        yield f"experts' down, {label}", (
            experts._down, ("*bf16", "*i64", "*bf16", *held, "*bf16", "*bf16", *("i32",) * 6),
            values | {"RESIDUAL": True, "ROWS": experts.DOWN[kind].rows}, warps, 0, ARCHS, {}, 0, k < WIDTH,
        )  # fmt: skip


def _many(name: str) -> Iterator[Named]:
    """Tiles of tokens of one expert."""
    of_halves = [(block, "bf16") for block in grouped_experts.AMD_TILES]
    tiles = [*of_halves, (grouped_experts.WIDE, "fp32")]
    in_tiles = KINDS[name][0] == experts.INT4 and KINDS[name][2] != experts.NV
    for (block, x), tiled in itertools.product(tiles, (False, True) if in_tiles else (False,)):
        held, form = _held(name, x, tiled)
        sizes = {"PRECISION": "ieee", "EXPERTS": 8, "ROWS": block.rows, "TOKENS": block.tokens,
                 "COLUMNS": block.columns, "TILED": tiled}  # fmt: skip
        label = f"{name}{' in tiles' if tiled else ''}{' in float32' if x == 'fp32' else ''}"
        x = f"*{x}"
        yield f"{block.tokens} tokens' gate and up, {label}", (
            grouped_experts._gate_up, (x, "*i64", "*i32", *held, x, *("i32",) * 6, "fp32", "fp32"),
            form | {"CODE": 0} | sizes, block.warps, 96,
        )  # fmt: skip
        yield f"{block.tokens} tokens' down, {label}", (
            grouped_experts._down, (x, "*i64", "*i32", x, *held, x, *("i32",) * 5), form | sizes, block.warps, 96,
        )  # fmt: skip
