"""GPTQ: weights are rounded column by column, and what a column loses is made up for by those that come after it.

    least  tr((W - Q) H (W - Q)^T),  H = mean of x x^T over the tokens of a calibration text

The inverse of H, damped, says how the error of one input is spread over the others. act_order: inputs are taken by the
size of their activations; each keeps its place and its group, so that nothing is reordered when the weight is used.
Source: Frantar et al. 2022, arXiv:2210.17323; their code rounds in the same blocks of columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, Protocol

import torch
from torch import Tensor

from accelpatch.device import probe
from accelpatch.errors import KernelError
from accelpatch.kernels.triton import launch
from accelpatch.quant.weight import grouped

BLOCK = 128  # columns whose errors wait before the others get them
DAMPING = 0.01  # of the mean of H's diagonal
LEAST_SHRINK, SHRINKS = 0.6, 20  # of a search for the range of a group's codes


class Grid(Protocol):
    """The values that a group of weights can take; Int4Grid is one. limits: the smallest and the largest code."""

    @property
    def limits(self) -> tuple[int, int]: ...

    def storage(self, groups: Tensor) -> torch.dtype: ...
    def fit(self, groups: Tensor, dtype: torch.dtype, shrink: float = 1.0) -> tuple[Tensor, Tensor | None]: ...
    def codes(self, groups: Tensor, scale: Tensor, offset: Any) -> Tensor: ...
    def values(self, u: Tensor, scale: Tensor, offset: Any) -> Tensor: ...
    def affine(self, scale: Tensor, offset: Any) -> tuple[Tensor, Tensor, Tensor]: ...
    def weight(self, u: Tensor, scale: Tensor, offset: Any) -> Any: ...


@dataclass(frozen=True)
class Gptq:
    """How weights are rounded. search: whether the range of each group's codes is searched for, too; damping: of H."""

    act_order: bool = False
    search: bool = False
    damping: float = DAMPING

    def rounded(self, weight: Tensor, hessian: Tensor, grid: Grid, group_size: int) -> Any:
        """The weight[N, K] in the format of `grid`, in groups along K, for inputs with this hessian[K, K].

        Raises KernelError for NaN or infinity in either, shapes that do not fit, and a hessian that has no inverse.
        """
        groups = grouped(weight, group_size, "GPTQ")
        k = weight.shape[1]
        if hessian.shape != (k, k):
            raise KernelError(f"the hessian is {list(hessian.shape)}, and {[k, k]} belongs to this weight")
        importance = hessian.diagonal().to(groups).view(1, -1, group_size)
        columns = _Columns(grid, groups, importance, self.search, grid.storage(groups))
        order = hessian.diagonal().argsort(descending=True, stable=True) if self.act_order else None
        factor = inverse_factor(hessian, self.damping, order)
        blocks = _round if launch.why_not(probe(weight.device)) else _round_by_kernel
        blocks(groups.flatten(1).clone(), factor, columns, order)
        return grid.weight(columns.u, columns.scale, columns.offset)


def nearest(weight: Tensor, hessian: Tensor, grid: Grid, group_size: int, search: bool = True) -> Any:
    """The same by rounding to the nearest value, with the range of each group's codes searched for."""
    groups = grouped(weight, group_size, "rounding")
    importance = hessian.diagonal().to(groups).view(1, -1, group_size)
    scale, offset = fitted(groups, importance, grid, grid.storage(groups), search)
    return grid.weight(grid.codes(groups, scale, offset), scale, offset)


def fitted(
    groups: Tensor, importance: Tensor, grid: Grid, dtype: torch.dtype, search: bool
) -> tuple[Tensor, Tensor | None]:
    """scale[N, G] and offset[N, G] of groups[N, G, g]: of the whole range, or of the part of it with the least squared
    error. importance[1, G, g]: of each input."""
    best = grid.fit(groups, dtype)
    if not search:
        return best
    least = _error(groups, importance, grid, best)
    for step in range(1, SHRINKS):
        tried = grid.fit(groups, dtype, 1 - (1 - LEAST_SHRINK) * step / (SHRINKS - 1))
        error = _error(groups, importance, grid, tried)
        better = error < least
        least = torch.where(better, error, least)
        scale = torch.where(better, tried[0], best[0])
        best = scale, None if best[1] is None or tried[1] is None else torch.where(better, tried[1], best[1])
    return best


def _error(groups: Tensor, importance: Tensor, grid: Grid, made: tuple[Tensor, Tensor | None]) -> Tensor:
    """Squared error [N, G] of groups[N, G, g], weighted by the importance of their inputs."""
    return (grid.values(grid.codes(groups, *made), *made) - groups).square_().mul_(importance).sum(2)


