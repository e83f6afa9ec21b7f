"""A Conv1D by the GEMV kernels: its weight lies as [N, K] in memory, and stays the parameter [K, N] that it was."""

from __future__ import annotations

import torch
from transformers.pytorch_utils import Conv1D

from accelpatch.kernels import dispatch
from accelpatch.modules.gemv_linear import GemvConv1D, rows_of_
from accelpatch.modules.replacement import adopt


def test_a_conv1d_keeps_its_parameter() -> None:
    torch.manual_seed(0)
    conv = Conv1D(48, 32)
    parameter, held, x = conv.weight, conv.weight.detach().clone(), torch.randn(2, 3, 32)
    due = conv(x)
    rows = rows_of_(conv)
    new = adopt(GemvConv1D, conv)
    assert rows.shape == (48, 32)
    assert rows.is_contiguous()
    assert rows.data_ptr() == parameter.data_ptr()
    assert conv.weight is parameter is new.weight
    assert torch.equal(parameter, held)
    assert rows_of_(conv).data_ptr() == rows.data_ptr()  # as it lies already
    torch.testing.assert_close(new(x), due)
    seen: list[str] = []
    with dispatch.observed(lambda op, args, result: seen.append(op)), torch.no_grad():
        torch.testing.assert_close(new(x), due)
    assert seen == ["float_linear"]
