"""The replacement of a decoder layer of an encoder-decoder, as a plan says it; FusedLayerReplacer proposes it.

Nothing is built before the swap but the module, which runs the original's forward. After it, `lay_out` concatenates the
weights that are there then, and the fused form is checked against the modules (verified_laid_out.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from accelpatch.device import Device
from accelpatch.fusion.cross_layer import activation_of, size_of
from accelpatch.fusion.encoder_replacer import MODULES, linear_reasons
from accelpatch.kernels.attention_shape import AttentionShape
from accelpatch.kernels.hip.attention import binding as hip_attention
from accelpatch.kernels.ops.attention import decode_attention
from accelpatch.kernels.ops.linear.fused_linear import INSIDE
from accelpatch.models.encoder_decoders import AttentionNames, CrossForm, cross_form_of, is_cross_layer
from accelpatch.models.encoders import part_of
from accelpatch.patching.replacer import Choice, Reason, Replaced
from accelpatch.patching.site import Site

#: kinds of devices whose runtime captures no steps of an encoder-decoder: layers run fused over transformers' caches
WITHOUT_STEPS: Collection[str] = ("cpu",)
BY_STEPS = "by_steps"  # in the detail of a choice: whether captured steps alone run fused
LAUNCHES, BEHIND, BIASED = 9, 3, 3  # more for norms behind each part, and for scores with a bias


def propose(site: Site, device: Device) -> Choice | Reason | None:
    """What would replace a decoder layer of an encoder-decoder, or why not; None for any other layer."""
    layer = site.original
    if not is_cross_layer(layer):
        return None
    form = cross_form_of(layer)
    if form is None:
        return Reason("its settings give it another form than the one that is known of its class")
    activation = activation_of(layer, form)
    if activation is None:
        return Reason(f"its activation is {type(part_of(layer, form.activation)).__name__}")
    dtype = part_of(layer, form.norms[0]).weight.dtype
    if form.bias and dtype == torch.float16:
        return Reason("its modules clamp float16, and fused layers do not")
    by_steps = device.kind not in WITHOUT_STEPS
    detail = {BY_STEPS: by_steps}
    if not by_steps:
        return Choice("torch", site.token_bytes, site.token_bytes, site.bytes, detail)
    shape = _shape(layer, form.own)
    if reason := decode_attention.why_not(shape, dtype, device):
        return Reason(reason)
    by = "hip" if hip_attention.why_not(shape, dtype, device) is None else "hip, attention by triton"
    more = BEHIND * form.post + BIASED * form.bias + (len(form.up) > 1 or activation not in INSIDE)
    kernel = f"{by}, {LAUNCHES + more} launches"
    libraries = (hip_attention.library(shape.size, dtype),) if by == "hip" else ()
    return Choice(kernel, site.token_bytes, site.token_bytes, site.bytes, detail, libraries=libraries)


def complete(site: Site, choice: Choice, replaced: Mapping[str, Replaced | None], device: Device) -> Choice:
    """The final Choice. replaced: as in Replacer.complete."""
    form = cross_form_of(site.original)
    assert form is not None
    reason = next(_reasons(site, form, replaced, device), None)
    if reason is not None:
        return replace(choice, kernel=MODULES, note=reason, fused=False, libraries=())
    return replace(choice, fused=True)


def _reasons(site: Site, form: CrossForm, replaced: Mapping[str, Replaced | None], device: Device) -> Iterator[str]:
    """Why a layer runs its modules."""
    if device.kind in WITHOUT_STEPS:
        return
    yield from linear_reasons(site.path, form.linears, replaced, device)
    for name in form.linears:
        made = replaced.get(f"{site.path}.{name}")
        if device.kind != "cpu" and made is not None and made.kernel != "hip":
            yield f"{name} is {made.replacer} by {made.kernel}"


def _shape(layer: Any, names: AttentionNames) -> AttentionShape:
    """Of the attention to the decoder's tokens, with a placeholder for its frequencies."""
    size = size_of(part_of(layer, names.module))
    heads = part_of(layer, names.q).out_features // size
    return AttentionShape(heads, heads, size, 1.0, torch.empty(size // 2, device="meta"))
