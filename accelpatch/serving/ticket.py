"""One accepted request: what is known of it from its arrival to its last token, across the threads that see it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


class TimeOver(Exception):
    """The request took longer than the server allows."""


class HungUp(Exception):
    """The client went away."""


@dataclass
class Ticket:
    """asked: the checked body. seconds: the most that it may take. new_tokens: the most that it asks for. Moments are
    those of time.monotonic(), None until then. tokens: generated so far. batched:
    whether it is answered together with others.

    The threads that generate write started, first_token and tokens; the event loop writes the rest.
    """

    asked: Mapping[str, Any]
    seconds: float
    new_tokens: int | None = None
    seed: int | None = None
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None
    first_token: float | None = None
    prompt_tokens: int = 0
    tokens: int = 0
    submitted: bool = False
    hung_up: bool = False
    batched: bool = False

    def check(self) -> None:
        """Raise HungUp or TimeOver where nobody waits for the answer any more."""
        if self.hung_up:
            raise HungUp
        if time.monotonic() > self.arrived + self.seconds:
            raise TimeOver(f"the request took longer than the {self.seconds:g} s that this server allows")

    def came(self) -> None:
        """Note when the first token came."""
        if self.first_token is None:
            self.first_token = time.monotonic()

    def token(self, count: int) -> None:
        """Count new tokens, and note when the first came."""
        self.came()
        self.tokens += count


#: the request that the running task handles
CURRENT: ContextVar[Ticket] = ContextVar("accelpatch_request")
