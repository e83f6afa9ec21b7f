"""OpenAI's three paths of a patched model: answers, streams, limits, keys, metrics and clients that go away."""

from __future__ import annotations

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from openai import AuthenticationError, NotFoundError

from accelpatch.serving.app import why_not_responses
from tests.support.serving import MESSAGES, NAME, Running, running, until

CHAT = "/v1/chat/completions"
LONG = {"messages": MESSAGES, "max_tokens": 900, "temperature": 0}


def metric(server: Running, name: str, **labels: str) -> float:
    """The value of a line of /metrics."""
    inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
    text = server.ask("/metrics")[1].decode()
    found = re.search(rf"^{name}{re.escape('{' + inside + '}') if inside else ''} (\S+)$", text, re.MULTILINE)
    return 0.0 if found is None else float(found[1])


def message(error: Any) -> str:
    return str(json.loads(error[1])["error"]["message"])


@pytest.mark.smoke
def test_chat(server: Running) -> None:
    asked: Any = {"model": NAME, "messages": MESSAGES, "max_completion_tokens": 12, "temperature": 0}
    with server.client() as client:
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(stream=True, **asked))
    text = server.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert whole.choices[0].message.content == server.lone(text, 12)
    assert "".join(one.choices[0].delta.content or "" for one in chunks) in whole.choices[0].message.content
    assert [whole.choices[0].finish_reason, chunks[-1].choices[0].finish_reason] == ["length", "length"]
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens == 12


@pytest.mark.smoke
def test_completion(server: Running) -> None:
    with server.client() as client:
        whole = client.completions.create(model=NAME, prompt="Once", max_tokens=9, temperature=0)
        chunks = list(client.completions.create(model=NAME, prompt="Once", max_tokens=9, temperature=0, stream=True))
    assert whole.choices[0].text == server.lone("Once", 9)
    assert "".join(one.choices[0].text for one in chunks) in whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.smoke
def test_response(server: Running) -> None:
    if (reason := why_not_responses()) is not None:
        assert metadata.version("transformers") < "5.24"
        answer = server.ask("/v1/responses", {"input": "Hello"})
        assert (answer[0], message(answer)) == (501, reason)
        return
    asked: Any = {"model": NAME, "input": "Hello", "max_output_tokens": 7, "temperature": 0}
    with server.client() as client:
        whole = client.responses.create(**asked)
        events = list(client.responses.create(stream=True, **asked))
    text = server.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert whole.output_text == server.lone(text, 7)
    assert whole.usage.output_tokens == 7
    assert events[-1].type == "response.completed"


def test_sampling_has_a_seed_of_its_own(server: Running) -> None:
    """The same seed gives the same answer whatever runs beside it, and another another."""
    asked: Any = {"model": NAME, "prompt": "Once", "max_tokens": 24, "temperature": 1.5}
    with server.client() as client, ThreadPoolExecutor(6) as pool:
        seeds = [1, 2, 3, 1, 2, 3]
        texts = list(pool.map(lambda seed: client.completions.create(seed=seed, **asked).choices[0].text, seeds))
    assert texts[:3] == texts[3:]
    assert len(set(texts)) == 3


def test_many_users(server: Running) -> None:
    """None lost, none mixed up: each answer is the one that a lone call of generate() makes."""
    prompts = {f"{number} " * (1 + number % 7): 4 + number % 13 for number in range(40)}
    with server.client() as client, ThreadPoolExecutor(8) as pool:
        ask: Any = lambda one: client.completions.create(model=NAME, prompt=one, max_tokens=prompts[one], temperature=0)  # noqa: E731
        answers = dict(zip(prompts, pool.map(ask, prompts), strict=True))
    for prompt, tokens in prompts.items():
        assert answers[prompt].choices[0].text == server.lone(prompt, tokens)
    until(lambda: server.app._open == 0)


