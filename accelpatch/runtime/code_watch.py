"""Looks, before each outermost call of a patched model, whether the code that its fast paths stand for would still run.

Outermost is a call of the model, of a model inside it, or of generate(), that no other such call of the same model in
the same thread is around: steps of a running generate() look at nothing. What changes meanwhile counts from the next
call on. Steps of requests that are answered together are calls of their own: those without a prompt look for the first
time when the last look is LOOKED seconds ago.
"""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from accelpatch import own_code
from accelpatch.modules import attention_settings as attention
from accelpatch.own_code.wrapped_forward import bind_wrapped
from accelpatch.runtime.graphs.logits_processors import CAPTURED, WATCHING
from accelpatch.runtime.graphs.sampler import CRITERIA, SUPPRESSING, WARPERS

CODE = "_accelpatch_code"  # the attribute of a patched model, and of the models inside it, that holds its CodeWatch
# The methods of generation that the loops over fast steps stand for.
LOOP = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_sample", "_prefill")
CACHES = (DynamicCache, DynamicLayer, DynamicSlidingWindowLayer)
# Methods that steps over their own caches stand for.
CACHED = ("update", "get_seq_length", "get_mask_sizes", "reorder_cache")
#: what samplers stand for
PICKING = (*SUPPRESSING, *WARPERS, *CAPTURED, *WATCHING, *CRITERIA, LogitsProcessorList, StoppingCriteriaList)

LOOKED = 0.1  # seconds
HELD_OFF = 10.0  # seconds that a new call waits at most for a change that waits for the calls before it


