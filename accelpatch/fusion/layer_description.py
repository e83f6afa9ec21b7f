"""Describes what a decoder layer computes: read once off its modules, by the table of families.

The plan describes original layers; the fused layers of a GPU and the native step of a CPU describe replaced ones. All
three lower the same description, and differ only in what their kernels can do. A fact is read when it is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn

from accelpatch import own_code
from accelpatch.fusion.adapters import is_adapter
from accelpatch.fusion.attention_description import UNKNOWN, AttentionDescription
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.spread import OFFLOADED, offloaded_inside
from accelpatch.models.family import (
    ACTIVATION_CLASSES,
    PLAIN_ACTIVATIONS,
    LayerForm,
    Sparse,
    child_of,
    family_of_class,
    family_of_layer,
    form_of,
    has_layer_norms,
    linears_of,
    norm_of,
)
from accelpatch.modules.experts import Experts, implementation_why_not
from accelpatch.modules.gated_mlp import GatedMLP
from accelpatch.modules.norm import ResidualNormLayer
from accelpatch.modules.quantized_linear import renormalises
from accelpatch.modules.replacement import unchanged

ACTIVATIONS = ("act_fn", "activation_fn", "act")  # the child's name, by family
# roles of the linear layers of attention's input, of the MLP's input and of the MLP's output: one layer or several
QKV = (("qkv_proj",), ("q_proj", "k_proj", "v_proj"))
INNER = (("gate_up_proj",), ("gate_proj", "up_proj"), ("fc1",))
LAST = (("down_proj",), ("fc2",))


class LayerDescription:
    """A decoder layer, original or replaced. family: UNKNOWN for a layer of no known one. form: None where it has
    none."""

    def __init__(self, layer: Any):
        self.layer = layer
        self.family = family_of_layer(layer) or UNKNOWN

    @cached_property
    def form(self) -> LayerForm | None:
        return form_of(self.layer)

    @cached_property
    def attention(self) -> AttentionDescription | None:
        """The description of its attention module; None where the layer has no known one."""
        module = getattr(self.layer, (self.family.layer or LayerForm()).attention, None)
        return None if module is None else AttentionDescription(module)

    @cached_property
    def mlp(self) -> Any:
        """The MLP, or the layer itself where it has the MLP's linear layers as children."""
        name = (self.family.layer or LayerForm()).mlp
        return self.layer if name is None else getattr(self.layer, name, None)

    @cached_property
    def roles(self) -> Mapping[str, str]:
        """Role -> dotted name in the layer, of its linear layers."""
        return linears_of(self.layer)

    def linears(self, *kinds: tuple[str, ...]) -> tuple[Any, ...]:
        """The linear layers of the first kind that the layer has all roles of; () where it has none of them."""
        found = next((kind for kind in kinds if all(role in self.roles for role in kind)), ())
        return tuple(child_of(self.layer, self.roles[role]) for role in found)

    @property
    def qkv(self) -> tuple[Any, ...]:
        """The linear layers of attention's input, in the order q, k, v."""
        return self.linears(*QKV)

    @property
    def inner(self) -> tuple[Any, ...]:
        """The linear layers of the MLP's input, in the order gate, up; a plain MLP's one."""
        return self.linears(*INNER)

    @property
    def output(self) -> tuple[Any, ...]:
        """The linear layer of attention's output."""
        return self.linears(("o_proj",))

    @property
    def last(self) -> tuple[Any, ...]:
        """The linear layer of the MLP's output."""
        return self.linears(*LAST)

    @property
    def plain(self) -> bool:
        """Whether the MLP is two linear layers and an activation between them, without a gate."""
        return "fc1" in self.roles

    @cached_property
    def sparse(self) -> Sparse | None:
        """The form of its MLP of experts; None where it has another MLP."""
        form = self.family.sparse
        if form is None or family_of_class(self.mlp, form.block) is not self.family:
            return None
        return form if all(hasattr(self.mlp, name) for name in (form.router, form.experts)) else None

    @property
    def experts(self) -> Any:
        """The experts of a sparse layer."""
        assert self.sparse is not None
        return getattr(self.mlp, self.sparse.experts)

    @property
    def activation(self) -> str:
        """The name of the MLP's activation; the class of one that is not known."""
        if isinstance(self.mlp, GatedMLP):
            return str(self.mlp.activation)
        known = PLAIN_ACTIVATIONS if self.plain else ACTIVATION_CLASSES
        module = next((one for name in ACTIVATIONS if (one := getattr(self.mlp, name, None)) is not None), None)
        return known.get(type(module).__name__, type(module).__name__)

    @property
    def norms(self) -> Mapping[str, Any]:
        """Place of a norm, such as mlp_norm -> its module; without the places that have none."""
        return {} if self.form is None else {at: getattr(self.layer, name) for at, name in self.form.norms.items()}

    @property
    def layer_norms(self) -> bool:
        """Whether its norms are LayerNorms, which stay as they are."""
        return has_layer_norms(self.layer)

    @property
    def multiplier(self) -> float:
        """The factor of the outputs of attention and of the MLP before they are added to the residual stream."""
        name = None if self.form is None else self.form.multiplier
        return 1.0 if name is None else float(getattr(self.layer, name))

    @property
    def other_code(self) -> str | None:
        """Why the layer, or a module inside, runs code that is not its package's; None where none does."""
        return own_code.why_not_in(self.layer.modules())

    @property
    def other_code_over_cache(self) -> str | None:
        """As `other_code`, for the modules that get the KV cache: the layer and its attention."""
        if self.attention is None:
            return self.other_code
        return own_code.why_not_in((self.layer, self.attention.module))

    def changed(self) -> str | None:
        """Why the replaced layer does not compute what its modules' replacements were made for; None where it does."""
        if offloaded_inside(self.layer):
            return OFFLOADED
        if not isinstance(self.layer, ResidualNormLayer):
            return "it is not a replaced Llama-like layer"
        gated = self.sparse is None and not self.plain
        if self.sparse is not None and not isinstance(self.experts, Experts):
            return "its experts were not replaced"
        if gated and not isinstance(self.mlp, GatedMLP):
            return "its MLP was not replaced"
        if not (unchanged(self.layer) and (not gated or unchanged(self.mlp))):
            return "a module that is fused into another was changed"
        return self.other_code or self.unknown()

    def unknown(self) -> str | None:
        """Why its modules may compute something that no fast path does; None where they do not."""
        form, attention = self.form, self.attention
        if form is None or attention is None:
            return "its form is not known"
        inside = (
            set() if self.sparse is None else {f"{form.mlp}.{self.sparse.router}", f"{form.mlp}.{self.sparse.experts}"}
        )
        known = {*self.roles.values(), *form.children, *inside}
        known |= {f"{form.attention}.{name}" for name in ("q_norm", "k_norm")}
        parts = {"": self.layer, f"{form.attention}.": attention.module}
        parts |= {} if form.mlp is None else {f"{form.mlp}.": self.mlp}
        for prefix, part in parts.items():
            for name, child in part.named_children():
                usual = isinstance(child, nn.Dropout) or type(child).__name__ in PLAIN_ACTIVATIONS
                if f"{prefix}{name}" not in known and not usual and name not in ACTIVATIONS:
                    return f"its {prefix}{name} is not known to fused layers"
        kinds = (norm_of(getattr(attention.module, name, None)) for name in ("q_norm", "k_norm"))
        if any(kind is not None and kind.layer for kind in kinds):
            return "its queries and keys have LayerNorms"
        return self._unknown_mlp(form) or attention.unknown()

    def _unknown_mlp(self, form: LayerForm) -> str | None:
        if self.sparse is not None:
            return self._unknown_experts(form, self.sparse)
        if not self.plain:
            return None
        if self.mlp is not self.layer and family_of_class(self.mlp, "MLP") != self.family:
            return f"its MLP is {type(self.mlp).__name__}"
        return None if self.activation in PLAIN_ACTIVATIONS.values() else f"its activation is {self.activation}"

    def _unknown_experts(self, form: LayerForm, sparse: Sparse) -> str | None:
        if form.parallel or form.multiplier is not None or form.after_mlp is not None:
            return "its experts are no part of a form that is known"
        if reason := implementation_why_not(self.experts):
            return reason
        router = getattr(self.mlp, sparse.router)
        biased = getattr(router, "bias", None) is not None
        if family_of_class(router, "TopKRouter") is not self.family or biased != sparse.bias:
            return f"its router is {type(router).__name__}"
        return None


