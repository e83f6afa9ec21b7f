"""The time of one manager of continuous batching, from before it is made until it has stopped."""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from typing import Any

from transformers.generation.continuous_batching.cache import PagedAttentionCache

from accelpatch.device import probe
from accelpatch.kernels.triton import launch
from accelpatch.modules import paged_setting
from accelpatch.modules.attention_settings import SETTING
from accelpatch.modules.paged_attention import STANDS_FOR, register
from accelpatch.modules.paged_setting import PAGED, implementation
from accelpatch.runtime.code_watch import CodeWatch
from accelpatch.runtime.cpu.torch_threads import one_thread

SWITCHES = ("switch_to_cb_friendly_attn", "switch_to_paged_attn")  # of managers since 5.24, and before


class Session:
    """From its begin on, the originals' attention runs, or that over pages where it can.

    why_not: why transformers' own attention runs over the pages; None for this package's.
    """

    def __init__(self, code: CodeWatch, settings: Any):
        self._code = code
        self._manager: Any = lambda: None
        self._paged: dict[int, Any] = {}
        code.begin(self)
        model = code.model
        self.why_not = "the model is gone" if model is None else why_not(model) or _of_settings(settings)
        if self.why_not is None:
            self._paged = _configurations(model)
            register()
            paged_setting.begin(self._paged)

    def watch(self, manager: Any) -> None:
        """End when this manager has stopped, or is gone."""
        self._manager = weakref.ref(manager)
        weakref.finalize(manager, self.end).atexit = False
        manager.stop = functools.partial(_stop, self, self._manager)
        model = self._code.model
        if model is not None and model.device.type == "cpu":
            manager._run_generation_loop = functools.partial(_loop, self._manager)
        for name in SWITCHES:
            if hasattr(type(manager), name):
                setattr(manager, name, functools.partial(_switch, name, self._manager))

    def end(self) -> None:
        """Give the model the implementations again that it had; a second call does nothing."""
        paged_setting.end(self._paged)
        self._paged = {}
        self._code.end(self)

    def end_after(self, thread: threading.Thread) -> None:
        """End when this thread of the manager's has ended, and no call of the model runs."""
        thread.join()
        with self._code.alone():
            self.end_if_idle()

    def end_if_idle(self) -> None:
        """End unless the manager's thread still runs."""
        manager: Any = self._manager()
        if manager is None or not manager.is_running():
            self.end()


def why_not(model: Any) -> str | None:
    """Why a model's continuous batching needs transformers' own attention; None where this package's can run it."""
    parameters = inspect.signature(PagedAttentionCache.update).parameters
    if "kwargs" not in parameters and not {"read_index", "write_index"} <= set(parameters):
        return "the pages of this version of transformers are not known"
    names = {implementation(config) for config in _configurations(model).values()}
    if others := sorted(str(name) for name in names - set(STANDS_FOR)):
        return f"the attention implementation is {others[0]}"
    device = probe(model.device)
    return None if device.kind == "cpu" else launch.why_not(device, model.dtype)


def _of_settings(settings: Any) -> str | None:
    """Why a ContinuousBatchingConfig needs transformers' own attention; None where it does not."""
    compiling = ("varlen_compile_config", "decode_compile_config", "default_compile_level")
    if settings is not None and any(getattr(settings, name, None) for name in compiling):
        return "its calls are compiled"
    return None


def _configurations(model: Any) -> dict[int, Any]:
    """The configurations of a model that name an implementation of attention, by id."""
    every = [vars(one).get("config") for one in model.modules()]
    return {id(one): one for one in every if SETTING in getattr(one, "__dict__", {})}


def _loop(reference: Any, *args: Any, **kwargs: Any) -> Any:
    """The thread of a manager; torch's own threads are off the cores between its calls of the model."""
    manager = reference()
    with one_thread():
        return type(manager)._run_generation_loop(manager, *args, **kwargs)


def _stop(session: Session, reference: Any, *args: Any, **kwargs: Any) -> Any:
    manager = reference()
    thread = manager._generation_thread
    try:
        return type(manager).stop(manager, *args, **kwargs)
    finally:
        session.end_if_idle()
        if thread is not None and thread.is_alive():  # after stop(block=False)
            threading.Thread(target=session.end_after, args=(thread,), daemon=True).start()


def _switch(name: str, reference: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """A manager that is kept prepares its calls as it first did: without masks, where it began with PAGED."""
    manager = reference()
    if vars(model.config)[SETTING] != PAGED:
        manager.batch_processor = None
    return getattr(type(manager), name)(manager, model, *args, **kwargs)
