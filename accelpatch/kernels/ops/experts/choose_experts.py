"""Which experts a token goes to: (ids[T, k], weights[T, k]) of router logits[T, E], the k largest in their order.

    p = softmax(logits) in float32;  weights = the k largest, divided by their sum where `normalise`

weights come in float32, or in the logits' dtype where `narrow`. Of equal logits torch takes any, the kernel the first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import FLOATS, require, say
from accelpatch.kernels.operation import operation
from accelpatch.kernels.spec import Case, Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch

OP = "choose_experts"
MOST_EXPERTS, MOST_CHOSEN = 1024, 64


def reference(logits: Tensor, top_k: int, normalise: bool, narrow: bool) -> tuple[Tensor, Tensor]:
    """By torch's softmax and topk, in float32 or wider."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    values, ids = torch.topk(torch.softmax(logits, dim=-1, dtype=wide), top_k, dim=-1)
    if normalise:
        values = values / values.sum(dim=-1, keepdim=True)
    return ids, values.to(logits.dtype if narrow else torch.float32 if wide != torch.float64 else wide)


def spec(logits: Tensor, top_k: int, normalise: bool, narrow: bool) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError for logits that are none."""
    fits = logits.dim() == 2 and logits.dtype in FLOATS
    require(fits, OP, f"logits are float [T, E], not {say(logits)}")
    require(1 <= top_k <= logits.shape[1], OP, f"{top_k} of {logits.shape[1]} experts cannot be chosen")
    return Spec(OP, {"M": len(logits), "E": logits.shape[1], "k": top_k}, logits.dtype)


def _triton_why_not(spec: Spec, device: Device) -> str | None:
    if reason := launch.why_not(device, spec.dtype):
        return reason
    few = spec.sizes["E"] <= MOST_EXPERTS and spec.sizes["k"] <= MOST_CHOSEN
    return None if few else f"more than {MOST_EXPERTS} experts, or {MOST_CHOSEN} a token"


def _triton(*args: Any) -> tuple[Tensor, Tensor]:
    from accelpatch.kernels.triton.choose_experts import choose_experts as run

    return run(*args)


@operation(OP)
def choose_experts(logits: Tensor, top_k: int, normalise: bool, narrow: bool) -> tuple[Tensor, Tensor]:
    """(ids int64 [T, k], weights[T, k]); see the module. Raises KernelError for arguments that do not fit."""
    made: tuple[Tensor, Tensor] = dispatch.run(OP, spec, logits.device, (logits, top_k, normalise, narrow))
    return made


@choose_experts.register_fake
def _fake(logits: Tensor, top_k: int, normalise: bool, narrow: bool) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(logits.dtype, torch.float32)
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape, dtype=logits.dtype if narrow else wide)


def cases() -> list[Case]:
    """Cases for parity checks; no two logits of a token are equal."""

    def case(tokens: int, experts: int, top_k: int, normalise: bool, narrow: bool) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
            order = [torch.randperm(experts, generator=generator) for _ in range(tokens)]
            logits = (torch.stack(order) if order else torch.empty(0, experts)).to(device, dtype) / 8
            return logits, top_k, normalise, narrow

        form = ("-normalised" if normalise else "") + ("-narrow" if narrow else "")
        return Case(f"t{tokens}-e{experts}-k{top_k}{form}", make)

    return [
        case(1, 8, 2, True, False),
        case(3, 128, 8, True, True),
        case(7, 60, 4, False, True),
        case(0, 4, 2, True, False),
    ]


KERNELS = {
    OP: Kernel(
        choose_experts, reference, spec,
        {"triton": Implementation(_triton, _triton_why_not), "torch": Implementation(reference, dispatch.anywhere)},
        cases,
    )
}  # fmt: skip
