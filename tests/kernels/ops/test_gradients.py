"""Gradients of operations: gradcheck of the references, and every kernel's gradient against its reference's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.ops.linear import gradient
from accelpatch.kernels.ops.linear.int8_linear import int8_linear
from accelpatch.kernels.ops.linear.packed_linear import packed_linear
from accelpatch.kernels.spec import in_precision
from tests.support.gradients import DIFFERENTIABLE, gradients, reference_gradients
from tests.support.parity import name

CPU = torch.device("cpu")
#: norms of single elements have no gradient but what rounding leaves of it
CASES = [(op, case) for op in DIFFERENTIABLE for case in dispatch.kernel(op).cases() if case.id != "x3x1"]
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 0.02}  # relative distance


def small(op: str) -> tuple[Any, ...]:
    """The first arguments of a few elements, in float64."""
    made = (case.make(torch.Generator().manual_seed(2), torch.float64, CPU) for case in dispatch.kernel(op).cases())
    return min((args for args in made if args[0].numel()), key=lambda args: args[0].numel())


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_gradcheck_of_the_reference(op: str) -> None:
    args, places = in_precision(small(op), torch.float64), DIFFERENTIABLE[op]

    def run(*values: Tensor) -> Any:
        own = list(args)
        for place, value in zip(places, values, strict=True):
            own[place] = value
        return dispatch.kernel(op).reference(*own)

    assert torch.autograd.gradcheck(run, [args[place].clone().requires_grad_() for place in places], fast_mode=True)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", BOUNDS, ids=name)
@pytest.mark.parametrize("op, case", CASES, ids=[f"{op}-{case.id}" for op, case in CASES])
def test_a_kernels_gradient_is_its_references(op: str, case: Any, dtype: torch.dtype) -> None:
    args = case.make(torch.Generator().manual_seed(7), dtype, CPU)
    due = reference_gradients(op, args)
    for found, exact in zip(gradients(dispatch.kernel(op).op, args, DIFFERENTIABLE[op]), due, strict=True):
        assert float((found.double() - exact).norm()) <= BOUNDS[dtype] * float(exact.norm())


@pytest.mark.parametrize("op", [op for op in DIFFERENTIABLE if "experts" not in op])
def test_in_a_compiled_graph(op: str) -> None:
    args = list(dispatch.kernel(op).cases())[1].make(torch.Generator().manual_seed(1), torch.float32, CPU)
    torch._dynamo.reset()
    run = dispatch.kernel(op).op
    compiled = torch.compile(lambda *values: run(*values), fullgraph=True, backend="aot_eager")
    due = gradients(run, args, DIFFERENTIABLE[op])
    for found, one in zip(gradients(compiled, args, DIFFERENTIABLE[op]), due, strict=True):
        assert torch.equal(found, one)


def test_a_bias_has_a_gradient_and_scales_have_none() -> None:
    q, scale = torch.randint(-127, 128, (5, 8), dtype=torch.int8), torch.rand(5, 1)
    x, bias = torch.randn(2, 3, 8, requires_grad=True), torch.randn(5, requires_grad=True)
    int8_linear(x, q, scale, bias).sum().backward()
    assert torch.equal(bias.grad, torch.full((5,), 6.0))  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="unpatch"):
        int8_linear(x, q, scale.requires_grad_(), bias).sum().backward()


def peak_of(run: Any) -> int:
    """Bytes that are allocated on the CPU at once during a call, beyond those before it."""
    with torch.profiler.profile(profile_memory=True) as profile:
        run()
    now = most = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.parametrize("bits", [8, 4])
def test_a_backward_pass_never_holds_the_whole_weight(bits: int) -> None:
    """Less than the weight in bfloat16, beside the gradients of the activations."""
    n, k, m = 4096, 2048, 16
    q = torch.randint(-127, 128, (n, k * bits // 8), dtype=torch.int8)
    pack = Pack.pack(q, torch.rand(n, k // 128), bits=bits)
    x = torch.randn(m, k, requires_grad=True)
    y = packed_linear(x, *pack.arguments(), None)
    dy = torch.randn_like(y)
    assert n * k > gradient.CPU_BLOCK
    activations = 4 * (m * k + m * n) * 2
    assert peak_of(lambda: y.backward(dy)) < 2 * n * k + activations
    assert peak_of(lambda: torch.empty(n, k)) >= 4 * n * k  # the measurement sees what is held
