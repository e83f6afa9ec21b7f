"""Compiles every Triton kernel for gfx90a, gfx942 and gfx950 without a GPU and reads the assembly: nothing may spill.

    python scripts/triton_gate.py

Needs Triton (any build of it compiles for AMD). `make gate` runs this. It says nothing about speed or right results:
the numbers are tested through Triton's interpreter and on GPUs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[1]))

from accelpatch.kernels.triton import decode_attention, gated_activation, rmsnorm, rope

ARCHS = ("gfx90a", "gfx942", "gfx950")
WAVE = 64
ALIGNED = ("capacity", "heads")
SPILLS = ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size")


@dataclass(frozen=True)
class Build:
    """A kernel with the types of its arguments, in order, and its compile-time values, as a 7B model launches it."""

    kernel: Any
    types: tuple[str, ...]
    constants: Mapping[str, Any]
    warps: int = 4
    scalars: int = 0  # scalar registers that may be kept in lanes of a vector register: no memory is touched for them


ATTENTION = ("*bf16", *("*i64",) * 3, "*bf16", "*bf16", "*fp32", *("*bf16",) * 3, "*fp32", "*fp32", "*i32",
             *("i32",) * 4, *("fp32",) * 4)  # fmt: skip
SHAPE = {
    "GROUP": 4, "NORM": False, "PLUS_ONE": False, "CAP": False, "SIZE": 128, "WIDE": 128, "TURNED": 128,
    "RUN": decode_attention.RUN, "SLOTS": decode_attention.OTHERS.slots, "ROWS": decode_attention.ROWS,
    "SOME": 4, "MOST": decode_attention.MOST, "ROOM": decode_attention.ROOM, "AHEAD": decode_attention.AHEAD,
    "STAGES": decode_attention.OTHERS.stages, "DEPENDENT": False,
}  # fmt: skip
SHAPES = {
    "128": {},
    "128 with norms": {"NORM": True},
    "80": {"SIZE": 80, "TURNED": 32},
    "256 with all": {
        "SIZE": 256,
        "WIDE": 256,
        "SLOTS": decode_attention.OTHERS.slots // 2,
        "TURNED": 256,
        "NORM": True,
        "PLUS_ONE": True,
        "CAP": True,
    },
}
BUILDS = {
    "rmsnorm": Build(
        rmsnorm._row,
        ("*bf16",) * 5 + ("i32", "fp32"),
        {"ADD": False, "AFTER": False, "PLUS_ONE": False, "BLOCK": 4096},
        8,
    ),
    **{
        name: Build(
            rmsnorm._row,
            ("*bf16",) * 5 + ("i32", "fp32"),
            {"ADD": name == "add_rmsnorm", "AFTER": name == "rmsnorm_add", "PLUS_ONE": True, "BLOCK": 4096},
            8,
        )
        for name in ("add_rmsnorm", "rmsnorm_add")
    },
    "rotary_cos_sin": Build(rope._position, ("*i64", "*fp32", "*bf16", "*bf16", "fp32", "i32"), {"BLOCK": 64}, 1),
    **{
        f"gated_activation {name}": Build(
            gated_activation._block, ("*bf16",) * 3 + ("i32",) * 3, {"CODE": code, "SIZE": gated_activation.BLOCK}
        )
        for name, code in (("silu", 0), ("gelu", 1), ("gelu_tanh", 2))
    },
    **{
        f"decode_attention {name}": Build(
            decode_attention._attend, ATTENTION, SHAPE | changes, decode_attention.OTHERS.warps, 96
        )
        for name, changes in SHAPES.items()
    },
}


def faults(arch: str, build: Build) -> list[str]:
    """What is wrong with a kernel's assembly for an arch."""
    names = build.kernel.arg_names
    types = [*build.types, *("constexpr" for _ in build.constants)]
    # as at a launch: tensors and the sizes of caches are multiples of 16
    attrs = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if types[place][0] == "*" or name in ALIGNED
    }
    source = ASTSource(build.kernel, dict(zip(names, types, strict=True)), dict(build.constants), attrs)
    made = triton.compile(source, target=GPUTarget("hip", arch, WAVE), options={"num_warps": build.warps})
    code = made.asm["amdgcn"]
    found = {key: int(value) for key in SPILLS for value in re.findall(rf"\.{key}: +(\d+)", code)}
    if set(found) != set(SPILLS):
        return [f"no figures for {', '.join(set(SPILLS) - set(found))}"]
    most = {"sgpr_spill_count": build.scalars}
    return [f"{key} is {value}" for key, value in found.items() if value > most.get(key, 0)]


def main() -> None:
    """Compile all for all; exit with 1 where anything is wrong."""
    bad = [
        f"{arch} {name}: {fault}" for arch in ARCHS for name, build in BUILDS.items() for fault in faults(arch, build)
    ]
    print("\n".join([*bad, f"{len(BUILDS)} Triton kernels for {', '.join(ARCHS)}, {len(bad)} faults"]))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
