"""All experts of an MLP, of checkpoints that have each expert's linear layers for themselves.

    0.gate_proj.weight, 0.gate_proj.weight_scale_inv, 0.up_proj..., 0.down_proj..., 1.gate_proj...

Gate and up each have their own scales, also one for a whole weight (NVFP4), which become those of their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from accelpatch.errors import KernelError

Reader = Callable[[Mapping[str, Any], Mapping[str, Any], int, int], Any]
UP, DOWN = "gate_up_proj", "down_proj"
LAYERS = {UP: ("gate_proj", "up_proj"), DOWN: ("down_proj",)}  # in the order of rows


def each_expert(reader: Reader, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of all experts as our state dict has them: ..._q, ..._scale and perhaps ..._offset of both weights.

    reader: of one linear layer. tensors: of all experts, by names such as 7.gate_proj.weight. config: the layout's
    arguments; number, of experts, and shapes, (N, K) of each of the weights. Raises KernelError, which begins with the
    name of the tensor that is wrong.
    """
    number, made = config["number"], dict[str, Tensor]()
    layers = {f"{expert}.{one}" for expert in range(number) for both in LAYERS.values() for one in both}
    for name in tensors:
        if name.rpartition(".")[0] not in layers:
            raise KernelError(f"{name} is of none of the {number} experts of config.json: fetch both again")
    for name, parts in LAYERS.items():
        n, k = config["shapes"][name]
        each = [
            [_layer(reader, tensors, f"{expert}.{part}", config, n // len(parts), k) for part in parts]
            for expert in range(number)
        ]
        for part, like in each[0][0].items():
            stack = torch.stack([torch.cat([_bytes(one[part]) for one in rows]) for rows in each])
            made[f"{name}_{part}"] = stack.view(like.dtype)
    return made


def _layer(
    reader: Reader, tensors: Mapping[str, Any], path: str, config: Mapping[str, Any], n: int, k: int
) -> dict[str, Tensor]:
    """The canonical tensors of one layer; what a checkpoint says of its input is left out."""
    of_layer = {name.removeprefix(f"{path}."): one for name, one in tensors.items() if name.startswith(f"{path}.")}
    try:
        found: dict[str, Tensor] = reader(of_layer, config, n, k).tensors()
    except KernelError as error:
        raise KernelError(f"{path}.{error}") from None  # the whole name is what a message begins with
    return {part: one for part, one in found.items() if part in ("q", "scale", "offset")}


def _bytes(one: Tensor) -> Tensor:
    """A tensor of 8-bit floats as bytes, which can be joined; others as they are."""
    return one.view(torch.uint8) if one.is_floating_point() and one.element_size() == 1 else one
