"""Compiles every Triton kernel for gfx90a, gfx942 and gfx950 without a GPU and reads the assembly: nothing may spill.

    python scripts/triton_gate.py

Kernels that begin while the one before them ends are compiled for sm_90 too: they wait before they touch memory. So are
products of 8-bit floats, of int8 and int4 weights, and attention: they run on its matrix unit, the latter two without
waiting for each other. Needs Triton (any build of it compiles for all). `make gate` runs this. It says nothing about
speed or right results: the numbers are tested through Triton's interpreter and on GPUs.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).parents[1]))

from gates.attention import PROMPT, kernels_of_attention, kernels_of_other_attention
from gates.blocks import kernels_of_blocks
from gates.builds import ARCHS, BEHIND, Build, compiled, impatient, no_matrix_unit, slow_on_hopper
from gates.decode_attention import TYPES, kernels_of_decode_attention
from gates.experts import kernels_of_experts
from gates.hopper_gemm import kernels_of_hopper_gemm
from gates.rows import NORM, kernels_of_rows

from accelpatch.errors import CompileError
from accelpatch.kernels.triton import (
    dequantize,
    fp8_weights,
    gated_activation,
    gemm,
    gemm_w8a8,
    gptq_columns,
    greedy,
    int3_rows,
    layernorm_q,
    prompt_attention,
    quantize_rows,
    query_key,
    reorder,
    rmsnorm,
    rope,
    step_end,
    weight_only,
)
from accelpatch.kernels.triton import gemm_w8a8_kernels as kernels

WAVE = 64
SPILLS = ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")


def sizes(block: gemm.Block) -> dict[str, int]:
    """A block's compile-time values."""
    return {"TOKENS": block.tokens, "ROWS": block.rows}


def of_tile(tile: gemm.Block) -> dict[str, int]:
    """A tile's compile-time values."""
    return {"TILE_M": tile.tokens, "TILE_N": tile.rows, "TILE_K": tile.columns}


BY_ROWS = {"GATE": False, "BIAS": True, "EVEN": True, "DEPENDENT": False}
TILED = {"KIND": 2, "GROUP": 128, "GROUPS": 1}
#: values that share a scale, and such groups in a step of K, for each kind of 4 bits
GROUPS = ((32, 4), (64, 2), (256, 1), (64, 2), (32, 4), (32, 4), (32, 4))
SCALES = {"e2m1": ("*bf16", "*bf16"), "nvfp4": ("*i16", "*fp32")}  # of tiles, and what lies beside them; else fp16
ROWS = {"CODE": -1, "GATED": False, "STATIC": False, "NATIVE": False, "DEPENDENT": False}
FLAGS = {"ROW": True, "COLUMN": True, "D": 2, "CORRECTED": False, "RESIDUAL": False, "CODE": -1, "EVEN": True}
TILE = gemm_w8a8.AMD_TILES[0][1]


