"""A call of the model over the pages of continuous batching."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelpatch.errors import KernelError
from accelpatch.modules.attention_settings import SETTING
from accelpatch.modules.paged_attention import PAGED, no_mask
from accelpatch.runtime.continuous import pages
from accelpatch.runtime.cpu.torch_threads import all_threads

CONTINUOUS = "continuous batching"


def outputs(runtime: Any, forward: Any, model: Any, given: Mapping[str, Any]) -> Any:
    """The model's outputs after a call over pages, whose arguments by name are `given`; None where transformers' own
    attention runs it. forward: of the model's own class."""
    if vars(model.config).get(SETTING) != PAGED:
        runtime.paths[f"{CONTINUOUS}, transformers' attention"] += 1
        return None
    if (reason := pages.why_not(given)) is not None:
        raise KernelError(f"continuous batching gave the model {reason}: leave max_blocks_per_request at its default")
    given = {**given, pages.PAGED_CACHE: pages.paged_cache(given), "attention_mask": no_mask(given["input_ids"])}
    runtime.paths[CONTINUOUS] += 1
    with all_threads():
        return forward(model, **given)
