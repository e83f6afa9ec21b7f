"""What calibration knows of a linear layer's input: figures of each channel, gathered while texts run through a model.

    absmax[c]        max |x[c]|                  of all tokens
    percentile[c]    99.9% of |x[c]|             the mean of the batches', weighted by their tokens
    mean_square[c]   mean x[c]^2
    rows[r, c]       some tokens' inputs, evenly spread, on which a search measures errors
    output_absmax[n] max |y[n]|                  of the outputs of q, k and v

Nothing else is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from accelpatch.errors import KernelError

PERCENTILE = 0.999
FIGURES = ("absmax", "percentile", "mean_square")
ROWS = 32  # tokens whose inputs are kept
BATCHES = 8  # whose rows wait to be thinned out together


@dataclass(frozen=True, eq=False)
class ChannelStatistics:
    """Figures of an input x[tokens, K]: each float32 [K], and rows[R, K] bfloat16, on the CPU.

    output_absmax: of the output y[tokens, N], float32 [N], or None.
    """

    absmax: Tensor
    percentile: Tensor
    mean_square: Tensor
    rows: Tensor
    output_absmax: Tensor | None = None

    def __post_init__(self) -> None:
        shapes = {name: (getattr(self, name).dtype, tuple(getattr(self, name).shape)) for name in FIGURES}
        if len(set(shapes.values())) > 1 or self.absmax.dim() != 1 or self.absmax.dtype != torch.float32:
            raise KernelError(f"the statistics of an input are float32 [K] each, not {shapes}: calibrate again")
        if self.rows.dtype != torch.bfloat16 or self.rows.shape[1:] != self.absmax.shape:
            raise KernelError(f"rows of an input are bfloat16 [R, K], not {self.rows.dtype} {list(self.rows.shape)}")
        most = self.output_absmax
        if most is not None and (most.dtype != torch.float32 or most.dim() != 1):
            raise KernelError(f"output_absmax is float32 [N], not {most.dtype} {list(most.shape)}: calibrate again")
        for name in (*FIGURES, *([] if most is None else ["output_absmax"])):
            values = getattr(self, name)
            if not bool((values.isfinite() & (values >= 0)).all()):
                raise KernelError(f"{name} of an input is negative or not finite: calibrate again")
        if not bool(self.rows.isfinite().all()):
            raise KernelError("rows of an input are not finite: calibrate again")


@dataclass(frozen=True, eq=False)
class Statistics:
    """What calibration found for one model. sites: dotted path of a linear layer -> statistics of its input.

    fingerprint: of the model's weights. tokens: how many ran through it.
    """

    sites: Mapping[str, ChannelStatistics]
    fingerprint: str
    tokens: int

    def of(self, path: str, k: int) -> ChannelStatistics:
        """Those of a site with K inputs. Raises KernelError where there are none for it."""
        found = self.sites.get(path)
        if found is None:
            raise KernelError(f"the statistics have nothing of {path}: no token reached it; calibrate with other text")
        if len(found.absmax) != k:
            raise KernelError(f"the statistics of {path} are of {len(found.absmax)} channels, and it has {k}")
        return found


@dataclass(eq=False)
class _Sums:
    absmax: Tensor
    percentile: Tensor  # times tokens, as the next
    squares: Tensor
    tokens: int = 0
    rows: list[Tensor] = field(default_factory=list)  # of each batch


@dataclass(eq=False)
class Collector:
    """Adds up the statistics of each site's inputs, on the device where they are."""

    _sums: dict[str, _Sums] = field(default_factory=dict)
    _outputs: dict[str, Tensor] = field(default_factory=dict)
    _latest: tuple[Tensor, int, tuple[Tensor, ...]] | None = None

    def see(self, path: str, x: Tensor) -> None:
        """Take the input x[..., K] of a site; q, k and v share one tensor, whose figures are computed once."""
        if not x.numel():
            return
        version = -1 if x.is_inference() else x._version  # those have none, and may be written into
        if version < 0 or self._latest is None or self._latest[0] is not x or self._latest[1] != version:
            self._latest = (x, version, _figures(x))
        most, percentile, squares, some = self._latest[2]
        tokens = x.numel() // x.shape[-1]
        sums = self._sums.setdefault(path, _Sums(most.clone(), torch.zeros_like(most), torch.zeros_like(most)))
        torch.maximum(sums.absmax, most, out=sums.absmax)  # NaN stays
        sums.percentile.add_(percentile, alpha=tokens)
        sums.squares.add_(squares)
        sums.rows = [*sums.rows, some] if len(sums.rows) < BATCHES else [_spread(torch.cat([*sums.rows, some]))]
        sums.tokens += tokens

    def see_output(self, path: str, y: Tensor) -> None:
        """Take the output y[..., N] of a site."""
        if y.numel():
            absmax = y.detach().reshape(-1, y.shape[-1]).abs().amax(0).float()
            earlier = self._outputs.get(path)
            self._outputs[path] = absmax if earlier is None else torch.maximum(earlier, absmax)

    def finish(self) -> dict[str, ChannelStatistics]:
        """The statistics by site. Raises KernelError, naming the site, for inputs that are not finite."""
        self._latest = None
        found = {}
        for path, sums in self._sums.items():
            figures = (sums.absmax, sums.percentile / sums.tokens, sums.squares / sums.tokens)
            if not bool(torch.stack([one.isfinite().all() for one in figures]).all()):
                channel = int((~figures[2].isfinite()).nonzero()[0])
                raise KernelError(
                    f"{path}: channel {channel} of its input is NaN or infinite while calibrating: "
                    "check the model in this dtype, or load it in bfloat16 or float32"
                )
            absmax, percentile, mean_square = (one.float().cpu() for one in figures)
            rows, most = _spread(torch.cat(sums.rows)).cpu(), self._outputs.get(path)
            most = None if most is None else most.cpu()
            if most is not None and not bool(most.isfinite().all()):
                raise KernelError(
                    f"{path}: its output is NaN or infinite while calibrating: check the model in this dtype"
                )
            found[path] = ChannelStatistics(absmax, percentile, mean_square, rows, most)
        return found


def _spread(rows: Tensor) -> Tensor:
    """At most ROWS of the rows, evenly spread."""
    return rows if len(rows) <= ROWS else rows[torch.arange(ROWS) * len(rows) // ROWS]


def _figures(x: Tensor) -> tuple[Tensor, ...]:
    rows = x.detach().reshape(-1, x.shape[-1]).float()
    size = rows.abs()
    place = max(1, round(PERCENTILE * len(rows)))
    some = _spread(rows).to(torch.bfloat16)
    return size.amax(0), size.kthvalue(place, dim=0).values, rows.square().sum(0), some
