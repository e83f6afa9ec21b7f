"""Every operation: the float rule on its own cases, views, random shapes, NaN and infinity; and what torch asks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from accelpatch.device import probe
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.check import parity
from accelpatch.kernels.layouts.row_major import FP8
from accelpatch.kernels.spec import Case, in_precision
from tests.support.experts import random_experts
from tests.support.gradients import DIFFERENTIABLE
from tests.support.parity import DTYPES, assert_parity, bits, name, strided, transposed
from tests.support.random_arguments import random_args

CPU = torch.device("cpu")
OPS = tuple(op for op in dispatch.TABLE if dispatch.kernel(op).registered)
CASES = [(op, case) for op in OPS for case in dispatch.kernel(op).cases()]
NO_GRADIENT = ("int8_embedding", "packed_embedding", "rotary_cos_sin", "gemm_w8a8", "gemm_fp8", "gated_fp8")
NO_GRADIENT += ("layernorm_q", "int8_attention", "block_embedding")  # integers or 8-bit floats go in, or come out
PRODUCTS = tuple(op for op in OPS if op.endswith("_linear") and op != "packed_linear")


def first_args(op: str, dtype: torch.dtype = torch.float32, index: int = 1) -> tuple[Any, ...]:
    return list(dispatch.kernel(op).cases())[index].make(torch.Generator().manual_seed(1), dtype, CPU)


def viewed(args: tuple[Any, ...], view: Any) -> tuple[Any, ...]:
    return tuple(view(value) if isinstance(value, Tensor) else value for value in args)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("op, case", CASES, ids=[f"{op}-{case.id}" for op, case in CASES])
def test_float_rule(op: str, case: Case, dtype: torch.dtype) -> None:
    assert_parity(op, case.make(torch.Generator().manual_seed(7), dtype, CPU))


@pytest.mark.each_value
@pytest.mark.parametrize("view", [strided, transposed], ids=["strided-offset", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("op", OPS)
def test_views(op: str, dtype: torch.dtype, view: Any) -> None:
    args = first_args(op, dtype)
    plain = assert_parity(op, args)
    for one, other in zip(assert_parity(op, viewed(args, view)), plain, strict=True):
        assert one.shape == other.shape


@pytest.mark.parametrize("op", OPS)
def test_random_shapes(op: str) -> None:
    rng, generator = random.Random(11), torch.Generator().manual_seed(11)
    for round_ in range(50):
        made = random_experts if op.endswith("experts") else random_args
        assert_parity(op, made(op, rng, generator, DTYPES[round_ % 3]))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("op", PRODUCTS)
def test_leading_dimensions(op: str, dtype: torch.dtype) -> None:
    x, *rest = first_args(op, dtype, index=4)
    (flat,) = assert_parity(op, (x, *rest))
    (one,) = assert_parity(op, (x[0], *rest))
    (deep,) = assert_parity(op, (x[:6].reshape(2, 1, 3, -1), *rest))
    assert one.shape == flat[0].shape
    assert deep.shape == (2, 1, 3, flat.shape[1])


@pytest.mark.parametrize("op", ["int8_linear", "int4_linear"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
def test_half_products_are_rounded_once(op: str, dtype: torch.dtype) -> None:
    """Tighter than the float rule: on a CPU the weight is not rounded, and the sum is in float32."""
    args = first_args(op, dtype, index=6)
    exact = dispatch.kernel(op).reference(*in_precision(args, torch.float64))
    error = (dispatch.kernel(op).op(*args).double() - exact).abs()
    assert bool((error <= 0.51 * parity.ulp(exact, dtype) + 1e-5).all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("op", [*PRODUCTS, "rmsnorm", "add_rmsnorm", "rmsnorm_add", "gated_activation"])
def test_nan_and_infinity_come_through(op: str, dtype: torch.dtype, value: float) -> None:
    args = list(first_args(op, dtype, index=4 if "linear" in op else 1))
    args[0] = args[0].clone()
    args[0].view(-1)[3] = value
    output = assert_parity(op, args)[0]
    assert not bool(output.isfinite().all())


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("op", OPS)
def test_opcheck(op: str, dtype: torch.dtype) -> None:
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    args = first_args(op, dtype)
    if not any(isinstance(one, Tensor) and one.dtype in FP8 for one in args):
        checks.append("test_schema")  # it changes the inputs' values, by operations that torch has not got for float8
    torch.library.opcheck(dispatch.kernel(op).op.custom, args, test_utils=checks)


@pytest.mark.parametrize("op", OPS)
def test_meta_and_fake_agree_with_real(op: str) -> None:
    for case in dispatch.kernel(op).cases():
        args = case.make(torch.Generator().manual_seed(0), torch.bfloat16, CPU)
        real = parity.as_tuple(dispatch.kernel(op).op(*args))
        ran = sum(dispatch.calls.values())
        on_meta = parity.as_tuple(dispatch.kernel(op).op(*viewed(args, lambda value: value.to("meta"))))
        with FakeTensorMode() as mode:
            fake = parity.as_tuple(dispatch.kernel(op).op(*viewed(args, mode.from_tensor)))
        assert sum(dispatch.calls.values()) == ran
        for expected, *others in zip(real, on_meta, fake, strict=True):
            for other in others:
                assert (other.shape, other.dtype, other.stride()) == (expected.shape, expected.dtype, expected.stride())


@pytest.mark.parametrize("op", OPS)
def test_compiles_into_one_graph(op: str) -> None:
    args = first_args(op)
    expected = parity.as_tuple(dispatch.kernel(op).op(*args))
    torch._dynamo.reset()
    run = dispatch.kernel(op).op
    compiled = torch.compile(lambda *values: run(*values), fullgraph=True, backend="aot_eager")
    chosen = dispatch.choose(op, dispatch.kernel(op).spec(*args), probe("cpu"))
    ran = dispatch.calls[op, chosen]
    for one, other in zip(parity.as_tuple(compiled(*args)), expected, strict=True):
        assert torch.equal(bits(one), bits(other))
    assert dispatch.calls[op, chosen] == ran + 1


def test_one_compiled_graph_serves_every_m() -> None:
    _, *rest = first_args("int8_linear", index=4)
    torch._dynamo.reset()
    compiled = torch.compile(torch.ops.accelpatch.int8_linear, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (2, 7, 129):
        x = torch.randn(m, rest[0].shape[1])
        with torch._dynamo.config.patch(error_on_recompile=m > 2):
            assert torch.equal(compiled(x, *rest), torch.ops.accelpatch.int8_linear(x, *rest))


@pytest.mark.parametrize("op", [op for op in OPS if op not in (*NO_GRADIENT, *DIFFERENTIABLE)])
def test_backward_says_what_to_do(op: str) -> None:
    first, *rest = first_args(op)
    outputs = parity.as_tuple(dispatch.kernel(op).op(first.requires_grad_(), *rest))
    output = next(one for one in outputs if one.is_floating_point())
    with pytest.raises(KernelError, match="unpatch"):
        output.float().sum().backward()


@pytest.mark.parametrize("op", OPS)
def test_autocast_changes_nothing(op: str) -> None:
    args = first_args(op)
    plain = parity.as_tuple(dispatch.kernel(op).op(*args))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = parity.as_tuple(dispatch.kernel(op).op(*args))
    for one, other in zip(inside, plain, strict=True):
        assert torch.equal(bits(one), bits(other))