def plain_why_not(module: Any) -> str | None:
    """Why a module is no plain linear layer or embedding with a float32 weight; None where it is one."""
    kind = type(module)
    if is_adapter(module):
        return "an adapter stands around it"
    if own := getattr(module, "kernel", ""):  # of a GemvLinear: a user's implementation
        return f"a linear layer runs by {own}"
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        return f"{kind.__name__} is not a linear layer or embedding of accelpatch"
    plain = kind.forward in (nn.Linear.forward, nn.Embedding.forward) or hasattr(module, "embed_scale")
    weight = getattr(module, "weight", None)  # another library may have it under another name
    if not plain or weight is None or weight.dtype != torch.float32 or weight.dim() != 2:
        return f"{kind.__name__} in {getattr(weight, 'dtype', 'another form')} is no plain weight in {torch.float32}"
    return renormalises(module)


def size_of(module: Any) -> tuple[int, int]:
    """(N, K) of an unpatched linear layer or embedding: of its float weight, or what it says of one that is packed.
    Raises CannotFuse where it says nothing."""
    weight = module._parameters.get("weight")
    if weight is not None and weight.dim() == 2 and weight.is_floating_point():
        rows, columns = weight.shape
        return (columns, rows) if type(module).__name__ == "Conv1D" else (rows, columns)
    for rows, columns in (("out_features", "in_features"), ("outfeatures", "infeatures")):  # the latter: AutoGPTQ's
        if hasattr(module, rows) and hasattr(module, columns):
            return getattr(module, rows), getattr(module, columns)
    raise CannotFuse(f"the size of {type(module).__name__} is not known")
