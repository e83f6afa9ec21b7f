"""CTranslate2's Whisper in 8 bits, made of a transformers model in memory, as another engine beside the patched ones.

It is installed by hand: pip install ctranslate2.
"""

from __future__ import annotations

import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: ids that CTranslate2 knows by their names -> the name; those of Whisper's vocabulary of several languages
NAMES = {50358: "<|translate|>", 50359: "<|transcribe|>", 50360: "<|startofprev|>", 50361: "<|nospeech|>"}
NO_TIMESTAMPS = 50362


class Whisper:
    """Answers the call of generate() that this topic makes: greedy, of a given number of tokens."""

    def __init__(self, model: Any):
        self.config, self.device, self.dtype = model.config, model.device, model.dtype
        library: Any = import_module("ctranslate2")
        loader: Any = import_module("ctranslate2.converters.transformers").WhisperLoader()
        names = NAMES | {NO_TIMESTAMPS: "<|notimestamps|>", self._start: "<|startoftranscript|>",
                         model.config.eos_token_id: "<|endoftext|>"}  # fmt: skip
        words = [names.get(place, f"{place}") for place in range(model.config.vocab_size)]
        loader.get_vocabulary = lambda model, tokenizer: words
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            spec = loader(model, _Tokenizer())
            spec.validate()
            spec.optimize(quantization="int8")
            spec.save(str(Path(folder)))
            self._engine = library.models.Whisper(
                folder, device="cpu", compute_type="int8", intra_threads=torch.get_num_threads(), inter_threads=1
            )
        self._array = library.StorageView.from_array

    @property
    def _start(self) -> int:
        return int(self.config.decoder_start_token_id)

    def generate(self, input_features: Tensor, max_new_tokens: int, **options: Any) -> Tensor:
        """Ids [1, new] of sound [1, mels, frames]. Of its longest text CTranslate2 makes the half, as Whisper does."""
        found = self._engine.generate(
            self._array(input_features.contiguous().numpy()), [[self._start, NO_TIMESTAMPS]], beam_size=1,
            max_length=2 * max_new_tokens, suppress_blank=False, suppress_tokens=[self.config.eos_token_id],
        )  # fmt: skip
        ids = torch.tensor(found[0].sequences_ids)
        if ids.shape != (1, max_new_tokens):
            raise RuntimeError(f"CTranslate2 made {ids.shape[1]} tokens in place of {max_new_tokens}")
        return ids


class _Tokenizer:
    """What the converter asks of a tokenizer."""

    bos_token = eos_token = unk_token = "<|endoftext|>"
    additional_special_tokens = ()
