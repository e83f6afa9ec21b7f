"""The captured steps of one patched model: made when first needed, few of them, dropped when the model changes."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from accelpatch.errors import KernelError, PatchError
from accelpatch.fusion.cannot_fuse import CannotFuse
from accelpatch.fusion.fused_layer import FUSED, FusedModel, fused_model
from accelpatch.runtime.cpu.native_step import recounted
from accelpatch.runtime.graphs.captured_batch import Batch, Drafts, GraphOf
from accelpatch.runtime.graphs.captured_cache import LayerShape, NotCached, capacity_for, learned
from accelpatch.runtime.graphs.captured_call import CapturedCalls, captured_outputs, generates
from accelpatch.runtime.graphs.captured_drafts import verifying
from accelpatch.runtime.graphs.captured_graph import GRAPHS, new_pool
from accelpatch.runtime.graphs.captured_step import CAPTURE_ERRORS, CapturedStep, first_line, for_decoding, graph_maker
from accelpatch.runtime.graphs.fused_forward import fused_outputs, prompts_of
from accelpatch.runtime.graphs.short_prompt import Prompts
from accelpatch.runtime.watch import Watch

CAPTURED = "captured step"
MODULES = "modules in the captured step: "  # and the reason
STEPS = 4  # graphs, each with its cache, that are kept per model
STATES = 4  # adapter states, besides the present one, whose graphs are kept


class NotCaptured(Exception):
    """Why a model's step could not be captured; the message goes into the report."""


