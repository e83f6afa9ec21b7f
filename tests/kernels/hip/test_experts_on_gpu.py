"""Experts by the HIP kernels on the GPU that is here: the float rule, bits, captured graphs; prompts from the tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.device import probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.hip.binding import weight_prefetch
from accelpatch.kernels.layouts.row_major import Plain
from accelpatch.kernels.ops.experts import choose_experts, experts, routed_experts
from accelpatch.kernels.ops.experts.cases import in_tiles, of_random
from accelpatch.kernels.ops.linear.fused_linear import FusedLinear
from accelpatch.kernels.ops.norm import rmsnorm
from accelpatch.kernels.ops.norm.fused_norm import FusedNorm
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


ROUTED = routed_experts.OP
MODELS = ("mixtral", "qwen3_moe")
FORMS = {"normalised": (True, False), "narrow": (False, True), "both": (True, True)}


def routed(shape: str, tokens: int, dtype: torch.dtype, form: str, ties: bool = False) -> tuple[Any, ...]:
    """The arguments of `routed_experts`; logits of which no two of a token are equal, or nearly all are."""
    x, ids, _, *rest = made(shape, tokens, dtype)
    number, generator = SHAPES[shape][0][0], torch.Generator().manual_seed(tokens)
    order = torch.stack([torch.randperm(number, generator=generator) for _ in range(tokens)]) - number // 2
    logits = ((order // 8 if ties else order) / 8).to(CUDA, dtype)
    weight = torch.randn(x.shape[1], generator=generator).to(CUDA, dtype)
    return x, weight, 1e-6, False, logits, ids.shape[1], *FORMS[form], *rest


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", HALVES, ids=name)
@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("shape", MODELS)
def test_norm_and_choice_inside(shape: str, tokens: int, dtype: torch.dtype, form: str) -> None:
    args = routed(shape, tokens, dtype, form)
    assert dispatch.choose(ROUTED, dispatch.kernel(ROUTED).spec(*args), probe(CUDA)) == "hip"
    assert_parity(ROUTED, args, "hip")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_chosen_ones_are_those_of_choose_experts(shape: str, form: str) -> None:
    """Ties and NaN included. With a norm that changes no value each weight is within a rounding, so are the sums."""
    x, _, _, _, logits, *rest = routed(shape, 4, torch.bfloat16, form, ties=True)
    logits[1, logits.shape[1] // 2] = float("inf")
    logits[2, 0] = float("nan")
    args = (x, torch.ones_like(x[0]), 1e-6, False, logits, *rest)
    ids, weights = choose_experts.choose_experts(logits, *rest[:3])
    with dispatch.forced("hip"):
        y = routed_experts.routed_experts(*args)
        due = experts.experts(rmsnorm.reference(x, args[1], 1e-6, False), ids, weights, *rest[3:])
    assert torch.equal(y.isnan(), due.isnan())
    assert not bool(y[[0, 3]].isnan().any())
    error = (y[[0, 3]].double() - due[[0, 3]].double()).norm() / due[[0, 3]].double().norm()
    assert error < 2.0**-8


@pytest.mark.parametrize("shape", MODELS)
def test_bits_of_a_choice_are_the_same_each_time_and_a_tokens_own(shape: str) -> None:
    args = routed(shape, 2, torch.bfloat16, "both", ties=True)
    with dispatch.forced("hip"):
        both: Tensor = routed_experts.routed_experts(*args)
        for _ in range(20):
            assert torch.equal(bits(routed_experts.routed_experts(*args)), bits(both))
        for token in range(2):
            own = tuple(one[token : token + 1] if place in (0, 4, len(args) - 1) else one
                        for place, one in enumerate(args))  # fmt: skip
            assert torch.equal(bits(routed_experts.routed_experts(*own)[0]), bits(both[token]))


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("shape", MODELS)
def test_logits_of_a_captured_graph_are_read_as_it_runs(shape: str, tokens: int) -> None:
    """Layer behind layer, as fused layers have them: router and experts alone, each of which begins early."""
    args = routed(shape, tokens, torch.bfloat16, "both")
    norm = FusedNorm(args[1], args[2])
    routers = [
        FusedLinear(Plain(torch.randn(args[4].shape[1], len(args[1]), device=CUDA, dtype=torch.bfloat16) / 64))
        for _ in range(4)
    ]

    def layers(x: Tensor) -> Tensor:
        for router in routers:
            x = routed_experts.routed_experts(x, *args[1:4], router(x, norm), *args[5:19], x)
        return x

    with dispatch.forced("hip"), weight_prefetch():
        x = args[0].clone()
        layers(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layers(x)
        for seed in range(8):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
            found = []
            for _ in range(3):
                graph.replay()
                found.append(y.clone())
            torch.cuda.synchronize()
            alone = x
            for router in routers:  # each kernel by itself
                logits = router(alone, norm)
                torch.cuda.synchronize()
                alone = routed_experts.routed_experts(alone, *args[1:4], logits, *args[5:19], alone)
                torch.cuda.synchronize()
            assert all(torch.equal(bits(one), bits(alone)) for one in found)
