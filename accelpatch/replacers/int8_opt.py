"""OPT's decoder layer in int8 from end to end, with static scales: SmoothQuant's own classes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.device import Device
from accelpatch.errors import PlanError
from accelpatch.kernels import dispatch
from accelpatch.kernels.ops.attention import int8_attention
from accelpatch.kernels.ops.linear import gemm_w8a8
from accelpatch.kernels.ops.norm import layernorm_q
from accelpatch.models.family import child_of
from accelpatch.modules.int8_opt import IMPLEMENTATIONS, Int8OPTDecoderLayer, int8_layer
from accelpatch.patching.replacer import Choice, Reason
from accelpatch.patching.site import Site
from accelpatch.quant import int8_opt
from accelpatch.quant.int8_opt import FLOAT, LEVELS, NORMS, STATIC
from accelpatch.quant.smoothing import SiteStatistics
from accelpatch.replacers.proposing import KernelReplacer

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Int8OPT(KernelReplacer):
    """A decoder layer with int8 weights, activations, attention and KV cache; all scales are static."""

    name = "int8_opt"
    whole = True
    smooths = True

    def calibrates(self, choice: Choice) -> bool:
        return True

    def proposed(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        layer: Any = site.original
        if reason := _unfit(layer):
            return Reason(reason)
        width, inner = layer.embed_dim, layer.fc1.out_features
        kernel = _planned(width, inner, layer.self_attn, layer.fc1.weight.dtype, device)
        before = sum(p.numel() * p.element_size() for p in layer.parameters())
        forms = int8_opt.forms(width, inner).values()
        after = sum((1 if whole else 4) * torch.Size(shape).numel() for whole, shape in forms) + 2 * 4 * 3 * width
        return Choice(kernel, before, after, after)

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        if stats is None or not stats.inside:
            raise PlanError("static scales need calibration statistics: accelpatch.calibrate(model, data)")
        return int8_layer(site.original, made(site.original, stats.inside))

    def restore(self, site: Site, choice: Choice, saved: Mapping[str, Tensor]) -> Int8OPTDecoderLayer:
        layer: Any = site.original
        config = layer.self_attn.config
        return int8_layer(layer, int8_opt.checked(saved, config.hidden_size, config.ffn_dim))

    def parts(self, site: Site, names: Iterable[str]) -> list[str]:
        """All tensors under the layer's name."""
        return [name for name in names if name.startswith(f"{site.path}.")]


@torch.no_grad()
def made(layer: Any, inside: Mapping[str, SiteStatistics]) -> dict[str, Tensor]:
    """The tensors of the int8 layer. inside: name of a norm or linear layer in it -> its statistics and smoothing."""
    given, out, to_fc1, to_fc2 = (_scale(inside[name].absmax) for name in (STATIC[0], FLOAT[0], STATIC[3], FLOAT[1]))
    q, k, v = (_scale(inside[name].output_absmax) for name in STATIC[:3])
    scaled = q * layer.self_attn.head_dim**-0.5  # transformers multiplies q by it, SmoothQuant its weight
    found = int8_opt.factors(scaled, k, v, out, layer.fc1.weight.device)
    scales = ((given, q), (given, k), (given, v), (to_fc1, to_fc2), (out, None), (to_fc2, None))
    for name, (one, other) in zip((*STATIC, *FLOAT), scales, strict=True):
        stats, linear = inside[name], child_of(layer, name)
        bias = None if linear.bias is None else stats.vector(linear.bias)
        tensors = int8_opt.linear(stats.weight(linear.weight), bias, one, other)
        found |= {f"{name}.{part}": tensor for part, tensor in tensors.items()}
    for name, scale in zip(NORMS, (given, to_fc1), strict=True):
        norm, stats = child_of(layer, name), inside.get(name, SiteStatistics())
        tensors = int8_opt.norm(stats.vector(norm.weight), stats.vector(norm.bias), scale)
        found |= {f"{name}.{part}": tensor for part, tensor in tensors.items()}
    return found


def _scale(most: Tensor | None) -> float:
    if most is None:
        raise PlanError("the statistics have no outputs of q, k and v: calibrate again")
    return float(most.max()) / LEVELS or 1 / LEVELS  # where nothing but zeros came


def _unfit(layer: Any) -> str | None:
    """Why a layer is no float OPT layer that int8 can replace; None where it is."""
    if type(layer).__name__ != "OPTDecoderLayer":
        return f"{type(layer).__name__} is no layer of OPT"
    if (used := layer.self_attn.config._attn_implementation) not in IMPLEMENTATIONS:
        return f"the attention implementation is {used}, whose masks its int8 attention does not read"
    if not layer.do_layer_norm_before:
        return "its norms are behind attention and MLP"
    if type(layer.activation_fn).__name__ not in ("ReLU", "ReLUActivation"):
        return f"its activation is {type(layer.activation_fn).__name__}, and ReLU is fused"
    for name in (*STATIC, *FLOAT, *NORMS):
        child = child_of(layer, name)
        if type(child) is not (nn.LayerNorm if name in NORMS else nn.Linear):
            return f"its {name} is {type(child).__name__}"
        if child.weight is None or child.weight.dtype not in FLOATS or (name in NORMS and child.bias is None):
            return f"its {name} has no weight and bias in float32, bfloat16 or float16"
    inside = [name for name, one in layer.named_modules() if name and (one._forward_hooks or one._forward_pre_hooks)]
    return f"a hook on its {inside[0]} would see int8" if inside else None


def _planned(width: int, inner: int, attention: Any, dtype: torch.dtype, device: Device) -> str:
    """The kernel of its products. Raises KernelError where a part of the layer cannot run."""
    products = gemm_w8a8.of_shape(1, inner, width, torch.int8, d=torch.int8, activation="relu")
    dispatch.choose(gemm_w8a8.OP, gemm_w8a8.of_shape(1, width, inner, dtype, residual=True), device)
    dispatch.choose(layernorm_q.OP, layernorm_q.of_shape(width, dtype), device)
    dispatch.choose(int8_attention.OP, int8_attention.of_shape(attention.num_heads, attention.head_dim), device)
    return dispatch.choose(gemm_w8a8.OP, products, device)
