"""Continuous batching of a patched model: transformers' own, over the originals' attention until its manager has ended.

Its manager takes transformers' own attention alone, and may give the model another implementation for its time.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelpatch.runtime.code_watch import CODE, CodeWatch

INIT, CONTEXT = "init_continuous_batching", "continuous_batching_context_manager"


class Session:
    """The time in which the originals' attention runs for one manager, from before it is made on."""

    def __init__(self, code: CodeWatch):
        self._code = code
        self._manager: Any = lambda: None
        code.begin(self)

    def watch(self, manager: Any) -> None:
        """End when this manager has stopped, or is gone."""
        self._manager = weakref.ref(manager)
        weakref.finalize(manager, self._code.end, self).atexit = False
        manager.stop = functools.partial(_stop, self, self._manager)

    def end_if_idle(self) -> None:
        """End unless the manager's thread still runs."""
        manager: Any = self._manager()
        if manager is None or not manager.is_running():
            self._code.end(self)


def _stop(session: Session, held: Any, *args: Any, **kwargs: Any) -> Any:
    manager = held()
    try:
        return type(manager).stop(manager, *args, **kwargs)
    finally:
        session.end_if_idle()


def initialised(cls: Any, name: str) -> Any:
    """Wraps the method of `cls` that makes, or finds, a manager."""

    @functools.wraps(getattr(cls, name))
    def init(self: Any, *args: Any, **kwargs: Any) -> Any:
        code = vars(self).get(CODE)
        if code is None:
            return getattr(cls, name)(self, *args, **kwargs)
        session = Session(code)
        try:
            manager = getattr(cls, name)(self, *args, **kwargs)
        except BaseException:
            code.end(session)
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
