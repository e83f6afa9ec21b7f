"""Drafts that are made from the target's hidden states: MTP heads (`use_mtp=True`) and DFlash (`speculation_type=`).

transformers' generators of candidates make them; captured steps check them, as many as pay, and leave the hidden states
of every token for the next ones. Each token is chosen only once the draft token before it was, as without drafts.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from accelpatch.fusion.cache_name import CACHE
from accelpatch.report import NO_DRAFTS
from accelpatch.runtime.generation.drafted_loop import Checked
from accelpatch.runtime.generation.drafter import PacedDrafter
from accelpatch.runtime.generation.hosted_drafts import ModelLookup
from accelpatch.runtime.graphs.drafts import DRAFTS, TOKENS
from accelpatch.runtime.graphs.kv_cache import NotCaptured
from accelpatch.runtime.graphs.states_check import STATES, StatesCheck
from accelpatch.runtime.graphs.step import CAPTURE_ERRORS, first_line

FEW = 2  # tokens of a check without draft tokens


def from_states(config: Any, assistant: Any) -> str | None:
    """`MTP heads` or `DFlash`, where a call of generate() asks for them; else None. An early exit and a prompt lookup
    go before them, as in transformers."""
    if config.assistant_early_exit is not None or config.prompt_lookup_num_tokens is not None:
        return None
    if getattr(config, "use_mtp", False):
        return "MTP heads"
    return "DFlash" if getattr(config, "speculation_type", None) == "dflash" and assistant is not None else None


def states_why_not(config: Any, kwargs: dict[str, Any], form: str, fused: bool) -> str | None:
    """Why transformers' own loop must make drafts from hidden states; None where captured steps can.

    form: of the KV cache. fused: whether the step runs fused layers.
    """
    if getattr(config, "prefill_chunk_size", None) is not None:
        return "a prompt in parts has the hidden states of its last part alone"
    if kwargs.get("inputs_embeds") is not None:
        return "embeddings in place of ids"
    if (cache := kwargs.get(CACHE)) is not None and int(cache.get_seq_length()):
        return "the cache holds tokens whose hidden states are not known"
    return None if fused or form == "float" else "modules over a KV cache in 8 bits"


class StatesDrafter(PacedDrafter):
    """Draft tokens of one of transformers' generators that reads hidden states. mask[1, L]: of the prompt."""

    def __init__(self, checked: Checked, generator: Any, ids: Tensor, mask: Tensor | None, lookup: StatesLookup):
        super().__init__(checked.pace, checked.limit, checked.counts, ids[0].tolist())
        self._generator, self._lookup = generator, lookup
        self._ids, self._mask = ids, torch.ones_like(ids) if mask is None else mask
        generator.get_candidates(ids, model_kwargs={}, model_outputs=None, is_first_iteration=True, n_last_matches=0)

    def proposed(self, most: int) -> list[int]:
        """As of PacedDrafter."""
        if len(self.text) <= getattr(self._generator, "num_mtp_layers", 0):
            return []  # several heads look back as many tokens
        states = self._lookup.pending()
        device, length = self._ids.device, len(self.text)
        mask = torch.nn.functional.pad(self._mask, (0, length - self._mask.shape[1]), value=1)
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        count = next(iter(states.values())).shape[1]
        found, _ = self._generator.get_candidates(
            torch.tensor([self.text], device=device),
            model_kwargs={"attention_mask": mask, "position_ids": positions},
            model_outputs=SimpleNamespace(hidden_states=_Chosen(states)), is_first_iteration=False,
            n_last_matches=count - 1,
        )  # fmt: skip
        tokens: list[int] = found[0, length:].tolist()
        return tokens[:most]

    def rolled_back(self, slot: int, drafted: int, accepted: int) -> None:
        """As of PacedDrafter: what is pending are the hidden states of tokens that were chosen."""


class _Chosen(dict[int, Tensor]):
    """Hidden states by index, of those that a generator reads."""


