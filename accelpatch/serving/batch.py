"""Requests that are answered at once, by continuous batching of the patched model: those whose next token is the
likeliest one or is drawn (draws.py), with stop texts or without. All others wait for their turn (generation.py)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import RequestStatus

from accelpatch.serving.draws import WARPERS, Draw, processors, top_k_of
from accelpatch.serving.stops import Watch
from accelpatch.serving.ticket import Ticket

PAGE = 16  # tokens of a page on a CPU; whole pages of a prompt's begin are shared, such as those of a system prompt
CALL_TOKENS = 256  # of a call on a CPU, prompts in parts
LEAST_TOKENS = 8192  # that the pages hold, for all requests together
MEMORY = 0.5  # of a GPU's free memory, for the pages
LOOK = 0.2  # seconds after which a waiting request looks whether its client is still there


class BatchFailed(RuntimeError):
    """The batch ended, or refused a request."""


class Waiting:
    """A request whose thread waits for tokens. each: for every new one, and else for the whole answer."""

    def __init__(self, ticket: Ticket, each: bool):
        self._ticket, self._each, self._found = ticket, each, queue.SimpleQueue[Any]()

    def put(self, result: Any) -> None:
        """Take what the request has by now, on the manager's own thread."""
        if result.generated_tokens:
            self._ticket.came()
        if self._each or self._ticket.hung_up or result.error is not None or result.is_finished():
            self._found.put(result)

    def get(self, seconds: float) -> Any:
        """The next result; None where none came within so many seconds."""
        try:
            return self._found.get(timeout=seconds)
        except queue.Empty:
            return None


class Router(OutputRouter):
    """Gives each result to the request that waits for it, with no thread between; what nobody waits for is dropped."""

    def __init__(self, waiting: Mapping[str, Waiting]):
        super().__init__()
        self._waiting = waiting

    def deliver(self, output: Any) -> None:
        """As in OutputRouter."""
        found = self._waiting.get(output.request_id)
        if found is not None:
            found.put(output)

    def deliver_batch(self, outputs: list[Any]) -> None:
        """As in OutputRouter."""
        for output in outputs:
            self.deliver(output)


class Batch:
    """One manager of transformers' continuous batching for a model, made when the first request comes."""

    def __init__(self, model: Any, context: int | None):
        self._model, self._context = model, context
        self._manager: Any = None
        self._waiting: dict[str, Waiting] = {}
        self._lock, self._count = threading.Lock(), 0

    def takes(self, config: Any) -> bool:
        """Whether a generation config asks for what a request of the batch can have."""
        if (config.num_beams or 1) > 1 or (config.num_return_sequences or 1) > 1:
            return False
        if not hasattr(self._model, "init_continuous_batching"):
            return False
        if config.do_sample and top_k_of(config) != top_k_of(self._model.generation_config):
            return False
        others = [one for one in self._model._get_logits_processor(config) if type(one) not in WARPERS]
        return not others

    def generate(
        self, ids: torch.Tensor, config: Any, ticket: Ticket, streamer: Any, stop: Watch | None = None,
        each: bool = True,
    ) -> torch.Tensor:  # fmt: skip
        """Ids [1, L + new] of a prompt ids[1, L], up to what `stop` sees; each new token goes to the streamer, when it
        is made or, without `each`, at the end. Raises HungUp, TimeOver and BatchFailed."""
        prompt = ids[0].tolist()
        streamer.put(ids)
        for token in self._tokens(list(prompt), config, ticket, each or stop is not None):
            streamer.put(torch.tensor([token]))
            prompt.append(token)
            if stop is not None and stop.over(token):
                break
        streamer.end()
        return torch.tensor([prompt], device=ids.device)

    def _tokens(self, prompt: list[int], config: Any, ticket: Ticket, each: bool) -> Iterator[int]:
        manager, found, name = self._started(), Waiting(ticket, each), self._name()
        draw = Draw.of(config, ticket.seed)
        self._waiting[name] = found
        seen, done = 0, False
        try:
            ends = config.eos_token_id if config.eos_token_id is not None else -1
            manager.add_request(
                prompt, request_id=name, max_new_tokens=config.max_new_tokens, streaming=True,
                eos_token_id=ends.tolist() if isinstance(ends, torch.Tensor) else ends,
                **({} if draw is None else draw.arguments),
            )  # fmt: skip
            while not done:
                ticket.check()
                result = found.get(LOOK)
                if result is None:
                    if not manager.is_running():
                        raise BatchFailed("the batch of all requests ended")
                    continue
                if result.error is not None or result.status == RequestStatus.FAILED:
                    raise BatchFailed(f"the request failed in the batch: {result.error}")
                done = result.is_finished()
                new, seen = result.generated_tokens[seen:], len(result.generated_tokens)
                yield from new
        finally:
            self._waiting.pop(name, None)
            if not done:  # nobody waits for it any more, or takes its tokens
                manager.cancel_request(name)

    def _name(self) -> str:
        with self._lock:
            self._count += 1
            return f"request-{self._count}"

    def _started(self) -> Any:
        """The manager, whose thread runs."""
        with self._lock:
            if self._manager is None or not self._manager.is_running():
                text = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1)
                with torch.no_grad():
                    self._manager = self._model.init_continuous_batching(
                        generation_config=text, continuous_batching_config=settings(self._model, self._context)
                    )
                    top_k = top_k_of(self._model.generation_config)
                    self._manager.logit_processor = processors(top_k, self._model.device.type != "cpu")
                    self._manager.output_router = Router(self._waiting)
                    self._manager.start()
            return self._manager

    def stop(self) -> None:
        """Stop the manager when its requests are answered."""
        with self._lock:
            if self._manager is not None and self._manager.is_running():
                self._manager.stop(block=True)
            self._manager = None


def settings(model: Any, context: int | None) -> ContinuousBatchingConfig:
    """Pages for some requests of the model's context on a CPU; on a GPU as many as half of the free memory holds."""
    if model.device.type == "cpu":
        tokens = max(2 * (context or 0), LEAST_TOKENS)
        made = ContinuousBatchingConfig(block_size=PAGE, num_blocks=tokens // PAGE, max_batch_tokens=CALL_TOKENS)
    else:
        made = ContinuousBatchingConfig(max_memory_percent=MEMORY)
    if hasattr(made, "auto_switch_to_flash"):
        made.auto_switch_to_flash = False
    return made
