"""Weights in 8 bits for activations in 8 bits: w[N, K] with a scale a row, and of int8 the static scale of its input
where it has one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from accelpatch.kernels.layouts.layout import WeightArguments
from accelpatch.kernels.layouts.row_major import FP8, RowMajor, fp8_name


def function_of(form: torch.dtype) -> tuple[str, str]:
    """The function of the device library that reads a weight of a form, and its variant."""
    return ("gemv_w8a8_fp8", fp8_name(form)) if form in FP8 else ("gemv_w8a8", "")


@dataclass(frozen=True, eq=False)
class W8A8Rows(RowMajor):
    """w[N, K] int8 or 8-bit floats, scale[N, 1] float32; input_scale[1] float32: of its input, None where each row has
    its own, as with floats."""

    whole_rows: ClassVar[bool] = True
    shared: ClassVar[tuple[str, ...]] = ("order", "input_scale")
    scale: Tensor
    input_scale: Tensor | None = None

    def arguments(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.w, self.scale, self.input_scale

    @property
    def format(self) -> tuple[Any, ...]:
        """Weights of one format can be concatenated."""
        return W8A8Rows, self.w.dtype, self.k, self.input_scale is None

    def why_not_fused(self, dtype: torch.dtype) -> str | None:
        return None

    @staticmethod
    def why_not_concat(parts: Sequence[Any]) -> str | None:
        """Why weights cannot be concatenated: they have static scales of different inputs. None where they can."""
        scales = [one.input_scale for one in parts if one.input_scale is not None]
        alike = all(torch.equal(one, scales[0]) for one in scales)
        return None if alike else "the static scales of their inputs differ"

    def launch(self) -> WeightArguments:
        """The arguments of a launch of gemv_w8a8, or gemv_w8a8_fp8."""
        w, scale = self.w.contiguous(), self.scale.to(torch.float32).contiguous()
        given = None if self.input_scale is None else self.input_scale.to(torch.float32)
        prefetchable = w is self.w and scale is self.scale and given is self.input_scale
        function, variant = function_of(w.dtype)
        return WeightArguments(
            function, self.n, self.k, w, None, scale, given, prefetchable=prefetchable, variant=variant
        )
