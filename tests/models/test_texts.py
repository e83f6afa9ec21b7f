"""Calibration data of every kind, and data that will not do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel

import accelpatch
from accelpatch.errors import LoadError, PatchError
from accelpatch.models.texts import windows
from accelpatch.quant.calibration import Statistics
from tests.support.smoothing import CharacterTokenizer
from tests.support.tiny import CAUSAL, snapshot

TEXT = "It was the best of times, it was the worst of times. " * 3
FOREIGN = "Ein schöner Tag. 今日は天気がいいですね。 Погода хорошая. 🌦️ טוב" * 2


class Rows:
    """As a `datasets.Dataset`: rows by number and one after the other."""

    def __init__(self, texts: list[Any], column: str = "text"):
        self.texts, self.column = texts, column

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {self.column: self.texts[at], "id": at}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[at] for at in range(len(self)))


@pytest.fixture(scope="module")
def model() -> Any:
    return CAUSAL["llama"].make()


def batches(model: Any, data: Any, tokenizer: Any = None, **options: Any) -> list[Any]:
    options = {"samples": 6, "length": 20} | options
    return windows(model, data, tokenizer or CharacterTokenizer(), **options)


def ids_of(found: list[Any]) -> list[int]:
    return [one for batch in found for one in batch["input_ids"].flatten().tolist()]


def test_every_kind_of_data_is_the_same_text(model: Any, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    kinds = {
        "path": file, "name": str(file), "strings": [TEXT], "generator": (one for one in [TEXT]), "tuple": (TEXT,),
        "dicts": [{"text": TEXT, "url": "x"}], "dataset": Rows([TEXT]), "in parts": [TEXT[:30], "", "  ", TEXT[30:]],
    }  # fmt: skip
    due = CharacterTokenizer()(TEXT, add_special_tokens=False)["input_ids"][:120]
    for name, data in kinds.items():
        assert ids_of(batches(model, data)) == due, name


def test_windows_without_padding(model: Any) -> None:
    found = batches(model, [TEXT[:50]])
    assert sorted(tuple(one["input_ids"].shape) for one in found) == [(1, 10), (2, 20)]
    assert all(bool(one["attention_mask"].all()) and one["use_cache"] is False for one in found)
    assert len(ids_of(batches(model, [TEXT], samples=2))) == 40
    many = batches(model, [TEXT * 5], samples=19)
    assert [len(one["input_ids"]) for one in many] == [8, 8, 3]


def test_no_window_is_longer_than_the_model_takes(model: Any) -> None:
    assert {one["input_ids"].shape[1] for one in batches(model, [TEXT * 9], samples=2, length=5000)} == {128}


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "mixtral"])
def test_the_models_own_text(name: str) -> None:
    model = CAUSAL[name].make()
    before, state = snapshot(model), torch.get_rng_state()
    found = accelpatch.calibrate(model, samples=3, length=40)
    again = accelpatch.calibrate(model, samples=3, length=40)
    assert found.tokens == 120
    assert snapshot(model) == before
    assert torch.get_rng_state().equal(state)
    for path, one in found.sites.items():
        assert one.absmax.equal(again.sites[path].absmax), path


def test_text_in_other_scripts(model: Any) -> None:
    assert accelpatch.calibrate(model, [FOREIGN], tokenizer=CharacterTokenizer()).tokens == len(FOREIGN)


def test_long_and_short_windows_are_counted_as_tokens(model: Any) -> None:
    found = accelpatch.calibrate(model, [TEXT], tokenizer=CharacterTokenizer(), samples=100, length=100)
    assert found.tokens == len(TEXT) == 159


class _Constant(CharacterTokenizer):
    def __init__(self, number: int):
        self.number = number

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [self.number] * len(text)}


CASES: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "empty-list": ([], CharacterTokenizer(), {}, "the text has 0 tokens, and 32 are the least"),
    "empty-string": ([""], CharacterTokenizer(), {}, "the text has 0 tokens"),
    "one-token": (["a"], CharacterTokenizer(), {}, "the text has 1 tokens"),
    "all-padding": ([TEXT], _Constant(0), {}, "the text is nothing but padding"),
    "one-token-again-and-again": ([TEXT], _Constant(7), {}, "the text is nothing but the token 7"),
    "no-tokenizer": ([TEXT], None, {}, "needs the model's tokenizer"),
    "beyond-the-vocabulary": ([TEXT], _Constant(160), {}, "gives id 160, and the model has 160"),
    "a-number": (7, CharacterTokenizer(), {}, "not <class 'int'>"),
    "a-dict": ({"text": TEXT}, CharacterTokenizer(), {}, "not <class 'dict'>"),
    "bytes": (TEXT.encode(), CharacterTokenizer(), {}, "is no string"),
    "numbers": ([1, 2], CharacterTokenizer(), {}, "is no string and has no column 'text': 1"),
    "another-column": (Rows([TEXT], "content"), CharacterTokenizer(), {}, "has no column 'text'"),
    "no-text-in-a-row": (Rows([TEXT, None]), CharacterTokenizer(), {"samples": 90}, "has no column 'text'"),
    "no-such-file": ("no/such/file.txt", CharacterTokenizer(), {}, "no/such/file.txt cannot be read"),
    "a-text-in-place-of-a-file": (TEXT * 100, CharacterTokenizer(), {}, "give strings in a list"),
    "a-null-byte-in-a-name": ("a\0b", CharacterTokenizer(), {}, "a\0b"),
    "no-windows": ([TEXT], CharacterTokenizer(), {"samples": 0}, "not 0 of 20"),
    "a-length-below-zero": ([TEXT], CharacterTokenizer(), {"length": -1}, "not 6 of -1"),
    "own-text-too-short": (None, None, {"samples": 1, "length": 8}, "1 windows of 8 tokens"),
}  # fmt: skip


@pytest.mark.parametrize(
    "data, tokenizer, options, words", [pytest.param(*case, id=name) for name, case in CASES.items()]
)
def test_data_that_will_not_do(model: Any, data: Any, tokenizer: Any, options: dict[str, Any], words: str) -> None:
    before = snapshot(model)
    with pytest.raises(LoadError) as caught:
        accelpatch.calibrate(model, data, tokenizer=tokenizer, **{"samples": 6, "length": 20} | options)
    assert words in str(caught.value)
    assert snapshot(model) == before


FILES = {
    "empty": (b"", "the text has 0 tokens"),
    "white-space": (b" \n\t " * 40, "the text has 0 tokens"),
    "latin-1": (b"caf\xe9 au lait " * 9, "is not UTF-8 text"),
    "utf-16": (TEXT.encode("utf-16"), "is not UTF-8 text"),
}


@pytest.mark.parametrize("content, words", [pytest.param(*case, id=name) for name, case in FILES.items()])
def test_files_that_will_not_do(model: Any, tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(content)
    with pytest.raises(LoadError, match=words):
        accelpatch.calibrate(model, file, tokenizer=CharacterTokenizer())
    with pytest.raises(LoadError, match="cannot be read"):
        accelpatch.calibrate(model, tmp_path, tokenizer=CharacterTokenizer())


def test_a_model_that_writes_no_text() -> None:
    config = BertConfig(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=40)
    bert = BertModel(config).eval()
    assert isinstance(accelpatch.calibrate(bert), Statistics)  # on noise: tests/models/test_signals.py
    with pytest.raises(LoadError, match="needs the model's tokenizer"):
        accelpatch.calibrate(bert, [TEXT])
    assert isinstance(accelpatch.calibrate(bert, [TEXT], tokenizer=CharacterTokenizer(50)), Statistics)


def test_a_weight_that_is_not_finite_is_found(model: Any) -> None:
    broken = CAUSAL["llama"].make()
    with torch.no_grad():
        broken.model.layers[1].self_attn.v_proj.weight[3, 4] = float("nan")
    before = snapshot(broken)
    for data in ([TEXT], None):
        with pytest.raises(PatchError, match=r"layers\.1\.self_attn\.[ov]_proj"):
            accelpatch.calibrate(broken, data, tokenizer=CharacterTokenizer())
        assert snapshot(broken) == before


def test_hooks_go_when_the_run_raises(model: Any) -> None:
    before, seen = snapshot(model), []

    def fails(stage: str, done: int, total: int) -> None:
        seen.append(stage)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        accelpatch.calibrate(model, [TEXT], tokenizer=CharacterTokenizer(), progress=fails)
    assert seen == ["calibrate"]
    assert snapshot(model) == before


@pytest.mark.parametrize("state", ["training", "patched", "on meta"])
def test_models_that_cannot_be_calibrated(state: str) -> None:
    model = CAUSAL["llama"].make()
    words = {"training": "training mode", "patched": "already patched", "on meta": "meta device"}[state]
    if state == "patched":
        accelpatch.patch(model, "int8", verify=False)
    model = model.train() if state == "training" else model.to("meta") if state == "on meta" else model
    with pytest.raises(PatchError, match=words):
        accelpatch.calibrate(model, [TEXT], tokenizer=CharacterTokenizer())
