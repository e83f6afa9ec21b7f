"""A load of N users on a server that speaks OpenAI's API: when requests go out, and what came of each."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelpatch.errors import AccelpatchError

WORDS = ("the", "of", "and", "a", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with")

Shown = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Asked:
    """One request. new_tokens: at most."""

    prompt: str
    new_tokens: int


@dataclass(frozen=True)
class Load:
    """users: requests open at once. rate: mean arrivals a second (a Poisson process); None: each user sends its next
    request when the last one is answered. seconds: until a request counts as failed. temperature: 0 for
    greedy answers."""

    url: str
    model: str
    users: int
    rate: float | None = None
    api_key: str | None = None
    chat: bool = True
    seconds: float = 600.0
    temperature: float = 0.0


@dataclass
class Answer:
    """What came of a request. Seconds are counted from the start of the load; moments: of each piece of text.

    tokens: as the server counts them, 0 where it does not. failure: why it failed, or None.
    """

    sent: float
    moments: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0
    text: str = ""
    failure: str | None = None

    @property
    def first(self) -> float | None:
        """Seconds from sending to the first piece of text."""
        return self.moments[0] - self.sent if self.moments else None

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first; None for fewer than two."""
        if self.tokens < 2 or len(self.moments) < 2:
            return None
        return (self.moments[-1] - self.moments[0]) / (self.tokens - 1)


def drawn(count: int, words: tuple[int, int], new_tokens: tuple[int, int], seed: int) -> list[Asked]:
    """Requests with lengths drawn uniformly from two ranges, both ends included; the same for the same seed."""
    draw = random.Random(seed)
    return [
        Asked(" ".join(draw.choices(WORDS, k=draw.randint(*words))), draw.randint(*new_tokens)) for _ in range(count)
    ]


def from_file(path: Path, count: int, new_tokens: int) -> list[Asked]:
    """Requests of a file of JSON lines, {"prompt": text, "max_tokens": number, which may be missing}, over and over.

    Raises AccelpatchError for a line that is none.
    """
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeError:
        raise AccelpatchError(f"{path} is not UTF-8 text") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            asked = Asked(row["prompt"], row.get("max_tokens", new_tokens))
        except (ValueError, TypeError, KeyError, AttributeError):
            asked = Asked("", 0)
        text, most = asked.prompt, asked.new_tokens
        if not (isinstance(text, str) and text and type(most) is int and most > 0):
            raise AccelpatchError(f'{path}:{number} is no {{"prompt": "...", "max_tokens": 16}}')
        found.append(asked)
    if not found:
        raise AccelpatchError(f"{path} has no line")
    return [found[place % len(found)] for place in range(count)]


def run(load: Load, requests: Sequence[Asked], seed: int, shown: Shown | None) -> list[Answer]:
    """Send the requests and return what came of each, in their order. shown: a progress function."""
    return asyncio.run(_run(load, requests, seed, shown))


def model_of(url: str, api_key: str | None) -> str:
    """The name of the first model that a server lists. Raises AccelpatchError where it cannot be asked."""
    import openai

    try:
        with openai.OpenAI(base_url=f"{url}/v1", api_key=api_key or "none", max_retries=0, timeout=20) as client:
            return client.models.list().data[0].id
    except (openai.OpenAIError, IndexError, ValueError, TypeError) as error:
        raise AccelpatchError(f"{url}/v1/models does not answer as a server does: {error}") from None


async def _run(load: Load, requests: Sequence[Asked], seed: int, shown: Shown | None) -> list[Answer]:
    import openai

    start = time.monotonic()
    answers: list[Answer | None] = [None] * len(requests)
    todo, done = enumerate(requests), 0
    async with openai.AsyncOpenAI(
        base_url=f"{load.url}/v1", api_key=load.api_key or "none", max_retries=0, timeout=load.seconds
    ) as client:

        async def one(place: int, asked: Asked) -> None:
            nonlocal done
            answers[place] = await _answer(client, load, asked, start)
            done += 1
            if shown is not None:
                shown("requests", done, len(requests))

        async def user() -> None:
            for place, asked in todo:
                await one(place, asked)

        if load.rate is None:
            await asyncio.gather(*(user() for _ in range(load.users)))
        else:
            await _arrivals(load, todo, one, random.Random(seed))
    return [one for one in answers if one is not None]


async def _arrivals(load: Load, todo: Iterator[tuple[int, Asked]], one: Any, draw: random.Random) -> None:
    places, running = asyncio.Semaphore(load.users), set()
    assert load.rate is not None
    for place, asked in todo:
        await places.acquire()
        task = asyncio.ensure_future(one(place, asked))
        running.add(task)
        task.add_done_callback(running.discard)
        task.add_done_callback(lambda _: places.release())
        await asyncio.sleep(draw.expovariate(load.rate))
    await asyncio.gather(*running)


async def _answer(client: Any, load: Load, asked: Asked, start: float) -> Answer:
    """Stream one answer."""
    import openai

    found, reason = Answer(time.monotonic() - start), None
    try:
        async for chunk in _chunks(client, load, asked):
            if "error" in chunk:
                raise ValueError(str(chunk["error"]))
            for choice in chunk.get("choices") or ():
                text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                reason = choice.get("finish_reason") or reason
                if text:
                    found.moments.append(time.monotonic() - start)
                    found.text += text
            usage = chunk.get("usage") or {}
            found.tokens, found.prompt_tokens = usage.get("completion_tokens", 0), usage.get("prompt_tokens", 0)
        if reason is None:
            found.failure = "the stream ended early"
    except openai.APIStatusError as error:
        found.failure = f"status {error.status_code}"
    except (openai.OpenAIError, *_transport_errors(), ValueError) as error:
        found.failure = f"{type(error).__name__}: {error}"
    found.ended = time.monotonic() - start
    return found


async def _chunks(client: Any, load: Load, asked: Asked) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream, as JSON: reading them into objects would cost the load tool more than the server."""
    options = {"model": load.model, "max_tokens": asked.new_tokens, "temperature": load.temperature, "stream": True,
               "stream_options": {"include_usage": True}}  # fmt: skip
    path: Any = client.completions
    if load.chat:
        path, options["messages"] = client.chat.completions, [{"role": "user", "content": asked.prompt}]
    else:
        options["prompt"] = asked.prompt
    async with path.with_streaming_response.create(**options) as response:
        async for line in response.iter_lines():
            if line.startswith("data:") and (data := line[5:].strip()) != "[DONE]":
                yield json.loads(data)


def _transport_errors() -> list[type[Exception]]:
    """What the HTTP client that openai uses raises in the middle of a stream; releases of openai differ in it."""
    return [sys.modules[name].HTTPError for name in ("httpx2", "httpx") if name in sys.modules]
