"""Batches of unequal lengths without their padding, through stacks of fused encoder layers.

The first layer of a stack gathers the rows of tokens that the attention mask keeps, all others take those rows, and the
last one scatters them: what the model returns keeps its shape, with zeros in the hidden states at padded places.
Attention is over each sequence by itself (variable lengths). A model's layers are either all without padding in a call
or not at all: one that cannot run fused keeps it for all, and so does code that is not transformers' own around them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelpatch import own_code
from accelpatch.fusion.encoder_attention import MASK, head_size
from accelpatch.fusion.encoder_layer import ASKS, FusedEncoderLayer
from accelpatch.fusion.packed_rows import Packing
from accelpatch.kernels.operation import is_eager, wants_gradient
from accelpatch.models.encoders import part_of
from accelpatch.modules.attention_settings import NAME
from accelpatch.modules.replacement import is_observed

KEPT = 0.9  # the largest share of a batch's places that are tokens with which padding is removed
#: places of a padded batch from which on; fewer take a GPU less time than their launches take the host
LEAST = {"cuda": 16384, "cpu": 0}
#: arguments that padded places cannot be seen by
NAMES = frozenset((
    "input_ids", "inputs_embeds", MASK, "token_type_ids", "position_ids", "labels", "num_items_in_batch", "return_dict",
))  # fmt: skip
INPUTS = ("input_ids", "inputs_embeds")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", NAME)  # which compute the same of each text
HALVES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256  # of torch's flash attention


def packing_of(model: Any, given: Mapping[str, Any]) -> Packing | None:
    """The packing of a call; None where it keeps its padding. Of a model of transformers' own classes alone, with one
    stack of layers: what another does with ids and mask on their way is not known."""
    mask = given.get(MASK)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.numel() < max(LEAST.get(mask.device.type, 0), 1):
        return None
    if not is_eager() or (mask.is_cuda and torch.cuda.is_current_stream_capturing()) or not _is_plain(model, given):
        return None
    kept = mask != 0
    lengths = kept.sum(1).tolist()  # waits for the device, as transformers' own look at a mask does
    # the first token of each text is what classifiers and poolers look at, also where it is padding
    if sum(lengths) > KEPT * mask.numel() or not bool(kept[:, 0].all()):
        return None
    stack = _stack_of(model)
    fused = [layer.fused_now() for layer in stack]
    if not fused or None in fused or not _fits(stack[0], mask.device):
        return None
    places = {id(layer): (place, len(stack) - 1, fused[place]) for place, layer in enumerate(stack)}
    edges = functional.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
    rows = kept.flatten().nonzero().flatten()
    return Packing(rows, edges.to(mask.device), tuple(lengths), (mask.shape[0], mask.shape[1]), places)


def _stack_of(model: nn.Module) -> list[FusedEncoderLayer]:
    """The layers of a model that may run without padding; [] where that is not known of the whole model."""
    modules = list(model.modules())
    found = [layer for layer in modules if isinstance(layer, FusedEncoderLayer)]
    lists = [list(one) for one in modules if isinstance(one, nn.ModuleList)]
    if not found or len(lists) != 1 or lists[0] != found or not all(layer.form.packs for layer in found):
        return []
    within = {id(part) for layer in found for part in layer.modules() if part is not layer}
    outside = [one for one in modules if id(one) not in within and one is not model]
    return [] if own_code.why_not_in([*outside, model]) is not None or is_observed(*outside) else found


def _is_plain(model: Any, given: Mapping[str, Any]) -> bool:
    """Whether a call gives nothing and asks for nothing by which padded places could be seen between layers."""
    if any(name not in NAMES and one is not None and one is not False for name, one in given.items()):
        return False
    labels, config = given.get("labels"), getattr(model, "config", None)
    if isinstance(labels, Tensor) and labels.dim() > 1:  # one of each token: a loss may count padded ones
        return False
    if any(getattr(config, name, False) for name in (*ASKS, "is_decoder", "is_encoder_decoder")):
        return False
    if getattr(config, "_attn_implementation", None) not in ATTENTIONS:
        return False
    inputs = next((one for name in INPUTS if isinstance(one := given.get(name), Tensor)), None)
    if inputs is None or inputs.shape[:2] != given[MASK].shape or inputs.device != given[MASK].device:
        return False
    return not wants_gradient((inputs, *(model.parameters() if torch.is_grad_enabled() else ())))


def _fits(first: FusedEncoderLayer, device: torch.device) -> bool:
    weight = part_of(first, first.form.norms[1]).weight
    if weight.device != device or device.type == "cpu":
        return bool(weight.device == device)
    size = head_size(part_of(first, first.form.attention))
    return device.type == "cuda" and weight.dtype in HALVES and size % 8 == 0 and size <= LARGEST_HEAD
