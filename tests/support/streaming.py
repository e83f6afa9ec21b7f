"""Streamers, processors and criteria of a user's own, for tests of generate()."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer


class Calling(BaseStreamer):
    """Keeps what comes, and calls `act` after the third put."""

    def __init__(self, act: Any = None) -> None:
        self.taken: list[Tensor] = []
        self.ended = False
        self._act = act

    def put(self, value: Tensor) -> None:
        self.taken.append(value.reshape(-1))
        if self._act is not None and len(self.taken) == 3:
            self._act()

    def end(self) -> None:
        self.ended = True


class Every(LogitsProcessor):
    """Forbids the last token; keeps the lengths that it saw."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.seen.append(input_ids.shape[1])
        return scores.scatter(1, input_ids[:, -1:], float("-inf"))


class AtLength(StoppingCriteria):
    """Ends row i at `lengths[i]` tokens."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = torch.tensor(lengths)

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return self._lengths <= input_ids.shape[1]
