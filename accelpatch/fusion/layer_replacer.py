"""The replacer of a layer: its module adds the residual and normalises in one operation, and it is fused.

What generates tokens is the fused layer (GPU) or its part of the native step (CPU), where its children allow that. Of a
layer of an encoder: encoder_replacer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from accelpatch.device import Device
from accelpatch.errors import KernelError
from accelpatch.fusion import cross_layer, cross_replacer, encoder_replacer
from accelpatch.fusion.encoder_layer import made_of
from accelpatch.fusion.planned import libraries, planned
from accelpatch.kernels import dispatch
from accelpatch.kernels.ops.norm import rmsnorm
from accelpatch.models.encoder_decoders import cross_form_of, is_cross_layer
from accelpatch.models.encoders import encoder_form_of
from accelpatch.models.family import LayerForm, Norm, form_of, linears_of, norm_of
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
        other = encoder_replacer.propose(site, device) or cross_replacer.propose(site, device)
        if other is not None:
            return other
        if form is None:
            return Reason(f"{type(layer).__name__} has no known norm after a residual addition")
        kernel, joined = "modules", _joined(layer, form)
        if joined is not None:
            if any(isinstance(child, nn.Dropout) and child.p > 0 for child in layer.children()):
                return Reason("the layer has dropout before the residual addition")
            norm, kind = joined
            try:
                spec = rmsnorm.of_weight("add_rmsnorm", norm.weight, kind.plus_one)
                kernel = dispatch.choose(spec.op, spec, device)
            except KernelError as error:
                return Reason(str(error))
        return Choice(kernel, site.token_bytes, site.token_bytes, site.bytes)

    def complete(self, site: Site, choice: Choice, replaced: Mapping[str, Replaced | None], device: Device) -> Choice:
        if encoder_form_of(site.original) is not None:
            return encoder_replacer.complete(site, choice, replaced, device)
        if is_cross_layer(site.original):
            return cross_replacer.complete(site, choice, replaced, device)
        fused = planned(site, replaced, device)
        if isinstance(fused, Reason):
            return replace(choice, note=fused.text, fused=False)
        return replace(choice, kernel=fused, fused=True, libraries=libraries(site, device))

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        layer, form, of_encoder = site.original, form_of(site.original), encoder_form_of(site.original)
        if of_encoder is not None:
            return made_of(layer, of_encoder)
        if (of_both := cross_form_of(layer)) is not None:
            return cross_layer.made_of(layer, of_both, choice.detail[cross_replacer.BY_STEPS])
        assert form is not None
        new = adopt(ResidualNormLayer, layer)
        joined = _joined(layer, form)
        new.norms, new.plain = form.norms, joined is None
        if joined is not None:
            norm, kind = joined
            new.norm_class, new.eps_name, new.plus_one = type(norm), kind.eps, kind.plus_one
        own = layer._modules.keys() - form.children - {name.partition(".")[0] for name in linears_of(layer).values()}
        if new.plain:  # its own forward applies dropout, and fused layers run outside of training alone
            own = {name for name in own if not isinstance(layer._modules[name], nn.Dropout)}
        new.skips = skipped(new, *own)
        new.positional = positional_names(layer)
        return new


def _joined(layer: nn.Module, form: LayerForm) -> tuple[Any, Norm] | None:
    """The norm that can be one operation with the residual addition before it, and its kind; None where none can."""
    if form.mlp_norm is None or form.multiplier is not None or form.parallel:
        return None
    norm = getattr(layer, form.mlp_norm)
    kind = norm_of(norm)
    return None if kind is None or kind.late or kind.layer else (norm, kind)
