"""The gated MLP with activation and multiplication as one operation; its linear layers keep their own rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from accelpatch import own_code
from accelpatch.device import Device
from accelpatch.kernels import dispatch
from accelpatch.kernels.spec import Spec
from accelpatch.models.family import ACTIVATION_CLASSES
from accelpatch.modules.gated_mlp import GatedMLP
from accelpatch.modules.replacement import adopt, skipped
from accelpatch.patching.replacer import EVERY_CHILD, Choice, Reason
from accelpatch.patching.site import Site
from accelpatch.replacers.proposing import KernelReplacer

ACTIVATIONS = ("act_fn", "activation_fn")  # the child's name, by family


class GatedMLPReplacer(KernelReplacer):
    """down(act(gate(x)) * up(x)), with gate and up as two linear layers or as one."""

    name = "gated_mlp"
    rounds = False
    consumes = EVERY_CHILD

    def proposed(self, site: Site, options: Mapping[str, Any], device: Device) -> Choice | Reason:
        mlp = site.original
        children = dict(mlp.named_children())
        fused = "gate_up_proj" in children
        expected = {"gate_up_proj", "down_proj"} if fused else {"gate_proj", "up_proj", "down_proj"}
        if not expected <= children.keys():
            return Reason(f"{type(mlp).__name__} is no gated MLP")
        activation = _activation(mlp)
        if activation is None:
            return Reason(f"the activation of {type(mlp).__name__} is not known here")
        down = children["down_proj"]
        width = getattr(down, "in_features", 1)
        dtypes = (one.dtype for one in (*down.parameters(), *down.buffers()))  # of codes too
        dtype = next((one for one in dtypes if one.is_floating_point and one.itemsize > 1), torch.float32)
        spec = Spec("gated_activation", {"M": 1, "K": width}, dtype, options={"activation": activation})
        kernel = dispatch.choose("gated_activation", spec, device)
        return Choice(kernel, 0, 0, site.bytes, {"activation": activation, "fused_gate_up": fused}, spec=spec)

    def build(self, site: Site, choice: Choice, stats: Any = None) -> nn.Module:
        new = adopt(GatedMLP, site.original)
        new.skips = skipped(new, *(name for name in ACTIVATIONS if name in new._modules))
        new.activation, new.fused_gate_up = choice.detail["activation"], choice.detail["fused_gate_up"]
        return new


def _activation(mlp: nn.Module) -> str | None:
    module = next((getattr(mlp, name) for name in ACTIVATIONS if hasattr(mlp, name)), None)
    return None if module is None or own_code.why_not(module) else ACTIVATION_CLASSES.get(type(module).__name__)
