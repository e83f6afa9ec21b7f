"""Compiles a kernel by Triton for two archs into tests/fixtures/profiling; needs `pip install triton`, and no GPU.

    TRITON_DISABLE_LINE_INFO=1 python scripts/make_fixtures/make_triton_kernels.py

What cuobjdump prints of the cubin is kept beside it, so that tests need no tool.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

OUT = Path(__file__).parents[2] / "tests/fixtures/profiling"
TARGETS = {"triton-gfx942": GPUTarget("hip", "gfx942", 64), "triton-sm90": GPUTarget("cuda", 90, 32)}
KEPT = ("name", "target", "num_warps", "num_stages", "shared", "triton_version")


@triton.jit
def dot_kernel(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """c[BM, BN] = a[BM, K] @ b[BN, K]^T by one block."""
    m, n, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for at in range(0, K, BK):
        x = tl.load(a + m[:, None] * K + at + k[None, :])
        y = tl.load(b + n[:, None] * K + at + k[None, :])
        acc = tl.dot(x, tl.trans(y), acc)
    tl.store(c + m[:, None] * BN + n[None, :], acc.to(tl.float16))


def main() -> None:
    if os.environ.get("TRITON_DISABLE_LINE_INFO") != "1":
        raise SystemExit("set TRITON_DISABLE_LINE_INFO=1: the files would name folders of this machine")
    types = {"a": "*fp16", "b": "*fp16", "c": "*fp16", "K": "i32", "BM": "constexpr", "BN": "constexpr"}
    source = ASTSource(dot_kernel, {**types, "BK": "constexpr"}, {(4,): 64, (5,): 64, (6,): 32})
    for folder, target in TARGETS.items():
        into = OUT / folder
        into.mkdir(parents=True, exist_ok=True)
        made = triton.compile(source, target=target, options={"num_warps": 4})
        for ending in ("amdgcn", "hsaco", "cubin", "ttgir"):
            if (text := made.asm.get(ending)) is not None:
                data = text if isinstance(text, bytes) else re.sub(r" ?loc\(.*\)|^#loc.*\n", "", text).encode()
                (into / f"dot_kernel.{ending}").write_bytes(data)
        facts = {name: getattr(made.metadata, name, None) for name in KEPT}
        facts["target"] = {"backend": target.backend, "arch": target.arch, "warp_size": target.warp_size}
        facts["triton_version"] = triton.__version__
        (into / "dot_kernel.json").write_text(json.dumps(facts, indent=1) + "\n")
    write_what_cuobjdump_prints(OUT / "triton-sm90")


def write_what_cuobjdump_prints(folder: Path) -> None:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    for name, option in {"resources.txt": "--dump-resource-usage", "sass.txt": "-sass"}.items():
        said = subprocess.run([tool, option, folder / "dot_kernel.cubin"], capture_output=True, text=True, check=True)
        text = re.sub(r"[ \t]+/\* 0x[0-9a-f]+ \*/", "", said.stdout)
        (folder / name).write_text("".join(f"{line.rstrip()}\n" for line in text.splitlines() if line.strip()))


if __name__ == "__main__":
    main()
