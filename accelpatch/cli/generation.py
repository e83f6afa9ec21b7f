"""Answers of a model to a prompt, streamed as text, and the rate at which it generates them: for `run` and `chat`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from . import prompt as prompts

if TYPE_CHECKING:
    from torch import Tensor

RATE_TOKENS = 64  # the fewest new tokens from which a rate is computed
WARM_UP_TOKENS = 8
MAX_SECONDS = 30.0  # time limit of a measurement


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled.

    temperature: 0 decodes greedily. top_p, top_k: None for the model's own. stops: texts before which an answer ends.
    draft: the model that drafts tokens, or None.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    stops: tuple[str, ...] = ()
    draft: Any = None

    def arguments(self) -> dict[str, Any]:
        """The arguments of ``generate()``."""
        drafting = {} if self.draft is None else {"assistant_model": self.draft}
        if self.temperature == 0:
            return GREEDY | {"max_new_tokens": self.max_new_tokens} | drafting
        given = {"top_p": self.top_p, "top_k": self.top_k}
        chosen = {name: value for name, value in given.items() if value is not None}
        return (
            {"do_sample": True, "temperature": self.temperature, "max_new_tokens": self.max_new_tokens}
            | chosen
            | drafting
        )


GREEDY: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}


def sampling(
    max_new_tokens: int, temperature: float, top_p: float | None, top_k: int | None, seed: int, stop: Sequence[str]
) -> Sampling:
    """Sampling by a command's options. Raises BadParameter for values out of range or that contradict each other."""
    if temperature != 0 and not 0.001 <= temperature <= 100:
        raise typer.BadParameter(f"{temperature} is neither 0 nor from 0.001 to 100", param_hint="--temperature")
    if top_p is not None and not 0 < top_p <= 1:
        raise typer.BadParameter(f"{top_p} is not above 0 and at most 1", param_hint="--top-p")
    for name, value in {"--top-p": top_p, "--top-k": top_k}.items():
        if value is not None and temperature == 0:
            raise typer.BadParameter("needs a --temperature above 0: without one, decoding is greedy", param_hint=name)
    for text in stop:
        if not text or not prompts.is_unicode(text):
            raise typer.BadParameter("is empty, or not UTF-8 text", param_hint="--stop")
    return Sampling(max_new_tokens, temperature, top_p, top_k, seed, tuple(stop))


class Stopped(Exception):
    """Raised by a streamer to end ``generate()``. Stopping criteria would not run on the fast paths."""


@dataclass(frozen=True)
class Rate:
    """New tokens per second, from the first to the last; None if not measured, for the reason `why_not`."""

    per_second: float | None
    why_not: str = ""

    def __str__(self) -> str:
        return f"not measured: {self.why_not}" if self.per_second is None else f"{self.per_second:.1f}"


@dataclass(frozen=True)
class Answer:
    """The answer to a prompt.

    tokens: their number. ended: "end" (by the model), "length", "stop" or "interrupted". seconds: from the first new
    token to the last.
    """

    text: str
    tokens: int
    ended: str
    seconds: float

    @property
    def rate(self) -> Rate:
        """The rate, not measured for a short answer."""
        if self.tokens < RATE_TOKENS:
            return Rate(None, f"the answer is shorter than {RATE_TOKENS} tokens")
        return Rate((self.tokens - 1) / self.seconds)

    def empty_because(self, template_left_out: bool = False) -> str | None:
        """Why the answer has no text; None if it has some. template_left_out: whether a chat template was not used."""
        if self.text.strip():
            return None
        if self.ended == "stop":
            return "it begins with a --stop text"
        if self.ended == "interrupted":
            return "it was interrupted"
        what = "are blank" if self.text else "are special ones"
        why = (
            "the model ended at once"
            if self.ended == "end" and self.tokens == 1
            else f"its {self.tokens} tokens {what}"
        )
        return f"{why}; this model has a chat template: leave out --raw" if template_left_out else why


