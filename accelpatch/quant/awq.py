"""AWQ: the inputs whose activations are large get more of a weight's few values, by smoothing chosen for its format.

    s[c] = rms(x[c])^alpha, scaled so that the largest and the smallest s have 1 between them

x / s comes in and w * s is rounded; alpha is that of a grid with the least error of the outputs, by the second moments
of x. Source: Lin et al. 2023, arXiv:2306.00978, where the mean of |x| stands for its root mean square.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelpatch.quant.formats import dequantize
from accelpatch.quant.gptq import Grid, nearest
from accelpatch.quant.smoothing import Channels

ALPHAS = tuple(step / 20 for step in range(20))
LEAST = 1e-4  # of a root mean square


@dataclass(frozen=True, eq=False)
class Rounding:
    """A weight[N, K] that is rounded to a grid in groups along K."""

    weight: Tensor
    grid: Grid
    group_size: int


def factors(channels: Channels, n: int, hessian: Tensor, consumers: Sequence[Rounding]) -> Tensor:
    """s[n] float32 of the n channels of a source, whose consumers' input has this hessian[K, K]."""
    size = channels.of_input(hessian.diagonal().float().sqrt(), n).clamp(min=LEAST)
    tried = [_centred(size.pow(alpha)) for alpha in ALPHAS]
    k = len(hessian)
    errors = [sum(_error(one, channels.to_input(s, k), hessian) for one in consumers) for s in tried]
    return tried[min(range(len(tried)), key=errors.__getitem__)]


def _centred(s: Tensor) -> Tensor:
    return s / (s.max() * s.min()).sqrt()


def _error(one: Rounding, s: Tensor, hessian: Tensor) -> float:
    """Mean squared error of the outputs with the weight rounded under smoothing s[K]."""
    weight = one.weight.float()
    made: Any = nearest(weight * s, hessian / torch.outer(s, s), one.grid, one.group_size, search=False)
    difference = dequantize(made) / s - weight
    return float((difference @ hessian).mul_(difference).sum())
