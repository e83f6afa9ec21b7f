"""What stands between transformers' handlers and the patched model: the queue, the limits and the counting.

Most requests are answered at once, by continuous batching (batch.py). Those with penalties or biases are answered one
after another, in the order in which they came, by the model's own generate(), on one thread. Each answer is the one
that a lone request gets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from fastapi import HTTPException
from transformers import StoppingCriteriaList
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import GenerateManager, GenerationState

from accelpatch.errors import FOREIGN
from accelpatch.serving.batch import Batch
from accelpatch.serving.limits import Limits
from accelpatch.serving.stops import CutQueue, Pieces, Watch, cut, taken_from
from accelpatch.serving.ticket import CURRENT, HungUp, Ticket, TimeOver


class FailedGeneration(RuntimeError):
    """generate() failed; the message has no quotes, for transformers puts it between some."""


class OneModel(ModelManager):
    """A ModelManager that has one model, which is loaded already and stays."""

    def __init__(self, name: str, model: Any, tokenizer: Any):
        super().__init__(device="cpu", force_model=None)
        self.force_model, self._pair = name, (model, tokenizer)

    def load_model_and_processor(self, *_: Any, **__: Any) -> tuple[Any, Any]:
        return self._pair

    @staticmethod
    def process_model_name(model_id: str) -> str:
        return model_id


class Watched:
    """A streamer for generate() that ends it when nobody waits for the answer, and counts. inner: the handler's own.

    stop: of the answer's stop texts, or None. config: the generation config by which the handler says why the answer
    ended: "length" for one of max_new_tokens, also where the last of them is an end token or completes a stop text.
    """

    def __init__(self, ticket: Ticket, inner: Any, stop: Watch | None, config: Any):
        self._ticket, self._inner, self._prompt = ticket, inner, True
        self._stop, self._config, self._last = stop, config, -1
        Pieces.of_streamer(inner)

    def put(self, value: torch.Tensor) -> None:
        self._ticket.check()
        if not self._prompt:  # the first call has the prompt
            self._ticket.token(value.numel())
            self._last = int(value.flatten()[-1])
        self._prompt = False
        if self._inner is not None:
            self._inner.put(value)

    def end(self) -> None:
        if self._last in _ids(self._config.eos_token_id) or (self._stop is not None and self._stop.ended):
            self._config.max_new_tokens = None  # nothing was cut off
        if self._inner is not None:
            self._inner.end()


class Generating:
    """What transformers' GenerateManager sees as the model: its generate(), for one request. batch: that answers it, or
    None. stops: the texts that end the answer. config: the handler's generation config."""

    def __init__(self, model: Any, ticket: Ticket, batch: Batch | None, stops: Sequence[str], config: Any):
        self._model, self._ticket, self._batch, self.stops, self._config = model, ticket, batch, stops, config

    def generate(self, *, streamer: Any = None, **given: Any) -> torch.Tensor:
        """Ids [1, L + new]. Raises HungUp, TimeOver and FailedGeneration."""
        ticket = self._ticket
        ticket.check()
        ticket.started = time.monotonic()
        stop = Watch(given["tokenizer"], self.stops) if self.stops else None
        watched = Watched(ticket, streamer, stop, self._config)
        try:
            if self._batch is not None:
                return self._batch.generate(
                    given["input_ids"], given["generation_config"], ticket, watched, stop, each=streamer is not None
                )
            if ticket.seed is not None:
                torch.manual_seed(ticket.seed)
            criteria = StoppingCriteriaList([] if stop is None else [stop])
            return self._model.generate(**given, streamer=watched, stopping_criteria=criteria)
        except FOREIGN as error:
            raise FailedGeneration(f"{type(error).__name__} in generate: {error}".replace('"', "'")) from error