def test_metrics_and_health(server: Running) -> None:
    before = [metric(server, "accelpatch_tokens_total", kind=kind) for kind in ("prompt", "generated")]
    answered = metric(server, "accelpatch_requests_total", path="/v1/completions", status="200")
    server.ask("/v1/completions", {"prompt": "12345", "max_tokens": 6, "temperature": 0})
    after = [metric(server, "accelpatch_tokens_total", kind=kind) for kind in ("prompt", "generated")]
    assert [new - old for new, old in zip(after, before, strict=True)] == [5, 6]
    assert metric(server, "accelpatch_requests_total", path="/v1/completions", status="200") == answered + 1
    assert metric(server, "accelpatch_first_token_seconds_count") > 0
    assert json.loads(server.ask("/health")[1]) == {"status": "ok", "model": NAME, "open": 0}
    assert json.loads(server.ask("/v1/models")[1])["data"][0]["id"] == NAME


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_client_that_hangs_up_frees_its_place(server: Running, stream: bool) -> None:
    """Both the one whose answer is made and the one that waits behind it, long before the answer would end."""
    gone, tokens = (
        metric(server, "accelpatch_hung_up_total"),
        metric(server, "accelpatch_tokens_total", kind="generated"),
    )
    data = json.dumps(LONG | {"stream": stream}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    clients = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
    for client in clients:
        client.sendall(head.encode() + data)
    until(lambda: json.loads(server.ask("/health")[1])["open"] == 2)
    for client in clients:
        client.close()
    until(lambda: json.loads(server.ask("/health")[1])["open"] == 0)
    assert server.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
    assert metric(server, "accelpatch_hung_up_total") == gone + 2
    assert metric(server, "accelpatch_tokens_total", kind="generated") - tokens < 900


def test_too_many_requests(folder: Path) -> None:
    with running(folder, requests=2, new_tokens=900) as server, ThreadPoolExecutor(2) as pool:
        long = [pool.submit(server.ask, CHAT, LONG) for _ in range(2)]
        until(lambda: json.loads(server.ask("/health")[1])["open"] == 2)
        refused = server.ask(CHAT, LONG)
        assert refused[0] == 429
        assert "2 requests are open" in message(refused)
        assert [one.result()[0] for one in long] == [200, 200]
        assert server.ask(CHAT, LONG | {"max_tokens": 1})[0] == 200


def test_limits_of_one_request(folder: Path) -> None:
    with running(folder, prompt_tokens=40, new_tokens=900, seconds=0.05, body_bytes=2000) as server:
        cases = {
            "the prompt has 60 tokens, and this server takes 40": {"prompt": "a" * 60},
            "this server generates 900 at most": {"prompt": "a", "max_tokens": 901},
            "the body is over 2000 bytes": {"prompt": "a" * 2000},
            "longer than the 0.05 s": {"prompt": "a", "max_tokens": 900, "temperature": 0},
        }
        found = {text: server.ask("/v1/completions", body) for text, body in cases.items()}
        assert [status for status, _ in found.values()] == [400, 400, 413, 504]
        for text, answer in found.items():
            assert text in message(answer)
        streamed = server.ask("/v1/completions", {"prompt": "a", "max_tokens": 900, "stream": True})[1].decode()
        last = json.loads(streamed.strip().rpartition("data: ")[2])
        assert "longer than the 0.05 s" in last["error"]


def test_a_key(folder: Path) -> None:
    with running(folder, key="secret") as server:
        assert server.ask("/health")[0] == 200
        assert [server.ask(path)[0] for path in ("/v1/models", "/metrics")] == [401, 401]
        assert server.ask(CHAT, LONG | {"max_tokens": 1}, Authorization="Bearer secrets")[0] == 401
        assert server.ask(CHAT, LONG | {"max_tokens": 1}, Authorization="Bearer secret")[0] == 200
        with server.client("secret") as client:
            assert client.models.list().data[0].id == NAME
        with server.client("wrong") as client, pytest.raises(AuthenticationError, match="missing or wrong"):
            client.models.list()


def test_pages_of_the_web_cannot_reach_it(server: Running) -> None:
    """A form's content type needs no leave of the browser's, and a name that a page made point here is another host."""
    assert server.ask(CHAT, LONG, Content_Type="text/plain")[0] == 415
    assert server.ask("/v1/models", Host="evil.example")[0] == 400
    assert server.ask("/v1/models", Host="localhost:1")[0] == 200
    assert [server.ask(path, {})[0] for path in ("/reset", "/load_model", "/v1/audio/transcriptions")] == [404] * 3


def test_another_model(server: Running) -> None:
    with server.client() as client, pytest.raises(NotFoundError, match="has the model tiny alone"):
        client.completions.create(model="other", prompt="a")