def products(form: str, sums: str, archs: tuple[str, ...], number: int) -> dict[str, Build]:
    """The GEMMs of 8 bits and what makes their rows, in one form. number: FLOAT of their kernels."""
    one, added = f"*{form}", {"FLOAT": number}
    behind = ("*bf16", "*fp32", "*fp32", "*bf16", "*i32", "*bf16", "fp32", "fp32")  # E, and what is behind the sums
    flags = {name: value for name, value in FLAGS.items() if name != "EVEN"}
    made = {
        "tiles": Build(kernels.tiles, (one, one, "*bf16", *behind, *("i32",) * 7),
                       FLAGS | {"TMA": False, "GROUP": 8, "D": 1} | of_tile(TILE) | added, TILE.warps, 48),
        "tiles, a matrix behind": Build(kernels.tiles, (one, one, "*bf16", *behind, *("i32",) * 7),
                                        FLAGS | {"TMA": False, "GROUP": 8} | of_tile(TILE) | added, TILE.warps, 64),
        "tiles, gated": Build(kernels.gated, (one, one, "*bf16", *behind[:4], *("i32",) * 5),
                              {"BIAS": True, "CODE": 0, "EVEN": True, "TMA": False, "GROUP": 8} | of_tile(TILE)
                              | added, TILE.warps),
        "streams added up": Build(kernels.add_up, (f"*{sums}", *behind, *("i32",) * 4), flags | {"SIZE": 1024} | added),
        "rows": Build(quantize_rows._row, ("*bf16", "*fp32", one, "*fp32", "i32", "i32"),
                      ROWS | {"BLOCK": 4096}, 8),
        "rows of a gate": Build(quantize_rows._row, ("*bf16", "*fp32", one, "*fp32", "i32", "i32"),
                                ROWS | {"CODE": 0, "GATED": True, "BLOCK": 16384}, 16),
        "rows of a norm": Build(rmsnorm._row, (*("*bf16",) * 3, one, "*bf16", "*fp32", "*fp32", "i32", "fp32"),
                                NORM | {"ADD": True, "ROWS": True}, 8),
    } | {
        f"stream, {rows} rows": Build(kernels.stream, (one, one, behind[0], f"*{sums}", *behind[1:], *("i32",) * 7),
                                      FLAGS | {"CUT": True} | of_tile(tile) | added, tile.warps, 192)
        for rows, tile in gemm_w8a8.AMD_STREAMS.items()
    }  # fmt: skip
    return {f"{form} {name}": replace(build, archs=archs) for name, build in made.items()}


