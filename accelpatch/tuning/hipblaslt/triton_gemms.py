"""accelpatch's own Triton GEMM on this GPU, in the place of hipBLASLt's kernels: every stage really runs there.

The reference is the configuration that `accelpatch/kernels/triton/gemm.py` ships. A choice whose result is beyond
TOLERANCE of torch's is refused at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelpatch.bench.timing import between_events, graph_of, measure_replays, timing
from accelpatch.errors import FOREIGN, AccelpatchError

from . import workload
from .bench_output import Row, text
from .configuration import Configuration
from .gemms import Gemm
from .platforms import choices_of, size_of, write_logic
from .search import Outcome, Trial
from .space import Choice
from .work import Work, write

TOLERANCE = 0.02  # of the Frobenius norm of float64's result
BEYOND = 300e6  # bytes of weights in rotation: more than an L2 cache holds
WARM, REPEATS = 3, 20  # replays of a graph in a search, before and while it is timed
CHECKED_REPEATS = 15  # of a benchmark, after the GPU was warmed up
PARAMETERS = ("TOKENS", "ROWS", "COLUMNS", "WARPS", "STAGES", "SPLITS")
DTYPES = {"bf16_r": torch.bfloat16, "f16_r": torch.float16}


class TritonGemms:
    """The Triton GEMM on a GPU. Raises AccelpatchError where there is none."""

    name = "triton"
    said = "Triton"

    def __init__(self, device: str, *, on: torch.device | None = None):
        if on is None and not torch.cuda.is_available():
            raise AccelpatchError(f"torch {torch.__version__} sees no GPU for Triton; use --on simulated")
        self._device = on or torch.device("cuda", int(device))
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        self._operands: tuple[Gemm, Tensor, list[Tensor], Tensor] | None = None

    def _of(self, gemm: Gemm) -> tuple[Tensor, list[Tensor], Tensor]:
        """x[n, k], weights[m, k] in rotation, and the result of the first of them in float64."""
        if self._operands is None or self._operands[0] != gemm:
            self._operands = None
            generator = torch.Generator(self._device).manual_seed(0)
            dtype = DTYPES[gemm.a_type]

            def made(*shape: int) -> Tensor:
                return torch.randn(shape, device=self._device, dtype=dtype, generator=generator)

            count = max(1, min(16, int(BEYOND / (2 * gemm.m * gemm.k)) + 1)) if self._device.type == "cuda" else 1
            x, weights = made(gemm.n, gemm.k), [made(gemm.m, gemm.k) for _ in range(count)]
            self._operands = gemm, x, weights, x.double() @ weights[0].double().T
        return self._operands[1:]

    def measure(self, gemm: Gemm, choice: Choice, found: Configuration, folder: Path) -> Outcome:
        """The median time of a call over weights that lie beyond the cache, in a captured graph."""
        try:
            error = self.error(gemm, choice)
            if not error <= TOLERANCE:
                return Outcome(None, f"its result is wrong by {error:.3g}")
            return Outcome(self.quick_microseconds(gemm, choice))
        except failures() as failure:
            return Outcome(None, f"{type(failure).__name__}: {' '.join(str(failure).split()):.160}")

    def error(self, gemm: Gemm, choice: Choice | None) -> float:
        """The relative error of a choice's result; of the shipped configuration's for None."""
        x, weights, expected = self._of(gemm)
        return float(torch.linalg.norm(run(x, weights[0], choice).double() - expected) / torch.linalg.norm(expected))

    def quick_microseconds(self, gemm: Gemm, choice: Choice) -> float:
        """The median time of a call on a GPU that is at work already, as one is in a search."""
        work, calls = self._rotation(gemm, choice)
        graph = graph_of(work)
        for _ in range(WARM):
            graph.replay()
        return 1e6 * timing([between_events(graph.replay) for _ in range(REPEATS)]).median / calls

    def microseconds(self, gemm: Gemm, choice: Choice | None) -> float:
        """The median time of a call, after a warm-up; of the shipped configuration for None."""
        work, calls = self._rotation(gemm, choice)
        return 1e6 * measure_replays(work, CHECKED_REPEATS).median / calls

    def _rotation(self, gemm: Gemm, choice: Choice | None) -> tuple[Callable[[], None], int]:
        """Calls with one weight after the other, and how many they are."""
        x, weights, _ = self._of(gemm)

        def all_of_them() -> None:
            for weight in weights:
                run(x, weight, choice)

        return all_of_them, len(weights)

    def reference(self, gemm: Gemm, found: Configuration) -> Choice | None:
        """The shipped configuration, as a choice of the parameters."""
        return shipped(gemm)

    def keep(self, gemm: Gemm, best: Trial, found: Configuration, folder: Path) -> None:
        """Write the best trial as library logic; hipBLASLt has no use for it."""
        write_logic(gemm, best, found, folder, "triton")

    def build(self, work: Work) -> None:
        """Nothing is to be built."""

    def bench(self, work: Work, library: Path, rows: list[workload.Row], which: str, out: Path) -> None:
        """Time the shipped configuration or the tuned one, in the form that hipblaslt-bench prints."""
        made, solutions = [], choices_of(library)
        for row in rows:
            choice = None if which == "reference" else solutions[size_of(row.gemm)]
            error = self.error(row.gemm, choice) if which == "verify" else None
            name = "triton_shipped" if choice is None or choice == shipped(row.gemm) else f"triton_{row.name}"
            made.append(Row(row.gemm, self.microseconds(row.gemm, choice), name, error))
        write(out, text(made))


def failures() -> tuple[type[Exception], ...]:
    """What a choice that this GPU cannot run raises: Triton's own errors (too much shared memory, say) are of no common
    kind of Python's."""
    from triton.errors import TritonError

    return (*FOREIGN, TritonError)


