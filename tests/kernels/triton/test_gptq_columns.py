"""GPTQ's columns by the kernel of GPUs give what they give one by one: formats, groups, orders, odd numbers of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.kernels.triton import launch
from accelpatch.quant import gptq
from accelpatch.quant.formats import dequantize
from accelpatch.quant.gptq import Gptq
from accelpatch.quant.int3 import Int3Grid
from accelpatch.quant.int4 import Int4Grid
from accelpatch.quant.int8 import Int8Grid
from tests.support.interpreted import DEVICE, HERE, _anywhere, here, interpret, needs_triton  # noqa: F401

pytestmark = needs_triton
marks = [pytest.mark.gpu, here]
GRIDS = {
    "minimum": Int4Grid(), "none": Int4Grid("none"), "zero_point": Int4Grid("zero_point"), "int3": Int3Grid(),
    "int8": Int8Grid(),
}  # fmt: skip


@pytest.mark.skipif(HERE, reason="the tests below run as they are")
def test_through_the_interpreter() -> None:
    interpret(__file__)


def problem(n: int, k: int) -> tuple[Tensor, Tensor]:
    """A weight and the second moments of correlated inputs, some of them large."""
    generator = torch.Generator().manual_seed(n + k)
    mixed = torch.randn(k, k, generator=generator) * torch.rand(k, generator=generator).mul(3).exp()
    inputs = torch.randn(4 * k, k, generator=generator) @ mixed
    hessian = inputs.t() @ inputs / len(inputs)
    return torch.randn(n, k, generator=generator).to(DEVICE), hessian.to(DEVICE)


def loss(made: Any, weight: Tensor, hessian: Tensor) -> float:
    difference = dequantize(made) - weight
    return float((difference @ hessian * difference).sum())


@pytest.mark.parametrize("act_order", [False, True], ids=["in order", "by activations"])
@pytest.mark.parametrize("n, k, group", [(24, 192, 64), (33, 256, 128), (5, 96, 32), (16, 256, 256)], ids=str)
@pytest.mark.parametrize("name", GRIDS)
class TestColumns:
    pytestmark = marks

    def test_as_one_by_one(
        self, name: str, n: int, k: int, group: int, act_order: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        weight, hessian = problem(n, k)
        calls = list[int]()
        by_kernel = gptq._round_by_kernel
        monkeypatch.setattr(gptq, "_round_by_kernel", lambda *given: (calls.append(1), by_kernel(*given)))
        made = Gptq(act_order=act_order).rounded(weight, hessian, GRIDS[name], group)
        assert calls
        monkeypatch.setattr(launch, "why_not", lambda device, *dtypes: "not here")
        due = Gptq(act_order=act_order).rounded(weight, hessian, GRIDS[name], group)
        same = (dequantize(made) - dequantize(due)).abs() <= 1e-5 * dequantize(due).abs()
        assert float(same.float().mean()) > 0.98  # a value half way between two codes may go either way
        assert loss(made, weight, hessian) == pytest.approx(loss(due, weight, hessian), rel=0.02)
