"""RMSNorm as one operation; and LayerNorm, which stays torch's own, where it is smoothed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.ops.norm import rmsnorm
from accelpatch.models.family import norm_of
from accelpatch.modules.norm import FusedRMSNorm, SmoothedLayerNorm, with_own
from accelpatch.modules.replacement import adopt
from accelpatch.patching.replacer import Choice, Reason, Replacer
from accelpatch.patching.site import Site
from accelpatch.replacers.proposing import KernelReplacer


class RMSNormReplacer(KernelReplacer):
    """An RMSNorm of a known class as one operation, equal to the original up to the float rule."""

    name = "rmsnorm"
    rounds = False
    smooths = True

    def proposed(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        kind = norm_of(site.original)
        if kind is None or kind.layer:
            return Reason(f"{type(site.original).__name__} is not an RMSNorm of a known family")
        spec = rmsnorm.of_weight("rmsnorm", cast(Tensor, site.original.weight), kind.plus_one)
        kernel = dispatch.choose(spec.op, spec, device)
        return Choice(kernel, site.token_bytes, site.token_bytes, site.bytes, spec=spec)

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        new, kind = adopt(FusedRMSNorm, site.original), norm_of(site.original)
        assert kind is not None
        new.eps_name, new.plus_one = kind.eps, kind.plus_one
        if stats is not None:
            one = float(kind.plus_one)
            with_own(new, weight=stats.vector(new.weight.detach().float() + one) - one)
        return new


class LayerNormReplacer(Replacer):
    """torch's LayerNorm, which takes the smoothing of the linear layers behind it."""

    name = "layernorm"
    rounds = False
    smooths = True

    def propose(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        kind, weight = norm_of(site.original), getattr(site.original, "weight", None)
        if kind is None or not kind.layer or not isinstance(weight, Tensor) or weight.dim() != 1:
            return Reason(f"{type(site.original).__name__} is no LayerNorm with a vector of weights")
        return Choice("torch", site.token_bytes, site.token_bytes, site.bytes)

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        new: Any = adopt(SmoothedLayerNorm, site.original)
        if stats is not None:
            bias = getattr(new, "bias", None)
            with_own(
                new, weight=stats.vector(new.weight.detach()),
                bias=None if bias is None else stats.vector(bias.detach()),
            )  # fmt: skip
        return cast(nn.Module, new)
