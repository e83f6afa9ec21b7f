"""Experts by the HIP kernels on the GPU that is here: the float rule, bits, captured graphs; prompts from the tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.device import probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.ops import experts
from accelpatch.kernels.ops.expert_cases import in_tiles, of_random
from accelpatch.kernels.spec import Case
from tests.support.parity import assert_parity, bits, name

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
]
CUDA = torch.device("cuda")
HALVES = (torch.bfloat16, torch.float16)
OP = experts.OP
TILED = [case for case in dispatch.kernel(OP).cases() if case.id.endswith("-tiles")]
#: (E, H, I, experts a token), and groups of gate and up and of down
SHAPES = {
    "mixtral": ((8, 4096, 14336, 2), (128, 128)),
    "qwen3_moe": ((128, 2048, 768, 8), (128, 128)),
    "groups of 32": ((16, 1024, 1408, 6), (32, 32)),
    "groups of 64": ((16, 1024, 640, 4), (64, 64)),
    "rows": ((4, 512, 1536, 2), (0, 0)),
}


def made(shape: str, tokens: int, dtype: torch.dtype, symmetric: bool = False) -> tuple[Any, ...]:
    (number, width, inner, chosen), groups = SHAPES[shape]
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, width, generator=generator).to(CUDA, dtype)
    ids = torch.stack([torch.randperm(number, generator=generator)[:chosen] for _ in range(tokens)]).to(CUDA)
    weights = torch.rand(tokens, chosen, generator=generator).to(CUDA, dtype)
    up, down = (
        of_random(generator, dtype, CUDA, 4, number, n, k, group, False, symmetric)
        for (n, k), group in zip(((2 * inner, width), (width, inner)), groups, strict=True)
    )
    stacks = (part for one in in_tiles(up, down, inner) for part in one)
    return x, ids, weights, *stacks, "silu", 0.0, 0.0, x.flip(0)


def chosen(args: tuple[Any, ...]) -> str:
    return dispatch.choose(OP, dispatch.kernel(OP).spec(*args), probe(CUDA))


@pytest.mark.parametrize("dtype", HALVES, ids=name)
@pytest.mark.parametrize("case", TILED, ids=[case.id for case in TILED])
def test_float_rule_of_cases(case: Case, dtype: torch.dtype) -> None:
    args = case.make(torch.Generator().manual_seed(7), dtype, CUDA)
    assert_parity(OP, args, chosen(args))


@pytest.mark.parametrize("dtype", HALVES, ids=name)
@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_float_rule(shape: str, tokens: int, dtype: torch.dtype) -> None:
    args = made(shape, tokens, dtype, symmetric=tokens == 2)
    assert chosen(args) == "hip"
    assert_parity(OP, args, "hip")


@pytest.mark.parametrize("tokens", [1, 40, 300])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "mixtral"])
def test_triton_reads_the_tiles(shape: str, tokens: int) -> None:
    assert_parity(OP, made(shape, tokens, torch.bfloat16), "triton")


@pytest.mark.parametrize("shape", ["qwen3_moe", "groups of 32"])
def test_a_tokens_bits_depend_on_nothing_beside_it_and_are_the_same_each_time(shape: str) -> None:
    args = made(shape, 2, torch.bfloat16)
    with dispatch.forced("hip"):
        both: Tensor = experts.experts(*args)
        for _ in range(20):
            assert torch.equal(bits(experts.experts(*args)), bits(both))
        for token in range(2):
            own = (*(one[token : token + 1] for one in args[:3]), *args[3:14], args[14][token : token + 1])
            assert torch.equal(bits(experts.experts(*own)[0]), bits(both[token]))


@pytest.mark.parametrize("shape", ["mixtral", "qwen3_moe"])
def test_ids_of_a_captured_graph_are_read_as_it_runs(shape: str) -> None:
    """Layer behind layer, so that launches overlap: the ids and weights of each come from the one before."""
    args = made(shape, 1, torch.bfloat16)
    router = torch.randn(SHAPES[shape][0][0], args[0].shape[1], device=CUDA, dtype=torch.bfloat16) / 64

    def layers(x: Tensor) -> Tensor:
        for _ in range(4):
            weights, ids = (x @ router.T).float().softmax(-1).topk(args[1].shape[1])
            x = experts.experts(x, ids, weights, *args[3:14], x)
        return x

    with dispatch.forced("hip"):
        x = args[0].clone()
        layers(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layers(x)
        for seed in range(8):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            found = y.clone()
            torch.cuda.synchronize()
            assert torch.equal(bits(found), bits(layers(x)))


def test_what_is_not_finite() -> None:
    args = list(made("groups of 64", 2, torch.bfloat16))
    for value in (float("nan"), float("inf")):
        args[0] = args[0].clone()
        args[0][0, 5] = value
        with dispatch.forced("hip"):
            y, due = experts.experts(*args), dispatch.kernel(OP).reference(*args)
        assert torch.equal(y.isnan(), due.isnan())
        assert torch.equal(y.isfinite(), due.isfinite())
