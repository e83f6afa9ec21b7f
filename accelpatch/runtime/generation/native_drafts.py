"""generate() with the drafts of a model over the native steps of a CPU, for one sequence.

The draft model's steps are native where it is patched, else calls of its modules over a cache of its own. The target
checks the draft tokens in one native call (cpu/native_row.py). Its places are then chosen one after the other by the
loop, each only once the draft token before it was chosen: processors, criteria, streamers and random numbers see what
they see without drafts.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from accelpatch.fusion.cache_name import CACHE
from accelpatch.kernels.cpu.native_library import MAX_BATCH
from accelpatch.models.multimodal import is_multimodal
from accelpatch.runtime.cpu.native_row import NativeRow
from accelpatch.runtime.cpu.native_step import NativeRuntime
from accelpatch.runtime.cpu.torch_threads import all_threads, one_thread
from accelpatch.runtime.generation.candidate_drafts import CandidateDrafter, settings_of, source_of
from accelpatch.runtime.generation.decoding import NativeSteps, loop, stock_loop_because
from accelpatch.runtime.generation.drafter import Counts, Limit, Pace, PacedDrafter, threshold_of

DRAFTS = MAX_BATCH - 1  # most draft tokens of a round


class Row(Protocol):
    """A model over a cache of one sequence, at any place of it."""

    def logits(self, tokens: list[int], slot: int) -> Tensor | None:
        """Logits [T, V] float32 after each of the tokens, the first at `slot`; None where that cannot be."""

    def crop(self, length: int) -> None:
        """The cache has so many tokens."""


class ModuleRow:
    """The modules of an assistant. mask[1, L]: of its prompt."""

    def __init__(self, model: Any, cache: DynamicCache, mask: Tensor):
        self._model, self._cache, self._mask = model, cache, mask

    def logits(self, tokens: list[int], slot: int) -> Tensor | None:
        """As of Row."""
        mask = torch.nn.functional.pad(self._mask, (0, slot + len(tokens) - self._mask.shape[1]), value=1)
        positions = (mask.cumsum(1) - 1)[:, slot:]
        ids = torch.tensor([tokens], device="cpu")
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, CACHE: self._cache}
        with all_threads():
            logits: Tensor = self._model(**given, use_cache=True, return_dict=True).logits
        return logits[0].float()

    def crop(self, length: int) -> None:
        """As of Row."""
        if (more := self._cache.get_seq_length() - length) > 0:
            self._cache.crop(-more)


class NativeDrafter(PacedDrafter):
    """Draft tokens of an assistant on a CPU."""

    def __init__(self, model: Any, pace: Pace, limit: Limit, counts: Counts):
        super().__init__(pace, limit, counts, [])
        self._model, self._threshold = model, threshold_of(model.generation_config)
        self._cached = 0  # tokens of the text whose keys and values it has
        self._row: Row | None = None

    def prompt(self, ids: Tensor, mask: Tensor | None, target: NativeRow) -> None:
        """Cache the prompt ids[1, L]; mask[1, L] hides padding. target: after the prompt."""
        self.text += ids[0].tolist()
        mask = torch.ones_like(ids) if mask is None or mask.shape != ids.shape else mask.long()
        cache, start = DynamicCache(config=self._model.config), int(mask.shape[1] - mask.sum())
        runtime = vars(self._model).get("_accelpatch_runtime")
        native = isinstance(runtime, NativeRuntime) and runtime.steps(self._model)
        if not native and hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        given["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        if self._model._supports_logits_to_keep():
            given["logits_to_keep"] = 1
        with all_threads():
            self._model(**given, **{CACHE: cache}, use_cache=True, return_dict=True)
        if native:
            assert isinstance(runtime, NativeRuntime)
            self._row = NativeRow(runtime, self._model, cache, start, -start)
        else:
            self._row = ModuleRow(self._model, cache, mask)
        self._cached = ids.shape[1]

    def proposed(self, most: int) -> list[int]:
        """As of PacedDrafter."""
        found: list[int] = []
        given = self.missing()
        self.fresh = self.fresh or len(given) > MAX_BATCH
        while len(found) < most:
            logits = self._run(given)
            if logits is None:
                self.limit.off = True  # it has changed, or somebody looks inside
                return []
            token = int(logits.argmax())
            found.append(token)
            if self._threshold > 0 and float((logits - logits.max()).exp().sum().reciprocal()) < self._threshold:
                break
            given = [token]
        return found

    def missing(self) -> list[int]:
        """The tokens of the text that are not cached, at least the last one."""
        return self.text[self._cached :]

    def _run(self, tokens: list[int]) -> Tensor | None:
        """Logits [V] after the last of the tokens, which come behind those that are cached."""
        assert self._row is not None
        logits = None
        while tokens:
            some, tokens = tokens[:MAX_BATCH], tokens[MAX_BATCH:]
            logits = self._row.logits(some, self._cached)
            if logits is None:
                return None
            self._cached += len(some)
        return None if logits is None else logits[-1]

    def rolled_back(self, slot: int, drafted: int, accepted: int) -> None:
        """As of PacedDrafter."""
        self._cached = min(self._cached, slot + 1 + accepted)
        if self._row is not None:
            self._row.crop(self._cached)


class NativeExit(NativeDrafter):
    """Draft tokens of the first `layers` layers of the target, which exits after them; over the target's own cache."""

    def __init__(self, model: Any, pace: Pace, limit: Limit, counts: Counts, layers: int):
        super().__init__(model, pace, limit, counts)
        self._layers = layers

    def prompt(self, ids: Tensor, mask: Tensor | None, target: NativeRow) -> None:
        """As of NativeDrafter."""
        self.text += ids[0].tolist()
        self._target, self._row = target, target.first(self._layers)

    def missing(self) -> list[int]:
        """As of NativeDrafter: the target has cached all others."""
        self._cached = self._target.length
        return self.text[-1:]

    def rolled_back(self, slot: int, drafted: int, accepted: int) -> None:
        """As of PacedDrafter: the target writes over what was rejected."""


