"""Wrappers for calls into transformers: errors of damaged files become LoadErrors, and progress bars are hidden."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers.utils import logging as transformers_logging

from accelpatch.errors import LoadError

# Exceptions of transformers and gguf on a damaged or unknown file, which they hardly check.
_BROKEN = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    AssertionError,
    OverflowError,
    ImportError,
    OSError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    struct.error,
)


class explained:
    """Context manager: turns exceptions that readers raise on a bad file into a LoadError that begins with ``what``."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None or issubclass(kind, torch.OutOfMemoryError):
            return
        # The tokenizers library raises bare Exceptions; those of any other class that is not listed are bugs.
        if issubclass(kind, _BROKEN) or kind is Exception:
            said = next(iter(str(error).strip().splitlines()), "")
            raise LoadError(f"{self.what}: {kind.__name__}: {said}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context manager: disables transformers' progress bars; the caller shows its own progress."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
