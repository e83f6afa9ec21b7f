"""Attention by the implementation that was measured to be the fastest of those that can run a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from accelpatch import own_code
from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.ops.attention import flash_attention
from accelpatch.kernels.spec import Spec
from accelpatch.modules.attention import attention
from accelpatch.modules.attention_settings import Registered, why_not_implementation, why_not_interface
from accelpatch.patching.replacer import EVERY_CHILD, Choice, Reason, Replacer
from accelpatch.patching.site import Site

PLANNED = 2048  # tokens of the prompt that a plan names the implementation for
SIZES = ("qk_head_dim", "head_dim", "head_size", "attention_head_size", "key_value_proj_dim")  # attributes, by family
HEADS = ("num_attention_heads", "num_heads", "n_heads")


class FlashAttentionReplacer(Replacer):
    """Attention modules that call transformers' attention interface; their linear layers keep their own rules.

    implementation: the name of one that every call must run by; default: the first that can run it, in the order that
    was measured for the device.
    """

    name = "flash_attention"
    options: ClassVar[Mapping[str, tuple[type, ...]]] = {"implementation": (str,)}
    rounds = False
    by_token = True
    consumes = EVERY_CHILD

    def propose(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        module: Any = site.original
        if (
            reason := why_not_interface(module)
            or why_not_implementation(module)
            or own_code.reached_by(Registered).reason
        ):
            return Reason(reason)
        spec = spec_of(module)
        if isinstance(spec, str):
            return Reason(spec)
        wanted = options.get("implementation")
        if wanted is not None and (reason := dispatch.why_not(flash_attention.OP, wanted, spec, device)):
            return Reason(f"{wanted}: {reason}")
        kernel = wanted or dispatch.choose(flash_attention.OP, spec, device)
        detail = {"implementation": wanted}
        return Choice(
            kernel, site.token_bytes, site.token_bytes, site.bytes, detail, note=described(spec, device), spec=spec
        )

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        return attention(site.original, choice.detail["implementation"])


def spec_of(module: Any) -> Spec | str:
    """The Spec of a prompt of an attention module, or what is not known of it."""
    config = module.config
    size, heads = _first(SIZES, module), _first(HEADS, config, module)
    if size is None and heads and getattr(config, "hidden_size", None):
        size = config.hidden_size // heads
    if size is None or heads is None:
        return f"the size of the heads of {type(module).__name__} is not known"
    groups = getattr(module, "num_key_value_groups", 1)
    dtypes = (one.dtype for one in module.parameters() if one.is_floating_point() and one.dtype.itemsize > 1)
    return flash_attention.of_shape(
        heads, heads // groups, size, next(dtypes, torch.float32), length=PLANNED, keys=PLANNED,
        causal=bool(getattr(module, "is_causal", True)), sinks=getattr(module, "sinks", None) is not None,
        softcap=float(getattr(module, "attn_logit_softcapping", None) or 0.0),
    )  # fmt: skip


def _first(names: Sequence[str], *owners: Any) -> int | None:
    """The first of these attributes that is a whole number."""
    found = (getattr(owner, name, None) for owner in owners for name in names)
    return next((one for one in found if isinstance(one, int)), None)


def described(spec: Spec, device: Device) -> str:
    """Every implementation of attention in the order of preference, and why it cannot run, for a plan."""
    lines = []
    for name in dispatch.order(flash_attention.OP, spec, device):
        reason = dispatch.why_not(flash_attention.OP, name, spec, device)
        lines.append(f"  {name}: {reason or 'can run'}")
    sizes = f"{spec.sizes['H']} heads of {spec.sizes['D']} in {str(spec.dtype).removeprefix('torch.')}"
    return "\n".join([f"attention of {sizes}, in the order of preference for a prompt of {PLANNED}:", *lines])
