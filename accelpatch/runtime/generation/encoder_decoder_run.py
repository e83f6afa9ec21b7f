"""One call of generate() of an encoder-decoder over captured steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateEncoderDecoderOutput

from accelpatch.fusion.cache_name import CACHE
from accelpatch.runtime.cache_contents import Contents
from accelpatch.runtime.generation.captured_run import CapturedRun
from accelpatch.runtime.generation.decoding import stock_loop_because
from accelpatch.runtime.graphs.encoder_decoder import MASK, OUTPUTS, EncoderDecoderStep, call_why_not
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
        return reason or call_why_not(model, kwargs) or runtime.why_not(model, kwargs)

    @classmethod
    def step_for(cls, model: Any, runtime: CapturedRuntime, ids: Tensor, capacity: int, kwargs: Any) -> CapturedStep:
        """As of CapturedRun."""
        decoder = runtime.captured.decoder
        assert decoder is not None
        return runtime.step(model, ids.shape[0], capacity, source=decoder.source(kwargs))

    def prompt(self, ids: Tensor, config: Any, kwargs: dict[str, Any]) -> Tensor:
        """As of CapturedRun."""
        outputs = self._model._prefill(ids, config, kwargs, is_first_iteration=True)
        cache, step = cache_of(outputs), self.step
        assert isinstance(step, EncoderDecoderStep)
        self.kwargs = self._model._update_model_kwargs_for_generation(outputs, kwargs, is_encoder_decoder=True)
        own = cache.self_attention_cache
        self._continue(own, own.get_seq_length(), kwargs.get(self.mask), self.kwargs.get(POSITIONS), config)
        self._cross = step.encoded.take(cache.cross_attention_cache, kwargs)
        logits: Tensor = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
        return logits.to(ids.device)
