"""Batches of unequal lengths without their padding, through stacks of fused encoder layers.

The first layer of a stack gathers the rows of tokens that the attention mask keeps, all others take those rows, and the
last one scatters them: what the model returns keeps its shape, with zeros in the hidden states at padded places.
Attention is over each sequence by itself (variable lengths). A stack is either without padding in a call or not at all:
one layer that cannot run fused keeps it for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from accelpatch.fusion.encoder_attention import MASK, head_size
from accelpatch.fusion.encoder_layer import ASKS, FusedEncoderLayer
from accelpatch.fusion.packed_rows import Packing
from accelpatch.models.encoders import part_of
from accelpatch.modules.replacement import is_observed

KEPT = 0.9  # the largest share of a batch's places that are tokens with which padding is removed
LEAST = {"cuda": 8192, "cpu": 0}  # rows of a padded batch from which on; fewer take a GPU less time than their launches
#: arguments that padded places cannot be seen by
NAMES = frozenset((
    "input_ids", "inputs_embeds", MASK, "token_type_ids", "position_ids", "labels", "num_items_in_batch", "return_dict",
))  # fmt: skip
HALVES = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256  # of torch's flash attention

Stack = Sequence[FusedEncoderLayer]


def stacks_of(model: nn.Module) -> list[Stack]:
    """The stacks of fused layers that may run without padding."""
    lists = [list(one) for one in model.modules() if isinstance(one, nn.ModuleList)]
    found = [(layers, [one for one in layers if isinstance(one, FusedEncoderLayer)]) for layers in lists]
    return [fused for layers, fused in found if layers == fused != [] and all(_packs(one) for one in fused)]


def _packs(layer: FusedEncoderLayer) -> bool:
    return layer.form.packs and layer.is_fused


def packing_of(model: Any, stacks: Sequence[Stack], given: Mapping[str, Any]) -> Packing | None:
    """The packing of a call; None where it keeps its padding."""
    mask = given.get(MASK)
    if not stacks or not isinstance(mask, Tensor) or mask.dim() != 2 or not _is_plain(model, given):
        return None
    if mask.numel() < LEAST.get(mask.device.type, 0):
        return None
    kept = mask != 0
    lengths = kept.sum(1).tolist()  # waits for the device, as transformers' own look at a mask does
    if min(lengths) == 0 or sum(lengths) > KEPT * mask.numel():
        return None
    if not all(_fits(stack, mask.device) for stack in stacks):
        return None
    edges = functional.pad(torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0))
    places = {id(layer): (place, len(stack) - 1) for stack in stacks for place, layer in enumerate(stack)}
    rows = kept.flatten().nonzero().flatten()
    return Packing(rows, edges.to(mask.device), tuple(lengths), (mask.shape[0], mask.shape[1]), places)


def _is_plain(model: Any, given: Mapping[str, Any]) -> bool:
    """Whether a call gives nothing and asks for nothing by which padded places could be seen between layers."""
    if any(name not in NAMES and one is not None and one is not False for name, one in given.items()):
        return False
    labels, config = given.get("labels"), getattr(model, "config", None)
    if isinstance(labels, Tensor) and labels.dim() > 1:  # one of each token: a loss may count padded ones
        return False
    return not any(getattr(config, name, False) for name in ASKS)


def _fits(stack: Stack, device: torch.device) -> bool:
    if not all(layer.runs_fused() and not is_observed(layer) for layer in stack):
        return False
    if device.type == "cpu":
        return True
    first = stack[0]
    size = head_size(part_of(first, first.form.attention))
    return device.type == "cuda" and first.dtype in HALVES and size % 8 == 0 and size <= LARGEST_HEAD
