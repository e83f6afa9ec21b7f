"""Attention of a fused encoder layer: by the interface that the model's configuration names, over one call's rows."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from accelpatch.models.encoders import EncoderForm

MASK, ROTARY = "attention_mask", "position_embeddings"
HEAD_SIZES = ("attention_head_size", "head_dim")  # attributes of attention modules, by family
SCALINGS = ("scaling", "scale")


class EncoderAttention:
    """Attention of one call, by the interface of the model's configuration."""

    def __init__(
        self, module: Any, form: EncoderForm, shape: torch.Size, given: Mapping[str, Any], own: frozenset[str]
    ):
        """module: the attention module. shape: of the hidden states. given: the layer's arguments by name; own: the
        names of those that are the layer's, all others go to the interface."""
        self._module, self._form, self._shape, self._given = module, form, shape[:-1], given
        self._more = {name: one for name, one in given.items() if name not in own and name != MASK}

    def __call__(self, qkv: Tensor) -> Tensor:
        """Rows of q, k and v[B L, 3 H D] -> rows of the output[B L, H D]."""
        module, size = self._module, head_size(self._module)
        q, k, v = (one.transpose(1, 2) for one in qkv.view(*self._shape, 3, -1, size).unbind(2))
        mask = self._given.get(MASK)
        if self._form.bias is not None:
            made = _with_bias(q, k, v, self._given.get(self._form.bias), mask)
            return made.transpose(1, 2).reshape(len(qkv), -1)
        functions = vars(sys.modules[_home(module)])
        if self._form.rotary:
            q, k = functions["apply_rotary_pos_emb"](q, k, *self._given[ROTARY], unsqueeze_dim=1)
        more = dict(self._more)
        if hasattr(module, "sliding_window"):
            more["sliding_window"] = module.sliding_window
        if hasattr(module, "deterministic_flash_attn"):
            more["deterministic"] = module.deterministic_flash_attn
        eager = functions["eager_attention_forward"]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager)
        made, _ = attend(module, q, k, v, mask, dropout=0.0, scaling=scaling(module), **more)
        return made.reshape(len(qkv), -1)


def _with_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    """Attention with a bias of the scores, as MPNet's module writes it out."""
    scores = torch.matmul(q, k.transpose(-1, -2)) / q.shape[-1] ** 0.5
    scores = scores if bias is None else scores + bias
    scores = scores if mask is None else scores + mask
    return torch.matmul(functional.softmax(scores, dim=-1), v)


def _home(module: Any) -> str:
    """The name of the Python module in which an attention module's original is defined."""
    return str(getattr(type(module), "replaced_class", type(module)).__module__)


def head_size(module: Any) -> int:
    """Size of a head of an attention module."""
    return int(next(getattr(module, name) for name in HEAD_SIZES if hasattr(module, name)))


def scaling(module: Any) -> float:
    """The factor of the scores of an attention module."""
    scalings = (getattr(module, name) for name in SCALINGS if hasattr(module, name))
    return float(next(scalings, head_size(module) ** -0.5))
