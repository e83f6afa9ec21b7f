"""transformers' generator of candidates by MTP heads, for a patched model, read from its checkpoint once.

transformers makes the heads of the classes of the model's last layer and of its norms. Those of a patched model are
replacements, which nobody can make without the originals: the heads are made of the classes that they stand for.
"""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace
from typing import Any

import torch

RUNTIME = "_accelpatch_runtime"  # as in patched_model.py
NAME = "_get_candidate_generator"  # transformers' method
OURS = __name__.partition(".")[0] + "."


class _AsItCame:
    """A patched model, whose last layer has the classes that it came with; what its heads share with it has no weights,
    which are tied later: those of a quantised head have names that no checkpoint has."""

    def __init__(self, model: Any):
        self._model = model
        config = model.config.get_text_config(decoder=True)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
        self._embedding = torch.nn.Embedding(config.vocab_size, config.hidden_size, device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_input_embeddings(self) -> Any:
        """Without weights, as the head."""
        return self._embedding

    def get_decoder(self) -> Any:
        """What MTP heads are made after: the last layer, with weights on no device, and the rotary embedding."""
        decoder: Any = self._model.get_decoder()
        last = decoder.layers[-1]
        config = self._model.config.get_text_config(decoder=True)
        with torch.device("meta"):
            layer = _class_of(last)(config, len(decoder.layers) - 1)
        layer.parameters = last.parameters  # asked for their device
        return SimpleNamespace(layers=[layer], rotary_emb=getattr(decoder, "rotary_emb", None))


def _class_of(module: Any) -> Any:
    """The class that a replacement stands for, or a module's own."""
    return next(one for one in type(module).__mro__ if not one.__module__.startswith(OURS))


def making_candidates(cls: Any, name: str) -> Any:
    """Wraps transformers' choice of what proposes candidates: MTP heads are made as above."""
    plain = getattr(cls, name)

    @functools.wraps(plain)
    def made(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        runtime = vars(self).get(RUNTIME)
        other = generation_config.assistant_early_exit is not None or generation_config.prompt_lookup_num_tokens
        if runtime is None or other or not getattr(generation_config, "use_mtp", False):
            return plain(self, generation_config, *args, **kwargs)
        return mtp_generator(self, runtime, generation_config, kwargs.get("logits_processor"))

    return made


def mtp_generator(model: Any, runtime: Any, config: Any, processors: Any) -> Any:
    """transformers' generator by MTP heads for one call."""
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    main: Any = _AsItCame(model)
    known = runtime.heads
    if known is None or known.device != next(iter(main.get_decoder().layers[-1].parameters())).device:
        known = MTPCandidateGenerator(main, config, {}, processors)
        runtime.heads = known
    made: Any = copy.copy(known)
    made.mtp_model.tie_with_main_model(model)
    made.mtp_cache = type(known.mtp_cache)(config=model.config.get_mtp_config())
    made.mtp_cache.activate_past_recording()
    made.do_sample, made.logits_processor, made.is_main_model_prefill = config.do_sample, processors, True
    return made
