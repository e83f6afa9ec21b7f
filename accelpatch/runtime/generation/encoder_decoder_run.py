"""One call of generate() of an encoder-decoder over captured steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateEncoderDecoderOutput
from transformers.modeling_outputs import Seq2SeqLMOutput

from accelpatch.fusion.cache_name import CACHE
from accelpatch.runtime.cache_contents import Contents
from accelpatch.runtime.generation.captured_run import CapturedRun
from accelpatch.runtime.generation.decoding import stock_loop_because
from accelpatch.runtime.graphs.encoder_decoder import (
    MASK,
    OUTPUTS,
    EncoderDecoderStep,
    call_why_not,
    hidden_of,
    hides_all,
)
from accelpatch.runtime.graphs.encoder_decoder_prompt import (
    CAPTURED_PROMPT,
    CapturedPrompts,
    begin_caches,
    prompt_why_not,
)
from accelpatch.runtime.graphs.kv_cache import cache_of
from accelpatch.runtime.graphs.runtime import CapturedRuntime
from accelpatch.runtime.graphs.step import CapturedStep

POSITIONS = "decoder_position_ids"
#: arguments of the model's calls that a step supports, and those that generate() alone reads
UNDERSTOOD = frozenset(
    {MASK, OUTPUTS, CACHE, "decoder_attention_mask", POSITIONS, "use_cache", "tokenizer", "output_attentions"}
)


class EncoderDecoderRun(CapturedRun):
    """One call of generate() of an encoder-decoder. The model's own forward makes the keys and values of the
    cross-attention with those of the prompt."""

    result = GenerateEncoderDecoderOutput
    mask = "decoder_attention_mask"

    def __init__(self, model: Any, runtime: CapturedRuntime, step: CapturedStep):
        super().__init__(model, runtime, step)
        self._cross: Contents | None = None

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._cross is not None:
            if not self._seen:
                self._cross.length = 0  # nothing to copy
            self._cross.detach()

    @classmethod
    def why_not(cls, model: Any, runtime: CapturedRuntime, config: Any, synced: bool, kwargs: Any) -> str | None:
        """As of CapturedRun."""
        reason = stock_loop_because(model, config, synced, kwargs, UNDERSTOOD)
        reason = reason or call_why_not(model, kwargs) or runtime.why_not(model, kwargs)
        return reason or ("a row whose mask hides all that the encoder gave" if hides_all(kwargs) else None)

    @classmethod
    def step_for(cls, model: Any, runtime: CapturedRuntime, ids: Tensor, capacity: int, kwargs: Any) -> CapturedStep:
        """As of CapturedRun."""
        decoder = runtime.captured.decoder
        assert decoder is not None
        return runtime.step(model, ids.shape[0], capacity, source=decoder.source(kwargs))

    def prompt(self, ids: Tensor, config: Any, kwargs: dict[str, Any]) -> Tensor:
        """As of CapturedRun."""
        step, cache = self.step, kwargs[CACHE]
        assert isinstance(step, EncoderDecoderStep)
        length = ids.shape[1]
        if self._by_graph(step, ids, config, kwargs):
            logits = step.batch.logits.clone()
            outputs: Any = Seq2SeqLMOutput(**{CACHE: cache})
            begin_caches(cache, step)
        else:
            outputs = self._model._prefill(ids, config, kwargs, is_first_iteration=True)
            cache = cache_of(outputs)
            logits, length = outputs.logits[:, -1].to(copy=True, dtype=torch.float32), cache.get_seq_length()
            step.encoded.vacate()
            step.encoded.show(kwargs)
        self.kwargs = self._model._update_model_kwargs_for_generation(outputs, kwargs, is_encoder_decoder=True)
        own, positions = cache.self_attention_cache, self._positions(ids, length, kwargs.get(self.mask))
        self._continue(own, length, kwargs.get(self.mask), positions, config)
        self._cross = step.encoded.attach(cache.cross_attention_cache, kwargs)
        self._cross.length = hidden_of(kwargs).shape[1]
        return logits.to(ids.device)

    def _positions(self, ids: Tensor, length: int, mask: Tensor | None) -> Tensor:
        """The position [B, 1] or [1, 1] of the next token, as the model itself would have it."""
        positions: Tensor | None = self.kwargs.get(POSITIONS)
        if positions is None and mask is not None:
            more = torch.cat([ids, ids[:, -1:]], dim=1)
            given = self._model.prepare_inputs_for_generation(more, next_sequence_length=1, **self.kwargs)
            positions = given.get(POSITIONS)
        return torch.tensor([[length]]) if positions is None else positions

    def _by_graph(self, step: EncoderDecoderStep, ids: Tensor, config: Any, kwargs: dict[str, Any]) -> bool:
        """Run the first tokens by a graph, where there is one: into the caches of the step."""
        if prompt_why_not(kwargs) is not None or getattr(config, "prefill_chunk_size", None) is not None:
            return False
        if step.first_tokens is None:
            step.first_tokens = CapturedPrompts()
        step.encoded.vacate()
        step.encoded.show(kwargs)
        graph = step.first_tokens.of(step, ids.shape[1], self.runtime.captured.graph(step.batch.device))
        if graph is None:
            return False
        graph(ids)
        self.runtime.paths[CAPTURED_PROMPT] += 1
        return True