def shipped(gemm: Gemm) -> dict[str, Any]:
    """What accelpatch's Triton GEMM takes for a problem, as a choice: the tiles and splits of `gemm.linear`."""
    from accelpatch.kernels.triton import gemm as kernel
    from accelpatch.kernels.triton.launch import cdiv

    blocks = kernel.floats(gemm.m, False)
    block = next((one for one in blocks.of if one.tokens >= gemm.n), blocks.of[-1])
    programs = cdiv(gemm.n, block.tokens) * cdiv(gemm.m, block.rows)
    runs = max(1, min(blocks.programs // programs, gemm.k // kernel.LEAST_RUN, 8))
    return {
        "TOKENS": block.tokens, "ROWS": block.rows, "COLUMNS": block.columns, "WARPS": block.warps,
        "STAGES": block.stages, "SPLITS": runs,
    }  # fmt: skip


def run(x: Tensor, w: Tensor, choice: Choice | None) -> Tensor:
    """y[M, N] = x[M, K] @ w[N, K].T by the Triton GEMM with a choice of its parameters; None: as it is shipped."""
    from accelpatch.kernels.layouts.tiling import TILE_VALUES
    from accelpatch.kernels.triton import gemm as kernel
    from accelpatch.kernels.triton.launch import cdiv, dependent, on

    if choice is None:
        return kernel.linear(x, w, None, None)
    named: Any = choice
    tokens, rows, columns, warps, stages, splits = (int(named[name]) for name in PARAMETERS)
    block = kernel.Block(tokens, rows, columns, warps, stages)
    (m, k), n = x.shape, w.shape[0]
    step = max(TILE_VALUES, columns)
    run_length = cdiv(k, splits * step) * step
    parts_of_k = cdiv(k, run_length)
    y = x.new_empty((m, n))
    parts = y if parts_of_k == 1 else y.new_empty((parts_of_k, m, n), dtype=torch.float32)
    with on(x):
        overlapped, options = dependent(x)
        kernel._gemm[kernel.grid(x, n, block, parts_of_k)](
            x, w, y, y, y, parts, m, n, k, x.stride(0), run_length, False, False, False, parts_of_k > 1,
            k % columns == 0, overlapped, tokens, rows, columns, **block.options(), **options,
        )  # fmt: skip
        if parts_of_k > 1:
            kernel._add_up[(cdiv(m * n, 1024),)](parts, y, y, m * n, n, parts_of_k, False, overlapped, 1024, **options)
    return y
