"""Tiny encoder-decoders of many families, texts and sounds for them, and graphs that refuse what a GPU's would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import masking_utils

from accelpatch.runtime.graphs.capture import EagerGraph
from tests.support.tiny import make

_HALF = {"layers": 2, "attention_heads": 4, "ffn_dim": 96}
_BOTH = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in _HALF.items()}
_IDS = {"vocab_size": 160, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
_BART = {"d_model": 64, "max_position_embeddings": 512, **_BOTH, **_IDS, "forced_eos_token_id": None}
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, **_IDS, "decoder_start_token_id": 0}
_GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_WHISPER = {"d_model": 64, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 64, **_BOTH, **_IDS,
            "begin_suppress_tokens": None}  # fmt: skip
WRITES = "ForConditionalGeneration"

#: name -> (prefix of the configuration's class, the model's suffix, configuration)
FAMILIES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "t5": ("T5", WRITES, _T5),
    "flan-t5": ("T5", WRITES, _T5 | _GATED),
    "mt5": ("MT5", WRITES, _T5 | _GATED),
    "umt5": ("UMT5", WRITES, _T5 | _GATED),
    "bart": ("Bart", WRITES, _BART),
    "mbart": ("MBart", WRITES, _BART | {"scale_embedding": True}),
    "m2m100": ("M2M100", WRITES, _BART | {"scale_embedding": True}),
    "marian": ("Marian", "MTModel", _BART | {"activation_function": "swish", "share_encoder_decoder_embeddings": True}),
    "pegasus": ("Pegasus", WRITES, _BART),
    "blenderbot": ("Blenderbot", WRITES, _BART),
    "whisper": ("Whisper", WRITES, _WHISPER),
}
TEXTS = [name for name in FAMILIES if name != "whisper"]


def encoder_decoder(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The model in evaluation mode, always the same weights."""
    prefix, suffix, config = FAMILIES[name]
    return make(prefix, dtype, suffix=suffix, **{**config, **changes})


def texts(length: int = 11, rows: int = 3, padded: bool = True) -> dict[str, Tensor]:
    """Texts for the encoder, the second one padded on the right."""
    ids = torch.randint(4, 160, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded and rows > 1:
        mask[1, length // 2 :] = ids[1, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def sounds(rows: int = 2) -> dict[str, Tensor]:
    """Mel spectrograms [rows, 16, 40] for Whisper."""
    return {"input_features": torch.randn(rows, 16, 40, generator=torch.Generator().manual_seed(2))}


def given_to(name: str) -> dict[str, Tensor]:
    """What the encoder of a family gets."""
    return sounds() if name == "whisper" else texts()


ASKING = frozenset({"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "nonzero", "cpu", "numpy"})


class _NothingAsked(TorchFunctionMode):
    """Context manager in which the host may ask no tensor for a number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ASKING:
            raise RuntimeError(f"the host asked for a number ({func.__name__}), which no graph can hold")
        return func(*args, **(kwargs or {}))


class StrictGraph(EagerGraph):
    """An EagerGraph whose program may not ask the device for a number, as that of a real one; transformers takes it
    for a capture. `replays` counts those of all."""

    replays: ClassVar[int] = 0

    def __init__(self, program: Any, device: torch.device, pool: Any):
        super().__init__(program, device, pool)
        self._run()

    def replay(self) -> None:
        StrictGraph.replays += 1
        self._run()

    def _run(self) -> None:
        with pytest.MonkeyPatch.context() as patch, _NothingAsked():
            patch.setattr(masking_utils, "is_tracing", lambda *given: True)
            super().replay()
