"""Held-out prompts answered by generate(), and how many answers are those that were due, character by character."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accelpatch.progress import Progress
from accelpatch.training.examples import Question

AT_ONCE = 25  # prompts
SPARE = 4  # tokens beyond the longest due answer: a longer one cannot be exact


@dataclass(frozen=True)
class Score:
    """exact: how many of `total` answers are those that were due, up to blanks at the ends."""

    exact: int
    total: int
    examples: tuple[tuple[str, str, str], ...]  # a few: prompt, due answer, the model's

    def __str__(self) -> str:
        return f"{self.exact} of {self.total} ({self.exact / self.total:.0%})"


@torch.no_grad()
def score(
    model: Any, tokenizer: Any, questions: Sequence[Question], most: int, progress: Progress, stage: str
) -> Score:
    """Answer greedily with at most `most` new tokens. The model's training mode is as it was at the end."""
    due = max(len(tokenizer(one.answer)["input_ids"]) for one in questions)
    given: list[str] = []
    was_training = model.training
    model.eval()
    try:
        for begin in range(0, len(questions), AT_ONCE):
            progress(stage, begin, len(questions))
            given += _answers(model, tokenizer, questions[begin : begin + AT_ONCE], min(most, due + SPARE))
        progress(stage, len(questions), len(questions))
    finally:
        model.train(was_training)
    exact = [answer == one.answer.strip() for answer, one in zip(given, questions, strict=True)]
    shown = [(_text(one.prompt), one.answer, answer) for one, answer in zip(questions[:3], given, strict=False)]
    return Score(sum(exact), len(questions), tuple(shown))


def _answers(model: Any, tokenizer: Any, questions: Sequence[Question], most: int) -> list[str]:
    encoded = [_ids(tokenizer, one.prompt) for one in questions]
    longest = max(map(len, encoded))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    ids = torch.tensor([[pad] * (longest - len(one)) + one for one in encoded], device=model.device)
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in encoded], device=model.device)
    made = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=most, do_sample=False, temperature=None, top_p=None,
        top_k=None, pad_token_id=pad,
    )  # fmt: skip
    return [tokenizer.decode(one[longest:], skip_special_tokens=True).strip() for one in made]


def _ids(tokenizer: Any, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])
