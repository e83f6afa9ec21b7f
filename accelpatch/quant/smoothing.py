"""SmoothQuant: outliers of activations move into the weights, channel by channel, before both become int8.

    s[c] = max|x[c]|^alpha / max_n |w[n, c]|^(1 - alpha)         x / s is what comes in, w * s what multiplies it

The division costs nothing: what makes x, a norm or another linear layer, has it folded into its own weights. Source:
Xiao et al. 2022, arXiv:2211.10438.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.ops.activation import quantize_rows
from accelpatch.kernels.ops.linear import by_layout
from accelpatch.quant import int8
from accelpatch.quant.calibration import ChannelStatistics

LEAST = 1e-5  # of a factor
SEARCHED = tuple(step / 20 for step in range(6, 20))  # values of alpha that a search tries, besides none
LEVELS = 127
SMOOTHING = ("factors", "divisors")  # of SiteStatistics, and of modules whose weight has them in it


@dataclass(frozen=True, eq=False)
class SiteStatistics:
    """What a replacement is built with: statistics of its original's input, and the smoothing around it.

    factors[K]: its input comes divided by them. divisors[N]: its output is to be divided by them. Float32, or None.
    inside: of a module that is replaced with all that is in it, those of its parts by their names in it. rounded: the
    quantised weight for these inputs and outputs, a RowMajor, where calibration has made it.
    """

    inputs: ChannelStatistics | None = None
    factors: Tensor | None = None
    divisors: Tensor | None = None
    inside: Mapping[str, SiteStatistics] = field(default_factory=dict)
    rounded: Any = None

    def smoothed_input(self, x: Tensor) -> Tensor:
        """What comes in where the original got x[..., K]."""
        return x if self.factors is None else (x.float() / self.factors.to(x.device)).to(x.dtype)

    def smoothed_output(self, y: Tensor) -> Tensor:
        """What comes out where the original gave y[..., N]."""
        return y if self.divisors is None else (y.float() / self.divisors.to(y.device)).to(y.dtype)

    def weight(self, weight: Tensor) -> Tensor:
        """The weight[N, K] for these inputs and outputs; float32 where it changes."""
        if self.factors is not None:
            weight = weight.float() * self.factors.to(weight.device)
        return self.vector(weight)

    def vector(self, values: Tensor) -> Tensor:
        """values[N, ...] of outputs, such as a bias or a norm's weight, divided as they are; float32 then."""
        if self.divisors is None:
            return values
        return values.float() / self.divisors.to(values.device).view(-1, *[1] * (values.dim() - 1))

    @property
    def absmax(self) -> Tensor | None:
        """max |x[c]| of what comes in, [K]; None where nothing is known."""
        if self.inputs is None:
            return None
        return self.inputs.absmax if self.factors is None else self.inputs.absmax / self.factors.cpu()

    @property
    def output_absmax(self) -> Tensor | None:
        """max |y[n]| of what is to come out, [N]; None where nothing is known."""
        most = None if self.inputs is None else self.inputs.output_absmax
        return most if most is None else self.vector(most)

    @property
    def static_error(self) -> float:
        """Relative RMSE that rounding to one scale for all tokens and channels adds to what comes in: step / sqrt(12)
        over its root mean square. Infinite where nothing is known."""
        if self.inputs is None or (most := self.absmax) is None:
            return float("inf")
        squares = self.inputs.mean_square
        squares = squares if self.factors is None else squares / self.factors.cpu().square()
        power = float(squares.mean())
        return float(most.max()) / LEVELS / 12**0.5 / power**0.5 if power else 0.0


@dataclass(frozen=True)
class Channels:
    """How the channels of a group's source lie in its consumers' inputs, and in the rows of the source.

    rows: "all", the "second half", or of one linear layer of q, k and v the "values", or "values by head". size: of a
    head, where the source makes values, 0 for others: with grouped queries several heads of the input read one.
    """

    rows: str = "all"
    size: int = 0

    def of_input(self, figures: Tensor, channels: int) -> Tensor:
        """figures[K] of the consumers' input as [channels] of the source: the largest of those that read one."""
        if not self.size or len(figures) == channels:
            return figures
        return figures.view(channels // self.size, -1, self.size).amax(1).flatten()

    def to_input(self, factors: Tensor, k: int) -> Tensor:
        """factors[channels] as the consumers' inputs [K] have them."""
        if not self.size or len(factors) == k:
            return factors
        heads = factors.view(-1, 1, self.size)
        return heads.expand(-1, k // len(factors), -1).flatten()

    def places(self, n: int, k: int) -> Tensor:
        """The source's rows, of N, that make the channels: int64. k: the consumers' inputs."""
        rows = torch.arange(n)
        if self.rows == "second half":
            return rows[n // 2 :]
        if self.rows == "values":
            return rows[n - (n - k) // 2 :]
        if self.rows == "values by head":
            return rows.view(-1, 3, self.size)[:, 2].flatten()
        return rows


def factors(absmax: Tensor, weight_absmax: Tensor, alpha: float) -> Tensor:
    """s[channels] float32 for the largest magnitudes of inputs and weights; 1 where a channel is all zeros.

    Raises KernelError for an alpha outside 0 to 1.
    """
    if not 0 <= alpha <= 1:
        raise KernelError(f"alpha is {alpha:g}, and it is from 0 (weights stay) to 1 (activations become alike)")
    x, w = (one.float().clamp(min=LEAST) for one in (absmax, weight_absmax))
    s = (x.pow(alpha) / w.pow(1 - alpha)).clamp(min=LEAST)
    return torch.where((absmax == 0) | (weight_absmax == 0), 1.0, s)


def searched(
    channels: Channels, inputs: Sequence[ChannelStatistics], weights: Sequence[Tensor], figures: tuple[Tensor, Tensor]
) -> Tensor:
    """The factors of the alpha with the least error of the group's outputs; figures: as of `factors`."""
    tried = [torch.ones_like(figures[0]), *(factors(*figures, alpha) for alpha in SEARCHED)]
    pairs = list(zip(inputs, weights, strict=True))
    errors = [
        sum(output_error(one, weight, channels.to_input(s, weight.shape[1])) for one, weight in pairs) for s in tried
    ]
    return tried[min(range(len(tried)), key=errors.__getitem__)]


def output_error(inputs: ChannelStatistics, weight: Tensor, s: Tensor) -> float:
    """Squared error of a linear layer's outputs in int8 on the rows that calibration kept, with a scale a token."""
    s, rows, weight = s.to(weight.device), inputs.rows.to(weight.device, torch.float32), weight.float()
    q, scale = quantize_rows.reference(rows / s)
    made = (q.float() * scale) @ by_layout.dequantized(int8.quantize(weight * s), torch.float32).t()
    return float((made - rows @ weight.t()).square().sum())


def with_divisors(found: SiteStatistics, rows: Tensor, s: Tensor, n: int) -> SiteStatistics:
    """These statistics with divisors of so many of the N outputs."""
    divisors = torch.ones(n, dtype=torch.float32)
    divisors[rows] = s.cpu()
    return replace(found, divisors=divisors)
