"""What tests of captured steps share: logits of a given continuation, by the fused step or by the stock loop."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from accelpatch.fusion.fused_model import FUSED
from accelpatch.fusion.signals import SentinelBuffers
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs.step import CAPTURED


class Given(LogitsProcessor):
    """Makes every loop take the same tokens, whatever the last bits of their logits say."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        chosen = (ids.shape[1] * 7 + torch.arange(len(ids), device=ids.device)) % (scores.shape[1] - 2) + 2
        return torch.full_like(scores, float("-inf")).scatter(1, chosen[:, None], 0.0)


def logits(model: Any, batch: dict[str, Tensor], new: int) -> Tensor:
    """[new, B, V] in float64, the prompt's first."""
    device = next(model.parameters()).device
    made = model.generate(
        **{key: value.to(device) for key, value in batch.items()}, max_new_tokens=new, do_sample=False,
        output_logits=True, return_dict_in_generate=True, logits_processor=LogitsProcessorList([Given()]),
    )  # fmt: skip
    return torch.stack(made.logits).double()


def silence(layers: Any, dtype: torch.dtype, device: torch.device) -> tuple[tuple[Any, ...], SentinelBuffers]:
    """In place of `with_signals`: no kernel signals the next."""
    return tuple(layers), SentinelBuffers(0, 0, device)


def inner(model: Any) -> Any:
    """The transformers model inside a PeftModel; another model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def stock(model: Any) -> Any:
    """A copy of a patched model that runs transformers' own loop over the same modules."""
    plain = copy.deepcopy(model)
    vars(inner(plain))[RUNTIME] = None
    return plain


def assert_like_the_stock_loop(model: Any, batch: dict[str, Tensor], new: int = 65) -> None:
    """Float32 logits of every step, to a few units in the last place of the largest one."""
    due = logits(stock(model), batch, new)
    error = (logits(model, batch, new) - due).abs().flatten(1).amax(1) / due.abs().flatten(1).amax(1)
    assert error.max() < 1e-5, f"step {int(error.argmax())} is off by {float(error.max()):.2g}"


def assert_float_rule(model: Any, batch: dict[str, Tensor], new: int = 32) -> None:
    """Fused layers are at most twice as far from float32 as the modules of the patched model are."""
    plain = stock(model)
    exact = logits(copy.deepcopy(plain).float(), batch, new)
    modules, fused, again = (
        ((logits(one, batch, new) - exact).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)).max().item()
        for one in (plain, model, model)  # a prompt's length that comes again is captured
    )
    assert max(fused, again) <= 2 * modules + 2**-8, (fused, again, modules)
    assert fused < 0.1, fused
    paths = inner(model).accelpatch.report().paths
    assert paths[FUSED] == paths[CAPTURED] == 2 * (new - 1), paths
    assert sum(count for way, count in paths.items() if "prefill" in way) == 2, paths
