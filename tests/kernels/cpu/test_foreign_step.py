"""The native decode step with the weights of others' checkpoints against its model in float64, on every path."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from accelpatch.device import probe
from accelpatch.errors import KernelError
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.layouts.cpu_pack import Pack
from tests.kernels.cpu.test_step import BASE, column, decode, expected, worst
from tests.support.packs import FOREIGN, canonical, packed, size_for
from tests.support.stepping import Quantize, build

reason = libraries.why_not("cpu", probe("cpu"))
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no native library: {reason}")
LENGTH, STEPS = 24, 20
#: a layer's weights q, k, v, o, gate, up, down, in turn: of one kind, or each of another
KINDS = {
    "zero": ("int4-zero-half64",),
    "order": ("int4-zero-order-half32",),
    "tables": ("nf4-half64", "fp4-group32"),
    "sixteen": ("int8-group16", "int4-minimum-half16"),
    "superblocks": ("Q4_K", "Q6_K", "Q4_K"),
    "orders-and-all": ("int4-zero-order-half32", "int4-zero32", "fp4-order64", "Q6_K", "int8-order"),
}


@pytest.fixture(params=native_library.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param not in native_library.isas():
        pytest.skip(f"this machine has no {request.param}")
    native_library.use_isa(request.param)
    yield
    native_library.use_isa(None)


def model() -> PreTrainedModel:
    torch.manual_seed(3)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    return LlamaForCausalLM(LlamaConfig(**{**BASE, **sizes})).eval()


def quantize(kinds: tuple[str, ...]) -> Quantize:
    """Random weights of these kinds in turn, whatever the model's own are."""
    made: list[Pack] = []

    def pack(weight: Tensor, bias: Tensor | None) -> Pack:
        format_ = kinds[len(made) % len(kinds)]
        n, k = weight.shape
        assert size_for(format_, 1, n, k) == (1, n, k)
        made.append(packed(format_, *canonical(format_, 1, n, k, seed=len(made))[1:4]))
        return made[-1]

    return pack


@pytest.mark.parametrize("kinds", KINDS)
def test_float_rule_of_padded_steps(isa: None, kinds: str) -> None:
    assert set(KINDS[kinds]) <= set(FOREIGN)
    like, pads = model(), column(0, 5)
    step = build(like, quantize(KINDS[kinds]), 4, LENGTH)
    ids = torch.randint(1, 131, (2, STEPS), generator=torch.Generator().manual_seed(1))
    found = decode(step, ids, pads)
    exact = expected(like, step, ids, pads, torch.float64)
    plain = expected(like, step, ids, pads, torch.float32)
    largest = max(float(part.abs().max()) for part in exact)
    assert worst(found, exact, pads) <= 2 * worst(plain, exact, pads) + largest * torch.finfo(torch.float32).eps


def test_neighbours_and_threads_change_no_bit(isa: None) -> None:
    like, before = model(), torch.get_num_threads()
    ids, pads = torch.randint(1, 131, (4, 6)), column(0, 0, 0, 0)
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(decode(build(like, quantize(KINDS["orders-and-all"]), 4, LENGTH), ids, pads))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)
    alone = decode(build(like, quantize(KINDS["orders-and-all"]), 4, LENGTH), ids[2:3], column(0))
    assert torch.equal(alone[0], results[0][2])


def test_an_order_out_of_range_is_refused() -> None:
    def outside(weight: Tensor, bias: Tensor | None) -> Pack:
        pack = quantize(KINDS["order"])(weight, bias)
        assert pack.order is not None
        pack.order[0] = pack.k
        return pack

    with pytest.raises(KernelError, match="do not fit"):
        build(model(), outside, 4, LENGTH)
