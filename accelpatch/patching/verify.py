"""Compares a replacement with its original on captured inputs, and the whole model before and after.

Two figures per site. `kernel_error`: every operation inside the replacement against the plain torch reference of its
own format in float64, by the float rule. `format_error`: the replacement against the original, in the recipe's metric.
For replacements that keep the format there is also `units`: the difference in units of u, the unit roundoff of the
dtype. N units allow each element N u times the larger of its original and its row's root mean square, so that one wrong
channel is found among thousands, and all elements together a relative RMSE of N u / 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.patching.capture import Call, copied, floats
from accelpatch.report import Verification

# A context manager that compares every operation run in it with its reference and lists (error, bound) for each.
# Its keywords say which part of linear layers is compared (extent.py).
Checking = Callable[..., AbstractContextManager[list[tuple[float, float]]]]


#: u of each dtype. 16 bits: the largest relative error of rounding to it. Others: four times that, as kernels also
#: accumulate in them.
UNITS = {torch.float64: 2**-51, torch.float32: 2**-22, torch.float16: 2**-11, torch.bfloat16: 2**-8}


@dataclass(frozen=True)
class SiteErrors:
    """The largest errors of a site.

    kernel_error and kernel_bound are absolute, in the unit of the operation's output. format_error: None if there is no
    original to compare with. units: the smallest number of units that every element and the relative RMSE are within; 0
    if it was not computed.
    """

    kernel_error: float | None
    kernel_bound: float | None
    format_error: float | None
    units: float

    def worse(self, other: SiteErrors) -> SiteErrors:
        """The larger figures of two."""
        kernel = max((self, other), key=lambda errors: (errors.kernel_error or 0.0) - (errors.kernel_bound or 0.0))
        form, units = max(self.format_error or 0.0, other.format_error or 0.0), max(self.units, other.units)
        return SiteErrors(kernel.kernel_error, kernel.kernel_bound, form, units)


def site_errors(
    new: nn.Module, calls: Sequence[Call], metric: str, checking: Checking, masks: Sequence[Tensor | None] = (),
    first_output_only: bool = False, units: bool = True, part: Mapping[str, int] = MappingProxyType({}),
) -> SiteErrors:  # fmt: skip
    """Run `new` on each recorded call of its original and compare the outputs. kernel_error is None if it runs none of
    our operations.

    masks: an attention mask [B, L] or None for each call, where the output [B, L, K] at padding is not compared.
    first_output_only: ignore all outputs but the first. units: whether to compute them. part: keywords of `checking`.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad(), checking(**part) as checks:
        after = [_run(new, call) for call in calls]
    if first_output_only:
        calls, after = [call._replace(outputs=call.outputs[:1]) for call in calls], [made[:1] for made in after]
    for call, made in zip(calls, after, strict=True):
        if len(call.outputs) != len(made) or any(a.shape != b.shape for a, b in zip(made, call.outputs, strict=True)):
            return SiteErrors(None, None, float("inf"), float("inf"))
        pairs += zip(made, call.outputs, strict=True)
    pairs = [_of_tokens(pair, mask) for pair, mask in zip(pairs, masks or [None] * len(pairs), strict=True)]
    error, bound = max(checks, key=lambda check: check[0] - check[1], default=(None, None))
    return SiteErrors(error, bound, format_error(metric, pairs), units_apart(pairs) if units else 0.0)


