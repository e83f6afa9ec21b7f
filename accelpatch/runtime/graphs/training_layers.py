"""Layers of a model that trains with gradient checkpointing as CUDA graphs: a layer's forward pass is one, and its
backward pass, which computes the layer again and takes its gradients, is another.

Both are the operations of torch's checkpoint in their order. A call of the same kind as two before it is captured
(captured_layer.py); every other one runs torch's checkpoint, and the report's `paths` say why.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import output_capturing

from accelpatch import own_code
from accelpatch.errors import FOREIGN, KernelError
from accelpatch.fusion.adapters import is_adapter
from accelpatch.kernels.operation import is_eager
from accelpatch.modules.replacement import GLOBAL_HOOKS, OWN_HOOK
from accelpatch.runtime.graphs.captured_layer import Call, CapturedLayer, OneAtATime, Static, read
from accelpatch.runtime.graphs.graph_memory import GraphMemory
from accelpatch.runtime.graphs.step import first_line
from accelpatch.runtime.watch import Watch, hook_tables, hooked, random_in_training

CAPTURED = "captured training layers"
STOCK = "no captured training layers: {}"
CHECKPOINT = "_gradient_checkpointing_func"  # the attribute of a layer through which transformers calls it
SETTINGS = frozenset({"use_reentrant", "preserve_rng_state", "determinism_check", "early_stop"})  # of checkpoint
RUNS = 2  # calls of a kind before one is captured
SHAPES = 4  # most kinds of calls that are captured
COUNTED = 4096  # most calls of layers whose runs are counted
CHANGES = 4  # changes of a model one after the other, without a captured call between, after which none is looked for
LARGEST = 1 << 25  # bytes of hidden states: for larger ones launch overhead does not matter


class TrainingWatch(Watch):
    """Detects changes that make captured training layers differ from the layers; writes into what trains are none."""

    def __init__(self, model: nn.Module, layers: list[nn.Module]):
        super().__init__(model)
        kept = [place for place, one in enumerate(self._written) if not one.requires_grad]
        self._written, self._versions = [self._written[i] for i in kept], [self._versions[i] for i in kept]
        self._inner = [module for layer in layers for module in layer.modules()]
        self._observers = hook_tables(self._inner)
        self._backward_hooks = [one for m in self._inner for one in (m._backward_hooks, m._backward_pre_hooks)]
        self._seen = self._present()
        self.reasons = list(map(why_not_layer, layers))
        self.random = random_in_training(model)

    def _present(self) -> tuple[Any, ...]:
        asking = [one.requires_grad for one in self._tensors]
        return asking, [module.training for module in self._inner], self.flags()

    def stale(self) -> bool:
        """As in Watch, and whether anything asks for a gradient, or trains, that did not or no more."""
        return super().stale() or self.switched() or self._present() != self._seen

    def objection(self) -> str | None:
        """Why no layer can be captured as things are, or None."""
        everywhere = chain.from_iterable(getattr(torch_module, name).values() for name in GLOBAL_HOOKS)
        if not all(hasattr(hook, OWN_HOOK) for hook in everywhere):
            return "a hook on all modules"
        if hooked(self._observers) or any(self._backward_hooks):
            return "a hook in a layer"
        if any("forward" in vars(module) for module in self._inner):
            return "a module whose forward was replaced"
        return self.random


def why_not_layer(layer: nn.Module) -> str | None:
    """Why a layer cannot be captured whatever it is called with, or None."""
    tensors = [*layer.parameters(), *layer.buffers()]
    if any(own_code.unusual(one) is not None for one in tensors) or len({one.device for one in tensors}) != 1:
        return "tensors of another kind, or on several devices"
    adapters = {id(one) for module in layer.modules() if is_adapter(module) for one in module.parameters()}
    trains = [one for one in layer.parameters() if one.requires_grad and id(one) not in adapters]
    return "a parameter outside of adapters trains" if trains else None


def reentrant(stock: Any) -> bool | None:
    """Whether the function that transformers calls a layer through is torch's checkpoint in its re-entrant form; None
    where it is another function, or has settings that a graph would not see."""
    if type(stock) is not partial or stock.func is not checkpoint or stock.args or stock.keywords.keys() - SETTINGS:
        return None
    form = stock.keywords.get("use_reentrant")
    return form if type(form) is bool else None


class TrainingLayers:
    """The captured layers of one model, dropped when it changes."""

    def __init__(self) -> None:
        self._calling, self._lock = threading.Lock(), threading.RLock()  # a call of the model; one of a layer
        self._alone = OneAtATime()
        self._changes = self._version = 0  # the latter: of the code that was read
        self.close()

    def close(self) -> None:
        """Free every graph; those of a call whose backward pass has not run live until then."""
        with self._lock:
            self._watch: TrainingWatch | None = None
            self._seen: Counter[Any] = Counter()
            self._shapes: dict[Any, Static] = {}
            self._captured: dict[Any, CapturedLayer | str] = {}  # or why there is none
            self._memory = GraphMemory()

    @contextmanager
    def around(self, runtime: Any, model: Any) -> Iterator[None]:
        """Context manager around a call of the model's modules, whose checkpointed layers run as graphs meanwhile."""
        layers: list[Any] = []
        if torch.is_grad_enabled() and model.training:
            layers = [one for one in model.modules() if isinstance(one, GradientCheckpointingLayer)]
            layers = [one for one in layers if one.gradient_checkpointing and CHECKPOINT in vars(one)]
        if not layers or not self._calling.acquire(blocking=False):  # another thread is within a call
            yield
            return
        before = [vars(one)[CHECKPOINT] for one in layers]
        try:
            self._ran, self._why = 0, self._why_not(runtime, model, layers)
            if self._why is None:
                for place, (layer, stock) in enumerate(zip(layers, before, strict=True)):
                    vars(layer)[CHECKPOINT] = partial(self._run, place, layer, stock)
            yield
            if self._why is not None or self._ran:
                runtime.paths[CAPTURED if self._ran else STOCK.format(self._why)] += 1
        finally:
            for layer, stock in zip(layers, before, strict=True):
                vars(layer)[CHECKPOINT] = stock
            self._calling.release()

    def _why_not(self, runtime: Any, model: Any, layers: list[Any]) -> str | None:
        """Why none of the layers of this call can be captured, or None; drops what was captured of another state."""
        if vars(model).get("_is_replica", False) or runtime.compiled is not None or not is_eager():
            return "a replica, a compiled model or a traced call"
        if reason := runtime.unable(model) or runtime.code.others:
            return str(reason)
        if self._changes > CHANGES:
            self.close()
            return "the model changes at every call"
        with self._lock:
            if self._watch is None or self._version != runtime.code.version or self._watch.stale():
                self._changes += 1
                self.close()
                self._version, self._watch = runtime.code.version, TrainingWatch(model, layers)
            return self._watch.objection()

    def _run(self, place: int, layer: Any, stock: Any, function: Any, *args: Any) -> Any:
        """One layer of a call, in the place of `stock`, which is torch's checkpoint."""
        watch = self._watch
        if torch.compiler.is_compiling() or watch is None or output_capturing._active_collector.get():
            return stock(function, *args)
        form, given = reentrant(stock), read(function, args)
        reason: str | None = "another function than torch's checkpoint" if form is None else watch.reasons[place]
        if reason is None:
            reason = given if isinstance(given, str) else why_not_tensors(given[1], layer, bool(form))
        if reason is None and not isinstance(given, str):
            call, tensors = given
            with self._lock:
                found = self._of((place, form, call.key(tensors)), layer, call, tensors)
            if isinstance(found, CapturedLayer):
                self._ran, self._changes = self._ran + 1, 0
                return found(call, tensors)
            reason = found
        self._why = reason or self._why
        return stock(function, *args)

    def _of(self, key: Any, layer: nn.Module, call: Call, tensors: list[Tensor]) -> CapturedLayer | str | None:
        """The captured layer of a call; or why there is none, None where the call has not come often enough."""
        if key in self._captured:
            return self._captured[key]
        shape = key[1:]
        if shape not in self._shapes and len(self._shapes) == SHAPES:
            return f"{SHAPES} shapes are captured"
        if len(self._seen) >= COUNTED:
            self._seen.clear()
        self._seen[key] += 1
        if self._seen[key] <= RUNS:
            return None
        made = CapturedLayer(
            layer, call, self._shapes.get(shape) or Static(tensors, self._alone), tensors, reentrant=key[1]
        )
        try:
            made.capture(self._memory.graph(tensors[0].device))
        except (*FOREIGN, KernelError) as error:  # a graph cannot hold it, or it is wrong, as checkpoint will say
            self._captured[key] = f"{type(error).__name__}: {first_line(error)}"
        else:
            self._captured[key], self._shapes[shape] = made, made.static
        return self._captured[key]


def why_not_tensors(tensors: list[Tensor], layer: nn.Module, form: bool) -> str | None:
    """Why no graph can take a call's tensors, the hidden states first; or None. form: whether it is re-entrant."""
    hidden, device = tensors[0], next(chain(layer.parameters(), layer.buffers())).device
    if any(type(one) is not Tensor or one.device != device or one.is_inference() for one in tensors):
        return "arguments of another kind, or on another device than the layer"
    if any(one.requires_grad for one in tensors[1:]):
        return "an argument besides the hidden states asks for a gradient"
    if torch.is_autocast_enabled(device.type):
        return "autocast"
    if not hidden.is_floating_point() or not hidden.is_contiguous() or hidden.nbytes > LARGEST:
        return f"hidden states that are no floats, not contiguous, or of more than {LARGEST} bytes"
    if not hidden.requires_grad and (form or not any(one.requires_grad for one in layer.parameters())):
        return "nothing before or in the layer asks for a gradient"
    return None
