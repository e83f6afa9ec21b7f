"""A layer's experts with the norm before them and the choice among them, of a router's logits[T, E].

    ids, weights = choose_experts(logits);   y[T, H] = experts(rmsnorm(x[T, H]), ids, weights) + residual[T, H]

For few tokens and 4-bit codes in tiles two launches, those of `experts`: each block chooses its token's experts for
itself, and gate and up take the norm into themselves. Else the three operations one after the other. Of equal logits
the first is chosen. See rmsnorm.py, choose_experts.py and experts.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accelpatch.device import Device, probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import require, say
from accelpatch.kernels.hip.experts import binding as launched
from accelpatch.kernels.layouts.expert_stack import Stack
from accelpatch.kernels.operation import operation
from accelpatch.kernels.ops.experts import cases as expert_cases
from accelpatch.kernels.ops.experts import choose_experts, experts
from accelpatch.kernels.ops.experts import gemv as expert_gemv
from accelpatch.kernels.ops.experts import reference as expert_reference
from accelpatch.kernels.ops.norm import rmsnorm
from accelpatch.kernels.spec import Case, Implementation, Kernel, Spec

OP = "routed_experts"


def reference(
    x: Tensor, weight: Tensor, eps: float, plus_one: bool, logits: Tensor, top_k: int, normalise: bool, narrow: bool,
    *given: Any,
) -> Tensor:  # fmt: skip
    """The references of norm and experts; the choice by torch's stable sort."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    values = torch.softmax(logits, dim=-1, dtype=wide).gather(1, ids)
    if normalise:
        values = values / values.sum(dim=-1, keepdim=True)
    normal = rmsnorm.reference(x, weight, eps, plus_one).to(x.dtype)
    return expert_reference.reference(normal, ids, values.to(logits.dtype if narrow else wide), *given)


