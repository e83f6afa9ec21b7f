"""Greedy requests of several users are answered at once, others one after another beside them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

import accelpatch
from accelpatch.fusion.native_rows import logits_of_rows
from accelpatch.runtime.continuous import step
from accelpatch.serving.batch import PAGE, Batch, Router, Waiting
from accelpatch.serving.ticket import HungUp, Ticket
from tests.support.serving import NAME, Running, running
from tests.support.tiny import CAUSAL

PROMPTS = ["Hello", "The sea is", "One two three four five", "a", "Why?"]
NEW = 24


def complete(server: Running, prompt: str, **more: Any) -> str:
    made = server.client().completions.create(model=NAME, prompt=prompt, max_tokens=NEW, **{"temperature": 0, **more})
    return str(made.choices[0].text)


def batched(server: Running) -> int:
    paths = server.model.accelpatch.report().paths
    return sum(count for path, count in paths.items() if path.startswith("continuous batching"))


def test_several_users_get_what_a_lone_one_gets(server: Running) -> None:
    due = [server.lone(prompt, NEW) for prompt in PROMPTS]
    before = batched(server)
    with ThreadPoolExecutor(len(PROMPTS)) as users:
        assert list(users.map(lambda prompt: complete(server, prompt), PROMPTS)) == due
    steps = batched(server) - before
    assert NEW <= steps < NEW * len(PROMPTS), "tokens of several requests come from one step"


def test_streams_and_sampled_answers_beside_them(server: Running) -> None:
    due = server.lone(PROMPTS[1], NEW)
    with ThreadPoolExecutor(3) as users:
        sampled = [users.submit(complete, server, PROMPTS[2], temperature=1.0, seed=5) for _ in range(2)]
        chunks = server.client().completions.create(
            model=NAME, prompt=PROMPTS[1], max_tokens=NEW, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) in due
        assert sampled[0].result() == sampled[1].result()


def test_a_client_that_hangs_up_leaves_the_batch(server: Running) -> None:
    stream = server.client().completions.create(model=NAME, prompt="Hello", max_tokens=900, temperature=0, stream=True)
    next(iter(stream))
    stream.close()
    assert complete(server, PROMPTS[3]) == server.lone(PROMPTS[3], NEW)
    end = time.monotonic() + 20
    while server.app.batch._waiting:
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_answer_that_nobody_takes_is_cancelled() -> None:
    """A client that went away is mostly seen when the next token is handed on."""
    model: Any = accelpatch.patch(CAUSAL["llama"].make(max_position_embeddings=4096), "exact", verify=False)
    batch, most = Batch(model, 4096), 3000

    class Gone:
        def put(self, value: torch.Tensor) -> None:
            if value.numel() == 1:
                raise HungUp

    config = GenerationConfig(max_new_tokens=most, do_sample=False)
    with pytest.raises(HungUp):
        batch.generate(torch.tensor([[5, 6, 7]]), config, Ticket({}, 60.0), Gone())
    batch.stop()  # when all requests are answered
    assert sum(model.accelpatch.report().paths.values()) < most


def test_a_whole_answer_wakes_its_thread_once() -> None:
    """With the time of its first token; and before, where its client is gone."""
    tickets = [Ticket({}, 60.0) for _ in range(3)]
    streamed, whole, gone = (Waiting(ticket, each) for ticket, each in zip(tickets, (True, False, False), strict=True))
    router = Router({"streamed": streamed, "whole": whole, "gone": gone})
    tickets[2].hung_up = True
    names = ("streamed", "whole", "gone", "nobody")
    made: Any = {"generated_tokens": [5], "status": RequestStatus.DECODING}
    router.deliver_batch([GenerationOutput(name, **made) for name in names])
    assert [one.get(0.0) is None for one in (streamed, whole, gone)] == [False, True, False]
    assert all(ticket.first_token is not None for ticket in tickets)
    router.deliver(GenerationOutput("whole", status=RequestStatus.FINISHED))
    assert whole.get(0.0).is_finished()
    router.deliver(GenerationOutput("whole", error="no room", status=RequestStatus.FAILED))
    assert whole.get(0.0).error == "no room"


def test_the_manager_ends_with_the_server(folder: Path) -> None:
    before = threading.active_count()
    with running(folder) as found:
        complete(found, PROMPTS[0])
        assert found.app.batch._manager.is_running()
    assert found.app.batch._manager is None
    assert threading.active_count() <= before + 3


def test_sampled_requests_are_in_the_batch(server: Running) -> None:
    """Beside greedy ones, each by its own temperature, top_p and seed: the answers are those that it gets alone."""
    asked: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 1}, {"temperature": 1.8, "seed": 1}, {"temperature": 1.0, "seed": 2},
        {"temperature": 1.0, "seed": 1, "top_p": 0.5}, {"temperature": 0}, {"temperature": 1e-9, "seed": 1},
    ]  # fmt: skip
    alone = [complete(server, PROMPTS[1], **one) for one in asked]
    before = batched(server)
    with ThreadPoolExecutor(len(asked)) as users:
        assert list(users.map(lambda one: complete(server, PROMPTS[1], **one), asked)) == alone
    steps = batched(server) - before
    assert NEW <= steps < NEW * len(asked), "tokens of several requests come from one step"
    assert len(set(alone)) == 5, "all differ but the two likeliest ones"
    assert alone[4] == alone[5] == server.lone(PROMPTS[1], NEW)


def test_what_prompts_begin_with_is_computed_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """By whole pages, while they hold it."""
    system, rows = "You are helpful. " * 6, list[int]()

    def counted(found: Any, ids: torch.Tensor, *more: Any) -> torch.Tensor:
        rows.append(len(ids))
        return logits_of_rows(found, ids, *more)

    monkeypatch.setattr(step, "logits_of_rows", counted)
    due = [server.lone(system + one, NEW) for one in ("One", "Two")]
    assert [complete(server, system + one) for one in ("One", "Two")] == due
    first, second = (count for count in rows if count > 1)
    assert first == len(system) + 3
    assert second == first - len(system) // PAGE * PAGE


def test_a_request_without_a_seed_draws_another_one_each_time(server: Running) -> None:
    assert len({complete(server, PROMPTS[1], temperature=2.0) for _ in range(3)}) == 3
