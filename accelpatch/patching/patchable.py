"""Refuses models that cannot be patched as they are; each error says what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from accelpatch.errors import ArgumentError, PatchError
from accelpatch.patching.apply import HANDLE, PATH
from accelpatch.patching.placement import WHOLE, Placement


def check_module(model: Any) -> None:
    """Raise ArgumentError unless `model` is a torch.nn.Module."""
    if isinstance(model, nn.Module):
        return
    advice = "load it first, by from_pretrained of transformers or by accelpatch.load(name, recipe)"
    if isinstance(getattr(model, "model", None), nn.Module):
        advice = "give its .model"
    raise ArgumentError(f"the model is {model!r:.80}, and no torch.nn.Module: {advice}")


def samples_of(inputs: Any) -> Sequence[Mapping[str, Any]] | None:
    """`inputs` of patch as a list of samples; None stays None. Raises ArgumentError for anything else."""
    if inputs is None or isinstance(inputs, Mapping):
        return inputs if inputs is None else [inputs]
    found = [] if isinstance(inputs, (str, Tensor)) else list(inputs) if isinstance(inputs, Iterable) else []
    if not found or not all(isinstance(one, Mapping) for one in found):
        raise ArgumentError(
            f"inputs is of type {type(inputs).__name__}; it takes a list of samples, each the keyword arguments of one "
            "call of the model by name, such as [tokenizer(text, return_tensors='pt')]"
        )
    return found


def check_patchable(model: nn.Module, placement: Placement = WHOLE) -> None:
    """Raise PatchError for a model that is patched already, in training mode, without weights, sharded or compiled, or
    spread over devices in a way that cannot be patched."""
    if HANDLE in vars(model):
        raise PatchError("the model is already patched; call accelpatch.unpatch(model) first")
    if type(model).__name__ == "OptimizedModule" or getattr(model, "_compiled_call_impl", None) is not None:
        raise PatchError("the model is compiled; patch the original model first and call torch.compile after")
    inside = [path for path, module in model.named_modules() if HANDLE in vars(module)]
    if inside:
        raise PatchError(f"a part of the model, {inside[0]}, is patched already; call accelpatch.unpatch on it first")
    if any(PATH in vars(module) for module in model.modules()):
        raise PatchError("the model belongs to one that is patched already; call accelpatch.unpatch on that one first")
    kinds = {type(module).__name__ for module in model.modules()}
    if kinds & {"FullyShardedDataParallel", "FSDPModule"} or any(name.startswith("FSDP") for name in kinds):
        raise PatchError("the model is sharded by FSDP; patch it before wrapping, or patch the unwrapped model")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor.data).__name__ == "DTensor" or type(tensor).__name__ == "DTensor":
            raise PatchError(f"{name} is a DTensor (tensor parallel or FSDP2); load the model without it, then patch")
    placement.check(model)
    if model.training:
        raise PatchError("the model is in training mode and accelpatch replaces for inference; call model.eval() first")
