"""Times every implementation of the linear operation, a user's among them, on weights of given shapes.

Each is checked by the float rule first; one that is wrong is not timed. A weight is one of several copies that are read
in turn, together larger than the caches, as a model's are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.bench.read_limit import ReadLimit, last_level_cache
from accelpatch.bench.timing import measure, measure_replays
from accelpatch.device import probe
from accelpatch.kernels import added, dispatch
from accelpatch.kernels.check import parity
from accelpatch.kernels.ops.linear import float_linear
from accelpatch.report import human, table

BEYOND_CACHES = 4  # times the last-level cache
GPU_CACHE = 256 << 20  # the largest of a GPU (MI300X)
CHECKED_ROWS = 512  # of the weight, evenly spread, whose results are compared with float64
REPEATS = 12


@dataclass(frozen=True)
class Timed:
    """One implementation on one shape. seconds: median; None where it did not run, for the `reason`. wrong: it ran and
    is outside the float rule. share: of the read limit, by the weight's bytes."""

    n: int
    k: int
    rows: int
    implementation: str
    seconds: float | None = None
    spread: float = 0.0
    bytes_per_second: float = 0.0
    share: float = 0.0
    reason: str = ""
    wrong: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


def added_names() -> list[str]:
    """The implementations of the linear operation that a user added."""
    return list(added.of(float_linear.OP))


def timed(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device, rows: int, limit: ReadLimit
) -> Iterator[Timed]:  # fmt: skip
    """A Timed for each implementation and shape (N, K) of a weight, with so many rows of x."""
    generator = torch.Generator(device).manual_seed(0)
    for n, k in shapes:
        weights = list(_copies(n, k, dtype, device, generator))
        x = torch.randn(rows, k, generator=generator, device=device).to(dtype)
        spec = float_linear.spec(x, weights[0])
        for name in dispatch.implementations_of(float_linear.OP):
            if reason := dispatch.why_not(float_linear.OP, name, spec, probe(device)):
                yield Timed(n, k, rows, name, reason=reason)
            elif reason := _wrong(name, x, weights[0]):
                yield Timed(n, k, rows, name, reason=reason, wrong=True)
            else:
                yield _time(name, x, weights, limit)


def _copies(n: int, k: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Iterator[Tensor]:
    caches = GPU_CACHE if device.type == "cuda" else last_level_cache()
    one = (torch.randn(n, k, generator=generator, device=device) / k**0.5).to(dtype)
    yield one
    for _ in range(BEYOND_CACHES * caches // one.nbytes):
        yield one.clone()


def _wrong(name: str, x: Tensor, w: Tensor) -> str:
    """Why an implementation is outside the float rule; "" where it is not."""
    with torch.no_grad(), dispatch.forced(name):
        y = float_linear.float_linear(x, w)
    rows = torch.arange(0, w.shape[0], -(-w.shape[0] // CHECKED_ROWS), device=w.device)
    exact = functional.linear(x.double(), w[rows].double())
    own = parity.torch_error(functional.linear(x, w[rows]), exact)
    return parity.compare(y[:, rows], exact, own).reason


def _time(name: str, x: Tensor, weights: Sequence[Tensor], limit: ReadLimit) -> Timed:
    run, rows, (n, k) = dispatch.implementations_of(float_linear.OP)[name].run, x.shape[0], weights[0].shape
    with torch.no_grad():
        found = (_on_gpu if x.is_cuda else _on_cpu)(run, x, weights)
    rate = weights[0].nbytes / found[0]
    return Timed(n, k, rows, name, *found, rate, rate / limit.bytes_per_second)


def _on_gpu(run: Callable[..., Any], x: Tensor, weights: Sequence[Tensor]) -> tuple[float, float]:
    """Median seconds of a call, and the spread, by replays of a graph of one call a weight."""
    made = measure_replays(lambda: [run(x, w, None) for w in weights], REPEATS)
    return made.median / len(weights), made.spread


def _on_cpu(run: Callable[..., Any], x: Tensor, weights: Sequence[Tensor]) -> tuple[float, float]:
    each = cycle(weights)
    made = measure(lambda: run(x, next(each), None), device=x.device, repeats=REPEATS, warmup=2)
    return made.median, made.spread


def text(found: Sequence[Timed], limit: ReadLimit) -> str:
    """A table of what was timed; below it why others were not."""
    rows = [("N x K", "rows", "implementation", "us", "spread", "read", "of the read limit")]
    for one in found:
        if one.seconds is not None:
            rate, share = f"{human(int(one.bytes_per_second))}/s", f"{one.share:.0%}"
            cells = f"{one.seconds * 1e6:.1f}", f"{one.spread:.0%}", rate, share
            rows.append((f"{one.n} x {one.k}", str(one.rows), one.implementation, *cells))
    reasons = dict.fromkeys(
        f"{'WRONG' if one.wrong else 'not timed'}  {one.implementation}: {one.reason}"
        + (f" (N = {one.n}, K = {one.k})" if one.wrong else "")
        for one in found
        if one.seconds is None
    )
    said = f"read limit  {human(int(limit.bytes_per_second))}/s, {limit.method}"
    return "\n".join([table(rows), said, *reasons])