class StatesLookup(ModelLookup):
    """Steps for the loop of the host, each of which is a check that leaves hidden states."""

    def __init__(self, checked: Checked, generator: Any, ids: Tensor, end: int | None):
        super().__init__(checked, ids, end)
        self._generator = generator
        asked = generator.model_kwargs_overrides[STATES]
        self._wanted = [asked] if type(asked) is int else list(asked)
        self._pending: list[list[Tensor]] = [[] for _ in self._wanted]
        self._check: StatesCheck | None = None  # the last one
        self._places = 0  # of it that hold tokens of the text
        self._left_off = False  # whether nothing more is drafted

    def prompt(self, ids: Tensor, config: Any, kwargs: dict[str, Any]) -> Tensor:
        """As of Lookup."""
        asked = self._generator.model_kwargs_overrides[STATES]
        logits = self.run.prompt(ids, config, kwargs | {STATES: asked})
        self.run.kwargs.pop(STATES, None)
        run: Any = self.run
        for place, pending in zip(self._wanted, self._pending, strict=True):
            pending.append(run.states[place])
        self.known = StatesDrafter(self._checked, self._generator, ids, kwargs.get("attention_mask"), self)
        self.known.end = self._end
        return logits

    def pending(self) -> dict[int, Tensor]:
        """By their index, the hidden states [1, T, K] of the tokens since this was last called, but for the last."""
        self._collect()
        joined = {place: torch.cat(pending, dim=1) for place, pending in zip(self._wanted, self._pending, strict=True)}
        self._pending = [[] for _ in self._wanted]
        return joined

    def draft(self) -> list[int] | None:
        """As of Lookup."""
        return None if self._left_off or not self._room() else self.known.draft()

    def verify(self, drafted: list[int]) -> None:
        """As of Lookup."""
        self._run(drafted, TOKENS)
        self.steps += 1

    def plain(self) -> None:
        """As of Lookup: a check without draft tokens."""
        if self._left_off:
            self.run.advance()
            return
        self._run([], FEW)
        self.sample(0)

    def sample(self, row: int) -> None:
        """As of Lookup."""
        super().sample(row)
        self._places = row + 1

    def _run(self, drafted: list[int], tokens: int) -> None:
        self._collect()
        self.drafts.send([*drafted, *[0] * (DRAFTS - len(drafted))])
        self._check = self.run.step.states[tokens, tuple(self._wanted)]
        self._check.graph.replay()

    def _collect(self) -> None:
        """Keep the hidden states of the last check's places that hold tokens of the text."""
        if self._check is not None and self._places:
            for pending, states in zip(self._pending, self._check.states, strict=True):
                pending.append(states[:, : self._places].clone())
        self._check, self._places = None, 0

    def _room(self) -> bool:
        """Whether a check has room and is captured; else plain steps go on, and nothing more is drafted."""
        run: Any = self.run
        try:
            if run.slot + TOKENS > run.step.capacity:
                run.step = run.runtime.larger(run.model, run.step)
            if run.slot + TOKENS > run.step.capacity:
                raise NotCaptured("the cache has no room for them")
            for tokens in (FEW, TOKENS):
                self._captured(run, tokens)
        except torch.OutOfMemoryError:
            raise
        except (*CAPTURE_ERRORS, NotCaptured) as error:
            self._collect()
            self._left_off = True
            if run.step.fused is not None:
                run.step.fused.forget()
            run.step.mask[:, run.slot :] = 0
            said = str(error) if isinstance(error, NotCaptured) else f"{type(error).__name__}: {first_line(error)}"
            run.runtime.paths[f"{NO_DRAFTS}{said}"] += 1
        return not self._left_off

    def _captured(self, run: Any, tokens: int) -> None:
        key, checks = (tokens, tuple(self._wanted)), run.step.states
        if key not in checks:
            if isinstance(self.known, PacedDrafter):
                self.known.fresh = True
            places, graph = self._checked.drafts.first(tokens), run.runtime.captured.graph(run.step.batch.device)
            with torch.inference_mode(False), torch.no_grad():
                checks[key] = StatesCheck(run.step, places, self._wanted, graph)
