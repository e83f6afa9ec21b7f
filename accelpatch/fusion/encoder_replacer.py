"""The replacement of a layer of an encoder, as a plan says it; FusedLayerReplacer proposes it where a layer is one.

Nothing is built before the swap but the module, which runs the original's forward. After it, `lay_out` concatenates the
weights that are there then, and the fused form is checked against the modules (verified_laid_out.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from accelpatch.device import Device
from accelpatch.errors import KernelError
from accelpatch.fusion.encoder_layer import activation_of
from accelpatch.kernels import dispatch
from accelpatch.kernels.ops.norm.layernorm import ADD
from accelpatch.kernels.spec import Spec
from accelpatch.models.encoders import EncoderForm, encoder_form_of, part_of, why_unfused
from accelpatch.patching.replacer import Choice, Reason, Replaced
from accelpatch.patching.site import Site

MODULES = "modules"


def propose(site: Site, device: Device) -> Choice | Reason | None:
    """What would replace a layer of an encoder, or why not; None for a layer of no encoder."""
    layer = site.original
    if reason := why_unfused(layer):
        return Reason(reason)
    form = encoder_form_of(layer)
    if form is None:
        return None
    if activation_of(layer, form) is None:
        return Reason(f"its activation is {type(part_of(layer, form.activation)).__name__}")
    norm = part_of(layer, form.norms[1])
    if norm.weight is None:
        return Reason("a norm has no weight")
    try:
        kernel = dispatch.choose(ADD, Spec(ADD, {"M": 1, "K": norm.weight.shape[0]}, norm.weight.dtype), device)
    except KernelError as error:
        return Reason(str(error))
    return Choice(kernel, site.token_bytes, site.token_bytes, site.bytes)


def complete(site: Site, choice: Choice, replaced: Mapping[str, Replaced | None], device: Device) -> Choice:
    """The final Choice. replaced: as in Replacer.complete."""
    form = encoder_form_of(site.original)
    assert form is not None
    reason = next(_reasons(site, form, replaced, device), None)
    if reason is not None:
        return replace(choice, kernel=MODULES, note=reason, fused=False)
    return replace(choice, fused=True)


def _reasons(site: Site, form: EncoderForm, replaced: Mapping[str, Replaced | None], device: Device) -> Iterator[str]:
    """Why a layer runs its modules."""
    yield from linear_reasons(site.path, form.linears, replaced, device)
    biases = {part_of(site.original, name).bias is None for name in form.qkv}
    if len(biases) > 1:
        yield "of q, k and v only some have a bias"
    weight = part_of(site.original, form.norms[1]).weight
    if device.kind != "cpu" and weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        yield f"its activations are {weight.dtype}"


def linear_reasons(
    path: str, names: Iterable[str], replaced: Mapping[str, Replaced | None], device: Device
) -> Iterator[str]:
    """Which of the linear layers of these names no fused layer reads."""
    for name in names:
        made = replaced.get(f"{path}.{name}")
        if made is None and device.kind != "cpu":
            yield f"{name} stays"
        elif made is not None and (device.kind == "cpu" or not made.fusable):
            yield f"{name} is {made.replacer} by {made.kernel}"
