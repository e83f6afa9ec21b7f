"""Stop texts end an answer and are no part of it, in a stream as in a whole one."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream
from transformers.cli.serving import utils

from accelpatch.serving.stops import Cut, CutQueue, Pieces, Watch, cut
from tests.support.serving import MESSAGES, NAME, Running

CASES = [
    pytest.param(["ab", "cd"], ["x"], "abcd", id="none"),
    pytest.param(["ab", "cd"], ["bc"], "a", id="across pieces"),
    pytest.param(["a", "a", "a", "b"], ["aab"], "a", id="a begin within a begin"),
    pytest.param(["ab", "c"], ["cd"], "abc", id="a begin that is held back to the end"),
    pytest.param(["one two"], ["two", "ne"], "o", id="the first of two"),
    pytest.param(["a", "b", "c"], ["a"], "", id="at once"),
]


@pytest.mark.parametrize(("pieces", "stops", "due"), CASES)
def test_pieces(pieces: list[str], stops: list[str], due: str) -> None:
    piecewise = Cut(stops)
    assert "".join([*(piecewise.add(one) for one in pieces), piecewise.rest()]) == due
    assert cut("".join(pieces), stops) == due


@pytest.mark.parametrize(("pieces", "stops", "due"), CASES)
def test_a_queue(pieces: list[str], stops: list[str], due: str) -> None:
    """What is no text goes through, after the text before it."""
    other = ("a call",)

    async def read() -> list[Any]:
        inner: asyncio.Queue[Any] = asyncio.Queue()
        for one in (*pieces, other, None):
            inner.put_nowait(one)
        outer, found = CutQueue(inner, stops), list[Any]()
        while not found or found[-1] is not None:
            found.append(await outer.get() if len(found) % 2 else outer.get_nowait())
        with pytest.raises(asyncio.QueueEmpty):
            outer.get_nowait()
        return found

    found = asyncio.run(read())
    assert "".join(one for one in found if isinstance(one, str)) == due
    assert found[-2:] == [other, None]


@pytest.mark.parametrize("more", [{}, {"frequency_penalty": 0.1}], ids=["in the batch", "by generate()"])
def test_answers(server: Running, more: dict[str, Any]) -> None:
    """The whole one and the stream end before the text, and nothing is generated after it."""
    asked: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 40, "temperature": 0} | more
    with server.client() as client:
        text = client.chat.completions.create(**asked).choices[0].message.content
        stop = text[8:11]
        due = text[: text.find(stop)]
        whole = client.chat.completions.create(stop=stop, **asked)
        chunks = list(client.chat.completions.create(stop=["no such text", stop], stream=True, **asked))
    assert len(text) > 20
    assert whole.choices[0].message.content == due
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == due
    assert [whole.choices[0].finish_reason, chunks[-1].choices[0].finish_reason] == ["stop", "stop"]
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens < 40


@pytest.mark.parametrize("more", [{}, {"frequency_penalty": 0.1}], ids=["in the batch", "by generate()"])
def test_a_stop_text_or_an_end_token_that_comes_last(
    server: Running, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was cut off where the last token of max_tokens completes a stop text, or is an end token."""
    asked: Any = {"model": NAME, "messages": MESSAGES, "temperature": 0} | more

    def reasons(client: Any, **more: Any) -> list[str]:
        whole = client.chat.completions.create(**asked, **more)
        *_, last = client.chat.completions.create(stream=True, **asked, **more)
        assert whole.usage.completion_tokens == last.usage.completion_tokens == more["max_tokens"]
        return [whole.choices[0].finish_reason, last.choices[0].finish_reason]

    with server.client() as client:
        text = client.chat.completions.create(max_tokens=40, **asked).choices[0].message.content
        stop = text[8:11]
        length = client.chat.completions.create(stop=stop, max_tokens=40, **asked).usage.completion_tokens
        assert reasons(client, stop=stop, max_tokens=length) == ["stop", "stop"]
        assert reasons(client, max_tokens=length) == ["length", "length"]
        end = server.tokenizer(text)["input_ids"][0]
        monkeypatch.setattr(server.model.generation_config, "eos_token_id", [end])
        assert reasons(client, max_tokens=1) == ["stop", "stop"]


def test_bytes_that_are_no_text() -> None:
    """A token for each byte, in which a model may write anything: the stop text after it is seen."""
    vocabulary = {"<unk>": 0, "end": 1, "▁": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    draw = random.Random(0)
    for length in range(100):
        ids = [2 + draw.choice([0, *range(129, 257)]) for _ in range(length)] + [2, 1]
        watch = Watch(SimpleNamespace(_tokenizer=made), ["end"])
        assert [watch.over(one) for one in ids] == [False] * (length + 1) + [True]
    watch = Watch(SimpleNamespace(_tokenizer=made), ["\u00e9 end"])
    ids = [*(3 + byte for byte in "a \u00e9".encode()), 2, 1]
    assert [watch.over(one) for one in ids] == [False] * 5 + [True]


def test_pieces_of_text_are_those_of_tokenizers(server: Running) -> None:
    """Of any bytes, where it has some."""
    inner, draw = server.tokenizer._tokenizer, random.Random(0)
    for _ in range(20):
        mine, theirs = Pieces(), DecodeStream([], skip_special_tokens=True)
        for _ in range(40):
            token = draw.randrange(inner.get_vocab_size())
            assert mine.step(inner, token) == theirs.step(inner, token)


def test_a_stream_goes_on_behind_bytes(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    class Raising:
        def step(self, *_: Any) -> None:
            raise Exception("Invalid prefix encountered while decoding stream")

    plain = utils.DirectStreamer.__init__

    def begun(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        self._decode_stream = Raising()

    monkeypatch.setattr(utils.DirectStreamer, "__init__", begun)
    asked: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 40, "temperature": 0}
    with server.client() as client:
        text = client.chat.completions.create(**asked).choices[0].message.content
        chunks = list(client.chat.completions.create(stream=True, **asked))
    found = "".join(one.choices[0].delta.content or "" for one in chunks)
    assert len(found) > 20
    assert text.startswith(found)
