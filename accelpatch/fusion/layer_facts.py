"""Facts about a decoder layer, read off its modules by what the family table says of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelpatch import own_code
from accelpatch.fusion.adapters import is_adapter
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.models.family import (
    ACTIVATION_CLASSES,
    PLAIN_ACTIVATIONS,
    Sparse,
    child_of,
    family_of_class,
    family_of_layer,
    form_of,
    linears_of,
    norm_of,
)
from accelpatch.modules.experts import implementation_why_not
from accelpatch.modules.gated_mlp import GatedMLP
from accelpatch.modules.quantized_linear import renormalises

QKV = (("qkv_proj",), ("q_proj", "k_proj", "v_proj"))
INNER = (("gate_up_proj",), ("gate_proj", "up_proj"), ("fc1",))
LAST = (("down_proj",), ("fc2",))
ACTIVATIONS = ("act_fn", "activation_fn", "act")  # the child's name, by family


def attention_of(layer: Any) -> Any:
    """The attention module of a layer; None where it has none that is known."""
    family = family_of_layer(layer)
    return getattr(layer, "self_attn" if family is None or family.layer is None else family.layer.attention, None)


def mlp_of(layer: Any) -> Any:
    """The MLP of a layer, or the layer itself where that holds the MLP's linear layers."""
    family = family_of_layer(layer)
    name = "mlp" if family is None or family.layer is None else family.layer.mlp
    return layer if name is None else getattr(layer, name, None)


def has_plain_mlp(layer: Any) -> bool:
    """Whether the MLP is two linear layers and an activation between them, without a gate."""
    return "fc1" in linears_of(layer)


def sparse_of(layer: Any) -> Sparse | None:
    """The form of a layer's MLP of experts; None where it has another MLP."""
    family, mlp = family_of_layer(layer), mlp_of(layer)
    if family is None or family.sparse is None or family_of_class(mlp, "SparseMoeBlock") is not family:
        return None
    return family.sparse if all(hasattr(mlp, name) for name in (family.sparse.router, family.sparse.experts)) else None


def why_not_sparse(layer: Any) -> str | None:
    """Why an MLP of experts may compute something that a fused layer does not; None where it does not."""
    form, sparse, mlp = form_of(layer), sparse_of(layer), mlp_of(layer)
    assert sparse is not None
    if form is None or form.parallel or form.multiplier is not None or form.after_mlp is not None:
        return "its experts are no part of a form that is known"
    router, family = getattr(mlp, sparse.router), family_of_layer(layer)
    if reason := implementation_why_not(getattr(mlp, sparse.experts)):
        return reason
    if family_of_class(router, "TopKRouter") is not family or getattr(router, "bias", None) is not None:
        return f"its router is {type(router).__name__}"
    return None


def activation_of(layer: Any) -> str:
    """The name of the activation of a layer's MLP; the class of one that is not known."""
    if isinstance(mlp_of(layer), GatedMLP):
        return str(mlp_of(layer).activation)
    known = PLAIN_ACTIVATIONS if has_plain_mlp(layer) else ACTIVATION_CLASSES
    module = next((one for name in ACTIVATIONS if (one := getattr(mlp_of(layer), name, None)) is not None), None)
    return known.get(type(module).__name__, type(module).__name__)


def by_head(layer: Any) -> bool:
    """Whether one linear layer of q, k and v has its rows head by head."""
    family = family_of_layer(layer)
    return family is not None and family.by_head


def linears(layer: Any, *forms: tuple[str, ...]) -> tuple[Any, ...]:
    """The linear layers of the first roles that a layer has all of; () where it has none of them."""
    names = linears_of(layer)
    roles = next((roles for roles in forms if all(role in names for role in roles)), ())
    return tuple(child_of(layer, names[role]) for role in roles)


def qkv_of(layer: Any) -> tuple[Any, ...]:
    """The linear layers of an attention's input, in the order q, k, v."""
    return linears(layer, *QKV)


def inner_of(layer: Any) -> tuple[Any, ...]:
    """The linear layers of an MLP's input, in the order gate, up; a plain MLP's one."""
    return linears(layer, *INNER)


def plain_why_not(module: Any, dtype: torch.dtype = torch.float32) -> str | None:
    """Why a module is no plain linear layer or embedding with a weight of `dtype`; None where it is one."""
    kind = type(module)
    if is_adapter(module):
        return "an adapter stands around it"
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        return f"{kind.__name__} is not a linear layer or embedding of accelpatch"
    plain = kind.forward in (nn.Linear.forward, nn.Embedding.forward) or hasattr(module, "embed_scale")
    weight = getattr(module, "weight", None)  # another library may hold it under other names
    if not plain or weight is None or weight.dtype != dtype or weight.dim() != 2:
        return f"{kind.__name__} in {getattr(weight, 'dtype', 'another form')} is no plain weight in {dtype}"
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


def other_code(layer: Any) -> str | None:
    """Why a layer, or a module inside, runs code that is not its package's; None where none does."""
    return own_code.why_not_in(layer.modules())


def other_code_over_cache(layer: Any) -> str | None:
    """As other_code, of the modules that are given the KV cache: a layer and its attention."""
    attention = attention_of(layer)
    return other_code(layer) if attention is None else own_code.why_not_in((layer, attention))


def why_not(layer: Any) -> str | None:
    """Why a layer's modules may compute something that a fused or native step does not; None where they do not."""
    family, form = family_of_layer(layer), form_of(layer)
    if family is None or form is None:
        return "its form is not known"
    names = linears_of(layer)
    attention, mlp = attention_of(layer), mlp_of(layer)
    sparse = sparse_of(layer)
    inside = set() if sparse is None else {f"{form.mlp}.{sparse.router}", f"{form.mlp}.{sparse.experts}"}
    known = {*names.values(), *form.children, *inside, f"{form.attention}.q_norm", f"{form.attention}.k_norm"}
    parts = {"": layer, f"{form.attention}.": attention} | ({} if form.mlp is None else {f"{form.mlp}.": mlp})
    for prefix, part in parts.items():
        for name, child in part.named_children():
            usual = isinstance(child, nn.Dropout) or type(child).__name__ in PLAIN_ACTIVATIONS
            if f"{prefix}{name}" not in known and not usual and name not in ACTIVATIONS:
                return f"its {prefix}{name} is not known to fused layers"
    if any((kind := norm_of(getattr(attention, name, None))) and kind.layer for name in ("q_norm", "k_norm")):
        return "its queries and keys have LayerNorms"
    if sparse is not None:
        return why_not_sparse(layer)
    if not has_plain_mlp(layer):
        return None
    if mlp is not layer and family_of_class(mlp, "MLP") != family:
        return f"its MLP is {type(mlp).__name__}"
    activation = activation_of(layer)
    return None if activation in PLAIN_ACTIVATIONS.values() else f"its activation is {activation}"
