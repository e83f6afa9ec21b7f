"""Sampling of many requests in one step of continuous batching, each by its own temperature, top_p and seed.

transformers' batches draw for all requests from one generator. Here a draw depends on its request alone: the noise of a
token is a hash of the request's seed, of the position in the text and of the token's id (the Gumbel-max trick: the
largest of scores / temperature + noise is distributed as softmax(scores / temperature)). So the answer to a seed is the
same whatever else is in the batch, and the device draws without the host, also in a captured graph.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
    ContinuousBatchingTopKLogitsWarper,
)
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)
COLDEST = 1e-5  # scores divided by less overflow; the likeliest token is drawn long before
TEMPERATURE, TOP_P, SEED = "temperature", "top_p", "seed"  # what a request may give to the manager


@dataclass(frozen=True)
class Draw:
    """How a request draws its tokens. temperature > 0; top_p in (0, 1]; seed below 2^63, drawn where none is given."""

    temperature: float
    top_p: float
    seed: int

    @classmethod
    def of(cls, config: GenerationConfig, seed: int | None) -> Draw | None:
        """That of a generation config; None for one without sampling."""
        if not config.do_sample:
            return None
        temperature, top_p = (1.0 if one is None else float(one) for one in (config.temperature, config.top_p))
        return cls(max(temperature, COLDEST), top_p, secrets.randbits(63) if seed is None else seed)

    @property
    def arguments(self) -> dict[str, Any]:
        """As the manager takes them with a request."""
        return {TEMPERATURE: self.temperature, TOP_P: self.top_p, SEED: self.seed}


def top_k_of(config: GenerationConfig) -> int:
    """The number of tokens that sampling by this generation config keeps; 0 for all."""
    default: int = GenerationConfig._get_default_generation_params()["top_k"]
    return default if config.top_k is None else int(config.top_k)


class Processors(ContinuousBatchingLogitsProcessorList):
    """Logits processors that are left out of a step in which no request draws, but for `always`, which a captured graph
    needs."""

    always = False

    def prepare_tensor_args(self, requests_in_batch: Any, arg_storage: Tensor) -> Tensor:
        """As in ContinuousBatchingLogitsProcessorList, before each step."""
        self.do_processing = self.always or any(SEED in one.state.logit_processor_kwargs for one in requests_in_batch)
        return super().prepare_tensor_args(requests_in_batch, arg_storage) if self.do_processing else arg_storage


def processors(top_k: int, always: bool) -> Processors:
    """The logits processors of a manager without sampling of its own (do_sample=False), whose requests may have the
    arguments of a Draw: the drawn token of a row gets the highest score. top_k: for all requests, 0 for none. always:
    that of Processors."""
    lines = [_Line(TEMPERATURE, float, _temperature), _Line(TOP_P, float, _top_p), _Line(SEED, int, _key)]
    made = Processors(LogitsProcessorList([*lines, _Drawn(top_k, *lines)]))
    made.tensors_required, made.always = len(lines), always
    return made


def _bits(value: float) -> int:
    """The bits of a positive float32 as an int32, which is positive too."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _temperature(state: Any) -> int:
    return _bits(state.logit_processor_kwargs.get(TEMPERATURE, 1.0))


def _top_p(state: Any) -> int:
    return _bits(state.logit_processor_kwargs.get(TOP_P, 1.0))


def _key(state: Any) -> int:
    """31 bits that are not 0, by the seed and by the number of tokens before the one to draw; 0 without sampling."""
    seed = state.logit_processor_kwargs.get(SEED)
    if seed is None:
        return 0
    digest = hashlib.blake2b(struct.pack("<qq", seed, state.position_offset), digest_size=4).digest()
    return int.from_bytes(digest) >> 1 or 1


class _Line(ContinuousBatchingTopKLogitsWarper):
    """One int32 for each row of the step, which `of` reads off the row's request. Which rows a request has differs from
    version to version of transformers: its own code for `top_k` lays them out."""

    ignored_kwargs = ()

    def __init__(self, name: str, kind: type, of: Callable[[Any], int]):
        self.supported_kwargs, self._of = {name: kind}, of
        self.top_k, self.min_tokens_to_keep = (
            of(SimpleNamespace(logit_processor_kwargs={})),
            0,
        )  # of rows without a request
        self.values = torch.empty(0, dtype=torch.int32)

    def prepare_tensor_args(self, requests: Any) -> Tensor:
        for one in requests:
            one.state.logit_processor_kwargs["top_k"] = self._of(one.state)
        return super().prepare_tensor_args(requests)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        self.values = tensor_arg[: scores.shape[0]]
        return scores


class _Drawn:
    """scores[R, V] float32 -> the same with the drawn token of each row with a seed at +inf."""

    supports_continuous_batching = True

    def __init__(self, top_k: int, *lines: _Line):
        self._top_k, self._lines = top_k, lines

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        temperature, top_p, key = (line.values for line in self._lines)
        given = temperature.view(torch.float32), top_p.view(torch.float32), key
        return (self._of_some if scores.device.type == "cpu" else self._of_all)(scores, *given)

    def _of_some(self, scores: Tensor, temperature: Tensor, top_p: Tensor, key: Tensor) -> Tensor:
        """Rows without a seed are not computed; nothing is captured on a CPU."""
        rows = key.nonzero()[:, 0]
        if not len(rows):
            return scores
        token = drawn(scores[rows], temperature[rows], top_p[rows], key[rows], self._top_k)
        return scores.index_put((rows, token), scores.new_full((), torch.inf))

    def _of_all(self, scores: Tensor, temperature: Tensor, top_p: Tensor, key: Tensor) -> Tensor:
        """The same for a captured graph, in which no size depends on a value."""
        token = drawn(scores, temperature, top_p, key, self._top_k)[:, None]
        raised = torch.where(key[:, None] == 0, scores.gather(1, token), torch.inf)
        return scores.scatter(1, token, raised)


def drawn(scores: Tensor, temperature: Tensor, top_p: Tensor, key: Tensor, top_k: int) -> Tensor:
    """One token id [R] a row of scores[R, V], each drawn by softmax(scores / temperature) of the top_k highest scores
    (0: of all), and of those the fewest that together have the probability top_p.

    temperature[R], top_p[R] float32; key[R] int32, that of the noise.
    """
    size = scores.shape[1]
    kept = min(top_k, size) if top_k else size
    values, ids = scores.topk(kept, dim=1)
    scaled = values.float() / temperature[:, None]
    chances = scaled.softmax(1)
    before = chances.cumsum(1) - chances  # of the tokens with higher scores
    left = (before < top_p[:, None]) | (torch.arange(kept, device=scores.device) == 0)
    noisy = (scaled.double() + noise(key[:, None], ids)).masked_fill(~left, -torch.inf)
    return ids.gather(1, noisy.argmax(1, keepdim=True))[:, 0]


def noise(key: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise float64 of each pair of integers from 0 to 2^32 - 1; the shapes broadcast."""
    uniform = (_mixed(_mixed(ids.long() ^ 0x9E3779B9) ^ key.long()).double() + 0.5) / 2.0**32
    return -(-uniform.log()).log()


def _mixed(x: Tensor) -> Tensor:
    """A permutation of 32 bits in int64 whose every output bit depends on all input bits (MurmurHash3's finaliser)."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)
