"""Operations that have a gradient, and which of their arguments carry one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accelpatch.kernels import dispatch
from accelpatch.kernels.check import parity
from accelpatch.kernels.spec import in_precision

#: operation -> places of the arguments whose gradients are compared
DIFFERENTIABLE: Mapping[str, tuple[int, ...]] = {
    "float_linear": (0, 1),
    "int8_linear": (0,),
    "int4_linear": (0,),
    "int3_linear": (0,),
    "tiled_int3_linear": (0,),
    "tiled_int4_linear": (0,),
    "compact_linear": (0,),
    "fp8_linear": (0,),
    "block_linear": (0,),
    "packed_linear": (0,),
    "rmsnorm": (0, 1),
    "add_rmsnorm": (0, 1, 2),
    "rmsnorm_add": (0, 1, 2),
    "add_layernorm": (0, 1, 2),
    "gated_activation": (0, 1),
    "experts": (0, 2),
    "packed_experts": (0, 2),
}


def gradients(function: Any, args: Sequence[Any], places: Sequence[int], seed: int = 5) -> list[Tensor]:
    """The gradients of the arguments at `places` of a weighted sum of the outputs, the weights those of the seed."""
    own = list(args)
    for place in places:
        own[place] = args[place].detach().clone().requires_grad_()
    outputs = parity.as_tuple(function(*own))
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(one.shape, generator=generator).to(one) for one in outputs]
    asked = [own[place] for place in places]
    if not any(one.requires_grad for one in outputs):  # of no token, no expert
        return [torch.zeros_like(one) for one in asked]
    return list(torch.autograd.grad(outputs, asked, weights, allow_unused=True, materialize_grads=True))


def reference_gradients(op: str, args: Sequence[Any]) -> list[Tensor]:
    """The same of the operation's reference, in float64."""
    return gradients(dispatch.kernel(op).reference, in_precision(args, torch.float64), DIFFERENTIABLE[op])
