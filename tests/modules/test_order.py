"""An order of columns beside a weight whose modules have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelpatch.errors import KernelError
from accelpatch.modules.quantized_linear import CodebookLinear, Int8Embedding, Int8WeightOnlyLinear, quantized
from accelpatch.quant import codebook, int8

ORDER = torch.arange(64, dtype=torch.int32).flip(0)
FLOATS = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "module, original, weight",
    [
        (CodebookLinear, nn.Linear(64, 32), codebook.quantize(FLOATS, group_size=32, codebook="nf4")),
        (Int8Embedding, nn.Embedding(32, 64), int8.quantize(FLOATS)),
    ],
    ids=["nf4", "embedding"],
)
def test_an_order_that_nothing_would_read_is_refused(module: Any, original: Any, weight: Any) -> None:
    with pytest.raises(KernelError, match="order does not belong"):
        quantized(module, original, weight.replace(order=ORDER))


def test_an_embedding_tied_to_an_ordered_head_is_refused() -> None:
    head = quantized(Int8WeightOnlyLinear, nn.Linear(64, 32), int8.quantize(FLOATS).replace(order=ORDER))
    with pytest.raises(KernelError, match="order does not belong"):
        quantized(Int8Embedding, nn.Embedding(32, 64), head)
