"""A conversation with a model: its messages, which of them fit the context, and the file that they are saved in."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelpatch.errors import AccelpatchError

from . import generation
from . import prompt as prompts
from .generation import Answer, Sampling

if TYPE_CHECKING:
    from torch import Tensor

SHARE = 4  # an answer is given room for 1/SHARE of the context, or its own limit if that is less


class Conversation:
    """Messages to and from a loaded model, the system message first where there is one.

    messages: all of them, also those that no longer fit the context. dropped: how many did not fit at the last answer.
    used: tokens of the context in use after it. limit: the context's length in tokens, or None.
    """

    def __init__(self, loaded: Any, sampling: Sampling, system: str | None = None):
        import torch

        self.limit = prompts.context_length(loaded.model)
        self.messages: list[prompts.Message] = [] if system is None else [prompts.message("system", system)]
        self.last: Answer | None = None
        self.used = self.dropped = 0
        self._loaded, self._sampling = loaded, sampling
        self._system = list(self.messages)
        torch.manual_seed(sampling.seed)

    def reset(self) -> None:
        """Forget all but the system message."""
        self.messages, self.last, self.used, self.dropped = list(self._system), None, 0, 0

    def set_adapter(self, name: str) -> str:
        """Make another adapter the active one; returns its name. Raises AccelpatchError if there is no such adapter."""
        known = list(getattr(self._loaded.model, "peft_config", {}))
        if name not in known:
            listed = f"there are {', '.join(known)}" if known else "give some by --adapter"
            raise AccelpatchError(f"no adapter is called {name!r}: {listed}")
        self._loaded.model.set_adapter(name)
        return name

    def answer(self, text: str, write: Callable[[str], None], interrupted: Callable[[], bool]) -> Answer:
        """Answer a message, and add both to the conversation; of an interrupted answer the part that was generated.

        Raises AccelpatchError, and leaves the conversation as it was, for a message that does not fit the context.
        """
        messages = [*self.messages, prompts.message("user", text)]
        ids, self.dropped = self._encode_fitting(messages)
        chosen = self._sampling
        if self.limit is not None:
            chosen = replace(chosen, max_new_tokens=min(self.limit - ids.shape[1], chosen.max_new_tokens))
        answer = generation.answer(self._loaded, ids.to(self._loaded.model.device), chosen, write, interrupted)
        self.messages = [*messages, prompts.message("assistant", answer.text)]
        self.last, self.used = answer, ids.shape[1] + answer.tokens
        return answer

    def _encode_fitting(self, messages: list[prompts.Message]) -> tuple[Tensor, int]:
        """Ids [1, L] of the messages that fit the context, and the number of messages that were dropped: pairs of
        question and answer, the oldest first."""
        first, dropped = len(self._system), 0
        while True:
            kept = [*messages[:first], *messages[first + dropped :]]
            ids = prompts.encode_messages(self._loaded.tokenizer, kept)
            if self.limit is None:
                return ids, dropped
            only_question = len(kept) == first + 1
            room = 1 if only_question else min(self._sampling.max_new_tokens, self.limit // SHARE)
            if ids.shape[1] + room <= self.limit:
                return ids, dropped
            if only_question:
                raise AccelpatchError(
                    f"the message is {ids.shape[1]} tokens long, and the model's context {self.limit}: shorten it"
                )
            dropped += 2

    def save(self, path: Path, *, replace: bool) -> None:
        """Write the messages as JSON, all or nothing. replace: whether to overwrite an existing file.

        Raises AccelpatchError where it cannot be written.
        """
        text = json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n"
        try:
            if path.is_dir():
                raise AccelpatchError(f"{path} is a folder: name a file")
            if path.exists() and not replace:
                raise AccelpatchError(f"{path} is there already; /save! {path} writes over it")
            part = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                part.write_text(text, encoding="utf-8")
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            raise AccelpatchError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from error
