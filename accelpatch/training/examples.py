"""Rows in the form that TRL takes, as the model's tokenizer sees them: with or without its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelpatch.errors import LoadError
from accelpatch.training.rows import Row

NAMED = 5  # line numbers that a message names


@dataclass(frozen=True)
class Question:
    """A held-out prompt with its due answer. prompt: text, or messages for the chat template."""

    prompt: Any
    answer: str


@dataclass
class Examples:
    """What a trainer gets. train, held_out: rows as TRL takes them; chat: whether they go through the chat template.

    max_length: tokens to which the trainer cuts longer rows. notes: what was cut or left out, for the user.
    """

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    questions: list[Question]
    chat: bool
    max_length: int
    notes: list[str] = field(default_factory=list)


def make(
    train: Sequence[Row], held_out: Sequence[Row], tokenizer: Any, *, template: str, max_length: int, too_long: str
) -> Examples:
    """Examples of rows. template: "auto", "none" or a Jinja file; max_length: tokens of a row.

    too_long: "refuse" raises for longer rows, "cut" cuts their ends. Raises LoadError for a chat template that is not
    there or refuses a row, and for rows that are too long; both name lines.
    """
    chat = with_template(train, tokenizer, template)
    notes: list[str] = []
    kept = [_fitting(rows, tokenizer, chat, max_length, too_long, notes) for rows in (train, held_out)]
    if not kept[0]:
        raise LoadError(f"no row is left: the prompts alone fill {max_length} tokens; set data.max_length higher")
    questions = [one for row in held_out for one in _questions(row, chat)]
    return Examples(kept[0], kept[1], questions, chat, max_length, notes)


def with_template(rows: Sequence[Row], tokenizer: Any, template: str) -> bool:
    """Whether rows go through the chat template, as all but texts do where there is one; sets that of a file.

    Raises LoadError for messages where there is none.
    """
    if template not in ("auto", "none"):
        try:
            tokenizer.chat_template = Path(template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LoadError(f"data.template: {template} cannot be read as a Jinja file ({error})") from None
    has = bool(getattr(tokenizer, "chat_template", None))
    if "messages" in rows[0].values and not has:
        raise LoadError(
            "the model's tokenizer has no chat template, and messages need one: give rows of prompt and completion, or "
            "name a Jinja file as data.template"
        )
    return "messages" in rows[0].values or (has and template != "none" and "text" not in rows[0].values)


def as_trl(row: Row, chat: bool) -> list[dict[str, Any]]:
    """A row as TRL takes it. Of messages there is one for each answer of the assistant, its prompt all before it."""
    values = row.values
    if "messages" in values:
        made = values["messages"]
        spoken = [place for place, one in enumerate(made) if one["role"] == "assistant"]
        return [{"prompt": made[:place], "completion": [made[place]]} for place in spoken]
    if not chat:
        return [dict(values)]
    prompt = [{"role": "user", "content": values["prompt"]}]
    answers = {key: [{"role": "assistant", "content": text}] for key, text in values.items() if key != "prompt"}
    return [{"prompt": prompt, **answers}]


def _questions(row: Row, chat: bool) -> list[Question]:
    for one in as_trl(row, chat)[-1:]:
        if "completion" in one:
            answer = one["completion"]
            return [Question(one["prompt"], answer if isinstance(answer, str) else answer[0]["content"])]
    return []


def _fitting(
    rows: Sequence[Row], tokenizer: Any, chat: bool, most: int, too_long: str, notes: list[str]
) -> list[dict[str, Any]]:
    """The rows as TRL takes them, without those of which a cut leaves nothing to learn."""
    kept: list[dict[str, Any]] = []
    cut: list[tuple[int, int]] = []
    dropped: list[tuple[int, int]] = []
    for row in rows:
        for one in as_trl(row, chat):
            prompt, whole = lengths(one, tokenizer, row.line)
            if whole > most:
                (dropped if prompt >= most else cut).append((row.line, whole))
            if prompt < most:
                kept.append(one)
    if (cut or dropped) and too_long == "refuse":
        line, tokens = (cut + dropped)[0]
        raise LoadError(
            f"line {line} has {tokens} tokens, and a row may have {most} ({_lines(cut + dropped)}): shorten them, set "
            "data.max_length higher, up to the model's context, or set data.too_long=cut"
        )
    notes += [f"{_lines(cut)}: cut to {most} tokens"] if cut else []
    notes += [f"{_lines(dropped)}: left out, for the prompt alone has {most} tokens or more"] if dropped else []
    return kept


def lengths(one: dict[str, Any], tokenizer: Any, line: int) -> tuple[int, int]:
    """Tokens of the prompt, 0 where there is none, and of the whole row; of DPO's the longer answer."""
    from jinja2 import TemplateError

    if "text" in one:
        return 0, len(tokenizer(one["text"])["input_ids"]) + 1
    prompt, answers = one["prompt"], [one[key] for key in ("completion", "chosen", "rejected") if key in one]
    if isinstance(prompt, str):
        return _tokens(tokenizer, prompt), max(_tokens(tokenizer, prompt + answer) for answer in answers) + 1
    try:
        asked = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        whole = [tokenizer.apply_chat_template(prompt + answer, return_dict=True)["input_ids"] for answer in answers]
    except TemplateError as error:
        raise LoadError(f"line {line}: the chat template refuses it: {error}") from None
    return len(asked), max(map(len, whole))


def _tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text)["input_ids"])


def _lines(found: Sequence[tuple[int, int]]) -> str:
    lines = list(dict.fromkeys(line for line, _ in found))
    more = f" and {len(lines) - NAMED} more" if len(lines) > NAMED else ""
    return f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines[:NAMED]))}{more}"