OTHERS = {
    "rotary_cos_sin": Build(rope._position, ("*i64", "*fp32", "*bf16", "*bf16", "fp32", "i32"), {"BLOCK": 64}, 1),
    "the highest score's token": Build(greedy._token, ("*fp32", "*i1", "*i1", *("*i64",) * 4, "*i32", "i32"),
                                       {"ENDS": True, "ONE": True, "PARTS": 32, "BLOCK": greedy.BLOCK}, greedy.WARPS),
    "what a step leaves": Build(step_end._leave, ("*bf16", "*fp32", *("*i64",) * 3, *("i32",) * 4),
                                {"ROWS": 1, "BLOCK": step_end.BLOCK}, step_end.WARPS),
    "activations in the order of tiles": Build(weight_only._spread, ("*bf16", "*bf16", *("i32",) * 3), {}, 1),
    "int8_linear as floats": Build(dequantize._int8_rows, ("*i8", "*fp32", "*bf16", *("i32",) * 4),
                                   {"PER_ROW": True, "E4M3": False, "ROWS": 8, "COLUMNS": 1024}),
    "fp8_linear as floats": Build(dequantize._int8_rows, ("*i8", "*fp32", "*bf16", *("i32",) * 4),
                                  {"PER_ROW": False, "E4M3": True, "ROWS": 8, "COLUMNS": 1024}),
    "tiled_int4_linear as floats": Build(dequantize._int4_weight_rows, ("*i32", "*fp16", "*fp16", "*bf16",
                                                                        *("i32",) * 5),
                                         TILED | {"ROWS": 64, "INTERLEAVED": True}),
    "columns in another order": Build(reorder._reordered, ("*bf16", "*i32", "*bf16", "*bf16", "i32", "i32", "fp32"),
                                      {"NORM": True, "PLUS_ONE": False, "DEPENDENT": False, "ROW": 4096,
                                       "COLUMNS": reorder.COLUMNS}),
    "int8 rows of a LayerNorm": Build(layernorm_q._row, ("*fp16", "*fp32", "*fp32", "*i8", "i32", "i32", "fp32"),
                                      {"DEPENDENT": False, "BLOCK": 8192}, 16),
    "tiled_int3_linear as floats": Build(int3_rows._int3_weight_rows,
                                         ("*u8", "*fp16", "*fp16", "*bf16", *("i32",) * 5),
                                         {"KIND": 2, "GROUPS": 1, "ROWS": int3_rows.ROWS, "INTERLEAVED": True}),
    "columns of GPTQ": Build(gptq_columns._columns, (*("*fp32",) * 7, *("i32",) * 3, "fp32", "fp32"),
                             {"ROWS": gptq_columns.ROWS, "BLOCK": 128}, gptq_columns.WARPS),
    "runs of K added up": Build(gemm._add_up, ("*fp32", "*bf16", "*bf16", "i32", "i32", "i32"),
                                {"BIAS": True, "DEPENDENT": False, "SIZE": 1024}),
}  # fmt: skip
BUILDS = {
    **OTHERS,
    **{
        name: Build(rmsnorm._row, ("*bf16",) * 5 + ("*fp32", "*fp32", "i32", "fp32"), NORM | changed, 8)
        for name, changed in {
            "rmsnorm": {},
            "add_rmsnorm": {"ADD": True, "PLUS_ONE": True},
            "rmsnorm_add": {"AFTER": True, "PLUS_ONE": True},
        }.items()
    },
    **{
        f"gated_activation {name}": Build(
            gated_activation._block,
            ("*bf16",) * 3 + ("i32",) * 3,
            {"CODE": code, "DEPENDENT": False, "SIZE": gated_activation.BLOCK},
        )
        for name, code in (("silu", 0), ("gelu", 1), ("gelu_tanh", 2))
    },
    **{name: Build(*given) for name, given in kernels_of_decode_attention().items()},
    **{
        f"a prompt's q, k and v{name}": Build(
            prompt_attention._rotate,
            ("*bf16", "*i64", "*fp32", *("*bf16",) * 4, *("i32",) * 4, "fp32", "fp32"),
            {
                "NORM": norms,
                "PLUS_ONE": norms and rotary < 128,
                "SIZE": 128,
                "ROTARY": rotary,
                "WIDE": rotary // 2,
                "REST": max(1, 128 - rotary),
                "HEADS": prompt_attention.HEADS,
            },
            prompt_attention.WARPS,
            24,
        )
        for name, norms, rotary in (("", False, 128), (" with norms", True, 128), (", partly rotated", True, 64))
    },
    **{
        f"q and k {name}": Build(
            query_key._prepare,
            ("*bf16", "*i64", "*bf16", "*bf16", "*fp32", *("i32",) * 3, "fp32", "fp32"),
            {"NORM": norms, "PAIRS": pairs, "SIZE": 128, "BLOCK": 2048},
            query_key.WARPS,
            160,
        )
        for name, norms, pairs in (("with norms", True, 0), ("interleaved", False, 32))
    },
    **{
        f"int8_linear, {block.tokens} tokens": Build(
            gemm._gemm,
            ("*bf16", "*i8", "*fp32", "*bf16", "*bf16", "*fp32", *("i32",) * 5),
            BY_ROWS | {"SCALED": True, "CUT": cut} | sizes(block) | {"COLUMNS": block.columns},
            block.warps,
            160,
        )
        for block, cut in zip(gemm.INT8.of, (True, True, False, False), strict=True)
    },
    **{
        f"gemv, {block.tokens} tokens{', K cut' if cut else ', gated' if gate else ''}": Build(
            gemm._gemm,
            ("*bf16",) * 5 + ("*fp32", *("i32",) * 5),
            BY_ROWS | {"SCALED": False, "GATE": gate == 1, "CUT": cut == 1} | sizes(block) | {"COLUMNS": block.columns},
            block.warps,
            200,
        )
        for blocks, cut, gate in ((gemm.FLOAT, 0, 0), (gemm.FLOAT_CUT, 1, 0), (gemm.FLOAT_GATE, 0, 1))
        for block in blocks.of
    },
    **{
        f"tiled_int4_linear, {block.tokens} tokens": Build(
            weight_only._int4_gemm,
            ("*bf16", "*i32", "*fp16", "*fp16", "*bf16", "*bf16", "*fp32", *("i32",) * 6),
            TILED | {"BIAS": True, "CUT": cut, "ASM": False} | sizes(block),
            block.warps,
        )
        for block, cut in zip(weight_only.INT4.of, (True, True, False), strict=True)
    },
    **{
        f"fp8 weights in blocks, {block.tokens} tokens": Build(
            fp8_weights._fp8_gemm,
            ("*bf16", "*i8", "*fp32", "*bf16", "*bf16", "*fp32", *("i32",) * 6),
            {"ROWS_ALONE": False, "BIAS": True, "CUT": True, "EVEN": True, "NATIVE": False, "COLUMNS": block.columns}
            | sizes(block),
            block.warps,
            200,
        )
        for block in fp8_weights.BLOCKS.of
    },
    **products("i8", "i32", ARCHS, 0),
    **products("fp8e4b8", "fp32", ("gfx942",), -1),
    **products("fp8e4nv", "fp32", ("gfx950",), -1),
    **{
        f"tiled_int4_linear in groups of {group}, {kind}": Build(
            weight_only._int4_gemm,
            ("*bf16", "*i32", *SCALES.get(kind, ("*fp16", "*fp16")), "*bf16", "*bf16", "*fp32", *("i32",) * 6),
            {"KIND": number, "GROUP": group, "GROUPS": groups, "BIAS": True, "CUT": True, "ASM": False}
            | sizes(weight_only.INT4.of[0]),
            weight_only.INT4.of[0].warps,
        )
        for (kind, number), (group, groups) in zip(weight_only.KINDS.items(), GROUPS, strict=True)
    },
    **{
        name: Build(*given)
        for made in (kernels_of_experts(), kernels_of_blocks(), kernels_of_other_attention(), kernels_of_rows())
        for name, given in made.items()
    },
    **{f"{name}, {arch}": Build(*given) for arch in ARCHS for name, given in kernels_of_attention(arch).items()},
}