class CapturedRuntime:
    """The graphs of one model. A deep copy starts without any and makes its own.

    graph: "auto" or "off". cache: "auto" or "stock". max_length: the most tokens of a sequence, or None. speculate:
    "off" or "prompt_lookup".
    """

    _learning = False  # true while `_learn` runs the modules

    def __init__(self, graph: str = "auto", cache: str = "auto", max_length: int | None = None, speculate: str = "off"):
        self.paths: Counter[str] = Counter()
        self.lock = threading.RLock()
        self.max_length = max_length
        self._settings = (graph, cache, max_length, speculate)
        self._speculate = speculate != "off"
        self._off = "the recipe says graph: off" if graph == "off" else "the recipe says cache: stock"
        self._off = self._off if graph == "off" or cache == "stock" else ""
        self._busy = False
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedRuntime:
        return recounted(CapturedRuntime(*self._settings), self.paths, memo)

    def close(self) -> None:
        """Free every graph and cache."""
        self._forget()
        self._adapters: tuple[str, ...] = ()
        self._others: OrderedDict[tuple[str, ...], dict[str, Any]] = OrderedDict()
        self._pool: Any = None
        self._watch: Watch | None = None
        self._flags: list[Any] = []
        self._done: torch.cuda.Event | None = None

    def _forget(self) -> None:
        """Drop everything that was made of the model in its present adapter state."""
        self._steps: OrderedDict[tuple[int, int], CapturedStep] = OrderedDict()
        self._batches: dict[int, Batch] = {}
        self._shapes: tuple[LayerShape, ...] | None = None
        self._vocabulary = 0
        self._unfit: str | None = None
        self._fused: FusedModel | None = None
        self._unfused = ""  # why there are no fused layers
        self._prompts: Prompts | None = None  # short prompts of single calls
        self._calls: CapturedCalls | None = None

    def outputs(self, model: nn.Module, given: Mapping[str, Any]) -> Any:
        """Outputs of a model call by fused layers or a graph; None where the modules must run."""
        if self._learning:
            return None
        return (fused_outputs if generates(model) else captured_outputs)(self, model, given)

    def fused(self, model: nn.Module) -> tuple[FusedModel | None, list[int]]:
        """The model's fused layers, if it has any, and the indices of layers with hooks, which must run as modules."""
        watch = self._looked(model)
        if watch is None:
            return None, []
        if self._fused is None and not self._unfused:
            self._fuse(model)
            watch = cast(Watch, self._watch)
        return self._fused, watch.watched()

    def calls(self, model: nn.Module) -> CapturedCalls | None:
        """The captured calls of the model as it is; None where its modules must run."""
        watch = self._looked(model)
        if watch is None or watch.watched():
            return None
        if self._calls is None:
            self._calls = CapturedCalls(model, self.graph(next(model.parameters()).device))
        return self._calls

    def _looked(self, model: nn.Module) -> Watch | None:
        """The Watch of the model, after a check for changes; None where the modules must run a single call."""
        replica = vars(model).get("_is_replica", False)  # a replica of nn.DataParallel has other weights
        if replica or self._busy or self._unable(model) is not None:
            return None
        self._look(model)
        assert self._watch is not None
        return self._watch if self._watch.objection() is None else None

    def steps(self, model: nn.Module) -> bool:
        """Whether `captured_decoding` handles generate(); nothing is captured before that is called."""
        return True

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Context manager: locks the model's steps; yields False where this thread holds them (in a streamer)."""
        with self.lock:
            if self._busy:
                yield False
                return
            self._busy = True
            try:
                if self._done is not None:
                    self._done.wait()  # the last step, on another stream, may still be running
                yield True
            finally:
                self._busy = False
                if self._pool is not None:
                    self._done = torch.cuda.Event()
                    self._done.record()

    def objection(self, model: nn.Module, rows: int) -> str | None:
        """Why no captured step can run for `rows` sequences, or None; inspects the model but captures nothing yet."""
        if reason := self._unable(model):
            return reason
        self._look(model)
        assert self._watch is not None
        objection = self._watch.objection() or ("a hook inside" if self._watch.watched() else None)
        if self._unfit is None and objection is not None:
            return "a hook on an inner module" if "hook" in objection else objection
        if self._unfit is None and self._shapes is None:
            self._learn(model)
            if self._fused is None and not self._unfused:
                self._fuse(model)
        return self._unfit

    def _unable(self, model: nn.Module) -> str | None:
        """Why neither captured steps nor fused layers can run now; does not look at the model's modules."""
        if (device := next((one.device for one in model.parameters()), None)) is None:
            return "a model without parameters"
        if self._off or device.type not in GRAPHS:
            return self._off or f"the model lies on {device.type}"
        if model.training or torch.is_autocast_enabled(device.type):
            return "training or autocast"
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return "the caller is capturing a graph"
        return None

    def _look(self, model: nn.Module) -> None:
        """Drop everything made of a model that has changed; if only its adapters changed, switch to their state."""
        if self._watch is None or self._watch.stale() or self._flags != self._watch.flags():
            self.close()
            self._watch = Watch(model)
            self._flags, self._adapters = self._watch.flags(), self._watch.adapters()
        elif (adapters := self._watch.adapters()) != self._adapters:
            self._switch(adapters)

    def _switch(self, adapters: tuple[str, ...]) -> None:
        """Switch to what was made of the model in another state of its adapters, keeping that of the present one."""
        names = ("_steps", "_batches", "_shapes", "_vocabulary", "_unfit", "_fused", "_unfused", "_prompts", "_calls")
        self._others[self._adapters] = {name: getattr(self, name) for name in names}
        self._forget()
        vars(self).update(self._others.pop(adapters, {}))
        self._adapters = adapters
        while len(self._others) > STATES:
            self._others.popitem(last=False)

    def room(self, length: int, most: int | None) -> int:
        """The cache capacity to start with after `length` tokens. Raises PatchError beyond the recipe's max_length."""
        if self.max_length is not None and (most or length) > self.max_length:
            raise PatchError(
                f"a sequence of up to {most or length} tokens was asked for and the recipe's max_length is "
                f"{self.max_length}: ask for fewer new tokens, or raise runtime: max_length"
            )
        return capacity_for(length + 1, self.max_length)

    def step(self, model: nn.Module, rows: int, capacity: int) -> CapturedStep:
        """The step for this size, captured if needed. Raises NotCaptured; then no other size is tried either."""
        key = (rows, capacity)
        if key not in self._steps:
            try:
                self._steps[key] = self._made(model, rows, capacity)
            except torch.OutOfMemoryError:
                self._others.clear()  # free the caches of other adapter states and sizes
                self._prompts = self._calls = None
                self._steps.clear()
                self._batches = {rows: self._batches[rows]}
                self._steps[key] = self._made(model, rows, capacity)
            self._flags = [] if self._watch is None else self._watch.flags()
            while len(self._steps) > STEPS:
                self._steps.popitem(last=False)
            used = {batch for batch, _ in self._steps}
            self._batches = {n: batch for n, batch in self._batches.items() if n in used}
        self._steps.move_to_end(key)
        return self._steps[key]

    def larger(self, model: nn.Module, step: CapturedStep) -> CapturedStep:
        """The step over a cache of twice the capacity, with the contents of this one's."""
        grown = self.step(model, step.batch.rows, capacity_for(step.capacity + 1, self.max_length))
        grown.adopt(step)
        return grown

    def graph(self, device: torch.device) -> GraphOf:
        """The function that captures programs for this model."""
        if self._pool is None and device.type == "cuda":
            self._pool = new_pool(device)
        return graph_maker(device, self._pool)

    def prompts(self, fused: FusedModel) -> Prompts:
        """The captured short prompts of the model's fused layers, for single calls."""
        if self._prompts is None:
            self._prompts = prompts_of(fused, self.graph(fused.norm.weight.device))
        return self._prompts

    def _made(self, model: nn.Module, rows: int, capacity: int) -> CapturedStep:
        assert self._shapes is not None
        device = next(model.parameters()).device
        with torch.inference_mode(False), torch.no_grad(), for_decoding(model):
            batch = self._batches.setdefault(rows, Batch(rows, self._vocabulary, device))
            if self._fused is not None and rows <= self._fused.most:
                try:
                    step = CapturedStep(model, batch, self._shapes, capacity, self.graph(device), self._fused)
                    drafting = self._speculate and rows == 1
                    return verifying(step, self._fused, self.graph(device)) if drafting else step
                except BaseException as error:
                    self._fused.forget()  # other steps go on with the same layers
                    if isinstance(error, torch.OutOfMemoryError) or not isinstance(error, CAPTURE_ERRORS):
                        raise
                    self._fused, self._unfused = None, f"{type(error).__name__}: {first_line(error)}"
            try:
                return CapturedStep(model, batch, self._shapes, capacity, self.graph(device))
            except torch.OutOfMemoryError:
                raise
            except CAPTURE_ERRORS as error:
                self._unfit = f"its step cannot be captured ({type(error).__name__}: {first_line(error)})"
                raise NotCaptured(self._unfit) from error

    def drafts(self, step: CapturedStep) -> Drafts | str | None:
        """The state for draft tokens, or why there are none; None where the recipe does not ask for them."""
        if not self._speculate:
            return None
        if step.batch.rows != 1:
            return f"{step.batch.rows} rows"
        if not step.fused:
            return "modules in the captured step"
        return step.no_drafts or step.batch.drafts

    def way(self, step: CapturedStep) -> str:
        """How a step runs, for the report."""
        if step.fused:
            return FUSED
        return MODULES + (self._unfused or f"{step.batch.rows} rows")

    def _fuse(self, model: nn.Module) -> None:
        """Read the model's fused layers, or why there are none; weights that get concatenated have moved after this."""
        self._watch = None  # the Watch would keep the old weights alive beside the new
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._fused = fused_model(model) if self._unfit is None else None
        except (CannotFuse, KernelError) as reason:
            self._unfused = str(reason)
        # graphs of other adapter states read weights at addresses that were left when weights were concatenated
        if any(other["_fused"] is None for other in self._others.values()):
            self._others.clear()
        self._watch = Watch(model)
        self._flags = self._watch.flags()

    def _learn(self, model: nn.Module) -> None:
        """Find out what the layers cache, by running one token."""
        self._learning = True
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._vocabulary, self._shapes = learned(model)
        except torch.OutOfMemoryError:
            raise
        except NotCached as error:
            self._unfit = str(error)
        except CAPTURE_ERRORS as error:
            self._unfit = f"its cache cannot be known ({type(error).__name__}: {first_line(error)})"
        finally:
            self._learning = False
        self._flags = [] if self._watch is None else self._watch.flags()
