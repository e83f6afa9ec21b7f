"""The replacer of a decoder layer: its module adds the residual and normalises in one operation, and it is fused.

What generates tokens is the fused layer (GPU) or its part of the native step (CPU), where its children allow that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from accelpatch.device import Device
from accelpatch.errors import KernelError
from accelpatch.fusion.planned import libraries, planned
from accelpatch.kernels.ops.norm.rmsnorm import chosen
from accelpatch.models.family import LayerForm, form_of, linears_of, norm_of
from accelpatch.modules.norm import ResidualNormLayer, positional_names
from accelpatch.modules.replacement import adopt, skipped
from accelpatch.patching.replacer import EVERY_CHILD, Choice, Reason, Replaced, Replacer
from accelpatch.patching.site import Site


class FusedLayerReplacer(Replacer):
    """A decoder layer as few launches, or one part of a native step; children keep their rules."""

    name = "fused_layer"
    rounds = False
    consumes = EVERY_CHILD
    fuses = True

    def propose(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        layer, form = site.original, form_of(site.original)
        if form is None:
            return Reason(f"{type(layer).__name__} has no known norm after a residual addition")
        kernel = "modules"
        if not _is_plain(layer, form):
            if any(isinstance(child, nn.Dropout) and child.p > 0 for child in layer.children()):
                return Reason("the layer has dropout before the residual addition")
            assert form.mlp_norm is not None
            norm = getattr(layer, form.mlp_norm)
            kind = norm_of(norm)
            assert kind is not None
            try:
                kernel = chosen("add_rmsnorm", norm.weight, kind.plus_one, device)
            except KernelError as error:
                return Reason(str(error))
        return Choice(kernel, site.token_bytes, site.token_bytes, site.bytes)

    def complete(self, site: Site, choice: Choice, replaced: Mapping[str, Replaced | None], device: Device) -> Choice:
        fused = planned(site, replaced, device)
        if isinstance(fused, Reason):
            return replace(choice, note=fused.text, fused=False)
        return replace(choice, kernel=fused, fused=True, libraries=libraries(site, device))

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        layer, form = site.original, form_of(site.original)
        assert form is not None
        new = adopt(ResidualNormLayer, layer)
        new.norms, new.plain = form.norms, _is_plain(layer, form)
        if not new.plain:
            assert form.mlp_norm is not None
            norm = getattr(layer, form.mlp_norm)
            kind = norm_of(norm)
            assert kind is not None
            new.norm_class, new.eps_name, new.plus_one = type(norm), kind.eps, kind.plus_one
        own = layer._modules.keys() - form.children - {name.partition(".")[0] for name in linears_of(layer).values()}
        if new.plain:  # its own forward applies dropout, and fused layers run outside of training alone
            own = {name for name in own if not isinstance(layer._modules[name], nn.Dropout)}
        new.skips = skipped(new, *own)
        new.positional = positional_names(layer)
        return new


def _is_plain(layer: nn.Module, form: LayerForm) -> bool:
    """Whether a layer has no residual addition that can be one operation with the norm after it."""
    if form.mlp_norm is None or form.multiplier is not None or form.parallel:
        return True
    kind = norm_of(getattr(layer, form.mlp_norm))
    return kind is None or kind.late or kind.layer