def spilled(arch: str, build: Build) -> list[str]:
    """What is wrong with a kernel's assembly for an arch of AMD."""
    code = compiled(build, GPUTarget("hip", arch, WAVE)).asm["amdgcn"]
    found = {key: int(value) for key in SPILLS for value in re.findall(rf"\.{key}: +(\d+)", code)}
    if set(found) != set(SPILLS):
        return [f"no figures for {', '.join(set(SPILLS) - set(found))}"]
    most = {"sgpr_spill_count": build.scalars, "vgpr_spill_count": build.vectors}
    return [f"{key} is {value}" for key, value in found.items() if value > most.get(key, 0)]


Check = tuple[str, str, Callable[[], list[str]]]  # an arch, the name of a kernel, and what finds its faults


def checks() -> Iterator[Check]:
    """All that is compiled, and what is looked at."""
    for name, build in BUILDS.items():
        for arch in build.archs:
            yield arch, name, partial(spilled, arch, build)
    # attention alone reads before it waits: what earlier steps have cached
    hopper = {name: one for name, one in BUILDS.items() if one.archs != ("gfx942",) and one.types not in TYPES}
    for name, build in hopper.items():
        if "DEPENDENT" in build.constants and not build.amd_alone:
            yield "sm_90", name, partial(impatient, build)
        if "*fp8e4nv" in build.types and "TILE_K" in build.constants:
            yield "sm_90", name, partial(no_matrix_unit, build)
    for name, given in kernels_of_attention("sm_90", (PROMPT,)).items():
        yield "sm_90", name, partial(slow_on_hopper, Build(*given))
    for name, given in kernels_of_hopper_gemm().items():
        yield "sm_90", name, partial(slow_on_hopper, Build(*given), BEHIND)


def faults(check: Check) -> list[str]:
    """What is wrong with a kernel, for people."""
    arch, name, find = check
    try:
        return [f"{arch} {name}: {fault}" for fault in find()]
    except CompileError as error:
        return [f"{arch} {name}: {error}"]


def main() -> None:
    """Compile all for all; exit with 1 where anything is wrong."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    every = list(checks())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        bad = [fault for found in pool.map(faults, every) for fault in found]
    on_hopper = sum(arch == "sm_90" for arch, _, _ in every)
    kernels = f"{len(every) - on_hopper} Triton kernels for {', '.join(ARCHS)}, {on_hopper} for sm_90"
    print("\n".join([*bad, f"{kernels}, {len(bad)} faults"]))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
