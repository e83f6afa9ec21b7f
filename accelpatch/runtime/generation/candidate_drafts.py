"""Drafts that transformers' own generators of candidates make, checked by captured or native steps, as many as pay.

`prompt_lookup_num_tokens=` looks in the text; an assistant of another tokenizer writes on in its own tokens. What
either proposes are tokens alone, so that the check, the choice of tokens and the report are those of any other draft.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from accelpatch.fusion.cache_name import CACHE
from accelpatch.runtime.generation.drafted_loop import Checked
from accelpatch.runtime.generation.drafter import Counts, Limit, Pace, PacedDrafter
from accelpatch.runtime.generation.hosted_drafts import ModelLookup
from accelpatch.runtime.graphs.drafts import DRAFTS

LOOKUP = "prompt_lookup_num_tokens"
BEHIND = 16  # tokens of the text that an assistant has not seen from which on it reads the whole text anew


def kind(config: Any, assistant: Any, extra: dict[str, Any]) -> str | None:
    """What transformers' generator would propose: `prompt lookup`, `another tokenizer`; None for other drafts.

    extra: the arguments of `_assisted_decoding` besides the loop's.
    """
    if config.assistant_early_exit is not None:
        return None
    if getattr(config, LOOKUP, None) is not None:
        return "prompt lookup"
    both = extra.get("tokenizer") is not None and extra.get("assistant_tokenizer") is not None
    return "another tokenizer" if both and assistant is not None else None


class CandidateDrafter(PacedDrafter):
    """Draft tokens of one of transformers' generators. room: whether a check has room."""

    def __init__(
        self, pace: Pace, limit: Limit, counts: Counts, generator: Any, room: Callable[[], bool] | None = None
    ):
        super().__init__(pace, limit, counts, [])
        self._generator, self._room = generator, room
        self._asking = "num_output_tokens" if hasattr(generator, "num_output_tokens") else "num_assistant_tokens"
        self._caches = getattr(getattr(generator, "generation_config", None), "cache_implementation", None)
        self._seen = 0  # tokens of the text, drafts apart, when it was last asked

    def prompt(self, ids: Tensor, mask: Tensor | None, target: Any) -> None:
        """The text begins with ids[1, L]."""
        self.text += ids[0].tolist()

    def proposed(self, most: int) -> list[int]:
        """As of PacedDrafter."""
        if self._room is not None and not self._room():
            return []
        generator = self._generator
        if self._asking == "num_assistant_tokens":
            self._begin(generator, len(self.text) - self._seen > BEHIND)
        self._seen = len(self.text)
        setattr(generator, self._asking, most)
        found, _ = generator.get_candidates(torch.tensor([self.text], device=_device_of(generator)))
        tokens: list[int] = found[0, len(self.text) :].tolist()
        return tokens[:most]

    def _begin(self, generator: Any, anew: bool) -> None:
        """Before an assistant of another tokenizer writes on. anew: its cache holds drafts rejected long ago."""
        given = generator.assistant_kwargs
        given.pop("position_ids", None)  # of the target's tokens
        if anew and self._seen:
            generator.prev_assistant_ids = None
            generator.generation_config.cache_implementation = self._caches
            given.pop(CACHE, None)

    def rolled_back(self, slot: int, drafted: int, accepted: int) -> None:
        """As of PacedDrafter: a generator sees in the next text what became of its candidates."""


class CandidateLookup(ModelLookup):
    """Steps for the loop of the host, of which some check the candidates of `generator`."""

    def __init__(self, checked: Checked, generator: Any, ids: Tensor, end: int | None):
        super().__init__(checked, ids, end)
        self._generator = generator

    def drafter(self, ids: Tensor) -> PacedDrafter:
        """As of ModelLookup."""
        checked = self._checked
        made = CandidateDrafter(
            checked.pace, checked.limit, checked.counts, self._generator, lambda: checked.check(DRAFTS) is not None
        )
        made.prompt(ids, None, None)
        return made


def candidate_generator(
    model: Any, given: tuple[Any, ...], assistant: Any, extra: dict[str, Any], kwargs: dict[str, Any]
) -> Any:
    """transformers' generator for a call. given: as of captured_loop. extra: as of `kind`."""
    ids, processors, _, config = given
    made: Any = model._get_candidate_generator(
        generation_config=config, input_ids=ids, inputs_tensor=extra.get("inputs_tensor"), assistant_model=assistant,
        logits_processor=processors, target_tokenizer=extra.get("tokenizer"),
        assistant_tokenizer=extra.get("assistant_tokenizer"), model_kwargs=kwargs,
    )  # fmt: skip
    if hasattr(made, "num_output_tokens"):
        # The text is looked through on the host. Processors would only sort out what the check rejects, and those that
        # keep a state of their own, as of guidance_scale, would take candidates for tokens of the text.
        ends, made.logits_processor = made.eos_token_id, None
        if ends is None:  # old versions of transformers want some
            ends = torch.empty(0, dtype=torch.int64)
        made.eos_token_id = ends.cpu() if isinstance(ends, Tensor) else ends
    return made


def settings_of(config: Any, assistant: Any) -> Any:
    """What limits the number of drafts: the assistant's generation config, or that of a prompt lookup; none for what
    hidden states give."""
    if (number := getattr(config, LOOKUP, None)) is not None:
        return SimpleNamespace(num_assistant_tokens=number)
    states = getattr(config, "use_mtp", False) or getattr(config, "speculation_type", None) is not None
    return SimpleNamespace(num_assistant_tokens=DRAFTS) if states else assistant.generation_config


def source_of(model: Any, candidates: str, assistant: Any) -> Any:
    """What stands for drafts of one kind among what drafts for a model: lookups in texts have no model of their own."""
    if candidates == "prompt lookup":
        return model.get_input_embeddings()
    return assistant if assistant is not None else model.get_output_embeddings()


def _device_of(generator: Any) -> Any:
    """Where a generator wants the text."""
    if (assistant := getattr(generator, "assistant_model", None)) is not None:
        return assistant.device
    ends = generator.eos_token_id
    return ends.device if isinstance(ends, Tensor) else torch.device("cpu")
