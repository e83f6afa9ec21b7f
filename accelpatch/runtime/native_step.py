"""Single-token steps of a patched model as one native call, behind the model's own forward.

Whoever calls `model(...)` for one more token over a filled cache (generate() in all its modes does) gets the logits
of the native step; every other call, and every step that someone watches from inside, runs the modules. `paths`
counts both.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter, contains, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from accelpatch.errors import KernelError
from accelpatch.kernels.cpu_native import MAX_BATCH
from accelpatch.kernels.cpu_step import DecodeStep
from accelpatch.modules.quantized_module import QuantizedModule
from accelpatch.modules.replacement import OWN_HOOK
from accelpatch.runtime.attention_facts import READ
from accelpatch.runtime.mixed_step import mixed_step
from accelpatch.runtime.native_cache import Store, attach, stored
from accelpatch.runtime.native_weights import NativeModel, Unfit, packed_modules, read
from accelpatch.runtime.torch_threads import all_threads

NATIVE = "native step"
# Arguments of a step whose value does not change what it computes, or that step() reads. The tokenizer is that of stop
# strings: generate() hands it on, and a criterion has it already.
UNDERSTOOD = frozenset(
    {
        "input_ids", "past_key_values", "attention_mask", "position_ids", "use_cache", "return_dict", "logits_to_keep",
        "tokenizer",
    }
)  # fmt: skip
_version = attrgetter("_version")
# Where transformers has the hooks that it leaves behind in every layer once hidden states or attentions were asked for.
# They do nothing but in calls that ask for them, and those run the modules anyway.
CAPTURING = "transformers.utils.output_capturing"
CAPTURES = "_output_capturing_hooks_installed"  # its own mark of a model that has them
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")


def _counts_writes(tensor: Tensor) -> bool:
    """Not those of inference mode, nor a tensor whose data are one's of it, which does not say so."""
    try:
        return tensor._version >= 0
    except RuntimeError:
        return False


class Watch:
    """Notices what would make a native step differ from the modules: a hook, another child, another weight.

    It looks at every module before every step, so the looking is left to C: some tenth of a millisecond.
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
        self._plain = [(vars(module), name) for module in inner for name in READ if name in vars(module)]
        self._values = self._read()
        self._tables: list[dict[str, Any]] = [t for m in modules for t in (m._modules, m._parameters, m._buffers)]
        self._filled = [table for table in self._tables if table]  # most are empty; their sizes alone are looked at
        self._held = list(chain.from_iterable(map(dict.values, self._filled)))
        self._tensors = [value for value in self._held if isinstance(value, Tensor)]
        self._pointers = list(map(Tensor.data_ptr, self._tensors))
        own = written_by_forward(modules)
        self._written = [tensor for tensor in self._tensors if _counts_writes(tensor) and id(tensor) not in own]
        self._versions = list(map(_version, self._written))
        self._packed = list(packed_modules(model))
        self._packs = [module.pack for module in self._packed]
        self._tiled = [module for module in modules if isinstance(module, QuantizedModule) and module.tiles is not None]
        self._tiles = [module.tiles for module in self._tiled]

    def objection(self) -> str | None:
        """Why the modules must run this step, or None."""
        if any(map(contains, self._attributes, repeat("forward"))):
            return "a module whose forward was replaced"
        everywhere = chain.from_iterable(getattr(torch_module, name).values() for name in _GLOBAL_HOOKS)
        if hooked(self._outer) or not all(map(_idle, everywhere)):
            return "a hook outside of the layers"
        return None

    def watched(self) -> list[int]:
        """The numbers of the layers that have a hook, on themselves or inside."""
        return [place for place, tables in enumerate(self._layers) if hooked(tables)] if any(self._hooks) else []

    def stale(self) -> bool:
        """Whether the model is no longer what the step was made of."""
        return (
            sum(map(len, self._tables)) != len(self._held)
            or not all(map(is_, chain.from_iterable(map(dict.values, self._filled)), self._held))
            or list(map(Tensor.data_ptr, self._tensors)) != self._pointers
            or list(map(_version, self._written)) != self._versions
            or not all(map(is_, map(attrgetter("pack"), self._packed), self._packs))
            or not all(map(is_, map(attrgetter("tiles"), self._tiled), self._tiles))
            or self._read() != self._values
        )

    def _read(self) -> list[Any]:
        return [attributes.get(name) for attributes, name in self._plain]


def written_by_forward(modules: Iterable[nn.Module]) -> set[int]:
    """Ids of the tensors that a forward itself writes: frequencies that it chooses by the length (longrope)."""
    longrope = [module for module in modules if getattr(module, "rope_type", None) == "longrope"]
    return {id(buffer) for module in longrope for name, buffer in module._buffers.items() if name == "inv_freq"}


def hook_tables(modules: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """Where the hooks of modules are kept."""
    return [table for module in modules for table in (module._forward_hooks, module._forward_pre_hooks)]


def hooked(tables: Iterable[dict[int, Any]]) -> bool:
    """Whether there is a hook that does something in a step."""
    return not all(map(_idle, chain.from_iterable(map(dict.values, filter(None, tables)))))


def _idle(hook: Any) -> bool:
    return hasattr(hook, OWN_HOOK) or getattr(hook, "__module__", None) == CAPTURING


@dataclass(frozen=True, eq=False)
class Reading:
    """What a model was found to be: its weights for native steps, or why it has none; and what sees a change."""

    model: NativeModel | None
    unfit: str | None
    watch: Watch


def recounted(made: Any, paths: Counter[str], memo: dict[int, Any]) -> Any:
    """The copy `made` of a runtime, which counts from zero in the copy of `paths` that the report's copy shows."""
    made.paths = copy.deepcopy(paths, memo)
    made.paths.clear()
    return made


