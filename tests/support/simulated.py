"""The same model in plain torch, its weights gone through the formats of a plan and back to floats."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.kernels.check import parity
from accelpatch.patching.entry import Entry
from accelpatch.patching.plan import Plan
from accelpatch.quant import codebook, int4, int8
from accelpatch.quant.formats import dequantize


def simulated(model: nn.Module, plan: Plan, dtype: torch.dtype) -> nn.Module:
    """A copy of the unpatched `model` in `dtype` whose weights are those that the plan's formats hold."""
    copied = copy.deepcopy(model).to(dtype)
    if dtype == torch.float64 and hasattr(copied, "set_experts_implementation"):
        copied.set_experts_implementation("eager")  # torch's grouped product takes no float64
    originals = dict(model.named_modules())
    for entry in plan.replaced:
        if entry.replacer is not None and entry.replacer.rounds:
            if entry.site.role == "experts":
                _round_experts(copied.get_submodule(entry.site.path), originals[entry.site.path], entry, dtype)
                continue
            held = _held(originals[entry.site.path], entry, dtype)
            weight = copied.get_submodule(entry.site.path).weight
            assert weight.shape == held.shape
            weight.data = held
    return copied


def _held(original: nn.Module, entry: Entry, dtype: torch.dtype) -> Tensor:
    """The weight as the format holds it, in the original's shape."""
    transposed = type(original).__name__ == "Conv1D"
    weight = original.weight.detach().t() if transposed else original.weight.detach()
    assert entry.replacer is not None
    assert entry.choice is not None
    formats: Any = {"int8_weight_only": int8, "int4_weight_only": int4}
    form = formats[entry.replacer.name]
    held = dequantize(form.quantize(weight, **entry.choice.detail), dtype)
    return held.t() if transposed else held


def _round_experts(copied: nn.Module, original: nn.Module, entry: Entry, dtype: torch.dtype) -> None:
    """Give a copy of experts the weights that the format holds, each expert's for itself, in the original's shape."""
    assert entry.replacer is not None
    assert entry.choice is not None
    detail, form = entry.choice.detail, entry.replacer.name
    for name, group in zip(("gate_up_proj", "down_proj"), detail["groups"], strict=True):
        weight, place = original.get_parameter(name), copied.get_parameter(name)
        for expert, one in enumerate(weight.detach().transpose(1, 2) if detail["form"].transposed else weight.detach()):
            if form == "mxfp4_experts":
                held: Any = codebook.quantize(one, group_size=group, codebook="e2m1")
            elif form == "int4_experts":
                held = int4.quantize(one, group_size=group, symmetric=detail["offset"] == "none")
            else:
                held = int8.quantize(one, group_size=group)
            full = dequantize(held, dtype)
            place.data[expert] = full.t() if detail["form"].transposed else full


@torch.no_grad()
def logits(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Logits at the places that are not padding: [tokens, vocabulary]."""
    return model(**batch).logits[batch["attention_mask"].bool()]


def assert_float_rule(output: Tensor, reference: Tensor, plain: Tensor) -> float:
    """`output` against a float64 reference: at most twice the error of torch's `plain` result, plus one ulp.

    Gives the error that this allows: twice torch's own.
    """
    error = parity.torch_error(plain, reference)
    found = parity.compare(output, reference, error)
    assert found.ok, found.reason
    return 2 * error


def assert_as_exact_as_torch(output: Tensor, reference: Tensor, plain: Tensor) -> None:
    """The root mean square error of a whole model in bfloat16, at most twice that of torch's `plain` result.

    Not the largest error: rounding grows through the layers, and its tails differ from one draw to the next.
    """
    ours, torchs = ((values.double() - reference).square().mean().sqrt() for values in (output, plain))
    assert ours <= 2 * torchs, f"error {ours:.3g}, and torch's own is {torchs:.3g}"


def greedy(model: nn.Module, batch: dict[str, Any], tokens: int = 8) -> Tensor:
    """What stock generate() makes of the batch."""
    ids: Tensor = model.generate(**batch, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
    return ids
