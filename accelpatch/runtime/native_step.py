"""Single-token steps of a patched model as one native call, behind the model's own forward.

Whoever calls `model(...)` for one more token over a filled cache (generate() in all its modes does) gets the logits
of the native step; every other call, and every step that someone watches from inside, runs the modules. `paths`
counts both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain, repeat
from operator import attrgetter, contains, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from accelpatch.errors import KernelError
from accelpatch.kernels.cpu_native import MAX_BATCH
from accelpatch.kernels.cpu_step import DecodeStep
from accelpatch.modules.weight_only import QuantizedModule
from accelpatch.runtime.mixed_step import mixed_step
from accelpatch.runtime.native_cache import Store, attach, stored
from accelpatch.runtime.native_weights import NativeModel, Unfit, packed_modules, read
from accelpatch.runtime.torch_threads import all_threads

NATIVE = "native step"
# Arguments of a step whose value does not change what it computes, or that step() reads.
UNDERSTOOD = frozenset(
    {"input_ids", "past_key_values", "attention_mask", "position_ids", "use_cache", "return_dict", "logits_to_keep"}
)
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


class Watch:
    """Notices what would make a native step differ from the modules: a hook, another child, another weight.

    It looks at every module before every step, so the looking is left to C: some tens of microseconds.
    """

    def __init__(self, model: nn.Module):
        modules = list(model.modules())
        inner = [module for module in modules if module is not model]
        layers = getattr(getattr(model, "model", None), "layers", ())
        self._layers = [hook_tables(layer.modules()) for layer in layers]
        within = {id(module) for layer in layers for module in layer.modules()}
        self._outer = hook_tables(module for module in inner if id(module) not in within)
        self._hooks = [*self._outer, *chain.from_iterable(self._layers)]
        self._attributes = [vars(m) for m in inner]
        self._tables: list[dict[str, Any]] = [t for m in modules for t in (m._modules, m._parameters, m._buffers)]
        self._held = list(chain.from_iterable(map(dict.values, self._tables)))
        self._tensors = [value for value in self._held if isinstance(value, Tensor)]
        self._pointers = list(map(Tensor.data_ptr, self._tensors))
        self._packed = list(packed_modules(model))
        self._packs = [module.pack for module in self._packed]
        self._tiled = [module for module in modules if isinstance(module, QuantizedModule) and module.tiles is not None]
        self._tiles = [module.tiles for module in self._tiled]

    def objection(self) -> str | None:
        """Why the modules must run this step, or None."""
        if any(self._outer) or any(getattr(torch_module, name) for name in _GLOBAL_HOOKS):
            return "a hook outside of the layers"
        return None

    def watched(self) -> list[int]:
        """The numbers of the layers that have a hook, on themselves or inside."""
        return [place for place, tables in enumerate(self._layers) if any(tables)] if any(self._hooks) else []

    def stale(self) -> bool:
        """Whether the model is no longer what the step was made of."""
        return (
            sum(map(len, self._tables)) != len(self._held)
            or not all(map(is_, chain.from_iterable(map(dict.values, self._tables)), self._held))
            or list(map(Tensor.data_ptr, self._tensors)) != self._pointers
            or not all(map(is_, map(attrgetter("pack"), self._packed), self._packs))
            or not all(map(is_, map(attrgetter("tiles"), self._tiled), self._tiles))
            or any(map(contains, self._attributes, repeat("forward")))
        )


def hook_tables(modules: Iterable[nn.Module]) -> list[Any]:
    """Where the hooks of modules are kept."""
    return [table for module in modules for table in (module._forward_hooks, module._forward_pre_hooks)]


class NativeRuntime:
    """The native steps of one patched model. A copy of the model starts with none and makes its own."""

    def __init__(self) -> None:
        self.paths: Counter[str] = Counter()
        self._model: NativeModel | None = None
        self._watch: Watch | None = None
        self._unfit: str | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeRuntime:
        return NativeRuntime()

    def logits(self, model: nn.Module, arguments: Mapping[str, Any]) -> Tensor | None:
        """Logits [B, 1, V] of one more token, written to the cache of `arguments`; None where the modules must run."""
        ids, cache = arguments.get("input_ids"), arguments.get("past_key_values")
        if ids is None or cache is None or ids.dim() != 2 or ids.shape[1] != 1 or cache.get_seq_length() == 0:
            self.paths["modules: a prompt, or no cache"] += 1
            return None
        reason = self._why_not(model, ids, arguments)
        store = attach(cache, ids.shape[0]) if reason is None else reason
        if isinstance(store, str):
            self.paths[f"modules: {store}"] += 1
            return None
        places = self._places(ids, store, arguments)
        if places is None:
            self.paths["modules: an attention mask that is not left padding"] += 1
            return None
        assert self._watch is not None
        if watched := self._watch.watched():
            logits = mixed_step(model, self._step(store), store, cache, ids[:, 0], places, watched)
            store.places, store.length = None, store.length + 1
            self.paths[f"{NATIVE}, but modules in layers {watched}: a hook inside"] += 1
            return logits.unsqueeze(1)
        store.places = places
        return self._advance(store, ids[:, 0]).unsqueeze(1)

    def run_of(self, cache: Any) -> Run | None:
        """What goes on from the last native step over `cache`; None where the last step was not native."""
        store = stored(cache)
        return None if store is None or store.places is None else Run(self, cache, store)

    def changed(self, model: nn.Module) -> bool:
        """Whether the modules would have to run the next step."""
        watch = self._watch
        return not self.steps(model) or watch is None or watch.objection() is not None or bool(watch.watched())

    def _advance(self, store: Store, tokens: Tensor) -> Tensor:
        with all_threads():
            logits = self._step(store)(tokens, *store.places)
        store.length += 1
        self.paths[NATIVE] += 1
        return logits

    def steps(self, model: nn.Module) -> bool:
        """Whether the model has native steps, as it is now."""
        if self._watch is None or self._watch.stale():
            self._read(model)
        return self._unfit is None

    def _why_not(self, model: nn.Module, ids: Tensor, arguments: Mapping[str, Any]) -> str | None:
        extra = [name for name, value in arguments.items() if name not in UNDERSTOOD and value not in (None, False)]
        if extra:
            return f"the argument {extra[0]}"
        if arguments.get("use_cache") is False or arguments.get("return_dict") is False:
            return "no cache or a tuple was asked for"
        if ids.shape[0] > MAX_BATCH:
            return f"a batch of more than {MAX_BATCH}"
        if torch.is_grad_enabled() or model.training or torch.is_autocast_enabled("cpu"):
            return "gradients, training or autocast"
        if not self.steps(model):
            return self._unfit
        assert self._watch is not None
        return self._watch.objection()

    def _read(self, model: nn.Module) -> None:
        self._model, self._unfit = None, None
        try:
            self._model = read(model)
        except (Unfit, KernelError) as reason:
            self._unfit = str(reason)
        self._watch = Watch(model)

    def _places(self, ids: Tensor, store: Store, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor] | None:
        """(slots, starts, positions), each int64 [B]; None for a mask with gaps."""
        batch, mask, positions = ids.shape[0], arguments.get("attention_mask"), arguments.get("position_ids")
        slots = torch.full((batch,), store.length, dtype=torch.int64)
        starts = torch.zeros(batch, dtype=torch.int64)
        if mask is not None:
            if mask.dim() != 2 or tuple(mask.shape) != (batch, store.length + 1):
                return None
            kept = mask.ne(0)
            starts = store.length + 1 - kept.sum(1)
            if not torch.equal(kept.int().argmax(1), starts):
                return None
        if positions is None:
            return slots, starts, slots
        return slots, starts, positions.reshape(-1, 1)[-batch:, 0].expand(batch).to(torch.int64)

    def _step(self, store: Store) -> DecodeStep:
        assert self._model is not None
        if store.step is None or store.made_by is not self._model:
            store.step, store.made_by = self._model.step(store.keys, store.values), self._model
        return store.step


class Run:
    """Native steps one after the other over one cache, for a loop that knows that nothing else happens between them."""

    def __init__(self, runtime: NativeRuntime, cache: Any, store: Store):
        self._runtime, self._cache, self._store = runtime, cache, store
        self._slots, self._starts, self._positions = (place.clone() for place in store.places)

    def logits(self, model: nn.Module, tokens: Tensor, watched: bool) -> Tensor | None:
        """Logits [B, V] after `tokens`[B]; None where the model has to be called. watched: look at it again first."""
        store = self._store
        if store.length >= store.capacity or stored(self._cache) is not store:
            return None
        if watched and (model._forward_hooks or model._forward_pre_hooks or self._runtime.changed(model)):
            return None
        self._slots += 1
        self._positions += 1
        store.places = (self._slots, self._starts, self._positions)
        return self._runtime._advance(store, tokens)
