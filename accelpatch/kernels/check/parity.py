"""The float rule: an output's error against the float64 reference is at most twice torch's own, plus one ulp.

"torch's own" is the largest error of the plain reference computed in the same precision, over the whole output; the ulp
is that of each element of the reference in the output's dtype, of 8-bit floats the step to the next. NaN and infinities
must be where the rounded reference has them. Used by the tests, by verification and by the self-test. Source: the tests
of flash-attention (Dao-AILab), which allow twice torch's error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelpatch.kernels import dispatch
from accelpatch.kernels.spec import in_precision

#: an output, its float64 reference, and torch's result in the same precision, or the largest error of that
Result = tuple[Tensor, Tensor, Tensor | float]


@dataclass(frozen=True)
class Comparison:
    """error: the largest |output - reference|. bound: the error allowed at that element. reason: why not ok, or ""."""

    error: float
    bound: float
    ok: bool
    reason: str


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance from |values| (float64) to the next larger number of `dtype`; float64 [...]. Of integers it is 1."""
    if not dtype.is_floating_point:
        return torch.ones_like(values)
    facts = torch.finfo(dtype)
    exponent = torch.frexp(values.abs().clamp(facts.smallest_normal, facts.max))[1].double() - 1
    return torch.exp2(exponent) * facts.eps


def compare(output: Tensor, reference: Tensor, torch_error: float) -> Comparison:
    """Judge an output against a float64 reference of its shape. torch_error: torch's own largest error."""
    return compare_all([(output, reference, torch_error)])[0]


def compare_all(results: Sequence[Result]) -> list[Comparison]:
    """Judge several outputs; those with equal row lengths in one batch, with a single synchronisation."""
    found: dict[int, Comparison] = {}
    alike: dict[tuple[Any, ...], list[int]] = {}
    for place, (output, reference, own) in enumerate(results):
        if output.shape != reference.shape:
            reason = f"shape {list(output.shape)}, not {list(reference.shape)}"
            found[place] = Comparison(math.inf, 0.0, False, reason)
        elif output.numel() == 0:
            found[place] = Comparison(0.0, 0.0, True, "")
        else:
            kind = output.dtype, output.device, output.shape[-1:], isinstance(own, Tensor)
            alike.setdefault(kind, []).append(place)
    for places in alike.values():
        found.update(zip(places, _compared([results[place] for place in places]), strict=True))
    return [found[place] for place in range(len(results))]


def _compared(results: Sequence[Result]) -> list[Comparison]:
    outputs, references, plains = zip(*results, strict=True)
    y, due = torch.cat([_rows(one) for one in outputs]), torch.cat([_rows(one) for one in references])
    # not finite where the output, the reference or its rounding is not
    error = (y.double() - due).abs_().add_(due.to(y.dtype) * 0)
    spacing = ulp(due, y.dtype)
    worst = (error - spacing).argmax(1, keepdim=True)  # twice torch's error is the same for all of an output
    measured = [error.gather(1, worst)[:, 0], spacing.gather(1, worst)[:, 0], worst[:, 0].double()]
    if isinstance(plains[0], Tensor):
        measured.append(_own_errors(torch.cat([_rows(one) for one in plains]), due).amax(1))
    figures, start, found = torch.stack(measured, 1).tolist(), 0, []
    for output, reference, own in results:
        rows = figures[start : start + output.numel() // y.shape[1]]
        start += len(rows)
        largest = max(row[3] for row in rows) if isinstance(own, Tensor) else own
        ordinary = all(math.isfinite(row[0]) for row in rows)
        found.append(_verdict(rows, y.shape[1], largest) if ordinary else _not_finite(output, reference, largest))
    return found


def _verdict(rows: Sequence[Sequence[float]], width: int, torch_error: float) -> Comparison:
    """rows: for each row of an output, (error, spacing, index) of the element with the largest error per spacing."""
    row = max(range(len(rows)), key=lambda one: rows[one][0] - rows[one][1])
    error, spacing, place = rows[row][:3]
    bound, worst = 2 * torch_error + spacing, row * width + int(place)
    reason = "" if error <= bound else f"error {error:.3g} is over the bound {bound:.3g} at flat index {worst}"
    return Comparison(error, bound, not reason, reason)


def _not_finite(output: Tensor, reference: Tensor, torch_error: float) -> Comparison:
    """The verdict where some values are not finite: they must be so in both; the others are compared as usual."""
    rounded = reference.to(output.dtype)
    special = ~torch.isfinite(rounded)
    agree = torch.where(special, (output == rounded) | (output.isnan() & rounded.isnan()), output.isfinite())
    if not bool(agree.all()):
        place = tuple(int(i) for i in (~agree).nonzero()[0])
        reason = f"{output[place].item()} at {list(place)} where the reference has {rounded[place].item()}"
        return Comparison(math.inf, 0.0, False, reason)
    if not bool(special.any()):
        return Comparison(math.inf, 0.0, False, "its distance from the reference is no float64")
    return compare(output.masked_fill(special, 0.0), reference.masked_fill(special, 0.0), torch_error)


def _rows(values: Tensor) -> Tensor:
    """values as [M, K]; a scalar as one row."""
    return values.reshape(-1, values.shape[-1] if values.dim() else 1)


def torch_error(plain: Tensor, reference: Tensor) -> float:
    """Largest finite |plain - reference|, of torch's result in the same precision."""
    return float(_own_errors(plain, reference).max()) if plain.numel() else 0.0


def _own_errors(plain: Tensor, reference: Tensor) -> Tensor:
    return (plain.double() - reference).abs_().nan_to_num_(0.0, 0.0, 0.0)


def check(op: str, args: Sequence[Any], outputs: Sequence[Tensor]) -> list[Comparison]:
    """Judge the outputs of `op` for these arguments by the float rule: one Comparison per output."""
    return compare_all(against_references(op, args, outputs))


def against_references(op: str, args: Sequence[Any], outputs: Sequence[Tensor]) -> list[Result]:
    """Each output of `op` with those of its reference, in float64 and in the arguments' own dtypes."""
    reference = dispatch.kernel(op).reference
    exact = as_tuple(reference(*in_precision(args, torch.float64)))
    plain = as_tuple(reference(*args))
    return list(zip(*(map(ordered, one) for one in (outputs, exact, plain)), strict=True))


def ordered(values: Tensor) -> Tensor:
    """8-bit floats as integers in their order, each one from the next, NaN beyond them; other tensors as they are."""
    if not values.is_floating_point() or values.element_size() > 1:
        return values
    codes = values.contiguous().view(torch.int8).to(torch.int16)
    return torch.where(codes < 0, -(codes & 127), codes).masked_fill(values.isnan(), 999)


def run_and_check(op: str, args: Sequence[Any], call: Callable[..., Any]) -> list[Comparison]:
    """Run `call` on the arguments and judge its outputs."""
    return check(op, args, as_tuple(call(*args)))


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    """An operation's outputs as a tuple, also where it has just one."""
    return (result,) if isinstance(result, Tensor) else tuple(result)
