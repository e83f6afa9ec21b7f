"""The ways into continuous batching of a patched model: transformers' own methods, around which a Session lasts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelpatch.runtime.code_watch import CODE
from accelpatch.runtime.continuous.session import Session

INIT, CONTEXT = "init_continuous_batching", "continuous_batching_context_manager"


def initialised(cls: Any, name: str) -> Any:
    """Wraps the method of `cls` that makes, or finds, a manager."""

    @functools.wraps(getattr(cls, name))
    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        code = vars(self).get(CODE)
        if code is None:
            return getattr(cls, name)(self, *args, **kwargs)
        given = inspect.signature(getattr(cls, name)).bind_partial(self, *args, **kwargs).arguments
        session = Session(code, given.get("continuous_batching_config"))
        try:
            manager = getattr(cls, name)(self, *args, **kwargs)
        except BaseException:
            session.end()
            raise
        session.watch(manager)
        return manager

    return init


def in_context(cls: Any, name: str) -> Any:
    """Wraps the context manager of `cls` around a manager, which may fail before it starts the manager's thread."""

    @functools.wraps(getattr(cls, name))
    @contextmanager
    def context(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        code = vars(self).get(CODE)
        before = [] if code is None else list(code.sessions)
        try:
            with getattr(cls, name)(self, *args, **kwargs) as manager:
                yield manager
        finally:
            for session in [] if code is None else list(code.sessions):
                if session not in before:
                    session.end_if_idle()

    return context
