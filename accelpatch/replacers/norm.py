"""RMSNorm, and the residual addition fused with the RMSNorm after it, in decoder layers of the forms in
modules/norm.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accelpatch.device import Device
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.spec import Spec
from accelpatch.models.family import RMS_NORMS
from accelpatch.modules.norm import CALLED, FusedRMSNorm, ResidualNormLayer, positional_names
from accelpatch.modules.replacement import adopt, skipped
from accelpatch.patching.replacer import EVERY_CHILD, Choice, Reason, Replacer
from accelpatch.patching.site import Site


def _kernel(op: str, norm: nn.Module, plus_one: bool, device: Device) -> str:
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    options = {"plus_one": plus_one, "weight_dtype": weight.dtype, "residual_dtype": weight.dtype}
    return dispatch.choose(op, Spec(op, {"M": 1, "K": weight.shape[0]}, weight.dtype, options=options), device)


class RMSNormReplacer(Replacer):
    """An RMSNorm of a known class as one operation, equal to the original up to the float rule."""

    name = "rmsnorm"
    rounds = False

    def propose(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        kind = RMS_NORMS.get(type(site.original).__name__)
        if kind is None:
            return Reason(f"{type(site.original).__name__} is not an RMSNorm of a known family")
        try:
            kernel = _kernel("rmsnorm", site.original, kind.plus_one, device)
        except KernelError as error:
            return Reason(str(error))
        return Choice(kernel, site.token_bytes, site.token_bytes, site.bytes)

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        kind = RMS_NORMS[type(site.original).__name__]
        new = adopt(FusedRMSNorm, site.original)
        new.eps_name, new.plus_one = kind.eps, kind.plus_one
        return new


class ResidualNormReplacer(Replacer):
    """A decoder layer that adds the residual and computes the next RMSNorm in one operation;
    children keep their rules."""

    name = "residual_rmsnorm"
    rounds = False
    consumes = EVERY_CHILD

    def propose(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        layer = site.original
        norm = getattr(layer, _norm_name(layer), None)
        kind = RMS_NORMS.get(type(norm).__name__)
        missing = [name for name in ("self_attn", "mlp", "input_layernorm") if not hasattr(layer, name)]
        if kind is None or norm is None or missing:
            return Reason(f"{type(layer).__name__} has no known RMSNorm after a residual addition")
        if any(isinstance(child, nn.Dropout) and child.p > 0 for child in layer.children()):
            return Reason("the layer has dropout before the residual addition")
        try:
            kernel = _kernel("add_rmsnorm", norm, kind.plus_one, device)
        except KernelError as error:
            return Reason(str(error))
        return Choice(kernel, site.token_bytes, site.token_bytes, site.bytes)

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        layer = site.original
        new = adopt(ResidualNormLayer, layer)
        new.norm_class = type(getattr(layer, _norm_name(layer)))
        kind = RMS_NORMS[new.norm_class.__name__]
        new.eps_name, new.plus_one = kind.eps, kind.plus_one
        new.skips = skipped(new, *(layer._modules.keys() - CALLED))
        new.sandwich = hasattr(layer, "pre_feedforward_layernorm")
        new.positional = positional_names(layer)
        return new


def _norm_name(layer: nn.Module) -> str:
    """The attribute name of the norm that follows the residual addition after attention."""
    sandwich = hasattr(layer, "pre_feedforward_layernorm")
    return "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
