"""The rule itself must be able to fail: outputs that are wrong in the ways that kernels go wrong."""

from __future__ import annotations

import pytest
import torch

from accelpatch.kernels.check import parity
from accelpatch.kernels.ops.linear.int8_linear import int8_linear
from accelpatch.kernels.ops.norm.rmsnorm import rmsnorm


def linear_args(k: int = 130) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    q = torch.randint(-127, 128, (33, k), generator=generator, dtype=torch.int8)
    return torch.randn(7, k, generator=generator), q, torch.rand(33, 1, generator=generator) / 127


def verdict(args: tuple[torch.Tensor, ...], output: torch.Tensor) -> parity.Comparison:
    return parity.check("int8_linear", args, [output])[0]


def test_right_output_passes() -> None:
    args = linear_args()
    assert verdict(args, int8_linear(*args)).ok


def test_lost_tail_of_k_fails() -> None:
    x, q, scale = linear_args(2050)
    found = verdict((x, q, scale), int8_linear(x[:, :2048].contiguous(), q[:, :2048].contiguous(), scale))
    assert not found.ok
    assert found.error > found.bound


@pytest.mark.parametrize("place", [(0, 0), (6, 32)], ids=["first", "last"])
def test_one_unwritten_element_fails(place: tuple[int, int]) -> None:
    args = linear_args()
    output = int8_linear(*args).clone()
    output[place] = float("nan")
    assert "nan at" in verdict(args, output).reason


def test_rounded_activations_fail() -> None:
    x, q, scale = linear_args()
    step = x.abs().amax(-1, keepdim=True) / 127
    assert not verdict((x, q, scale), int8_linear((x / step).round() * step, q, scale)).ok


def test_bfloat16_accumulation_fails() -> None:
    x, q, scale = linear_args(1024)
    x = x.bfloat16()
    total = torch.zeros(7, 33, dtype=torch.bfloat16)
    weight = (q * scale).bfloat16()
    for k in range(1024):
        total = total + x[:, k, None] * weight[:, k]
    assert not verdict((x, q, scale), total).ok


def test_missing_nan_fails() -> None:
    x, q, scale = linear_args()
    broken = x.clone()
    broken[2, 5] = float("nan")
    assert verdict((broken, q, scale), int8_linear(broken, q, scale)).ok
    assert not verdict((broken, q, scale), int8_linear(x, q, scale)).ok


def test_wrong_shape_fails() -> None:
    args = linear_args()
    assert "shape" in verdict(args, int8_linear(*args)[:6]).reason


def test_one_float_rule_step_over_the_bound_fails() -> None:
    x, weight = torch.randn(3, 65, generator=torch.Generator().manual_seed(0)), torch.ones(65)
    output = rmsnorm(x, weight, 1e-6, False)
    found = parity.check("rmsnorm", (x, weight, 1e-6, False), [output])[0]
    assert found.ok
    worse = output + 2 * found.bound + 1e-5
    assert not parity.check("rmsnorm", (x, weight, 1e-6, False), [worse])[0].ok


@pytest.mark.parametrize(
    "value, dtype, expected",
    [
        (1.0, torch.float32, 2.0**-23),
        (1.999, torch.bfloat16, 2.0**-7),
        (-4.0, torch.float16, 2.0**-8),
        (0.0, torch.float16, 2.0**-24),
        (0.0, torch.float32, 2.0**-149),
    ],
    ids=["one", "below-two", "negative", "zero-half", "zero-float"],
)
def test_ulp(value: float, dtype: torch.dtype, expected: float) -> None:
    assert float(parity.ulp(torch.tensor(value, dtype=torch.float64), dtype)) == expected


def kept(output: torch.Tensor, reference: torch.Tensor, torch_error: float) -> bool:
    """The rule element by element."""
    for y, due in zip(output.flatten(), reference.flatten(), strict=True):
        rounded, spacing = due.to(y.dtype), float(parity.ulp(due, y.dtype))
        same = bool(y == rounded) or bool(y.isnan() and rounded.isnan())
        near = bool(y.isfinite()) and abs(float(y) - float(due)) <= 2 * torch_error + spacing
        if not (near if rounded.isfinite() else same):
            return False
    return True


def off(output: torch.Tensor, place: int, value: float) -> torch.Tensor:
    """The same with another value in one place."""
    other = output.clone()
    other.view(-1)[place] = value
    return other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bf16", "half"])
def test_outputs_judged_together_are_judged_as_alone(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    results: list[parity.Result] = []
    for shape in ((1, 7), (3, 7), (2, 3, 7), (5,), (), (0, 7), (1, 7)):
        due = torch.randn(shape, generator=generator, dtype=torch.float64) * 100
        due = due if not due.numel() else off(due, 0, 70000.0)  # beyond half precision
        y, plain = due.to(dtype), (due * (1 + 1e-3)).to(dtype)
        results += [(y, due, plain), (y, due, 0.25)]
        if due.numel():
            for wrong in (y.view(-1)[-1].item() + 40, float("nan"), float("inf")):
                results.append((off(y, -1, wrong), due, 0.25))
            results.append((off(y, -1, float("nan")), off(due, -1, float("nan")), plain))
            results.append((off(y, -1, 1.0), off(due, -1, float("-inf")), plain))
    together = parity.compare_all(results)
    alone = [parity.compare_all([result])[0] for result in results]
    assert together == alone
    errors = [parity.torch_error(own, due) if isinstance(own, torch.Tensor) else own for _, due, own in results]
    due = [kept(output, reference, error) for (output, reference, _), error in zip(results, errors, strict=True)]
    assert [found.ok for found in together] == due
    assert 10 < sum(due) < len(due) - 10


def test_a_distance_that_no_float64_holds_is_a_verdict() -> None:
    far = torch.tensor([1.7e308, 1.0], dtype=torch.float64)
    assert parity.compare(far, -far, 0.0).reason
    special = torch.tensor([1.7e308, float("inf")], dtype=torch.float64)
    assert parity.compare(special, special * torch.tensor([-1.0, 1.0]), 0.0).reason