class DraftedSteps:
    """Steps for the loop, of which some check draft tokens. end: the most tokens of the sequence."""

    def __init__(self, model: Any, runtime: NativeRuntime, drafter: NativeDrafter | CandidateDrafter, end: int):
        self._steps, self._drafter = NativeSteps(model, runtime), drafter
        drafter.end = end
        self._model, self._runtime = model, runtime
        self._row: NativeRow | None = None
        self._due: list[int] = []  # draft tokens of the last check that may still be accepted
        self._drafted = 0  # how many they were
        self._logits: Tensor | None = None  # [T, V] of the last check

    @property
    def kwargs(self) -> dict[str, Any]:
        """As of Steps."""
        return self._steps.kwargs

    def prompt(self, ids: Tensor, config: Any, kwargs: dict[str, Any]) -> Tensor:
        """As of Steps."""
        mask = kwargs.get("attention_mask")
        logits = self._steps.prompt(ids, config, kwargs)
        start = 0 if mask is None else int(mask.shape[1] - mask.sum())
        self._row = NativeRow(self._runtime, self._model, self._steps.kwargs[CACHE], start, -start)
        self._drafter.prompt(ids, mask, self._row)
        return logits

    def next(self, ids: Tensor, tokens: Tensor) -> Tensor:
        """As of Steps."""
        token, drafter = int(tokens[0]), self._drafter
        drafter.append(token)
        if self._due and self._due[0] == token and self._row is not None:
            place = self._drafted - len(self._due) + 1
            del self._due[0]
            return self._of(place)
        if self._drafted:
            drafter.learn(self._drafted - len(self._due))
        self._due = [] if self._row is None else drafter.draft() or []
        self._drafted = len(self._due)
        if self._row is not None:
            self._logits = self._row.logits([token, *self._due], self._row.length)
            if self._logits is not None:
                return self._of(0)
            self._row, self._due, self._drafted = None, [], 0  # the modules go on
        return self._steps.next(ids, tokens)

    def close(self) -> None:
        """The call is over."""
        if self._drafted:
            self._drafter.learn(self._drafted - len(self._due))
        self._drafter.finish()

    def _of(self, place: int) -> Tensor:
        """Logits [1, V] after a token of the last check, which the cache has from here on."""
        assert self._row is not None
        assert self._logits is not None
        self._row.grow()
        self._steps.behind += 1
        return self._logits[place : place + 1].clone()


