"""Tiny models that accelerate has spread over the CPU and the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import cpu_offload, disk_offload, dispatch_model

PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")
#: kind of map -> the parts that lie on disk, the others being on the CPU. None: all are offloaded, by that call
KINDS: dict[str, tuple[str, ...] | None] = {
    "a-layer": ("model.layers.1",),
    "a-layer-and-the-head": ("model.layers.0", "lm_head"),
    "the-ends": ("model.embed_tokens", "model.norm", "lm_head"),
    "disk": None,
    "cpu": None,
}


def offloaded(model: Any, kind: str, folder: Path) -> Any:
    """The model, with the parts of a kind of map offloaded."""
    parts = KINDS[kind]
    if parts is not None:
        places = dict.fromkeys(PARTS, "cpu") | dict.fromkeys(parts, "disk")
        return dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)
    if kind == "disk":
        return disk_offload(model, str(folder), execution_device=torch.device("cpu"))
    return cpu_offload(model, execution_device=torch.device("cpu"))
