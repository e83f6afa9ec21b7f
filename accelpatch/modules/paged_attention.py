"""Attention over the pages of continuous batching, as transformers' attention interface has it.

While a manager of continuous batching lives, the model's configurations name this function. A call over pages gives it
a PagedCache in the place of transformers' cache; other calls meanwhile run the implementation that the configuration
named before, with its masks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from accelpatch.kernels.ops.attention.paged_attention import paged_attention_
from accelpatch.modules.attention_settings import EAGER, names_in
from accelpatch.modules.paged_cache import PAGES, PagedCache
from accelpatch.modules.paged_setting import PAGED, implementation

CAPPED = ("eager", None)  # implementations that cap scores where a model has a softcap
STANDS_FOR = (*CAPPED, "sdpa")  # the implementations in whose place the function can be


def register() -> None:
    """Make the function and its mask known to transformers under PAGED."""
    AttentionInterface.register(PAGED, attention_over_pages)
    AttentionMaskInterface.register(PAGED, _mask)


def attention_over_pages(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
    softcap: float | None = None, s_aux: Tensor | None = None, **options: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """transformers' attention interface: y[1, T, Hq, D] of query[1, Hq, T, D] over the pages of the call.

    Without pages, the implementation that the module's configuration named before.
    """
    before = implementation(module.config)
    pages = options.pop(PAGES, None) or options.get("cache")
    if not isinstance(pages, PagedCache):
        given = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
        options |= {name: one for name, one in given.items() if one is not None}
        return _other(module, before)(module, query, key, value, attention_mask, **options)
    layer = pages.of(int(getattr(module, "layer_idx", 0)))
    q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    cap = (softcap or 0.0) if before in CAPPED else 0.0
    y = paged_attention_(q, k, v, layer.keys, layer.values, layer.rows, scale, layer.window, cap, s_aux)
    return y[None], None


def _other(module: Any, name: Any) -> Callable[..., Any]:
    """The function that the model's own code runs for a name."""
    cls = getattr(type(module), "replaced_class", type(module))
    own = vars(sys.modules[cls.__module__])
    eager = next(own[one] for one in (*names_in(cls.forward), *own) if one.endswith(EAGER) and one in own)
    found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(name or "eager", eager)
    return found


def _mask(*args: Any, **given: Any) -> Any:
    """transformers' mask interface: the mask of the implementation that the configuration named before."""
    make = ALL_MASK_ATTENTION_FUNCTIONS.get(implementation(given["config"]) or "eager")
    return None if make is None else make(*args, **given)


def no_mask(like: Tensor) -> Tensor:
    """A mask that says nothing, in whose stead transformers makes none."""
    return torch.empty(1, 1, 1, 1, dtype=torch.bool, device=like.device)
