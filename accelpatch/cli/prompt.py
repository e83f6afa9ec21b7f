"""Tokenizes prompts and conversations, and checks that they fit the model's context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accelpatch.errors import AccelpatchError, LoadError

if TYPE_CHECKING:
    from torch import Tensor, nn

Message = Mapping[str, str]  # role: "system", "user" or "assistant"; content: its text


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: arguments that are not valid text contain surrogates, which cannot."""
    try:
        text.encode()
    except UnicodeError:
        return False
    return True


def tokenizer_of(loaded: Any) -> Any:
    """The tokenizer of a loaded model; LoadError where it came without one."""
    if loaded.tokenizer is None:
        raise LoadError(
            f"{loaded.source.name} has no tokenizer; put tokenizer.json and tokenizer_config.json beside its weights"
        )
    return loaded.tokenizer


def has_template(tokenizer: Any) -> bool:
    """Whether a tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def check_template(tokenizer: Any) -> None:
    """Raise LoadError where a tokenizer has no chat template."""
    if not has_template(tokenizer):
        raise LoadError("the model's tokenizer has no chat template: `accelpatch run --raw` gives it plain text")


def message(role: str, text: str) -> Message:
    """A message of a conversation."""
    return {"role": role, "content": text}


def encode(tokenizer: Any, prompt: str, *, chat: bool, system: str | None = None, option: str = "--prompt") -> Tensor:
    """Token ids [1, L] int64 of ``prompt``, with ``chat`` inside the model's chat template.

    Raises AccelpatchError for a prompt without tokens, naming the command-line option ``option``.
    """
    if chat:
        first = [] if system is None else [message("system", system)]
        return encode_messages(tokenizer, [*first, message("user", prompt)])
    ids: Tensor = tokenizer(prompt, return_tensors="pt")["input_ids"]
    if ids.numel() == 0:
        raise AccelpatchError(f"the text has no tokens; give another one with {option}")
    return ids.long()


def encode_messages(tokenizer: Any, messages: Sequence[Message]) -> Tensor:
    """Token ids [1, L] int64 of a conversation in the model's chat template, up to where the answer begins.

    Raises LoadError if there is no template, and AccelpatchError if the template refuses the conversation.
    """
    from jinja2 import TemplateError

    check_template(tokenizer)
    try:
        encoded = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    except TemplateError as error:
        hint = "; leave out --system" if messages[0]["role"] == "system" else ""
        raise AccelpatchError(f"the model's chat template refuses this conversation: {error}{hint}") from error
    ids: Tensor = encoded["input_ids"]
    if ids.numel() == 0:
        raise AccelpatchError("the model's chat template makes no tokens of the prompt: give it with --raw")
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