class NativeRuntime:
    """The native steps of one patched model. A copy of the model starts with none and makes its own."""

    def __init__(self) -> None:
        self.paths: Counter[str] = Counter()
        self._reading: Reading | None = None
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> NativeRuntime:
        return recounted(NativeRuntime(), self.paths, memo)

    def __reduce__(self) -> tuple[type[NativeRuntime], tuple[()]]:
        return NativeRuntime, ()

    def logits(self, model: nn.Module, arguments: Mapping[str, Any]) -> Tensor | None:
        """Logits [B, 1, V] of one more token, written to the cache of `arguments`; None where the modules must run."""
        ids, cache = arguments.get("input_ids"), arguments.get("past_key_values")
        if ids is None or cache is None or ids.dim() != 2 or ids.shape[1] != 1 or cache.get_seq_length() == 0:
            self.paths["modules: a prompt, or no cache"] += 1
            return None
        reading = self.reading(model)
        reason = _why_not(model, ids, arguments) or reading.unfit or reading.watch.objection()
        store = attach(cache, ids.shape[0]) if reason is None else reason
        if isinstance(store, str):
            self.paths[f"modules: {store}"] += 1
            return None
        places = self._places(ids, store, arguments)
        if places is None:
            self.paths["modules: an attention mask that is not left padding"] += 1
            return None
        if watched := reading.watch.watched():
            logits = mixed_step(model, _step(reading, store), store, cache, ids[:, 0], places, watched)
            store.places, store.length = None, store.length + 1
            self.paths[f"{NATIVE}, but modules in layers {watched}: a hook inside"] += 1
            return logits.unsqueeze(1)
        store.places = places
        return self.advance(reading, store, ids[:, 0]).unsqueeze(1)

    def run_of(self, cache: Any) -> Run | None:
        """What goes on from the last native step over `cache`; None where the last step was not native."""
        store = stored(cache)
        return None if store is None or store.places is None else Run(self, cache, store)

    def advance(self, reading: Reading, store: Store, tokens: Tensor) -> Tensor:
        """Logits [B, V] after `tokens`[B] at the store's places."""
        with all_threads():
            logits = _step(reading, store)(tokens, *store.places)
        store.length += 1
        self.paths[NATIVE] += 1
        return logits

    def steps(self, model: nn.Module) -> bool:
        """Whether the model has native steps, as it is now."""
        return self.reading(model).unfit is None

    def reading(self, model: nn.Module) -> Reading:
        """What the model is now; read anew where it has changed since the last time."""
        reading = self._reading
        if reading is not None and not reading.watch.stale():
            return reading  # with no lock: the child of a fork would inherit one that another thread held
        with self._lock:
            if self._reading is None or self._reading.watch.stale():
                try:
                    found, unfit = read(model), None
                except (Unfit, KernelError) as reason:
                    found, unfit = None, str(reason)
                self._reading = Reading(found, unfit, Watch(model))
            return self._reading

    def _places(self, ids: Tensor, store: Store, arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor] | None:
        """(slots, starts, positions), each int64 [B]; None for a mask with gaps."""
        batch, mask, positions = ids.shape[0], arguments.get("attention_mask"), arguments.get("position_ids")
        slots = torch.full((batch,), store.length, dtype=torch.int64, device="cpu")
        starts = torch.zeros(batch, dtype=torch.int64, device="cpu")
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


def _why_not(model: nn.Module, ids: Tensor, arguments: Mapping[str, Any]) -> str | None:
    """Why a call is none of a native step, whatever the model."""
    if extra := unknown(arguments, UNDERSTOOD):
        return f"the argument {extra}"
    if arguments.get("use_cache") is False or arguments.get("return_dict") is False:
        return "no cache or a tuple was asked for"
    if any(getattr(model.config, name, None) for name in ("output_hidden_states", "output_attentions")):
        return "attentions or hidden states were asked for"
    if ids.shape[0] > MAX_BATCH:
        return f"a batch of more than {MAX_BATCH}"
    if torch.is_grad_enabled() or model.training or torch.is_autocast_enabled("cpu"):
        return "gradients, training or autocast"
    return None


def unknown(arguments: Mapping[str, Any], understood: Container[str]) -> str | None:
    """The first argument that is not understood and asks for something."""
    asking = (name for name, value in arguments.items() if value is not None and value is not False)
    return next((name for name in asking if name not in understood), None)


def _step(reading: Reading, store: Store) -> DecodeStep:
    assert reading.model is not None
    if store.step is None or store.made_by is not reading.model:
        store.step, store.made_by = reading.model.step(store.keys, store.values), reading.model
    step: DecodeStep = store.step
    return step


class Run:
    """Native steps one after the other over one cache, each of which looks at the model first."""

    def __init__(self, runtime: NativeRuntime, cache: Any, store: Store):
        self._runtime, self._cache, self._store = runtime, cache, store
        self._slots, self._starts, self._positions = (place.clone() for place in store.places)

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor | None:
        """Logits [B, V] after `tokens`[B]; None where the model has to be called."""
        store, reading = self._store, self._runtime.reading(model)
        if store.length >= store.capacity or stored(self._cache) is not store or reading.unfit is not None:
            return None
        if model._forward_hooks or model._forward_pre_hooks or reading.watch.objection() or reading.watch.watched():
            return None
        self._slots += 1
        self._positions += 1
        store.places = (self._slots, self._starts, self._positions)
        return self._runtime.advance(reading, store, tokens)
