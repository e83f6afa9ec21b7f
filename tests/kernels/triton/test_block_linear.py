"""Linear layers over GGUF's blocks of two levels by Triton: every value, the float rule, few rows and many, views."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelpatch.kernels.ops.linear.block_linear import BY_TRITON, random_blocks, triton_why_not
from accelpatch.kernels.ops.linear.gguf_values import dequantize_rows
from tests.support.interpreted import DEVICE, HERE, INTERPRETED, _anywhere, here, interpret, needs_triton  # noqa: F401
from tests.support.parity import assert_parity, name, strided

pytestmark = needs_triton
marks = [pytest.mark.gpu, here]
# the interpreter cuts bfloat16 off where GPUs round
DTYPES = (torch.float16, torch.float32) if INTERPRETED else (torch.bfloat16, torch.float16, torch.float32)
SIZES = ((1, 100, 256), (9, 65, 768), (17, 16, 2048), (33, 1, 512), (65, 70, 256), (0, 5, 256))  # m, n, k


@pytest.mark.skipif(HERE, reason="the tests below run as they are")
def test_through_the_interpreter() -> None:
    interpret(__file__)


def args_of(m: int, n: int, k: int, form: str, dtype: torch.dtype, bias: bool = True) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(m + n)
    x, beside = torch.randn(m, k, generator=generator), torch.randn(n, generator=generator)
    blocks = random_blocks(generator, n, k, form).to(DEVICE)
    return x.to(DEVICE, dtype), blocks, form, beside.to(DEVICE, dtype) if bias else None


class TestHere:
    pytestmark = marks

    @pytest.mark.parametrize("form", BY_TRITON)
    @pytest.mark.parametrize("dtype", DTYPES, ids=name)
    @pytest.mark.parametrize("m, n, k", SIZES, ids=lambda size: str(size))
    def test_float_rule(self, m: int, n: int, k: int, dtype: torch.dtype, form: str) -> None:
        assert_parity("block_linear", args_of(m, n, k, form, dtype, bias=n % 2 == 0), "triton")

    @pytest.mark.parametrize("form", BY_TRITON)
    def test_every_value_is_that_of_the_formula(self, form: str) -> None:
        from accelpatch.kernels.triton.block_linear import block_floats

        blocks = random_blocks(torch.Generator().manual_seed(5), 37, 1024, form).to(DEVICE)
        out = torch.full((37, 1024), torch.nan, device=DEVICE)
        block_floats(blocks, form)(0, 37, out)
        # float32 rounds once in both, and a fused multiply-add changes nothing where products are exact
        assert torch.equal(out, dequantize_rows(blocks, form, torch.float32))
        part = torch.full((20, 1024), torch.nan, device=DEVICE)
        block_floats(blocks, form)(11, 31, part)
        assert torch.equal(part, out[11:31])

    @pytest.mark.parametrize("form", BY_TRITON)
    @pytest.mark.parametrize("m", [3, 80])
    def test_views_and_leading_dimensions(self, m: int, form: str) -> None:
        x, blocks, _, bias = args_of(m, 32, 512, form, DTYPES[0])
        (plain,) = assert_parity("block_linear", (x, blocks, form, bias), "triton")
        for view in (strided(x), x.unsqueeze(0), x.t().contiguous().t()):
            (other,) = assert_parity("block_linear", (view, blocks, form, bias), "triton")
            assert torch.equal(other.reshape(m, 32), plain)


def test_what_it_does_not_take() -> None:
    from accelpatch.device import KNOWN
    from accelpatch.kernels.ops.linear.block_linear import of_shape

    said = triton_why_not(of_shape(8, 64, torch.float16, "Q4_0"), KNOWN["sm_90"])
    assert said is not None
    assert said.endswith("Q4_K, Q6_K, not Q4_0")