def native_why_not(
    model: Any, runtime: NativeRuntime, given: tuple[Any, ...], synced: bool, assistant: Any, kwargs: dict[str, Any]
) -> str | None:
    """Why transformers' own loop must run; None where `native_assisted` can."""
    ids, _, criteria, config = given
    reading = runtime.reading(model)
    if reading.model is None or reading.model.unfused:
        return str(reading.unfit or "modules in the native step")
    if reason := stock_loop_because(model, config, synced, kwargs) or runtime.code.cache or reading.watch.objection():
        return reason
    if is_multimodal(model) or kwargs.get("inputs_embeds") is not None:
        return "embeddings in place of ids"
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None and (mask.dim() != 2 or bool((mask.diff(dim=1) < 0).any())):
        return "an attention mask that is not left padding"
    if positions is not None:
        last = (ids.shape[1] if mask is None else int(mask.sum())) - 1
        if positions.dim() != 2 or int(positions[0, -1]) != last:
            return "positions that do not count the tokens"
    if assistant is not None and (reason := _assistant_why_not(assistant)):
        return reason
    if not isinstance(kwargs[CACHE], DynamicCache) or any(
        getattr(one, "record_past", 0) for one in kwargs[CACHE].layers
    ):
        return f"the cache is a {type(kwargs[CACHE]).__name__}"
    return None if criteria.max_length else "no maximum length"


def _assistant_why_not(assistant: Any) -> str | None:
    if assistant.device.type != "cpu" or assistant._forward_hooks or assistant._forward_pre_hooks:
        return "the assistant lies elsewhere, or has a hook"
    settings = assistant.config.get_text_config(decoder=True)
    if getattr(settings, "sliding_window", None) and vars(assistant).get("_accelpatch_runtime") is None:
        return "an assistant with a sliding window that is not patched"
    return None


@torch.no_grad()
def native_assisted(
    model: Any, runtime: NativeRuntime, given: tuple[Any, ...], streamer: Any, assistant: Any, kwargs: dict[str, Any],
    generator: Any = None,
) -> Any:  # fmt: skip
    """The result of generate() with drafts of `assistant`, or of one of transformers' generators.

    given: as of captured_loop.
    """
    ids, processors, criteria, config = given
    source = model if config.assistant_early_exit is not None else assistant
    limit = Limit(settings_of(config, assistant) if generator is not None else source.generation_config, DRAFTS)
    if generator is not None and config.prompt_lookup_num_tokens is not None:
        source = source_of(model, "prompt lookup", assistant)
    pace = runtime.paces.setdefault(source, Pace())
    counts = Counts(pace)
    if generator is not None:
        drafter: Any = CandidateDrafter(pace, limit, counts, generator)
    else:
        drafter = NativeDrafter(source, pace, limit, counts)
    if (layers := config.assistant_early_exit) is not None:
        drafter = NativeExit(source, pace, limit, counts, layers)
    steps = DraftedSteps(model, runtime, drafter, criteria.max_length)
    try:
        with one_thread():
            return loop(steps, ids, processors, criteria, config, streamer, kwargs)
    finally:
        steps.close()
        counts.report(runtime.paths)
        limit.keep()
