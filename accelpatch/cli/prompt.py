"""Tokenizes prompts, checks that they fit the model's context, and streams answers as text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from accelpatch.errors import AccelpatchError, LoadError

if TYPE_CHECKING:
    from torch import Tensor, nn


def tokenizer_of(loaded: Any) -> Any:
    """The tokenizer of a loaded model; LoadError where it came without one."""
    if loaded.tokenizer is None:
        raise LoadError(
            f"{loaded.source.name} has no tokenizer; put tokenizer.json and tokenizer_config.json beside its weights"
        )
    return loaded.tokenizer


def encode(tokenizer: Any, prompt: str, *, chat: bool, option: str = "--prompt") -> Tensor:
    """Token ids [1, L] int64 of ``prompt``, with ``chat`` inside the model's chat template.

    Raises AccelpatchError for a prompt without tokens, naming the command-line option ``option``.
    """
    if chat and not getattr(tokenizer, "chat_template", None):
        raise LoadError("the model's tokenizer has no chat template; run without --chat")
    if chat:
        messages = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    ids: Tensor = encoded["input_ids"]
    if ids.numel() == 0:
        raise AccelpatchError(f"the text has no tokens; give another one with {option}")
    return ids.long()


def context_length(model: nn.Module) -> int | None:
    """The model's maximum context length in tokens; None where its configuration has none."""
    text = model.config.get_text_config(decoder=True)  # type: ignore[operator, union-attr]
    length = getattr(text, "max_position_embeddings", None)
    return length if isinstance(length, int) else None


def check_fits(model: nn.Module, prompt_tokens: int, new_tokens: int) -> None:
    """Raise AccelpatchError where prompt and answer together are longer than the model's context."""
    limit = context_length(model)
    if limit is not None and prompt_tokens >= limit:
        raise AccelpatchError(
            f"the prompt has {prompt_tokens} tokens and the model's context {limit}; shorten the prompt"
        )
    if limit is not None and prompt_tokens + new_tokens > limit:
        raise AccelpatchError(
            f"{prompt_tokens} tokens of prompt and {new_tokens} new ones are more than the model's context of {limit}; "
            f"use --max-new-tokens {limit - prompt_tokens} or less"
        )


class TextStream:
    """A streamer for ``generate()``: calls ``write`` with new text, once every byte of its characters has arrived.

    ``text`` is the answer so far. The first ``put`` is the prompt and is not shown.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], None]):
        self.text = ""
        self.tokens: list[int] = []
        self.first_token_at: float | None = None  # time.perf_counter() at the first new token
        self._tokenizer, self._write, self._prompt_seen = tokenizer, write, False

    def put(self, ids: Tensor) -> None:
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        self.tokens += ids.reshape(-1).tolist()
        text = self._decode()
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._show(text)

    def end(self) -> None:
        self._show(self._decode())

    def _decode(self) -> str:
        text: str = self._tokenizer.decode(self.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _show(self, text: str) -> None:
        if len(text) > len(self.text):
            self._write(text[len(self.text) :])
            self.text = text


def write_stdout(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def write_nothing(piece: str) -> None:
    """Discard the text: with --json the answer is part of the document that is printed at the end."""