class CodeWatch:
    """A context manager around each call of a model; the outermost one looks, and a change to the model waits.

    version: another one once other code would run than before; what was derived from the model is then out of date.
    others: why some module runs other code than its package's, or None. loop: why generate() must run transformers' own
    loop. cache: why no step may use a cache of its own. sessions: what has begun and not ended in which the originals'
    attention runs every call. runtime: that of the model, whose calls of its encoder may be captured too.
    """

    def __init__(self, model: Any = None):
        self._model = None if model is None else weakref.ref(model)
        self.runtime: weakref.ref[Any] | None = None
        self._snapshot: own_code.Snapshot | None = None
        self._overridden: dict[str, Any] = {}
        self._aside: attention.Aside = []  # configurations that name the originals' attention meanwhile
        self.sessions: dict[Any, Any] = {}  # those of `begin` -> the implementations that the model had
        self._gate = threading.Condition()
        self._changing: set[threading.Thread] = set()  # that wait in `alone` for the calls of others
        self._callers: Counter[threading.Thread] = Counter()  # the threads that are in calls of the model, and how deep
        self._looked = -LOOKED  # when the last look was
        self.version = 0
        self.others: str | None = None
        self.loop: str | None = None
        self.cache: str | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CodeWatch:
        made = CodeWatch(memo.get(id(self._model and self._model())))
        memo[id(self)] = made
        made._aside = copy.deepcopy(self._aside, memo)
        return made

    def __reduce__(self) -> tuple[type[CodeWatch], tuple[()]]:
        return CodeWatch, ()

    @property
    def model(self) -> Any:
        """The whole model, None where it is gone."""
        return None if self._model is None else self._model()

    def __enter__(self) -> None:
        self._begin(looks=True)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Context manager: as this object, around one more token of each of some requests, whose prompts had a look."""
        self._begin(looks=time.monotonic() > self._looked + LOOKED)
        try:
            yield
        finally:
            self.__exit__()

    def _begin(self, looks: bool) -> None:
        caller = threading.current_thread()
        if caller not in self._callers:
            if self._changing:
                with self._gate:
                    self._gate.wait_for(lambda: not any(thread.is_alive() for thread in self._changing), HELD_OFF)
            if looks:
                self.look()
        with self._gate:
            self._callers[caller] += 1

    def __exit__(self, *error: Any) -> None:
        caller = threading.current_thread()
        with self._gate:
            self._callers[caller] -= 1
            if not self._callers[caller]:
                del self._callers[caller]
                self._gate.notify_all()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context manager for a change to the model: it waits for the calls of other threads, and holds new ones off.

        A call of this thread that it is within does not count, nor do those of other threads that wait here too.
        """
        with self._gate:
            own = self._callers.pop(threading.current_thread(), 0)
            self._changing.add(threading.current_thread())
            self._gate.notify_all()
            try:
                # a thread that is gone without an end of its call is one of the parent of a fork
                self._gate.wait_for(lambda: not any(thread.is_alive() for thread in self._callers))
            finally:
                self._changing.discard(threading.current_thread())
                self._gate.notify_all()
            try:
                yield
            finally:
                if own:
                    self._callers[threading.current_thread()] = own

    def begin(self, session: Any) -> None:
        """Let the originals' attention run every call until `end`."""
        model = None if self._model is None else self._model()
        if model is not None:
            with self.alone():
                first = next(iter(self.sessions.values()), None)
                self.sessions[session] = attention.names(model) if first is None else first
                self._choose_attention(model)

    def end(self, session: Any) -> None:
        """End what began, if it has not ended; the last one gives the model the implementations that it had."""
        begun = self.sessions.pop(session, [])
        if self.sessions:
            return
        for settings, name in begun:
            settings[attention.SETTING] = name
        model = None if self._model is None else self._model()
        if model is not None:
            self._choose_attention(model)

    def _choose_attention(self, model: Any) -> None:
        attention.take_up(self._aside)
        ours = {attention.Registered, *map(type, attention.replaced_in(model))}
        # or others changed a registry in which an attention function of ours stands for transformers' own
        other = self.sessions or any(own_code.reached_by(cls).in_registry for cls in ours)
        self._aside = attention.set_aside(model) if other else []

    def look_anew(self) -> None:
        """Look at the modules that the model has now, which are others than at the last look."""
        self._snapshot = None
        self.look()

    @torch.compiler.assume_constant_result
    def look_as_compiled(self) -> None:
        """Look while torch.compile traces a call of the model: once, since nothing of it is in the compiled code."""
        self.look()

    def look(self) -> None:
        """Look whether code has changed since the last look; replacements stand aside, or no more, from here on."""
        model: Any = None if self._model is None else self._model()
        if model is None:
            return
        self._looked = time.monotonic()
        overridden = {name: vars(model)[name] for name in LOOP if name in vars(model)}
        if self._snapshot is not None:
            if not self._snapshot.changed() and overridden == self._overridden:
                return
            self.version += 1
        reasons = [own_code.why_not(one) for one in model.modules()]  # of all: each looks at its instance
        self.others = next(filter(None, reasons), None)
        own_code.refresh()
        for one in model.modules():
            wrapped = getattr(vars(one).get("_old_forward"), "__func__", None)
            if hasattr(type(one), "replaced_class") and own_code.is_ours(wrapped):  # it calls the class's forward
                bind_wrapped(one)
        self._choose_attention(model)
        loops = [own_code.reached_by(type(model), LOOP, deep=False)]
        loops += [own_code.reached_by(cls, ("__call__",)) for cls in PICKING]
        caches = [own_code.reached_by(cls, CACHED) for cls in CACHES]
        self._overridden, self._snapshot = overridden, own_code.Snapshot(model.modules(), [*loops, *caches])
        named = (name for name, value in overridden.items() if not _hides_itself(model, name, value))
        own = next((f"{type(model).__name__} has a {name} of its own on the instance" for name in named), None)
        self.loop = own or next((one.reason for one in loops if one.reason), None)
        self.cache = next((one.reason for one in caches if one.reason), None)


def _hides_itself(model: Any, name: str, value: Any) -> bool:
    """Whether an instance's attribute is the method that it hides, as PEFT puts it back."""
    hidden = getattr(type(model), name, None)
    return getattr(value, "__self__", None) is model and value.__func__ is hidden
