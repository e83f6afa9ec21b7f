"""Whisper keeps its own generate(), whose calls of the decoder are captured steps: chunks, timestamps, the pipeline."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import WhisperFeatureExtractor, WhisperTokenizer, pipeline

import accelpatch
from accelpatch.runtime.generation.patched_model import RUNTIME
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.step import CAPTURED
from tests.support.encoder_decoders import StrictGraph, encoder_decoder

pytestmark = pytest.mark.filterwarnings("ignore")
RATE = 16000
BYTES = [chr(code) for code in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>",
           "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]  # fmt: skip
TIMES = [f"<|{0.02 * place:.2f}|>" for place in range(1501)]
ID = {name: len(BYTES) + place for place, name in enumerate((*SPECIAL, *TIMES))}


@pytest.fixture(autouse=True)
def _captured_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(capture.GRAPHS, "cpu", StrictGraph)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("whisper")
    vocabulary = {name: place for place, name in enumerate((*BYTES, *SPECIAL, *TIMES))}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    return WhisperTokenizer(*files, pad_token="<|endoftext|>")


def whisper() -> Any:
    """A tiny model with the ids of a multilingual Whisper."""
    end, start = ID["<|endoftext|>"], ID["<|startoftranscript|>"]
    ids = {"eos_token_id": end, "bos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    sizes = {"vocab_size": len(ID) + len(BYTES), "max_source_positions": 1500, "max_target_positions": 96}
    model = encoder_decoder("whisper", **sizes, **ids, begin_suppress_tokens=[ID["<|de|>"], end])
    given = {"is_multilingual": True, "lang_to_id": {"<|en|>": ID["<|en|>"], "<|de|>": ID["<|de|>"]}}
    given |= {"task_to_id": {"translate": ID["<|translate|>"], "transcribe": ID["<|transcribe|>"]}}
    given |= {"no_timestamps_token_id": ID["<|notimestamps|>"], "max_initial_timestamp_index": 50}
    given |= {"prev_sot_token_id": ID["<|startofprev|>"], "suppress_tokens": list(range(10)), "max_length": 40}
    model.generation_config.update(**given)
    for name, value in given.items():
        setattr(model.generation_config, name, value)
    return accelpatch.patch(model, "exact", verify=False)


def stock(model: Any) -> Any:
    plain = copy.deepcopy(model)
    vars(plain)[RUNTIME] = None
    return plain


def sine(seconds: float) -> Any:
    """A tone that rises."""
    time = torch.arange(int(RATE * seconds)) / RATE
    return (0.3 * torch.sin(2 * torch.pi * (200 + 40 * time) * time)).numpy()


def assert_steps(model: Any, least: int = 1) -> None:
    paths = model.accelpatch.report().paths
    assert paths[CAPTURED] >= least, paths
    assert not any(path.startswith(("stock loop", "token chosen by the host")) for path in paths), paths


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="language found"),
        pytest.param({"language": "en", "task": "translate"}, id="language given"),
        pytest.param({"language": "en", "return_timestamps": True}, id="timestamps"),
        pytest.param({"language": "en", "num_beams": 3}, id="beams"),
    ],
)
def test_sounds(options: dict[str, Any]) -> None:
    model = whisper()
    sound = torch.randn(2, 16, 3000, generator=torch.Generator().manual_seed(0))
    made, due = (one.generate(sound, max_new_tokens=24, **options) for one in (model, stock(model)))
    assert torch.equal(made, due)
    assert_steps(model, 10)


def test_long_sound_in_chunks_of_its_own() -> None:
    model = whisper()
    sound = torch.randn(1, 16, 4500, generator=torch.Generator().manual_seed(0))
    given = {"attention_mask": torch.ones(1, 4500, dtype=torch.long), "return_timestamps": True, "language": "en"}
    made, due = (
        one.generate(sound, max_new_tokens=24, condition_on_prev_tokens=True, temperature=0.0, **given)
        for one in (model, stock(model))
    )
    assert torch.equal(made, due)
    assert_steps(model, 10)


def test_temperatures_and_silence() -> None:
    """Long sound as Whisper's authors decode it: tokens drawn anew where they are unlikely, silence found, the device
    choosing each token all the while."""
    model, made = whisper(), []
    sound = torch.randn(1, 16, 4500, generator=torch.Generator().manual_seed(0))
    given = {"attention_mask": torch.ones(1, 4500, dtype=torch.long), "return_timestamps": True, "language": "en"}
    given |= {"temperature": (0.0, 0.4), "compression_ratio_threshold": 1.35, "logprob_threshold": -1.0}
    for one in (model, stock(model)):
        torch.manual_seed(5)
        made.append(one.generate(sound, max_new_tokens=24, no_speech_threshold=0.6, **given))
    assert torch.equal(*made)
    assert_steps(model, 10)


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as it comes": ({}, {}),
    "chunks in batches": ({"chunk_length_s": 10, "batch_size": 2}, {"num_beams": 1}),
    "chunks in batches, beams": ({"chunk_length_s": 10, "batch_size": 2}, {"num_beams": 3}),
    "timestamps": ({"chunk_length_s": 10, "batch_size": 2, "return_timestamps": True}, {"num_beams": 1}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_sine_through_the_pipeline(tokenizer: Any, name: str) -> None:
    options, choosing = CALLS[name]
    model, results = whisper(), []
    for one in (model, stock(model)):
        recognise = pipeline(
            "automatic-speech-recognition", model=one, tokenizer=tokenizer,
            feature_extractor=WhisperFeatureExtractor(feature_size=16), device=-1, **options,
        )  # fmt: skip
        given = {"max_new_tokens": 12, "language": "en", **choosing}
        sounds = [{"raw": sine(seconds), "sampling_rate": RATE} for seconds in (22.0, 7.5)]
        results.append(recognise(sounds, generate_kwargs=given))
    assert results[0] == results[1]
    assert all(one["text"] for one in results[0])
    assert_steps(model, 10)