def _of_tokens(pair: tuple[Tensor, Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both outputs without the rows of padding."""
    new, original = pair
    if mask is None or mask.shape != new.shape[:2]:
        return pair
    kept = mask.to(new.device).bool()
    return new[kept], original[kept]


def _run(module: nn.Module, call: Call) -> list[Tensor]:
    """The floating-point outputs of `module.forward`, called without the user's hooks."""
    args, kwargs, _ = copied(call)
    return list(floats(module.forward(*args, **kwargs)))


def relative_rmse(y: Tensor, original: Tensor) -> Tensor:
    """||y - original|| / ||original||; zero where both are zero."""
    difference = (y - original).norm()
    return torch.where(difference == 0, 0.0, difference / original.norm())


def max_abs(y: Tensor, original: Tensor) -> Tensor:
    """The largest absolute difference."""
    return (y - original).abs().max()


def cosine(y: Tensor, original: Tensor) -> Tensor:
    """1 - cosine similarity, the outputs taken as one vector each."""
    similarity = torch.nn.functional.cosine_similarity(y, original, dim=0, eps=1e-300)
    return torch.where(y.norm() + original.norm() == 0, 0.0, 1 - similarity)


METRICS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relative_rmse": relative_rmse,
    "max_abs": max_abs,
    "cosine": cosine,
}


def format_error(metric: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """A metric over all finite elements of the outputs (new, original) of a site, joined into one vector each.

    Joined, because the first token of a text alone is misleading: models park attention on it and its values are near
    zero, so its relative error is large. Infinite if NaN or Inf are at different elements.
    """
    new, original = (torch.cat([pair[i].flatten() for pair in pairs] or [torch.empty(0)]).double() for i in (0, 1))
    if not original.numel():
        return 0.0
    figure = float(METRICS[metric](new, original))
    if math.isfinite(figure):
        return figure
    finite = original.isfinite()
    if not torch.equal(finite, new.isfinite()):
        return math.inf
    return float(METRICS[metric](*(torch.where(finite, values, 0.0) for values in (new, original))))


def units_apart(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """The least N for which every output (new, original) of a site is within N units; infinite for NaN or Inf in only
    one.

    The relative RMSE is over all outputs of a dtype together, as in `format_error`.
    """
    worst, squares = 0.0, dict[torch.dtype, Tensor]()
    for y, original in pairs:
        if not original.numel():
            continue
        dtype, expected = original.dtype, original.double()
        equal = (y == original) | (y.isnan() & original.isnan())  # also where both are the same infinity
        error = (y.double() - expected).abs().where(~equal, 0.0).nan_to_num(math.inf, math.inf)
        expected = expected.where(expected.isfinite(), 0.0)
        magnitude = expected.abs()
        row_rms = expected.square().mean(-1, keepdim=True).sqrt() if expected.dim() else magnitude
        largest = torch.where(error == 0, 0.0, error / torch.maximum(magnitude, row_rms)).max().item()
        unit = UNITS.get(dtype, 0.0)  # other dtypes must be equal
        units = largest / unit if unit else math.inf if largest else 0.0
        worst = max(worst, units if units == units else math.inf)
        sums = torch.stack((error.square().sum(), expected.square().sum())).cpu()
        squares[dtype] = squares.get(dtype, torch.zeros(2, dtype=torch.float64)) + sums
    for dtype, (error_sum, expected_sum) in squares.items():
        if error_sum:
            unit = UNITS.get(dtype, 0.0)
            known = expected_sum and unit
            worst = max(worst, 4 * math.sqrt(error_sum / expected_sum) / unit if known else math.inf)
    return worst if worst == worst else math.inf


def compare_logits(before: Sequence[Any], after: Sequence[Any], masks: Sequence[Tensor | None]) -> Verification:
    """Mean KL(before || after) in nats and top-1 agreement of next-token logits [B, L, V], where the mask is not 0."""
    total, agree, tokens = 0.0, 0, 0
    for old, new, mask in zip(before, after, masks, strict=True):
        if getattr(old, "logits", None) is None or old.logits.dim() != 3:
            continue
        keep = mask.bool().flatten() if mask is not None and mask.numel() == old.logits[..., 0].numel() else None
        p, q = (_rows(output.logits, keep) for output in (old, new))
        total += kl_divergence(p, q).sum().item()
        agree += int((p.argmax(-1) == q.argmax(-1)).sum())
        tokens += p.shape[0]
    return Verification(kl=total / tokens, top1=agree / tokens, tokens=tokens) if tokens else Verification()


def _rows(logits: Tensor, keep: Tensor | None) -> Tensor:
    rows = logits.flatten(0, 1)
    return rows if keep is None else rows[keep.to(rows.device)]


def kl_divergence(p_logits: Tensor, q_logits: Tensor) -> Tensor:
    """KL(p || q) in nats of each row of two logit matrices [T, V], computed in float64."""
    p, q = p_logits.double().log_softmax(-1), q_logits.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)
