"""A fingerprint of a model's weights: what was measured of one model must not be used for another."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from accelpatch.own_code import unusual

SOME = 64  # values of a parameter that are looked at, evenly spread


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of every parameter's name and shape and of some of its values in bfloat16.

    The same for a checkpoint that is loaded in bfloat16 and in float32; float16 rounds otherwise.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} ".encode())
        if unusual(parameter) is not None:
            continue  # its values are not read, and its class or layout is no part of the model
        flat = parameter.detach().reshape(-1)
        values = flat[:: max(1, flat.numel() // SOME)][:SOME].to(torch.bfloat16).cpu()
        digest.update(values.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
