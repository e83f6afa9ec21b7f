"""Looks, before each outermost call of a patched model, whether the code that its fast paths stand for would still run.

Outermost is a call of the model, of a model inside it, or of generate(), that no other such call of the thread is
within: steps of a running generate() look at nothing. What changes meanwhile counts from the next call on.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from accelpatch import own_code
from accelpatch.modules import attention
from accelpatch.modules.replacement import bind_wrapped

CODE = "_accelpatch_code"  # the attribute of a patched model, and of the models inside it, that holds its CodeWatch
# The methods of generation that the loops over fast steps stand for.
LOOP = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_sample", "_prefill")
CACHES = (DynamicCache, DynamicLayer, DynamicSlidingWindowLayer)
CACHED = ("update", "get_seq_length", "get_mask_sizes")  # methods that steps over their own caches stand for


class _Calls(threading.local):
    depth = 0


_CALLS = _Calls()


class CodeWatch:
    """A context manager around each call of a model; the outermost one looks.

    version: another one once other code would run than before; what was derived from the model is then out of date.
    others: why some module runs other code than its package's, or None. loop: why generate() must run transformers' own
    loop. cache: why no step may use a cache of its own.
    """

    def __init__(self, model: Any = None):
        self._model = None if model is None else weakref.ref(model)
        self._snapshot: own_code.Snapshot | None = None
        self._overridden: dict[str, Any] = {}
        self._aside: list[Any] = []  # configurations that name the originals' attention meanwhile
        self.version = 0
        self.others: str | None = None
        self.loop: str | None = None
        self.cache: str | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CodeWatch:
        made = CodeWatch(memo.get(id(self._model and self._model())))
        memo[id(self)] = made
        return made

    def __reduce__(self) -> tuple[type[CodeWatch], tuple[()]]:
        return CodeWatch, ()

    def __enter__(self) -> None:
        if _CALLS.depth == 0:
            self.look()
        _CALLS.depth += 1

    def __exit__(self, *error: Any) -> None:
        _CALLS.depth -= 1

    def look(self) -> None:
        """Look whether code has changed since the last look; replacements stand aside, or no more, from here on."""
        model: Any = None if self._model is None else self._model()
        if model is None:
            return
        overridden = {name: vars(model)[name] for name in LOOP if name in vars(model)}
        if self._snapshot is not None:
            if not self._snapshot.changed() and overridden == self._overridden:
                return
            self.version += 1
        reasons = [own_code.why_not(one) for one in model.modules()]  # of all: each looks at its instance
        self.others = next(filter(None, reasons), None)
        own_code.refresh()
        for one in model.modules():
            if "_old_forward" in vars(one) and hasattr(type(one), "replaced_class"):
                bind_wrapped(one)
        attention.take_up(self._aside)
        self._aside = attention.set_aside(model) if own_code.reached_by(attention.Registered).reason else []
        loop = own_code.reached_by(type(model), LOOP, deep=False)
        caches = [own_code.reached_by(cls, CACHED) for cls in CACHES]
        self._overridden, self._snapshot = overridden, own_code.Snapshot(model.modules(), [loop, *caches])
        named = (name for name, value in overridden.items() if not _hides_itself(model, name, value))
        own = next((f"{type(model).__name__} has a {name} of its own on the instance" for name in named), None)
        self.loop = own or loop.reason
        self.cache = next((one.reason for one in caches if one.reason), None)


def _hides_itself(model: Any, name: str, value: Any) -> bool:
    """Whether an instance's attribute is the method that it hides, as PEFT puts it back."""
    hidden = getattr(type(model), name, None)
    return getattr(value, "__self__", None) is model and value.__func__ is hidden
