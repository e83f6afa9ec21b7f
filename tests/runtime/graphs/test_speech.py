"""Speech to text besides Whisper by captured steps (Moonshine, Speech2Text, SpeechT5), and text to speech."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import accelpatch
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.encoder_decoder_prompt import CAPTURED_PROMPT
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.encoder_decoders import StrictGraph

pytestmark = pytest.mark.filterwarnings("ignore")
IDS = {"vocab_size": 160, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
_HALF = {"layers": 2, "attention_heads": 4, "ffn_dim": 96}
BOTH = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in _HALF.items()}
SPEECH_T5 = {
    "hidden_size": 64, "conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "positional_dropout": 0.0, "speech_decoder_prenet_dropout": 0.0, "speech_decoder_prenet_units": 32,
    "speech_decoder_postnet_units": 32, "max_speech_positions": 400, "max_text_positions": 64,
}  # fmt: skip


def moonshine() -> Any:
    sizes = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in
             (("num_hidden_layers", 2), ("num_attention_heads", 4), ("num_key_value_heads", 4))}  # fmt: skip
    config = transformers.MoonshineConfig(
        **IDS, **sizes, hidden_size=64, intermediate_size=96, max_position_embeddings=128
    )
    return transformers.MoonshineForConditionalGeneration(config)


def speech2text() -> Any:
    sizes = {"d_model": 64, "input_feat_per_channel": 16, "input_channels": 1, "conv_channels": 32}
    places = {"max_source_positions": 200, "max_target_positions": 64}
    return transformers.Speech2TextForConditionalGeneration(
        transformers.Speech2TextConfig(**IDS, **BOTH, **sizes, **places)
    )


def speecht5() -> Any:
    return transformers.SpeechT5ForSpeechToText(transformers.SpeechT5Config(**IDS, **BOTH, **SPEECH_T5))


MAKES = {"moonshine": moonshine, "speech2text": speech2text, "speecht5": speecht5}


def patched(name: str) -> Any:
    torch.manual_seed(0)
    return accelpatch.patch(MAKES[name]().eval(), "exact", verify=False)


def stock(model: Any) -> Any:
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = None
    return plain


def sound(name: str, masked: bool, seed: int = 1) -> dict[str, Tensor]:
    """Two sounds, the second one shorter."""
    draws = torch.Generator().manual_seed(seed)
    shape, rest, key = (2, 8000), 6000, "input_values"
    if name == "speech2text":
        shape, rest, key = (2, 80, 16), 50, "input_features"  # type: ignore[assignment]
    given = {key: torch.randn(shape, generator=draws)}
    if masked:
        given["attention_mask"] = torch.ones(shape[:2], dtype=torch.long)
        given["attention_mask"][1, rest:] = 0
    return given


@pytest.fixture(autouse=True)
def _captured_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", StrictGraph)  # type: ignore[arg-type]


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("name", MAKES)
def test_tokens_are_those_of_the_stock_loop(name: str, masked: bool) -> None:
    model = patched(name)
    plain, options = stock(model), {"max_new_tokens": 14, "eos_token_id": None, "pad_token_id": 0}
    asked = {"return_dict_in_generate": True, "output_logits": True}
    for more in ({"do_sample": False}, {"do_sample": True, "top_k": 10}, {"do_sample": False, "num_beams": 3}):
        for seed in (1, 2):
            made = []
            for one in (model, plain):
                torch.manual_seed(5)
                made.append(one.generate(**sound(name, masked, seed), **options, **more, **asked))
            assert torch.equal(made[0].sequences, made[1].sequences)
            for mine, its in zip(made[0].logits, made[1].logits, strict=True):
                torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)
    paths = model.accelpatch.report().paths
    assert paths[CAPTURED] == 6 * 13
    assert paths[CAPTURED_PROMPT] > 1
    assert not any(path.startswith("stock loop") for path in paths), paths


@pytest.mark.parametrize("name", MAKES)
def test_outputs_of_an_encoder_that_the_caller_hands_in(name: str) -> None:
    model = patched(name)
    plain, given = stock(model), sound(name, True)
    with torch.no_grad():
        states = plain.get_encoder()(**given)
    call = {"encoder_outputs": states, "attention_mask": given["attention_mask"], "max_new_tokens": 8}
    made, due = (one.generate(**call, do_sample=False, eos_token_id=None) for one in (model, plain))
    assert torch.equal(made, due)
    assert model.accelpatch.report().paths[CAPTURED] == 7


def test_text_to_speech_runs_its_own_loop() -> None:
    """It writes no tokens: each of its steps is a frame of a spectrogram."""
    torch.manual_seed(0)
    model = transformers.SpeechT5ForTextToSpeech(transformers.SpeechT5Config(**IDS, **BOTH, **SPEECH_T5)).eval()
    made, ids = [], torch.tensor([[5, 9, 33, 12, 7]])
    for one in (model, accelpatch.patch(copy.deepcopy(model), "exact", verify=False)):
        torch.manual_seed(5)
        voice = torch.zeros(1, model.config.speaker_embedding_dim)
        made.append(one.generate_speech(ids, voice, threshold=0.9, maxlenratio=3.0))
    torch.testing.assert_close(*made, rtol=1e-4, atol=1e-5)
