"""What the runtimes of a patched model on a CPU and on a GPU have in common."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self
from weakref import WeakKeyDictionary

from accelpatch.fusion.packed_rows import Packing
from accelpatch.fusion.padding import packing_of
from accelpatch.runtime.code_watch import CodeWatch
from accelpatch.runtime.generation.drafter import Pace


class ModelRuntime:
    """paths: how calls ran, and how often. unfused: place -> why, of layers that were over their bound at the patch.
    loss: how training computes it: the model's own way ("whole"), or over chunks of the tokens ("chunked"). padding:
    whether encoders' layers compute it ("keep") or not ("remove"). kv_cache: the format of the KV cache, as a recipe
    names it.

    A deep copy is made with the same settings and starts without steps; its `paths`, zeroed, are the copied report's.
    """

    loss = "whole"
    padding = "remove"
    kv_cache = "auto"
    compiled: Any = None  # the model's forward, compiled; None where the recipe does not ask for it
    heads: Any = None  # transformers' generator by the model's MTP heads, once they were read (mtp_heads.py)
    begin: Any = None  # called with ids and configuration before generate() decodes; None for nothing
    training_layers: Any = None  # captured layers of a model that trains, on a GPU
    static_cache = False  # whether generate() makes a static cache, for the compiled forward

    def __init__(self, *settings: Any) -> None:
        self.paths: Counter[str] = Counter()
        self.code = CodeWatch()
        self.unfused: Mapping[int, str] = {}
        self._settings = settings
        self.paces: WeakKeyDictionary[Any, Pace] = WeakKeyDictionary()  # draft model -> what its drafts gave so far

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        made = type(self)(*self._settings)
        made.paths = copy.deepcopy(self.paths, memo)
        made.paths.clear()
        made.begin = self.begin
        made.loss, made.padding = self.loss, self.padding
        made.unfused, made.code = self.unfused, copy.deepcopy(self.code, memo)
        made.code.runtime = None if self.code.runtime is None else weakref.ref(made)
        return made

    def packing(self, model: Any, given: Mapping[str, Any]) -> Packing | None:
        """How the layers of an encoder run such a call without its padding; None where they do not."""
        return None if self.padding == "keep" else packing_of(model, given)

    def checkpointed(self, model: Any) -> AbstractContextManager[None]:
        """Context manager around a call by the modules, whose checkpointed layers may be captured meanwhile."""
        return nullcontext() if self.training_layers is None else self.training_layers.around(self, model)

    def modules(self, forward: Any, model: Any, args: Any, kwargs: Any) -> Any:
        """Outputs of a call by the model's modules. forward: of the model's own class."""
        if self.compiled is None or vars(model).get("_is_replica", False):  # one of nn.DataParallel has other weights
            return forward(model, *args, **kwargs)
        return self.compiled(*args, **kwargs)

    def part_outputs(self, part: Any, given: Mapping[str, Any] | None) -> Any:
        """Outputs of a call of a model inside the patched one, by fused layers or a graph; None for its modules."""
        return None