def answer(
    loaded: Any,
    ids: Tensor,
    chosen: Sampling,
    write: Callable[[str], None],
    interrupted: Callable[[], bool] | None = None,
) -> Answer:
    """Continue ids [1, L]; `write` gets the text as it comes. interrupted: called at each token, True ends it."""
    import torch

    stream = TextStream(loaded.tokenizer, write, chosen.stops, interrupted)
    ended = "length"
    with torch.inference_mode():
        try:
            loaded.model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), streamer=stream, **chosen.arguments()
            )
        except Stopped as stopped:
            ended = str(stopped)
    if ended == "length" and len(stream.tokens) < chosen.max_new_tokens:
        ended = "end"
    return Answer(stream.text, len(stream.tokens), ended, stream.seconds)


def measured_rate(model: Any, ids: Tensor) -> Rate:
    """The rate of greedy ``generate()`` for RATE_TOKENS tokens after the prompt ids [1, L], after a warm-up call."""
    limit = prompts.context_length(model)
    if limit is not None and ids.shape[1] + RATE_TOKENS > limit:
        return Rate(None, f"the context of {limit} has no room for {RATE_TOKENS} more tokens")
    begin = time.perf_counter()
    _timed(model, ids, Timer(WARM_UP_TOKENS, begin + MAX_SECONDS))
    timer = Timer(RATE_TOKENS, begin + MAX_SECONDS)
    _timed(model, ids, timer)
    if timer.count < RATE_TOKENS:
        return Rate(None, f"{RATE_TOKENS} tokens take over {MAX_SECONDS:.0f} s")
    return Rate((timer.count - 1) / timer.seconds)


def _timed(model: Any, ids: Tensor, timer: Timer) -> None:
    import torch

    length = {"min_new_tokens": RATE_TOKENS, "max_new_tokens": RATE_TOKENS}
    with torch.inference_mode():
        try:
            model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), streamer=timer, **GREEDY, **length)
        except Stopped:
            return


class Timer:
    """A streamer for ``generate()``: counts new tokens, and raises Stopped at a count or a time of perf_counter.

    seconds: from the first new token to the last. The first ``put`` is the prompt.
    """

    def __init__(self, max_count: float = math.inf, deadline: float = math.inf):
        self.count, self.seconds = 0, 0.0
        self._max_count, self._deadline = max_count, deadline
        self._prompt_seen, self._first = False, 0.0

    def put(self, ids: Tensor) -> None:
        now = time.perf_counter()
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        if not self.count:
            self._first = now
        self.count, self.seconds = self.count + ids.numel(), now - self._first
        if self.count >= self._max_count or now > self._deadline:
            raise Stopped

    def end(self) -> None:
        """Called by ``generate()`` after the last token."""


class TextStream(Timer):
    """A streamer for ``generate()``: calls ``write`` with new text, once all bytes of its characters are there.

    ``text`` is the answer so far. It ends before the first of the texts `stops`; text that may be the beginning of one
    is not written before the next token decides. interrupted: called at each token, True ends it.
    """

    def __init__(
        self, tokenizer: Any, write: Callable[[str], None], stops: Sequence[str] = (),
        interrupted: Callable[[], bool] | None = None,
    ):  # fmt: skip
        super().__init__()
        self.text = ""
        self.tokens: list[int] = []
        self._tokenizer, self._write, self._stops, self._interrupted = tokenizer, write, tuple(stops), interrupted

    def put(self, ids: Tensor) -> None:
        before = self.count
        super().put(ids)
        if self.count == before:
            return
        self.tokens += ids.reshape(-1).tolist()
        text = self._decode()
        found = [index for stop in self._stops if (index := text.find(stop)) >= 0]
        if found:
            self._show(text[: min(found)])
            raise Stopped("stop")
        if self._interrupted is not None and self._interrupted():
            self._show(text)
            raise Stopped("interrupted")
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            partial = (n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
            self._show(text[: len(text) - max(partial, default=0)])

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
