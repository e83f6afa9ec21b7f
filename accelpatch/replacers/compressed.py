"""What a module of compressed-tensors says of itself that is not taken over, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def refusal(module: nn.Module, scheme: Any, tensors: Mapping[str, Tensor | None], n: int) -> str | None:
    """Why the weight [n, K] of a module with this scheme stays; None where codes, scales and activations can run."""
    weights, inputs, packed = scheme.weights, scheme.input_activations, tensors["weight_packed"] is not None
    scale, kind = tensors["weight_scale"], getattr(weights, "type", "int")
    if any(type(child).__name__.endswith("Transform") for child in module._modules.values()):
        return "it is rotated while it runs (transform_config)"
    if getattr(scheme, "output_activations", None) is not None:
        return "its outputs are quantised (output_activations)"
    if packed and kind == "float":
        return f"{weights.num_bits}-bit floats (NVFP4, MXFP4) are not read"
    if scale is not None and scale.dim() == 2 and scale.shape[0] not in (1, n):
        return "its scales are of blocks of several rows, and those of rows and groups are read"
    if packed and inputs is not None:
        return f"{weights.num_bits}-bit weights with quantised activations are not read"
    if inputs is None:
        return None
    form = getattr(inputs, "type", kind)  # an Enum of texts
    if inputs.num_bits != 8 or form != kind:
        return f"activations of {inputs.num_bits} bits as {_text(form)} are not run beside {_text(kind)} weights"
    zero = tensors["input_zero_point"]
    asymmetric = zero is not None and not zero.is_meta and bool(zero.cpu().any())
    if kind == "int" and (asymmetric or (inputs.dynamic is not False and inputs.symmetric is False)):
        return "its activations are asymmetric, which is not run"
    return None


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))