def spec(
    x: Tensor, weight: Tensor, eps: float, plus_one: bool, logits: Tensor, top_k: int, normalise: bool, narrow: bool,
    *given: Any,
) -> Spec:  # fmt: skip
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes or devices do not fit together."""
    choose_experts.spec(logits, top_k, normalise, narrow)
    alike = x.dim() != 2 or len(x) == len(logits)
    require(alike, OP, f"x and logits have a row for each token, not {say(x)} and {say(logits)}")
    ids = torch.empty((len(logits), top_k), dtype=torch.int64, device=logits.device)
    experts.check_routing(OP, x, ids, logits[:, :top_k], given[8])
    rmsnorm.spec(x, weight, eps, plus_one)
    made = experts.of_stacks(OP, x, top_k, given)
    number = made.sizes["E"]
    require(logits.shape[1] == number, OP, f"logits are [T, {number}], one an expert, not {say(logits)}")
    return _with_dtypes(made, weight.dtype, logits.dtype)


def _with_dtypes(made: Spec, norm: torch.dtype, logits: torch.dtype) -> Spec:
    return replace(made, op=OP, options={**made.options, "norm_dtype": norm, "logits_dtype": logits})


def why_not_one(dtype: torch.dtype, chosen: int, *given: Any) -> str | None:
    """Why `hip` would not run on these weights for one token and `chosen` experts, all in `dtype`; None where it would.

    given: as the operation's, from gate_up on. Raises KernelError for weights that do not fit together.
    """
    x = given[0].new_empty((1, Stack(*given[4:8]).n), dtype=dtype)
    made = experts.of_stacks(OP, x, chosen, given)
    return hip_why_not(_with_dtypes(made, dtype, dtype), probe(x.device))


def unfit(number: int, width: int) -> str | None:
    """Why so many experts, or tokens of such a width, are beyond the kernels; None where they are not."""
    if number > launched.MOST_SCORES:
        return f"{number} experts are more than the {launched.MOST_SCORES} that a kernel chooses from"
    most = launched.MOST_NORMED
    return None if width <= most else f"its tokens have {width} values, and a norm inside takes up to {most}"


def hip_why_not(spec: Spec, device: Device) -> str | None:
    """Why `by_hip` cannot run a spec; None where it can."""
    if reason := expert_gemv.why_not(spec, device) or unfit(spec.sizes["E"], spec.sizes["H"]):
        return reason
    if spec.options["norm_dtype"] != spec.dtype:
        return f"its norm's weight is {spec.options['norm_dtype']}, and x {spec.dtype}"
    logits = spec.options["logits_dtype"]
    return None if logits in launched.WEIGHTS else f"its logits are {logits}"


def by_hip(
    x: Tensor, weight: Tensor, eps: float, plus_one: bool, logits: Tensor, top_k: int, normalise: bool, narrow: bool,
    *given: Any,
) -> Tensor:  # fmt: skip
    """The implementation `hip`: two launches."""
    routing, norm = launched.RouterLogits(logits, top_k, normalise, narrow), launched.Norm(weight, eps, plus_one)
    return launched.experts(x, routing, Stack(*given[:4]), Stack(*given[4:8]), given[11], norm)


def by_operations(
    x: Tensor, weight: Tensor, eps: float, plus_one: bool, logits: Tensor, top_k: int, normalise: bool, narrow: bool,
    *given: Any,
) -> Tensor:  # fmt: skip
    """The implementation `operations`: norm, choice and experts."""
    normal = rmsnorm.rmsnorm.function(x, weight, eps, plus_one).to(x.dtype)
    ids, weights = choose_experts.choose_experts.function(logits, top_k, normalise, narrow)
    return experts.experts.function(normal, ids, weights, *given)


@operation(OP)
def routed_experts(
    x: Tensor, weight: Tensor, eps: float, plus_one: bool, logits: Tensor, top_k: int, normalise: bool, narrow: bool,
    gate_up: Tensor, gate_up_scale: Tensor | None, gate_up_offset: Tensor | None, gate_up_bias: Tensor | None,
    down: Tensor, down_scale: Tensor | None, down_offset: Tensor | None, down_bias: Tensor | None,
    activation: str = "silu", alpha: float = 0.0, limit: float = 0.0, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y[T, H] in x's dtype, contiguous; see the module.

    x[T, H] float, before the norm; weight[H], eps and plus_one: as in `rmsnorm`; logits[T, E] float, and the next
    three: as in `choose_experts`; the rest: as in `experts`. Raises KernelError for arguments that do not fit together.
    """
    given = (
        gate_up, gate_up_scale, gate_up_offset, gate_up_bias, down, down_scale, down_offset, down_bias,
        activation, alpha, limit, residual,
    )  # fmt: skip
    args = (x, weight, eps, plus_one, logits, top_k, normalise, narrow, *given)
    y: Tensor = dispatch.run(OP, spec, x.device, args)
    return y


@routed_experts.register_fake
def _fake(x: Tensor, *given: Any, **named: Any) -> Tensor:
    return x.new_empty(x.shape)


def cases() -> list[Case]:
    """The cases of `experts`, with logits of which no two of a token are equal."""

    def routing(make: Any, at: int) -> Any:
        def made(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            x, ids, _, *given = make(generator, dtype, device)
            number = len(given[0])
            order = [torch.randperm(number, generator=generator) for _ in range(len(x))]
            logits = (torch.stack(order) if order else torch.empty(0, number)).to(device, dtype) / 4
            weight = torch.randn(x.shape[1], generator=generator).to(device, dtype)
            chosen, plus_one = min(ids.shape[1], number), at % 3 == 1
            return x, weight, 1e-5, plus_one, logits, chosen, at % 2 == 0, at % 4 < 2, *given

        return made

    return [Case(case.id, routing(case.make, at)) for at, case in enumerate(expert_cases.cases())]


KERNELS = {
    OP: Kernel(
        routed_experts, reference, spec,
        {"hip": Implementation(by_hip, hip_why_not), "operations": Implementation(by_operations, dispatch.anywhere)},
        cases, composed=True,
    )
}  # fmt: skip
