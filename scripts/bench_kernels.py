"""Times the HIP linear kernels beside their peers on the GPU that is here; each is checked by the float rule first.

    python scripts/bench_kernels.py gemv --libraries DIR [--formats plain int8 int4_g128] [--tuning '{"depth": 8}' ...]
    python scripts/bench_kernels.py gemv --libraries DIR --shapes [--no-chain]
    python scripts/bench_kernels.py rows --libraries DIR [--tokens 16 32 64] [--clusters 0 1 2 4 8]
    python scripts/bench_kernels.py rows --floats [--tokens 16 32 64]

DIR is a folder that `accelpatch build --arch ARCH --out DIR` filled. Figures are medians of graph replays, with weights
in rotation beyond L2. Run scripts/check_kernels.py first: no speed without correctness.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import gemv, rows

from tests.support.hip_gemv import TIMED

GEMV = """Time 1 to 8 tokens: the read limit of this GPU, the linear layers of a 7B model (32 layers of four) as one
graph, and with --shapes each shape alone beside its peers: torch, torchao where it is installed, and a plain Triton
GEMV."""
ROWS = """Time products of 16 to 64 tokens, for the four products of a Llama-2-7B layer: the HIP kernel with int4
weights beside Triton's and torch's in bf16; or with --floats Triton's with bf16 weights beside torch's."""


def add_gemv(parser: argparse.ArgumentParser) -> None:
    """The options of `gemv`."""
    parser.add_argument("--libraries", type=Path, nargs="+", required=True, metavar="DIR",
                        help="Folders of built libraries. Shapes are timed for the first alone.")  # fmt: skip
    parser.add_argument("--formats", nargs="*", default=["plain", "int8", "int4_g128", "int4_g128_minimum"],
                        choices=list(TIMED), metavar="FORMAT",
                        help=f"The formats to time, of {', '.join(TIMED)} (default: %(default)s).")  # fmt: skip
    parser.add_argument("--tuning", nargs="*", default=["{}"], metavar="JSON",
                        help="Launch settings as JSON objects. The chain is timed with each, the shapes with the first "
                        "(default: the kernels' own choice).")  # fmt: skip
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 8], metavar="M",
                        help="The numbers of tokens to time (default: %(default)s).")  # fmt: skip
    parser.add_argument("--shapes", action="store_true", help="Time each shape alone too, beside its peers.")
    parser.add_argument("--no-chain", action="store_true", help="Leave out the chain of all layers.")


def add_rows(parser: argparse.ArgumentParser) -> None:
    """The options of `rows`."""
    parser.add_argument("--libraries", type=Path, metavar="DIR",
                        help="The folder with the built libraries. It is needed unless --floats is given.")  # fmt: skip
    parser.add_argument("--floats", action="store_true", help="Time bf16 weights, which need no library.")
    parser.add_argument("--tokens", nargs="*", type=int, default=[16, 32, 64], metavar="M",
                        help="The numbers of tokens to time (default: %(default)s).")  # fmt: skip
    parser.add_argument("--clusters", nargs="*", type=int, default=[0, 1, 2, 4, 8], metavar="BLOCKS",
                        help="Blocks that share K; 0 is the kernel's own choice (default: %(default)s).")  # fmt: skip
    parser.add_argument("--alone", action="store_true", help="Leave out Triton's and torch's products.")


def main() -> None:
    """Time what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add_gemv(commands.add_parser("gemv", help=GEMV, description=GEMV))
    by_gemm = commands.add_parser("rows", help=ROWS, description=ROWS)
    add_rows(by_gemm)
    options = parser.parse_args()
    if options.command == "rows" and not options.floats and options.libraries is None:
        by_gemm.error("--libraries DIR, or --floats")
    torch.manual_seed(0)
    (gemv if options.command == "gemv" else rows).show(options)


if __name__ == "__main__":
    main()
