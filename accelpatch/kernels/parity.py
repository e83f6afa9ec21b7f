"""The float rule: an output's error against the float64 reference is at most twice torch's own, plus one ulp.

"torch's own" is the largest error of the plain reference computed in the same precision, over the whole output; the
unit in the last place is that of each element of the reference in the output's dtype. NaN and infinities come out
where the reference, rounded to the output's dtype, has them. Used by the tests, by a patch's verification and by the
self-test of a machine. Source of the rule: the tests of flash-attention (Dao-AILab), which take twice torch's error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelpatch.kernels import dispatch


@dataclass(frozen=True)
class Comparison:
    """error: the largest |output - reference|; bound: what that element was allowed; reason: why not ok, else ""."""

    error: float
    bound: float
    ok: bool
    reason: str


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance from |values| (float64) to the next number of `dtype` away from zero; float64 [...]."""
    facts = torch.finfo(dtype)
    exponent = torch.frexp(values.abs().clamp(facts.smallest_normal, facts.max))[1].double() - 1
    return torch.exp2(exponent) * facts.eps


def compare(output: Tensor, reference: Tensor, torch_error: float) -> Comparison:
    """Judge an output against a float64 reference of its shape; `torch_error` is torch's own largest error."""
    if output.shape != reference.shape:
        return Comparison(math.inf, 0.0, False, f"shape {list(output.shape)}, not {list(reference.shape)}")
    if output.numel() == 0:
        return Comparison(0.0, 0.0, True, "")
    rounded = reference.to(output.dtype)
    special = ~torch.isfinite(rounded)
    agree = torch.where(special, (output == rounded) | (output.isnan() & rounded.isnan()), output.isfinite())
    if not bool(agree.all()):
        place = [int(i) for i in (~agree).nonzero()[0]]
        got, due = output[tuple(place)].item(), rounded[tuple(place)].item()
        return Comparison(math.inf, 0.0, False, f"{got} at {place} where the reference has {due}")
    error = torch.where(special, 0.0, (output.double() - reference).abs())
    allowed = 2 * torch_error + ulp(torch.where(special, 0.0, reference), output.dtype)
    worst = int((error - allowed).argmax())
    at, bound = float(error.flatten()[worst]), float(allowed.flatten()[worst])
    reason = "" if at <= bound else f"error {at:.3g} is over the bound {bound:.3g} at flat index {worst}"
    return Comparison(at, bound, not reason, reason)


def torch_error(plain: Tensor, reference: Tensor) -> float:
    """The largest finite |plain - reference| of torch's result in the same precision."""
    error = (plain.double() - reference).abs_()
    return float(error.nan_to_num_(0.0, 0.0, 0.0).max()) if error.numel() else 0.0


def check(op: str, args: Sequence[Any], outputs: Sequence[Tensor]) -> list[Comparison]:
    """Judge the outputs of `op` for these arguments by the float rule, one Comparison an output."""
    reference = dispatch.kernel(op).reference
    exact = as_tuple(reference(*dispatch.in_precision(args, torch.float64)))
    plain = as_tuple(reference(*args))
    return [compare(output, due, torch_error(own, due)) for output, due, own in zip(outputs, exact, plain, strict=True)]


def run_and_check(op: str, args: Sequence[Any], call: Callable[..., Any]) -> list[Comparison]:
    """Run `call` on the arguments and judge what it gives."""
    return check(op, args, as_tuple(call(*args)))


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    """The outputs of an operation as a tuple, also where there is one."""
    return (result,) if isinstance(result, Tensor) else tuple(result)
