"""Attention masks in captured calls of encoders: one that hides nothing is left out, as transformers does elsewhere.

transformers drops a padding mask of ones before attention, but not while a graph is captured, because it would have to
look at its values. Attention with a mask that hides nothing takes two to three times as long on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import masking_utils

MASK = "attention_mask"
TRACING = "is_tracing"  # by this name transformers' masks ask whether a graph is captured
_LOCK = threading.RLock()  # or two threads would put each other's function back


def without_full_mask(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call, without an attention mask [B, L] that is 1 everywhere."""
    mask = given.get(MASK)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not bool((mask == 1).all()):
        return given
    return {name: one for name, one in given.items() if name != MASK}


@contextmanager
def no_mask_of_ones() -> Iterator[None]:
    """Context manager: in this thread, transformers makes no mask of ones where it is given none, in a captured program
    too. Older versions, 5.17 among them, make one. transformers' own function is back at the end."""
    with _LOCK:
        asked, thread = getattr(masking_utils, TRACING), threading.get_ident()

        def is_tracing(tensor: Any = None) -> bool:
            return False if tensor is None and threading.get_ident() == thread else bool(asked(tensor))

        setattr(masking_utils, TRACING, is_tracing)
        try:
            yield
        finally:
            setattr(masking_utils, TRACING, asked)
