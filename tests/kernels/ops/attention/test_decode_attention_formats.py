"""Attention of new tokens over a static cache in 8 bits: what is written, and what comes of it.

The cache is checked against another computation of its rounding, and the output against float64 attention over what the
cache then holds: so a kernel's own rounding of keys is no excuse for its sums. The Triton kernel runs on a GPU, or
interpreted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.device import KNOWN
from accelpatch.errors import KernelError
from accelpatch.kernels.check.attention_check import Step
from accelpatch.kernels.hip.attention import binding as attention
from accelpatch.kernels.layouts.kv_states import LARGEST, QuantizedStates, zeros
from accelpatch.kernels.ops.attention import decode_attention
from accelpatch.kernels.ops.attention.decode_attention import reference_
from accelpatch.kernels.triton import launch
from tests.kernels.ops.attention.test_decode_attention import (  # noqa: F401  _rows_apart: a fixture
    CASES,
    SAME,
    _rows_apart,
)
from tests.support.cache_formats import assert_codes, assert_same_bits, assert_sums, quantized
from tests.support.interpreted import DEVICE, HERE, LOW, here, interpret, needs_triton

FORMS = list(LARGEST)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_reference(case: Step, form: str) -> None:
    args, shape = quantized(case, torch.float32, form, torch.device("cpu"))
    y = decode_attention.decode_attention_(*args, shape)
    assert_codes(case, args, shape, form)
    assert_sums(case, args, shape, y, plain=None)


@needs_triton
@pytest.mark.skipif(HERE, reason="the test below runs as it is")
def test_through_the_interpreter() -> None:
    interpret(__file__, "-k", "triton_kernel")


@needs_triton
@here
@pytest.mark.each_value
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [LOW, torch.float32], ids=["low", "float32"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_triton_kernel(case: Step, dtype: torch.dtype, form: str) -> None:
    from accelpatch.kernels.triton import decode_attention as kernel

    args, shape = quantized(case, dtype, form, DEVICE)
    plain, _ = quantized(case, dtype, form, DEVICE)
    y = kernel.decode_attention_(*args, shape)
    assert_codes(case, args, shape, form)
    assert_sums(case, args, shape, y, (reference_(*plain, shape), plain))


@needs_triton
@here
@pytest.mark.each_value
@pytest.mark.usefixtures("_rows_apart")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", SAME.values(), ids=SAME)
def test_the_triton_kernel_gives_a_token_the_bits_that_it_gets_alone(
    case: Step, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelpatch.kernels.triton import decode_attention as kernel

    monkeypatch.setattr(launch, "processors", lambda device: 2)
    assert_same_bits(kernel.decode_attention_, case, LOW, form, DEVICE)


def _call(keys: Any, values: Any) -> Tensor:
    (qkv, positions, slot, mask, *_), shape = quantized(Step(), torch.float32, "int8", torch.device("cpu"))
    return decode_attention.decode_attention_(qkv, positions, slot, mask, keys, values, shape)


def test_caches_that_do_not_fit_are_refused() -> None:
    (*_, keys, values), _ = quantized(Step(), torch.float32, "int8", torch.device("cpu"))
    assert isinstance(keys, QuantizedStates)
    assert keys.scale is not None
    other = zeros("fp8", tuple(values.shape), torch.float32, torch.device("cpu"))
    with pytest.raises(KernelError, match="one format"):
        _call(keys, other)
    with pytest.raises(KernelError, match="one dtype"):
        _call(replace(keys, dtype=torch.bfloat16), values)
    with pytest.raises(KernelError, match="are not of"):
        _call(keys.part(slice(0, 1)), values)
    with pytest.raises(KernelError, match=r"scales of \[2, 2, 256\]"):
        _call(replace(keys, scale=keys.scale[:, :, :-1].contiguous()), values)
    with pytest.raises(KernelError, match="bfloat16"):
        _call(replace(keys, scale=keys.scale.float()), values)
    with pytest.raises(KernelError, match="contiguous"):
        _call(replace(keys, scale=keys.scale.mT.contiguous().mT), values)


def test_the_library_says_what_it_takes() -> None:
    device = KNOWN["gfx942"]
    shape = quantized(Step(size=72), torch.bfloat16, "int8", torch.device("cpu"))[1]
    assert "multiple of 16" in str(attention.why_not(shape, torch.bfloat16, device, "int8"))
    shape = replace(shape, size=128)
    assert "beside bfloat16" in str(attention.why_not(shape, torch.float16, device, "fp8"))
    assert "beside bfloat16" in str(attention.why_not(shape, torch.bfloat16, device, "bf16"))
    assert attention.function("float") == "decode_attention"
    assert attention.library(128, torch.bfloat16, "fp8") == "decode_attention_fp8_bf16_128"
