"""Damaged headers and tensors: an AccelpatchError comes out or what was read, soon, in little memory."""

from __future__ import annotations

import functools
import json
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from accelpatch.checkpoints import saved
from accelpatch.checkpoints.inspection import inspect
from accelpatch.errors import AccelpatchError
from accelpatch.models.gguf_header import read_header
from tests.support.checkpoints import saved as save
from tests.support.packed import plain

SECONDS, BYTES = 1, 64 << 20
EVERY, SOME = 2_000, 20  # of each of six readers
FUZZ = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
PIECES = [b"\0", b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\0\0\0\x80", b"[" * 300, b'{"a":' * 90, b'"', b"\\ud800", b"-1",
          b"1e999", b"9" * 30, b"null", b"BF16", b"F8_E8M0", b"data_offsets", b"__metadata__", b"\x09\0\0\0" * 8,
          (2**61).to_bytes(8, "little"), (2**32).to_bytes(8, "little")]  # fmt: skip


@functools.cache
def _patched() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        save(plain("llama", num_hidden_layers=1), "int4", Path(folder) / "patched")
        return (Path(folder) / "patched" / "model.safetensors").read_bytes()


@functools.cache
def _gguf() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / "a.gguf", "llama")
        writer.add_context_length(64)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_token_list([f"w{index}" for index in range(80)])
        writer.add_array("general.tags", ["a", "b"])
        for name in ("token_embd.weight", "output_norm.weight"):
            writer.add_tensor(name, np.ones((8, 32), dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return (Path(folder) / "a.gguf").read_bytes()


@st.composite
def _mutated(draw: st.DrawFn, good: Callable[[], bytes], places: int) -> bytes:
    """A good file with some of its first `places` bytes, or of any, replaced, left out or added; or cut."""
    data = bytearray(good())
    for _ in range(draw(st.integers(1, 4))):
        end = len(data) if draw(st.integers(0, 4)) == 0 else min(places, len(data))
        start = draw(st.integers(0, end))
        gone = draw(st.sampled_from([0, 1, 2, 4, 8, 40]))
        piece = draw(st.sampled_from(PIECES) | st.binary(max_size=9))
        if draw(st.booleans()):
            gone = len(piece)  # the rest stays where it is
        data[start : start + gone] = piece
    if draw(st.integers(0, 9)) == 0:
        del data[draw(st.integers(0, len(data))) :]
    return bytes(data)


@functools.cache
def _header() -> dict[str, Any]:
    data = _patched()
    found: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4)
    | st.sampled_from(["F16", "I8", "F4", "C64", "", "int4_weight_only"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def _changed(draw: st.DrawFn, value: Any) -> Any:
    """A JSON document with one of its values replaced, left out or added."""
    if not isinstance(value, dict) or not value or draw(st.integers(0, 3)) == 0:
        return draw(_VALUES)
    key = draw(st.sampled_from(sorted(value)))
    copied = dict(value)
    if draw(st.integers(0, 5)) == 0:
        del copied[key]
    else:
        copied[key] = _changed(draw, value[key])
    return copied


@st.composite
def _document(draw: st.DrawFn) -> bytes:
    """A file whose header is still JSON, the facts in it too."""
    head = dict(_header())
    if draw(st.booleans()):
        facts = _changed(draw, json.loads(head["__metadata__"]["accelpatch"]))
        head["__metadata__"] = {"format": "pt", "accelpatch": json.dumps(facts)}
    else:
        head = _changed(draw, head)
    text, data = json.dumps(head).encode(), _patched()
    return len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :]


def _read_patched(file: Path) -> None:
    reading = saved.Reading(saved.read([file]), (), torch.device("cpu"))
    try:
        reading.finish()
    finally:
        reading.close()


def _bounded(read: Callable[[Path], Any], name: str, data: bytes) -> None:
    """Read the file; only an AccelpatchError that names it may come out, soon, in the memory that the file takes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        file = Path(folder) / name
        file.write_bytes(data)
        tracemalloc.start()  # here alone: it slows down what makes the examples too
        start = time.process_time()
        try:
            read(file)
        except AccelpatchError as error:
            assert str(file) in str(error)  # noqa: PT017  most examples raise nothing, or this
        finally:
            seconds, taken = time.process_time() - start, tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert seconds < SECONDS
        assert taken < len(data) + BYTES


#: reader, name of the file -> what it is given
READERS: dict[str, tuple[Callable[[Path], Any], str, st.SearchStrategy[bytes]]] = {
    "bytes": (_read_patched, "a.safetensors", _mutated(_patched, 3000)),
    "JSON": (_read_patched, "a.safetensors", _document()),
    "inspected bytes": (inspect, "a.safetensors", _mutated(_patched, 3000)),
    "inspected JSON": (inspect, "a.safetensors", _document()),
    "inspected GGUF": (inspect, "a.gguf", _mutated(_gguf, 1500)),
    "GGUF": (read_header, "a.gguf", _mutated(_gguf, 300)),
}


@pytest.mark.each_value
@pytest.mark.parametrize(
    "examples", [pytest.param(SOME, id=str(SOME)), pytest.param(EVERY, id=str(EVERY), marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("name", READERS)
def test_mutations(name: str, examples: int) -> None:
    read, file, strategy = READERS[name]

    @settings(FUZZ, max_examples=examples)
    @given(strategy)
    def run(data: bytes) -> None:
        _bounded(read, file, data)

    run()


@pytest.mark.parametrize(
    ("name", "good"), [("a.safetensors", _patched), ("a.gguf", _gguf)], ids=["safetensors", "GGUF"]
)
def test_what_is_mutated_is_good(tmp_path: Path, name: str, good: Callable[[], bytes]) -> None:
    (tmp_path / name).write_bytes(good())
    assert inspect(tmp_path / name).kinds
    if good is _patched:
        _read_patched(tmp_path / name)
