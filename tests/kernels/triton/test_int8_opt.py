"""The Triton kernels of int8 OPT: the float rule on poisoned outputs, random sizes and views, special values."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.kernels import dispatch
from accelpatch.kernels.ops.attention import int8_attention as attention
from accelpatch.kernels.ops.norm.layernorm_q import layernorm_q
from accelpatch.kernels.spec import Case
from tests.support.interpreted import DEVICE, HERE, INTERPRETED, LOW, _anywhere, here, interpret, needs_triton  # noqa: F401
from tests.support.parity import assert_parity, name

pytestmark = needs_triton
marks = [pytest.mark.gpu, here]
DTYPES = (LOW, torch.float16, torch.float32)
OPS = ("layernorm_q", "int8_attention")
CASES = [(op, case) for op in OPS for case in dispatch.kernel(op).cases() if not case.id.endswith("float")]
SEEDS = range(6 if INTERPRETED else 60)


@pytest.mark.skipif(HERE, reason="the tests below run as they are")
def test_through_the_interpreter() -> None:
    interpret(__file__)


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("op, case", CASES, ids=[f"{op}-{case.id}" for op, case in CASES])
class TestCases:
    pytestmark = marks

    def test_float_rule(self, op: str, case: Case, dtype: torch.dtype) -> None:
        assert_parity(op, case.make(torch.Generator().manual_seed(7), dtype, DEVICE), "triton")


def qkv(rng: random.Random, size: int, masked: str) -> tuple[Any, ...]:
    """Arguments as the module has them: q, k and v are views of one product, the cache is longer."""
    generator = torch.Generator().manual_seed(rng.randint(0, 1 << 30))
    b, h, m = rng.randint(1, 3), rng.randint(1, 4), rng.choice((1, 2, 16, 17, 70))
    n = m + rng.choice((0, 1, 50, 200))
    rows = torch.randint(-128, 128, (b, m, 3 * h * size), generator=generator).to(DEVICE, torch.int8)
    q = rows.chunk(3, -1)[0].view(b, m, h, size).transpose(1, 2)
    k, v = (torch.randint(-128, 128, (b, h, n, size), generator=generator).to(DEVICE, torch.int8) for _ in range(2))
    mask = None
    if masked == "bool":
        mask = (torch.rand(b, 1, m, n, generator=generator) > 0.5).to(DEVICE)
    scales = torch.tensor([rng.uniform(0.5, 8) / (127 * 127 * size**0.5), 1 / 127], device=DEVICE)
    return q, k, v, scales, mask, masked == "causal"


@pytest.mark.parametrize("masked", ["none", "bool", "causal"])
@pytest.mark.parametrize("seed", SEEDS)
class TestAttention:
    pytestmark = marks

    def test_random_sizes(self, seed: int, masked: str) -> None:
        rng = random.Random(f"{seed} {masked}")
        assert_parity("int8_attention", qkv(rng, rng.choice((32, 40, 64, 80, 128, 256)), masked), "triton")


class TestValues:
    pytestmark = marks

    def test_a_query_that_sees_no_key_gets_zeros_and_disturbs_no_other(self) -> None:
        q, k, v, scales, _, _ = qkv(random.Random(1), 64, "none")
        mask = torch.ones(q.shape[0], 1, q.shape[2], k.shape[2], dtype=torch.bool, device=DEVICE)
        mask[:, :, 0] = False
        (y,) = assert_parity("int8_attention", (q, k, v, scales, mask, False), "triton")
        assert not bool(y[:, 0].any())

    def test_what_is_hidden_has_no_influence(self) -> None:
        q, k, v, scales, mask, _ = qkv(random.Random(2), 64, "bool")
        assert mask is not None
        mask[..., -1] = False
        (y,) = assert_parity("int8_attention", (q, k, v, scales, mask, False), "triton")
        k[:, :, -1], v[:, :, -1] = 127, 127
        (again,) = assert_parity("int8_attention", (q, k, v, scales, mask, False), "triton")
        assert torch.equal(y, again)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_row_that_is_not_finite_is_zeros_and_its_neighbour_is_not(self, value: float) -> None:
        x = torch.randn(2, 70, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        x[0, 3] = value
        weight, bias = torch.full((70,), 9.0, device=DEVICE), torch.full((70,), 5.0, device=DEVICE)
        (q,) = assert_parity("layernorm_q", (x, weight, bias, 1e-5), "triton")
        assert not bool(q[0].any())
        assert bool(q[1].any())

    def test_large_values_saturate(self) -> None:
        x: Tensor = torch.linspace(-9, 9, 64, device=DEVICE)[None]
        weight = torch.full((64,), 1e4, device=DEVICE)
        q = layernorm_q(x, weight, torch.zeros_like(weight), 1e-5)
        assert (q.min().item(), q.max().item()) == (-128, 127)


def test_additive_masks_are_refused_with_the_reason() -> None:
    spec = attention.of_shape(2, 64, added=True)
    assert "boolean masks" in str(attention.IMPLEMENTATIONS["triton"].why_not(spec, None))  # type: ignore[arg-type]
