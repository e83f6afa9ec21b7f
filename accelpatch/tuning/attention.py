"""Times every implementation of flash_attention on a device; the order that comes out is stored for later calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from accelpatch.bench.timing import measure
from accelpatch.device import Device
from accelpatch.errors import CompileError
from accelpatch.kernels import dispatch
from accelpatch.kernels.check import parity
from accelpatch.kernels.ops.attention import flash_attention
from accelpatch.kernels.ops.attention import stored as attention_stored
from accelpatch.kernels.spec import Spec

REPEATS, SECONDS = 5, 0.2  # of one implementation and shape: runs at least, and about so long
LENGTHS = (512, 2048, 8192, 32768)
SIZES = (64, 128)
HEADS = 32  # of a batch of one
TOKENS = 16384  # a batch has about so many, but one row at least
CHECKED = 128  # queries of which the output is checked
LARGEST = 1 << 30  # elements of a matrix of scores that `eager` may make


@dataclass(frozen=True)
class Measured:
    """One shape. flop: of a call, 4 B H S^2 D, half of that where it is causal. seconds: name -> median of a call.
    refused: name -> why it did not run, or what was wrong with its output."""

    dtype: str
    size: int
    length: int
    batch: int
    causal: bool
    flop: float
    seconds: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def order(self) -> list[str]:
        """The implementations that ran, the fastest first."""
        return sorted(self.seconds, key=self.seconds.__getitem__)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        facts = {
            name: getattr(self, name) for name in ("dtype", "size", "length", "batch", "causal", "order", "refused")
        }
        return facts | {"tflops": {name: self.flop / seconds / 1e12 for name, seconds in self.seconds.items()}}


def tune(
    device: Device, *, dtype: torch.dtype, sizes: Sequence[int] = SIZES, lengths: Sequence[int] = LENGTHS,
    heads: int = HEADS, kv_heads: int | None = None, store: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Measured]:  # fmt: skip
    """Time each implementation that can run, for prompts of these lengths, causal and not; store the orders.

    An implementation whose output is not that of `eager`, within the precision of the dtype, or that fails, does not
    count. heads, kv_heads: of q, and of k and v.
    """
    shapes = [(size, length, causal) for size in sizes for length in sorted(lengths) for causal in (True, False)]
    found = []
    for done, (size, length, causal) in enumerate(shapes):
        batch = max(1, min(8, TOKENS // length))
        spec = flash_attention.of_shape(
            heads, kv_heads or heads, size, dtype, b=batch, length=length, keys=length, causal=causal,
            scaling=1 / math.sqrt(size),
        )  # fmt: skip
        found.append(_measured(spec, device))
        if progress is not None:
            progress("tune", done + 1, len(shapes))
    if store:
        attention_stored.store(device, [
            attention_stored.Order(one.dtype, one.size, one.length, one.causal, tuple(one.order))
            for one in found if one.seconds
        ])  # fmt: skip
    return found


def _measured(spec: Spec, device: Device) -> Measured:
    sizes, causal = spec.sizes, bool(spec.options["causal"])
    length, size, batch, heads = (sizes[name] for name in ("L", "D", "B", "H"))
    flop = 4.0 * batch * heads * length * length * size / (2 if causal else 1)
    dtype = str(spec.dtype).removeprefix("torch.")
    made = Measured(dtype, size, length, batch, causal, flop)
    place = torch.device(device.kind, device.index) if device.index is not None else torch.device(device.kind)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(batch, count, length, size, generator=generator).to(place, spec.dtype)
        for count in (heads, sizes["Hkv"], sizes["Hkv"])
    )
    args = (q, k, v, None, None, None, causal, 0, 0.0, spec.options["scaling"])
    for name, implementation in dispatch.kernel(flash_attention.OP).implementations.items():
        reason = implementation.why_not(spec, device)
        if name == "eager" and batch * heads * length * length > LARGEST:
            reason = "its matrix of scores is too large"
        try:
            reason = reason or _wrong(implementation.run, args)
            if reason is None:
                made.seconds[name] = _seconds(implementation.run, args)
        except (CompileError, RuntimeError, ImportError, TypeError) as error:  # or of a package whose limits changed
            reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if reason is not None:
            made.refused[name] = reason
    return made


def _seconds(run: Callable[..., Any], args: Sequence[Any]) -> float:
    """Median time of a call."""
    device = args[0].device
    first = measure(lambda: run(*args), device=device, repeats=1).median
    repeats = max(REPEATS, min(100, int(SECONDS / first)))
    return measure(lambda: run(*args), device=device, repeats=repeats, warmup=2).median


def _wrong(run: Callable[..., Any], args: Sequence[Any]) -> str | None:
    """Why an output is not right, by the float rule on its first rows; None where it is."""
    q, k, v, ranges, bias, sinks, causal, *others = args
    rows = min(CHECKED, q.shape[2])
    keys = rows if causal else k.shape[2]  # that the first rows see
    part = (q[:, :, :rows], k[:, :, :keys], v[:, :, :keys])
    q64, k64, v64 = (one.double() for one in part)
    wide = flash_attention.reference(q64, k64, v64, ranges, bias, sinks, causal, *others)
    plain = flash_attention.reference(*part, ranges, bias, sinks, causal, *others)
    found = parity.compare(run(*args)[:, :rows], wide, parity.torch_error(plain, wide))
    return None if found.ok else f"its output is wrong: {found.reason or found.error}"
