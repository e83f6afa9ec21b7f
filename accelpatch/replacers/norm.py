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
from accelpatch.kernels.dispatch import Spec
from accelpatch.models.family import LayerForm, Norm, family_of_class
from accelpatch.modules.norm import FusedRMSNorm, ResidualNormLayer, positional_names
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
        kind = _norm_of(site.original)
        if kind is None:
            return Reason(f"{type(site.original).__name__} is not an RMSNorm of a known family")
        try:
            kernel = _kernel("rmsnorm", site.original, kind.plus_one, device)
        except KernelError as error:
            return Reason(str(error))
        return Choice(kernel, site.token_bytes, site.token_bytes, site.bytes)

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        new, kind = adopt(FusedRMSNorm, site.original), _norm_of(site.original)
        assert kind is not None
        new.eps_name, new.plus_one = kind.eps, kind.plus_one
        return new


class ResidualNormReplacer(Replacer):
    """A decoder layer that adds the residual and computes the next RMSNorm in one operation;
    children keep their rules."""

    name = "residual_rmsnorm"
    rounds = False
    consumes = EVERY_CHILD

    def propose(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        layer, form = site.original, _form_of(site.original)
        kind = None if form is None else _norm_of(getattr(layer, form.mlp_norm))
        if form is None or kind is None:
            return Reason(f"{type(layer).__name__} has no known RMSNorm after a residual addition")
        norm = getattr(layer, form.mlp_norm)
        if any(isinstance(child, nn.Dropout) and child.p > 0 for child in layer.children()):
            return Reason("the layer has dropout before the residual addition")
        try:
            kernel = _kernel("add_rmsnorm", norm, kind.plus_one, device)
        except KernelError as error:
            return Reason(str(error))
        return Choice(kernel, site.token_bytes, site.token_bytes, site.bytes)

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        layer, form = site.original, _form_of(site.original)
        assert form is not None
        norm = getattr(layer, form.mlp_norm)
        kind = _norm_of(norm)
        assert kind is not None
        new = adopt(ResidualNormLayer, layer)
        new.norms, new.norm_class = form.norms, type(norm)
        new.eps_name, new.plus_one = kind.eps, kind.plus_one
        new.skips = skipped(new, *(layer._modules.keys() - form.children))
        new.positional = positional_names(layer)
        return new


def _norm_of(module: Any) -> Norm | None:
    """What a family's RMSNorm computes; None for any other module."""
    family = family_of_class(module, "RMSNorm")
    return None if family is None else family.norm


def _form_of(layer: nn.Module) -> LayerForm | None:
    """The form of a decoder layer, by the class of its norms; None where it is not known or a child is missing."""
    family = family_of_class(getattr(layer, "input_layernorm", None), "RMSNorm")
    if family is None or family.layer is None or not all(hasattr(layer, name) for name in family.layer.children):
        return None
    norms = [getattr(layer, name) for name in family.layer.norms.values()]
    return family.layer if all(family_of_class(norm, "RMSNorm") is family for norm in norms) else None
