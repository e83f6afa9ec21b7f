"""The device library's attention on a GPU: the float rule, the same bits in every company, odd masks, repeats."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.device import probe
from accelpatch.errors import KernelError
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.check.attention_check import Step, made
from accelpatch.kernels.hip import binding
from accelpatch.kernels.hip.attention import binding as attention
from accelpatch.kernels.ops.attention.decode_attention import reference_
from accelpatch.kernels.ops.linear import float_linear
from tests.kernels.ops.attention.test_decode_attention import CASES, SAME, assert_float_rule, assert_the_same_bits
from tests.support.interpreted import DEVICE
from tests.support.parity import bits

HERE = torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="needs a GPU that torch can use")]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
LONG = {
    "long": Step(size=128, slot=4500, capacity=4608, rows=1, heads=8, kv_heads=8),
    "long-rows": Step(size=128, slot=2100, capacity=4096, rows=5, padding=700, tokens=8),
    "into-the-fifth-node": Step(size=128, slot=8188, capacity=8448, rows=2, heads=8, kv_heads=2, tokens=8),
    "padding-and-bunches": Step(
        size=128, slot=20000, capacity=20480, rows=2, heads=8, kv_heads=2, padding=9000, tokens=3
    ),
    "half-nodes": Step(size=128, slot=16383, capacity=16384, rows=1, heads=32, kv_heads=8),
    "shares-over-heads": Step(size=128, slot=3800, capacity=4096, rows=5, heads=32, kv_heads=32, padding=1100),
    "a-lone-row-of-many-spans": Step(size=128, slot=8500, capacity=12288, rows=1, heads=32, kv_heads=32),
    "rows-of-many-spans": Step(size=128, slot=8500, capacity=12288, rows=2, heads=32, kv_heads=32, padding=2500),
    "claimed-spans": Step(size=128, slot=17000, capacity=17152, rows=3, heads=32, kv_heads=32, padding=9000),
    "claimed-spans-of-shared-heads": Step(
        size=128, slot=30000, capacity=30208, rows=8, heads=32, kv_heads=8, padding=20000
    ),
    "five-bunches": Step(size=128, slot=70000, capacity=70144, rows=1, heads=4, kv_heads=1),
    "windows-from-two-bunches": Step(size=64, slot=33000, capacity=33024, rows=1, heads=4, tokens=8, window=24811),
    "window-over-spans": Step(size=128, slot=1251, capacity=1536, heads=32, kv_heads=8, tokens=8, window=1000),
    "more-heads-than-blocks": Step(size=64, slot=300, capacity=512, rows=9, heads=32, kv_heads=32),
    "rows-of-many-lengths": Step(size=128, slot=9000, capacity=9216, rows=7, heads=32, kv_heads=8, apart=1400),
    "tokens-of-rows-of-many-lengths": Step(size=128, slot=2000, capacity=2048, rows=8, tokens=3, apart=277, window=900),
    "many-rows-of-many-lengths": Step(size=64, slot=900, capacity=1024, rows=300, heads=2, kv_heads=1, apart=3),
    "many-rows": Step(size=64, slot=20, capacity=64, rows=300, heads=2, kv_heads=1),
}


@pytest.fixture(scope="module", autouse=True)
def _there() -> None:
    shape = AttentionShape(1, 1, 64, 1.0, torch.ones(32))
    if HERE and (reason := attention.why_not(shape, torch.bfloat16, probe("cuda"))):
        pytest.skip(reason)


def _attend(*args: Any) -> Tensor:
    """What blocks hand each other is gone when they have ended."""
    y = attention.decode_attention_(*args)
    assert not any(one.any() for one in args[-1].memory.buffers)
    return y


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("case", (CASES | LONG).values(), ids=CASES | LONG)
def test_float_rule(case: Step, dtype: torch.dtype) -> None:
    assert_float_rule(_attend, case, dtype)


@pytest.mark.parametrize("case", (CASES | LONG).values(), ids=CASES | LONG)
def test_while_the_kernel_before_runs(case: Step) -> None:
    """Then a launch reads the cache before it waits, and brings nearer what follows: the bits stay."""
    args, shape = made(case, torch.bfloat16, DEVICE)
    due = attention.decode_attention_(*args, shape)
    caches = [one.clone() for one in args[-2:]]
    weights = torch.randn(3000, 1024, device=DEVICE)
    for following in (weights, weights.view(-1)[1:], weights[:1, :3], None):
        for one in args[-2:]:
            for row, slot in enumerate(case.slots):
                one[row, :, slot : slot + case.tokens] = 0
        torch.cuda._sleep(100_000)
        args[0].mul_(1)
        with binding.weight_prefetch():
            assert torch.equal(bits(attention.decode_attention_(*args, shape, following)), bits(due))
        assert all(torch.equal(bits(one), bits(kept)) for one, kept in zip(args[-2:], caches, strict=True))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("case", (SAME | LONG).values(), ids=SAME | LONG)
def test_a_token_gets_the_bits_that_it_gets_alone(case: Step, dtype: torch.dtype) -> None:
    assert_the_same_bits(_attend, dataclasses.replace(case, rows=min(case.rows, 9)), dtype)


def test_a_thousand_random_steps() -> None:
    draw = random.Random(11)
    for trial in range(1000):
        kv_heads, tokens = draw.choice([1, 2, 3]), draw.randint(1, 8)
        slot = draw.randint(0, draw.choice([40, 300, 900, 900, 9000]))
        case = Step(
            heads=kv_heads * draw.choice([1, 2, 4, 7]), kv_heads=kv_heads, size=draw.choice([64, 80, 96, 128, 256]),
            slot=slot, capacity=slot + tokens + draw.randint(0, 300), rows=draw.choice([1, 2, 3, 8]), tokens=tokens,
            padding=draw.randint(0, slot), window=draw.choice([0, 0, 5, 100, 400, 3000]), norms=draw.random() < 0.3,
            apart=draw.choice([0, 0, 1, 70, 300, 5000]),
        )  # fmt: skip
        try:
            assert_the_same_bits(_attend, case, torch.bfloat16)
        except AssertionError as error:
            raise AssertionError((trial, case)) from error


def test_masks_with_holes_and_tokens_before_the_own_ones() -> None:
    case = Step(rows=3, slot=200, size=128)
    (qkv, positions, slot, mask, *cache), shape = made(case, torch.bfloat16, DEVICE)
    mask[0, 3:40], mask[1, :100:2], mask[2, 150:] = 0, 0, 0
    positions = mask[:, :200].sum(1, keepdim=True)  # as transformers counts: the first slots can be a token's own
    for one in cache:
        one[0, :, 3:40] = float("nan")
    due = reference_(qkv.float(), positions, slot, mask, *(one.float() for one in cache), shape)
    found = attention.decode_attention_(qkv, positions, slot, mask, *cache, shape)
    torch.testing.assert_close(found.float(), due, rtol=2e-2, atol=2e-2)


def test_repeats() -> None:
    args, shape = made(CASES["two-runs-of-a-padded-row"], torch.bfloat16, DEVICE)
    due = attention.decode_attention_(*args, shape)
    for _ in range(1000):
        assert torch.equal(bits(attention.decode_attention_(*args, shape)), bits(due))


class Chain:
    """Steps of a small layer, as a captured step has them: a plain kernel, then products and attention that overlap."""

    def __init__(self, rows: int, tokens: int):
        draw, options = torch.Generator("cuda").manual_seed(3), {"device": "cuda", "dtype": torch.bfloat16}
        self.shape = AttentionShape(8, 2, 128, 128**-0.5, (10000 ** (-torch.arange(0, 128, 2) / 128)).cuda())
        self.embedding = torch.randn(50, 1024, generator=draw, **options)
        self.weights = [torch.randn(n, 1024, generator=draw, **options) / 32 for n in (self.shape.columns, 1024)]
        self.keys, self.values = (torch.zeros(rows, 2, 1024, 128, **options) for _ in range(2))
        self.ids = torch.arange(rows * tokens, device="cuda") % 50
        self.slot = torch.full([rows], 5, device="cuda")
        self.positions = (5 + torch.arange(tokens, device="cuda")).repeat(rows, 1)
        self.mask = torch.zeros(rows, 1024, dtype=torch.int64, device="cuda")
        self.mask[:, :5] = 1
        self.y = torch.zeros(rows * tokens, 1024, **options)

    def step(self) -> None:
        x = self.embedding.index_select(0, self.ids)
        qkv = float_linear.by_hip(x, self.weights[0])
        held = (self.slot, self.mask, self.keys, self.values, self.shape)
        self.y.copy_(float_linear.by_hip(attention.decode_attention_(qkv, self.positions, *held), self.weights[1]))
        self.ids.add_(7).remainder_(50)
        self.mask.scatter_(1, self.slot[:, None] + torch.arange(self.positions.shape[1], device="cuda"), 1)
        self.slot.add_(self.positions.shape[1])
        self.positions.add_(self.positions.shape[1])


@pytest.mark.parametrize("rows, tokens", [(1, 1), (1, 8), (4, 1), (8, 1)])
def test_launches_that_overlap_in_a_graph(rows: int, tokens: int) -> None:
    apart, captured = Chain(rows, tokens), Chain(rows, tokens)
    fresh = Chain(rows, tokens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()), binding.weight_prefetch():
        captured.step()  # loads, and makes the counters
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured.step()
    for name in ("keys", "values", "ids", "slot", "positions", "mask"):
        getattr(captured, name).copy_(getattr(fresh, name))
    for step in range(1000 // tokens - 2):
        apart.step()
        graph.replay()
        assert torch.equal(bits(captured.y), bits(apart.y)), step
    assert torch.equal(bits(captured.keys), bits(apart.keys))


def test_what_is_refused() -> None:
    (qkv, positions, slot, mask, keys, values), shape = made(CASES["grouped"], torch.bfloat16, DEVICE)
    odd = torch.empty(keys.numel() + 1, dtype=keys.dtype, device=keys.device)[1:].view_as(keys)
    with pytest.raises(KernelError, match="pointer"):
        attention.decode_attention_(qkv, positions, slot, mask, odd, values, shape)
