"""The inner step of a gated MLP, elementwise: y = act(gate) * up, with act(gate) rounded to the dtype first.

Activations have the names of model configurations (`ACTIVATIONS`). Source: Shazeer 2020, arXiv:2002.05202.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.arguments import FLOATS, require
from accelpatch.kernels.operation import operation
from accelpatch.kernels.spec import Case, Implementation, Kernel, Spec
from accelpatch.kernels.triton import launch


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return torch.square(functional.relu(x))


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


#: what runs: torch's own functions, equal to the bit to transformers' activations of these names
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": functional.relu,
    "relu2": _relu2,
    "quick_gelu": _quick_gelu,
    "sigmoid": torch.sigmoid,
}

_TANH = math.sqrt(2 / math.pi)
_FORMULAS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "swish": lambda x: x / (1 + (-x).exp()),
    # torch's own: on a CPU it may be oneDNN's, with an error larger than that of the formula by torch.erf
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: x / 2 * (1 + (_TANH * (x + 0.044715 * x**3)).tanh()),
    "gelu_pytorch_tanh": lambda x: x / 2 * (1 + (_TANH * (x + 0.044715 * x**3)).tanh()),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) * x.clamp(min=0),
    "quick_gelu": lambda x: x / (1 + (-1.702 * x).exp()),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
}


def reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """By formula; in float64 where gate is float64, else in float32."""
    return activated_reference(gate, activation) * up


def activated_reference(x: Tensor, activation: str) -> Tensor:
    """activation(x) by formula, rounded to x's dtype; in float64 where x is float64, else in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return _FORMULAS[activation](x.to(wide)).to(x.dtype)


def spec(gate: Tensor, up: Tensor, activation: str) -> Spec:
    """The Spec of a call, for dispatch. Raises KernelError where shapes, dtypes, devices or the name do not fit."""
    op = "gated_activation"
    known = ", ".join(ACTIVATIONS)
    require(activation in ACTIVATIONS, op, f"no activation {activation!r}; there are {known}: keep this MLP")
    require(
        gate.dtype in FLOATS and gate.dtype == up.dtype, op, f"gate is {gate.dtype}, up {up.dtype}: make them one float"
    )
    require(gate.shape == up.shape, op, f"gate is {list(gate.shape)}, up {list(up.shape)}: make them equal")
    require(gate.device == up.device, op, f"gate lies on {gate.device}, up on {up.device}: move one")
    return Spec(op, {"numel": gate.numel()}, gate.dtype, options={"activation": activation})


def _torch(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return (ACTIVATIONS[activation](gate) * up).contiguous()


def _triton_why_not(spec: Spec, device: Device) -> str | None:
    return launch.why_not(device, spec.dtype)


def _triton(*args: Any) -> Tensor:
    from accelpatch.kernels.triton.gated_activation import gated_activation as run

    return run(*args)


@operation("gated_activation")
def gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """act(gate) * up, contiguous; gate, up and the result have one shape and one float dtype.

    Raises KernelError for arguments that do not fit together and for an activation that is not in ACTIVATIONS.
    """
    y: Tensor = dispatch.run("gated_activation", spec, gate.device, (gate, up, activation))
    return y


@gated_activation.register_fake
def _fake(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    spec(gate, up, activation)
    return gate.new_empty(gate.shape)


gated_activation.recompute(_torch)


def gated(both: Tensor, activation: str) -> Tensor:
    """activation(first half of the columns) * second half."""
    gate, up = both.chunk(2, dim=-1)
    y: Tensor = gated_activation.function(gate, up, activation)
    return y


def cases() -> list[Case]:
    """Cases for parity checks: every activation, odd sizes."""

    def case(shape: tuple[int, ...], activation: str) -> Case:
        def make(generator: torch.Generator, dtype: torch.dtype, device: torch.device) -> tuple[object, ...]:
            gate = (3 * torch.randn(*shape, generator=generator)).to(device, dtype)
            return gate, torch.randn(*shape, generator=generator).to(device, dtype), activation

        return Case(f"x{'x'.join(map(str, shape))}-{activation}", make)

    sizes = ((1, 1, 1536), (2, 7, 65), (0, 64), (129, 33), (1,))
    return [case((3, 65), name) for name in ACTIVATIONS] + [case(shape, "silu") for shape in sizes]


KERNELS = {
    "gated_activation": Kernel(
        gated_activation,
        reference,
        spec,
        {"triton": Implementation(_triton, _triton_why_not), "torch": Implementation(_torch, dispatch.anywhere)},
        cases,
    )
}
