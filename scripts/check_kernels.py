"""Checks the HIP linear kernels on the GPU that is here against float64 references, and prints what is wrong.

    python scripts/check_kernels.py --libraries DIR             # everything, as `all`
    python scripts/check_kernels.py gemv --libraries DIR [--formats plain int8 ...]
    python scripts/check_kernels.py rows --libraries DIR
    compute-sanitizer --tool memcheck python scripts/check_kernels.py gemv --libraries DIR --small

DIR is a folder that `accelpatch build --arch ARCH --out DIR` filled. The exit status is 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.gemv_checks import check_signals, check_small, kinds, run
from tests.support.gemv_reference import wrong
from tests.support.hip_gemv import FORMATS, Library, pack
from tests.support.rows_checks import ROWS_FORMATS, check_rows

SHAPES = [(48, 4096), (16, 11008), (100, 576), (33, 65), (1, 128), (7, 2048), (4096, 4096), (32, 6144)]
SHAPES += [(16, 16384), (16, 36864)]  # more than half of an SM's memory even for one token
TOKENS = (1, 2, 7, 8, 9, 33)
ROWS_TUNINGS: tuple[dict[str, int], ...] = ({}, *({"blocks": count} for count in (1, 2, 4, 8)), {"dependent": -1})
COMMANDS = ("all", "gemv", "rows")


def check_format(lib: Library, name: str, dtype: torch.dtype) -> list[str]:
    """Every shape, number of tokens and epilogue of one format; the failures in words."""
    bad, ran = [], 0
    for (n, k), interleaved in itertools.product(SHAPES, (False, True)):
        if (interleaved and n % 2) or (name not in ("plain",) and name.startswith("int4") and k % 2):
            continue
        w = torch.randn(n, k, device="cuda") / k**0.5
        p = pack(w, name, dtype=dtype, interleaved=interleaved)
        x = torch.randn(max(TOKENS), k + 8, dtype=dtype, device="cuda")[:, :k]
        for kind_name, kind in kinds(n, k, max(TOKENS), dtype).items():
            if (kind_name == "silu_gate") != interleaved or (
                kind_name not in ("product", "rms", "silu_gate") and n > 100
            ):
                continue
            whole = run(lib, p, x, kind)
            ran += 1
            if reason := wrong(whole, p.dense, x, kind):
                bad.append(f"{name} {dtype} N={n} K={k} {kind_name}: {reason}")
            for m, tuning in itertools.product(TOKENS, ({}, {"shallow": 1, "blocks": 5}, {"dependent": -1})):
                part = {**kind, "residual": kind["residual"][:m]} if "residual" in kind else kind
                if not torch.equal(run(lib, p, x[:m], part, **tuning), whole[:m]):
                    bad.append(f"{name} {dtype} N={n} K={k} {kind_name}: M={m} {tuning} has other bits")
    print(f"{name:18} {dtype!s:15} {ran:4} cases, {len(bad)} bad", flush=True)
    return bad


def special(lib: Library) -> list[str]:
    """NaN and Inf, the subnormals of fp16, shifted pointers, no tokens, repeats."""
    bad = []
    for dtype in (torch.bfloat16, torch.float16):
        w = torch.randn(64, 1024, device="cuda") / 32
        for name in FORMATS:
            if (name, dtype) == ("compact", torch.float16):
                continue
            p = pack(w, name, dtype=dtype)
            x = torch.randn(8, 1024, dtype=dtype, device="cuda")
            x[1, 5], x[2, 7], x[3, 9] = float("nan"), float("inf"), float("-inf")
            x[4] *= 2.0**-24 if dtype == torch.float16 else 2.0**-120
            x[5] *= 2.0**6 if dtype == torch.float16 else 2.0**60
            x[7] *= torch.exp2(torch.randint(-20, 5, (1024,), device="cuda")).to(dtype)
            y = run(lib, p, x, {})
            parts = (
                (slice(0, 4), "NaN or Inf"),
                (slice(4, 5), "subnormals"),
                (slice(5, 6), "large values"),
                (slice(7, 8), "a wide range"),
            )
            for rows, what in parts:
                if reason := wrong(y[rows], p.dense, x[rows], {}):
                    bad.append(f"{name} {dtype} {what}: {reason}")
            run(lib, p, x[:0], {})
            first = run(lib, p, x[5:], {})
            if any(not torch.equal(run(lib, p, x[5:], {}), first) for _ in range(1000)):
                bad.append(f"{name} {dtype}: repeats differ")
        shifted = torch.randn(33, 1024 * 64 + 1, device="cuda").to(dtype)[0, 1:].view(64, 1024)
        p = pack(w, "plain", dtype=dtype)
        p.w, p.dense = shifted, shifted.double()
        x = torch.randn(3, 1027, dtype=dtype, device="cuda")[:, 1:1025]
        if reason := wrong(run(lib, p, x, {}), p.dense, x, {}):
            bad.append(f"{dtype} shifted pointers: {reason}")
    return bad


def odd_tokens(lib: Library) -> list[str]:
    """Values outside the usual range where K is staged whole (one token) and in several tiles (eight)."""
    bad = []
    for name in ("int8", "int4_g128", "fp8"):
        p = pack(torch.randn(4096, 12288, device="cuda") / 110, name, dtype=torch.bfloat16)
        x = torch.randn(8, 12288, dtype=torch.bfloat16, device="cuda")
        x[1] *= 2.0**60
        x[2] *= 2.0**-60
        x[3, 12000], x[4, 5] = 2.0**40, float("inf")
        x[5] = 0
        whole = run(lib, p, x, {"residual": x[:, :4096]})
        if reason := wrong(whole, p.dense, x, {"residual": x[:, :4096]}):
            bad.append(f"{name} odd tokens: {reason}")
        for row in range(8):
            one = run(lib, p, x[row : row + 1], {"residual": x[row : row + 1, :4096]})
            if not torch.equal(one.nan_to_num(7), whole[row : row + 1].nan_to_num(7)):
                bad.append(f"{name} odd tokens: row {row} has other bits alone")
    return bad


def check_gemv(lib: Library, formats: Sequence[str] = tuple(FORMATS), *, small: bool = False) -> list[str]:
    """Up to 33 tokens in each format; small: few launches, all of these kernels."""
    torch.manual_seed(0)
    check = check_small if small else check_format
    every = itertools.product(formats, (torch.bfloat16, torch.float16))
    every = [one for one in every if one != ("compact", torch.float16)]
    bad = [line for name, dtype in every for line in check(lib, name, dtype)]
    if not small:
        bad += special(lib) + odd_tokens(lib)
        bad += [line for name in formats for line in check_signals(lib, name, torch.bfloat16)]
    return bad


def check_every_row(lib: Library) -> list[str]:
    """Products of 9 to 64 tokens with int4 weights, by every number of blocks that can share K."""
    torch.manual_seed(0)
    every = itertools.product(ROWS_FORMATS, (torch.bfloat16, torch.float16), ROWS_TUNINGS)
    return [line for name, dtype, tuning in every for line in check_rows(lib, name, dtype, **tuning)]


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line; `all` where it names no subcommand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{all,gemv,rows}")
    about = {
        "all": "Run the checks of gemv and rows, one after the other. This is what runs when no subcommand is named.",
        "gemv": "Check 1 to 33 tokens in every weight format, with every epilogue, and that a token's bits are those "
        "that it gets alone.",
        "rows": "Check products of 9 to 64 tokens with int4 weights, and that repeats give the same bits.",
    }
    made = {name: commands.add_parser(name, help=about[name], description=about[name]) for name in COMMANDS}
    for one in made.values():
        one.add_argument("--libraries", type=Path, required=True, metavar="DIR",
                         help="The folder with the built libraries, that of `accelpatch build --out`.")  # fmt: skip
    made["gemv"].add_argument("--formats", nargs="*", default=list(FORMATS), choices=list(FORMATS), metavar="FORMAT",
                              help=f"The weight formats to check: {', '.join(FORMATS)} (default: all).")  # fmt: skip
    made["gemv"].add_argument("--small", action="store_true",
                              help="Make few launches, and none but of these kernels: for a sanitizer.")  # fmt: skip
    named = words and words[0] in (*COMMANDS, "-h", "--help")
    return parser.parse_args(words if named else ["all", *words])


def main() -> int:
    """Run the checks that were asked for; 1 where one failed."""
    options = arguments(sys.argv[1:])
    bad, lib = [], Library(options.libraries)
    if options.command in ("all", "gemv"):
        if small := getattr(options, "small", False):
            os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # read at torch's first allocation
        bad += check_gemv(lib, getattr(options, "formats", tuple(FORMATS)), small=small)
    if options.command in ("all", "rows"):
        bad += check_every_row(lib)
    print("\n".join(bad[:40]))
    print(f"{len(bad)} failures")
    return bool(bad)


if __name__ == "__main__":
    raise SystemExit(main())
