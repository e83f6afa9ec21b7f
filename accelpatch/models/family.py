"""Look-ups in the table of model families: by a configuration, by a module's class, and by a decoder layer."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from accelpatch import own_code
from accelpatch.models.families import (
    ACTIVATION_CLASSES,
    CLAMPED_GATES,
    EMBEDDING_CLASSES,
    FAMILIES,
    LAYER_NORM,
    LINEAR_CLASSES,
    PLAIN_ACTIVATIONS,
    STATIC_ROPE,
)
from accelpatch.models.form import DecoderForm, Family, LayerForm, Norm, Rotary, Sparse

__all__ = [
    "ACTIVATION_CLASSES", "CLAMPED_GATES", "EMBEDDING_CLASSES", "FAMILIES", "LINEAR_CLASSES", "PLAIN_ACTIVATIONS",
    "STATIC_ROPE",
    "DecoderForm", "Family", "LayerForm", "Norm", "Rotary", "Sparse", "child_of", "family_of", "family_of_class",
    "family_of_layer", "form_of", "has_layer_norms", "linears_of", "norm_of", "roles_of",
]  # fmt: skip

_BY_CLASSES: Mapping[str, Family] = MappingProxyType({family.classes: family for family in FAMILIES if family.classes})
# Roles of the linear layers of attention and MLP.
LINEARS = (
    "qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj",
    "gate_up_proj", "gate_proj", "up_proj", "down_proj", "fc1", "fc2",
)  # fmt: skip
LAYER_ENDINGS = ("DecoderLayer", "Layer", "Block")  # of the names of layers' classes


def family_of(config: Any) -> Family | None:
    """The family of a configuration, by its model_type or that of its text part; None for an unknown one."""
    types = [getattr(config, "model_type", None)]
    if hasattr(config, "get_text_config"):
        types.append(getattr(config.get_text_config(decoder=True), "model_type", None))
    return next((family for family in FAMILIES for name in types if name in family.model_types), None)


def family_of_class(module: Any, ending: str) -> Family | None:
    """The family that a module's class belongs to, by its name: LlamaAttention with the ending Attention is Llama's.

    Of a replacement the class that it replaced counts, of a subclass the one of transformers that it derives from.
    """
    name = own_code.base_of(getattr(type(module), "replaced_class", type(module))).__name__
    return _BY_CLASSES.get(name.removesuffix(ending)) if name.endswith(ending) else None


def norm_of(module: Any) -> Norm | None:
    """What a family's RMSNorm, or a LayerNorm, computes; None for any other module."""
    if getattr(type(module), "replaced_class", type(module)) is nn.LayerNorm:
        return LAYER_NORM
    family = family_of_class(module, "RMSNorm") or family_of_class(module, "LayerNorm")
    return None if family is None else family.norm


def family_of_layer(layer: Any) -> Family | None:
    """The family of a decoder layer, by the class of its first norm, of its attention, or of itself."""
    first = family_of_class(getattr(layer, "input_layernorm", None), "RMSNorm")
    family = first or family_of_class(getattr(layer, "self_attn", None), "Attention")
    return family or next((found for end in LAYER_ENDINGS if (found := family_of_class(layer, end)) is not None), None)


def form_of(layer: Any) -> LayerForm | None:
    """The form of a decoder layer; None where its family has none, a child is missing, or a norm is of another
    family."""
    family = family_of_layer(layer)
    if family is None or family.layer is None or family.norm is None:
        return None
    form = family.layer.of(layer)
    if form.where is not None and not getattr(layer, form.where):
        return None
    if not all(hasattr(layer, name) for name in form.children):
        return None
    norms = [getattr(layer, name) for name in form.norms.values()]
    if family.norm.layer:
        return form if all(norm_of(norm) == family.norm for norm in norms) else None
    return form if all(family_of_class(norm, "RMSNorm") is family for norm in norms) else None


def has_layer_norms(layer: Any) -> bool:
    """Whether the norms of a decoder layer's family are LayerNorms, which stay as they are."""
    family = family_of_layer(layer)
    return family is not None and family.norm is not None and family.norm.layer


def linears_of(layer: Any) -> dict[str, str]:
    """Role -> dotted name in the layer of its linear layers, by the roles of its family; those that it has."""
    family = family_of_layer(layer)
    roles = {} if family is None else family.roles
    names = {role: pattern.removeprefix("*layers.#").lstrip("*.") for pattern, role in roles.items() if role in LINEARS}
    return {role: name for role, name in names.items() if child_of(layer, name) is not None}


def child_of(module: Any, name: str) -> Any:
    """The module of a dotted name within another; None where it has none."""
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def roles_of(config: Any) -> Mapping[str, str]:
    """The role table for a configuration; empty for an unknown family."""
    family = family_of(config)
    return family.roles if family else {}