class _Columns:
    """The codes, scales and offsets of a weight that is rounded column by column."""

    def __init__(self, grid: Grid, groups: Tensor, importance: Tensor, search: bool, dtype: torch.dtype):
        self._grid, self._importance, self._search, self._dtype = grid, importance, search, dtype
        self.size = groups.shape[2]
        self.u = torch.empty_like(groups)
        self.scale, self.offset = fitted(groups, importance, grid, dtype, search)

    def fit(self, group: int, values: Tensor) -> None:
        """Fit a group anew to values[N, g]."""
        importance = self._importance[:, group : group + 1]
        scale, offset = fitted(values.unsqueeze(1), importance, self._grid, self._dtype, self._search)
        self.scale[:, group] = scale[:, 0]
        if self.offset is not None and offset is not None:
            self.offset[:, group] = offset[:, 0]

    def round(self, place: int, column: Tensor) -> Tensor:
        """Choose the codes of the column[N] of the input at `place`; returns the values [N] that they stand for."""
        group, within = divmod(place, self.size)
        made = self.scale[:, group, None], None if self.offset is None else self.offset[:, group, None]
        codes = self._grid.codes(column[:, None, None], *made)
        self.u[:, group, within] = codes[:, 0, 0]
        return self._grid.values(codes, *made)[:, 0, 0]

    def round_block(self, places: Tensor, w: Tensor, factor: Tensor) -> Tensor:
        """Choose the codes of the columns w[N, C] of the inputs at `places`, one after the other, by a kernel of a GPU;
        returns their errors [N, C], for the columns that come after them."""
        from accelpatch.kernels.triton.gptq_columns import round_columns

        groups = places // self.size
        affine = self._grid.affine(self.scale[:, groups], None if self.offset is None else self.offset[:, groups])
        codes, errors = round_columns(w, factor, affine, self._grid.limits)
        self.u.flatten(1)[:, places] = codes
        return errors


def _round(w: Tensor, factor: Tensor, columns: _Columns, order: Tensor | None) -> None:
    """Round w[N, K] in place of its columns' order. factor: as of `inverse_factor`. Groups are fitted when their first
    column comes; in another order than the inputs', once and before all."""
    k, size = w.shape[1], columns.size
    places = range(k) if order is None else order.tolist()
    w = w if order is None else w[:, order]
    block = BLOCK if order is not None or BLOCK % size == 0 else size
    for start in range(0, k, block):
        stop = min(start + block, k)
        part, rows = w[:, start:stop], factor[start:stop, start:stop]
        errors = torch.empty_like(part)
        for i in range(stop - start):
            if order is None and (start + i) % size == 0:
                columns.fit((start + i) // size, part[:, i : i + size])
            made = columns.round(places[start + i], part[:, i])
            errors[:, i] = (part[:, i] - made) / rows[i, i]
            part[:, i:].addr_(errors[:, i], rows[i, i:], alpha=-1)
        w[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)


def _round_by_kernel(w: Tensor, factor: Tensor, columns: _Columns, order: Tensor | None) -> None:
    """The same on a GPU: each block of columns is one launch, and has no more columns than have their groups fitted."""
    k, size = w.shape[1], columns.size
    places = torch.arange(k, device=w.device) if order is None else order
    w, block = (w, gcd(size, BLOCK)) if order is None else (w[:, order], BLOCK)
    for start in range(0, k, block):
        stop = min(start + block, k)
        if order is None and start % size == 0:
            columns.fit(start // size, w[:, start : start + size])
        errors = columns.round_block(places[start:stop], w[:, start:stop], factor[start:stop, start:stop])
        w[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)


def inverse_factor(hessian: Tensor, damping: float, order: Tensor | None = None) -> Tensor:
    """Upper Cholesky factor [K, K] float32 of the inverse of a damped hessian, whose inputs are taken in `order`.

    An input that is always zero has no part in it. Raises KernelError where there is none however it is damped.
    """
    if not bool(hessian.isfinite().all()):
        raise KernelError("the hessian is not finite: check the activations of the model in this dtype")
    for more in (1, 10, 100):
        h = _damped(hessian, damping * more, order)  # one name for all: two matrices of doubles at a time
        h, failed = torch.linalg.cholesky_ex(h)
        if not int(failed):
            h = torch.cholesky_inverse(h)
            h, failed = torch.linalg.cholesky_ex(h, upper=True)
            if not int(failed):
                return h.float()
    raise KernelError(
        f"the hessian has no inverse, even with a damping of {100 * damping:g}: calibrate with more text, or other"
    )


def _damped(hessian: Tensor, damping: float, order: Tensor | None) -> Tensor:
    """A copy in float64 whose inputs are taken in `order`, with so much of the diagonal's mean added to it."""
    h = (hessian if order is None else hessian[order][:, order]).to(torch.float64, copy=True)
    diagonal = h.diagonal()
    mean = float(diagonal.mean()) or 1.0
    diagonal[diagonal == 0] = mean
    diagonal.add_(damping * mean)
    return h
