"""Experts rounded by calibration: the inputs of each expert's two products, of the tokens that are routed to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from accelpatch.errors import KernelError
from accelpatch.kernels.layouts.row_major import Int4Rows, Int8Rows
from accelpatch.kernels.ops.experts.experts import gated
from accelpatch.modules.experts import DOWN, UP, ExpertsForm, original_of, rows_of
from accelpatch.patching.capture import Call
from accelpatch.patching.entry import Entry
from accelpatch.quant.formats import dequantize
from accelpatch.quant.hessian import Hessians
from accelpatch.replacers.calibrated import CalibratedReplacer
from accelpatch.replacers.experts import stacked


class ExpertHessians:
    """Second moments of what each expert of a module reads: x in `gate_up_proj`, and in `down_proj` the gated product
    that its own float weights make of x."""

    def __init__(self, entry: Entry):
        self._module = entry.site.original
        self._form: ExpertsForm = cast(Any, entry.choice).detail["form"]
        self._of = Hessians()

    def see(self, call: Call) -> None:
        """Take a call of the module: hidden_states[T, H], ids[T, k] and weights[T, k], in any order of the last two."""
        given = [one for one in (*call.args, *call.kwargs.values()) if isinstance(one, Tensor)]
        x, ids = given[0].detach(), next(one for one in given[1:] if not one.is_floating_point())
        up, bias = self._weights(UP)
        for expert in range(len(up)):
            rows = x[(ids == expert).any(-1)]
            if len(rows):
                both = linear(rows, up[expert], None if bias is None else bias[expert])
                inner = gated(both, self._form.activation, self._form.alpha, self._form.limit)
                self._of.see(f"{UP}.{expert}", rows)
                self._of.see(f"{DOWN}.{expert}", inner)

    def of(self, name: str, expert: int) -> Tensor | None:
        """[K, K] float32; None for an expert that no token reached. Raises KernelError for what is not finite."""
        return self._of.of(f"{name}.{expert}")

    def _weights(self, name: str) -> tuple[Tensor, Tensor | None]:
        """A weight [E, N, K] and its bias [E, N], in the operation's order."""
        weight, bias = (self._module._parameters.get(key) for key in (name, f"{name}_bias"))
        assert weight is not None
        rows = rows_of(self._form, name, weight.detach())
        return rows, None if bias is None else rows_of(self._form, f"{name}_bias", bias.detach())


def rounded_experts(entry: Entry, hessians: ExpertHessians) -> tuple[dict[str, Tensor], int]:
    """The canonical tensors of a site's experts, by their names in a state dict; and how many matrices no token
    reached, which are rounded to the nearest values. Raises KernelError, naming the site."""
    replacer, choice = cast(Any, entry.replacer), cast(Any, entry.choice)
    made, unreached = dict[str, Tensor](), 0
    for name, group in zip((UP, DOWN), choice.detail["groups"], strict=True):
        weight = entry.site.original._parameters[name]
        assert weight is not None
        each = []
        for expert, rows in enumerate(rows_of(choice.detail["form"], name, weight.detach())):
            try:
                hessian = hessians.of(name, expert)
                new = None if hessian is None else _rounded(replacer, rows, choice.detail, group, hessian)
            except KernelError as error:
                raise KernelError(f"{entry.site.path}, expert {expert}: {error}") from None
            unreached += hessian is None
            each.append(replacer.quantized(rows, group, choice) if new is None else new)
        made |= {f"{name}_{part}": one for part, one in stacked(each).items() if one is not None}
    return made, unreached


def nearest_experts(entry: Entry) -> dict[str, Tensor]:
    """The same with all of them rounded to the nearest values."""
    replacer, choice, made = cast(Any, entry.replacer), cast(Any, entry.choice), dict[str, Tensor]()
    for name, group in zip((UP, DOWN), choice.detail["groups"], strict=True):
        weight = entry.site.original._parameters[name]
        assert weight is not None
        rows = rows_of(choice.detail["form"], name, weight.detach())
        each = stacked([replacer.quantized(one, group, choice) for one in rows])
        made |= {f"{name}_{part}": one for part, one in each.items() if one is not None}
    return made


def _rounded(
    replacer: CalibratedReplacer, rows: Tensor, detail: Mapping[str, Any], group: int, hessian: Tensor
) -> Int4Rows | Int8Rows:
    made: Int4Rows | Int8Rows = replacer.rounded(rows, detail, group, hessian)
    return made


def floats_of(entry: Entry, made: Mapping[str, Tensor]) -> list[tuple[nn.Parameter, Tensor]]:
    """The parameters of a site's experts, each with the floats, in its own order, that the new weight stands for."""
    form, module = cast(Any, entry.choice).detail["form"], entry.site.original
    found = []
    for name in (UP, DOWN):
        parts: Sequence[Any] = [made[f"{name}_q"], made[f"{name}_scale"], made.get(f"{name}_offset")]
        kind: Callable[..., Any] = Int8Rows if cast(Any, entry.replacer).bits == 8 else Int4Rows
        each = [dequantize(kind(*(one[expert] for one in parts if one is not None))) for expert in range(len(parts[0]))]
        parameter = module._parameters[name]
        assert parameter is not None
        found.append((parameter, original_of(form, name, torch.stack(each))))
    return found
