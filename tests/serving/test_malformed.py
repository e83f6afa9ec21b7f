"""Requests that are wrong in many ways: each gets a status of 4xx with a reason, and the server goes on."""

from __future__ import annotations

import gc
import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from accelpatch.serving.app import why_not_responses
from tests.support.serving import MESSAGES, Running, until

CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 1}, TEXT: {"prompt": "a", "max_tokens": 1},
    RESPONSE: {"input": "a", "max_output_tokens": 1},
}  # fmt: skip
JUNK = [
    None, True, -1, 0, 1.5, 1e308, 2**70, -(2**70), "", "x", "\ud800", "a\u0000b", [], [None], [[]], {}, {"a": 1},
    [{"role": "user"}], [{"role": "user", "content": 7}], [{"role": "tool"}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": "file:///etc"}]}],
    [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
]  # fmt: skip
FIELDS = (
    "messages", "prompt", "input", "max_tokens", "max_completion_tokens", "max_output_tokens", "temperature", "top_p",
    "stop", "seed", "n", "stream", "tools", "logit_bias", "frequency_penalty", "presence_penalty", "logprobs", "model",
    "generation_config", "chat_template_kwargs", "response_format", "instructions", "unknown", "suffix", "best_of",
)  # fmt: skip


def bodies(count: int, seed: int) -> list[tuple[str, bytes]]:
    """Paths and bodies: good ones with one or more fields replaced by junk, and bytes that are no such object."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        path = draw.choice(list(GOOD))
        body: Any = dict(GOOD[path])
        for _ in range(draw.randint(1, 3)):
            body[draw.choice(FIELDS)] = draw.choice(JUNK)
        data = json.dumps(body).encode()
        kind = draw.randrange(8)
        if kind == 0:
            data = data[: draw.randrange(len(data))]
        elif kind == 1:
            place = draw.randrange(len(data))
            data = data[:place] + draw.randbytes(3) + data[place:]
        found.append((path, data))
    return found


def check(server: Running, path: str, data: bytes) -> int:
    """Send it; returns the status, which is 200 where the junk was harmless."""
    status, answer = server.ask(path, data)
    lacking = path == RESPONSE and status == 501 and why_not_responses() is not None
    assert status == 200 or 400 <= status < 500 or lacking, (status, answer, data)
    if status != 200:
        assert json.loads(answer)["error"]["message"], data
    return status


def test_hundreds(server: Running) -> None:
    statuses = [check(server, *one) for one in bodies(400, 0)]
    assert statuses.count(200) < 150
    assert server.ask(TEXT, GOOD[TEXT])[0] == 200
    until(lambda: server.app._open == 0)


@pytest.mark.slow
def test_ten_thousand_that_are_refused(server: Running) -> None:
    """The process does not grow by them: neither its memory, nor its threads, nor what the server keeps of requests."""
    refused, seed, held = 0, 1, list[tuple[int, int]]()
    while refused < 10_000:
        refused += sum(check(server, *one) != 200 for one in bodies(500, seed))
        seed += 1
        gc.collect()
        held.append((_memory(), threading.active_count()))
    assert server.ask(TEXT, GOOD[TEXT])[0] == 200
    until(lambda: server.app._open == 0)
    assert not server.app.batch._waiting
    first, last = held[len(held) // 4], held[-1]
    assert last[0] - first[0] < 10e6, held
    assert last[1] <= first[1] + 2, held


def _memory() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("path", "change", "reason"),
    [
        pytest.param(CHAT, {"temperature": -0.1}, "temperature: Input should be greater than or equal to 0", id="cold"),
        pytest.param(CHAT, {"max_tokens": 10**9}, "this server generates 900 at most", id="long"),
        pytest.param(CHAT, {"messages": []}, "messages: List should have at least 1 item", id="no messages"),
        pytest.param(CHAT, {"n": 2}, "n is not supported", id="two answers"),
        pytest.param(CHAT, {"nn": 2}, "Unexpected fields in the request", id="a field"),
        pytest.param(CHAT, {"logit_bias": {"999999": 1}}, "no token's number", id="a token"),
        pytest.param(CHAT, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "may not have", id="a template"),
        pytest.param(CHAT, {"generation_config": "{}"}, "generation_config is not supported", id="configuration"),
        pytest.param(TEXT, {"prompt": "a" * 2000}, "the model's context is 1024", id="a prompt over the context"),
        pytest.param(TEXT, {"stop": []}, "stop", id="no stop"),
        pytest.param(RESPONSE, {"previous_response_id": "x"}, "previous_response_id is not supported", id="before"),
    ],
)  # fmt: skip
def test_reasons(server: Running, path: str, change: dict[str, Any], reason: str) -> None:
    status, answer = server.ask(path, GOOD[path] | change)
    if path == RESPONSE and (lacking := why_not_responses()) is not None:
        status, reason = 400, lacking
    assert (status // 100, reason in json.loads(answer)["error"]["message"]) == (4, True), answer


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b"", "not valid JSON", id="nothing"),
        pytest.param(b"[1]", "no JSON object", id="a list"),
        pytest.param(b'{"prompt": "a", "temperature": NaN}', "NaN is no JSON number", id="NaN"),
        pytest.param(b'{"prompt": "\\ud83d"}', "not valid Unicode", id="half a character"),
        pytest.param(b'{"prompt": "\xff"}', "not valid Unicode", id="bytes"),
        pytest.param(b'{"a":' * 100_000, "nested too deeply", id="depth"),
        pytest.param(b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}", "not valid JSON", id="a long number"),
    ],
)
def test_no_json(server: Running, data: bytes, reason: str) -> None:
    status, answer = server.ask(TEXT, data)
    assert (status, reason in json.loads(answer)["error"]["message"]) == (400, True), answer


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"temperature": 0.7}], ids=["whole", "a stream", "sampled"])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_token_that_the_model_does_not_know(
    server: Running, path: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of another model's tokenizer."""
    monkeypatch.setattr(server.model.config, "vocab_size", 2)
    status, answer = server.ask(path, GOOD[path] | more)
    message = json.loads(answer)["error"]["message"]
    assert (status, "the model's vocabulary 2 tokens" in message) == (400, True), answer