class Queue(GenerateManager):
    """transformers' GenerateManager, whose one thread takes requests in their order, with the limits before it.

    batch: takes the requests that it can answer; each of them waits in a thread of its own.
    """

    def __init__(self, limits: Limits, context: int | None, batch: Batch):
        super().__init__()
        self._limits, self._context, self._batch = limits, context, batch
        self._waiting = ThreadPoolExecutor(limits.requests, "accelpatch-request")

    def submit(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """As in GenerateManager; requests of the batch do not wait for others."""
        if CURRENT.get().batched:
            return self._waiting.submit(fn, *args, **kwargs)
        return super().submit(fn, *args, **kwargs)

    def async_submit(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """As in GenerateManager; requests of the batch do not wait for others."""
        if CURRENT.get().batched:
            return asyncio.wrap_future(self._waiting.submit(fn, *args, **kwargs))
        return super().async_submit(fn, *args, **kwargs)

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, **more: Any) -> Any:
        seen = self._admitted(model, inputs, gen_config)
        pieces, streamer = super().generate_streaming(seen, processor, inputs, gen_config, **more)
        return CutQueue(pieces, seen.stops), streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, **more: Any
    ) -> Any:
        seen = self._admitted(model, inputs, gen_config)
        text, *others = await super().generate_non_streaming(seen, processor, inputs, gen_config, **more)
        return cut(text, seen.stops), *others

    def _admitted(self, model: Any, inputs: Any, config: Any) -> Generating:
        """The model as this request's generation sees it. Raises HTTPException for what is over a limit."""
        check_vocabulary(model, inputs["input_ids"])
        ticket, length = CURRENT.get(), inputs["input_ids"].shape[-1]
        _complete(config, ticket.asked, self._new_tokens(length, ticket.new_tokens))
        ticket.prompt_tokens, ticket.submitted = length, True
        whole = set(inputs) <= {"input_ids", "attention_mask"} and bool(
            inputs.get("attention_mask", torch.ones(1)).all()
        )
        ticket.batched = whole and self._batch.takes(config)
        return Generating(model, ticket, self._batch if ticket.batched else None, taken_from(config), config)

    def _new_tokens(self, prompt: int, asked: int | None) -> int:
        limits, context = self._limits, self._context
        if not prompt:
            raise HTTPException(400, "the prompt has no tokens")
        if limits.prompt_tokens is not None and prompt > limits.prompt_tokens:
            raise HTTPException(400, f"the prompt has {prompt} tokens, and this server takes {limits.prompt_tokens}")
        if context is not None and prompt >= context:
            raise HTTPException(400, f"the prompt has {prompt} tokens, and the model's context is {context}")
        if asked is not None and asked > limits.new_tokens:
            raise HTTPException(400, f"max_tokens is {asked}, and this server generates {limits.new_tokens} at most")
        if asked is not None and context is not None and prompt + asked > context:
            raise HTTPException(
                400,
                f"{prompt} tokens of the prompt and max_tokens {asked} are over the model's context of {context}",
            )
        room = limits.new_tokens if context is None else min(limits.new_tokens, context - prompt)
        return room if asked is None else asked


def check_vocabulary(model: Any, ids: torch.Tensor) -> None:
    """Raise HTTPException for ids that the model has no embedding of: on a GPU they would end the whole process."""
    known, most = model.config.get_text_config(decoder=True).vocab_size, int(ids.max()) if ids.numel() else 0
    if most >= known:
        raise HTTPException(
            400,
            f"the prompt has the token {most}, and the model's vocabulary {known} tokens: another model's tokenizer",
        )


def _ids(tokens: Any) -> list[int]:
    """The end tokens of a generation config as a list."""
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.tolist()
    return [] if tokens is None else [tokens] if isinstance(tokens, int) else list(tokens)


def _complete(config: Any, asked: Any, new_tokens: int) -> None:
    """Finish a generation config that transformers made of a body: it sets temperature and top_p and leaves sampling
    off, and lengths to 1,024 where none is given."""
    config.max_new_tokens, config.max_length = new_tokens, None
    temperature = asked.get("temperature")
    if temperature is not None:
        config.do_sample = temperature > 0
    elif asked.get("top_p") is not None:
        config.do_sample = True
    if not config.do_sample:
        config.temperature = config.top_p = config.top_k = None


class OneQueue(GenerationState):
    """transformers' GenerationState, with the queue as its one manager."""

    def __init__(self, queue: Queue):
        super().__init__()
        self._queue = queue

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        return self._queue


__all__ = ["FailedGeneration", "HungUp", "OneModel", "OneQueue", "Queue", "TimeOver"]
