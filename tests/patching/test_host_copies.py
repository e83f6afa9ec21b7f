"""Originals on a device are copied to host memory beside the rest of a patch; undone, the model has the same bits."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accelpatch
from accelpatch.errors import PatchError
from accelpatch.patching import host_copies
from accelpatch.patching.host_copies import HostCopies
from tests.support.simulated import logits
from tests.support.tiny import CAUSAL, padded_batch, snapshot

SHAPES = {"one-chunk": (5, 3), "chunks": (7, 33), "exact": (4, 32), "scalar": (), "empty": (0, 4)}
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int64": torch.int64}


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("accelpatch-originals")]


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU model's originals are taken for a device's, in chunks that are small beside them."""
    monkeypatch.setattr(host_copies, "on_a_device", lambda parameter: True)
    monkeypatch.setattr(host_copies, "CHUNK", 256)
    monkeypatch.setattr(host_copies, "LARGE", 1 << 12)


def failing(monkeypatch: pytest.MonkeyPatch, after: int, error: BaseException, step: str = "start_chunk") -> list[Any]:
    """The step after so many raises; the list fills with those that were begun."""
    begun: list[Any] = []
    real = getattr(host_copies._DeviceCopier, step)

    def broken(self: Any, *given: Any) -> None:
        begun.append(given)
        if len(begun) > after:
            raise error
        real(self, *given)

    monkeypatch.setattr(host_copies._DeviceCopier, step, broken)
    return begun


@pytest.mark.parametrize("dtype", [pytest.param(dtype, id=name) for name, dtype in DTYPES.items()])
@pytest.mark.parametrize("shape", [pytest.param(shape, id=name) for name, shape in SHAPES.items()])
def test_copies_have_the_same_bits(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "CHUNK", 64)
    given = (torch.randn(shape) * 50).to(dtype)
    with HostCopies([given, given]) as copies:
        copies.finish(lambda *step: None)
        copy = copies.of(given)
    assert (copy.shape, copy.dtype) == (given.shape, given.dtype)
    assert copy.data_ptr() != given.data_ptr() or not given.numel()
    assert copy.reshape(-1).view(torch.uint8).equal(given.reshape(-1).view(torch.uint8))


def test_a_transposed_tensor_is_copied() -> None:
    given = torch.randn(6, 40).t()
    with HostCopies([given]) as copies:
        copies.finish(lambda *step: None)
        assert copies.of(given).equal(given)
        assert copies.of(given).data_ptr() != given.data_ptr()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="needs huge pages, which Linux has")
def test_a_copy_that_is_let_go_gives_its_memory_back() -> None:
    def held() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    given = torch.ones(1 << 24)
    before = held()
    with HostCopies([given]) as copies:
        copies.finish(lambda *step: None)
        copy = copies.of(given)
    assert held() - before >= given.nbytes // 2
    del copy, copies
    assert held() - before < given.nbytes // 2


def test_many_tensors_share_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "CHUNK", 100)
    begun = failing(monkeypatch, 1000, MemoryError())
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(n, generator=generator).to(d) for n in (1, 24, 3, 90, 0, 7) for d in DTYPES.values()]
    steps: list[tuple[str, int, int]] = []
    with HostCopies(given) as copies:
        copies.finish(lambda *step: steps.append(step))
        for one in given:
            assert copies.of(one).view(torch.uint8).equal(one.view(torch.uint8))
    sizes = [sum(len(piece) for piece, _ in chunk) for (chunk,) in begun]
    assert set(sizes[:-1]) == {100}
    assert sum(sizes) == sum(one.nbytes for one in given)
    assert steps == [("originals", done + 1, len(sizes) + 1) for done in range(len(sizes) + 1)]


def test_memory_that_cannot_be_had_is_an_error_before_anything_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **options: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_copies.mmap, "mmap", full)
    with pytest.raises(PatchError, match="Cannot allocate memory"):
        HostCopies([torch.ones(1 << 21)])
    assert threads() == []


def test_what_is_written_once_a_patch_is_over_does_not_reach_the_copy() -> None:
    given = torch.ones(3)
    with HostCopies([given]) as copies:
        copies.finish(lambda *step: None)
        copy = copies.of(given)
    given.zero_()
    assert copy.equal(torch.ones(3))
    assert threads() == []


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("name, recipe", [("llama", "int8"), ("gpt2", "int4")], ids=["int8", "int4"])
def test_originals_are_moved_and_come_back_twice(name: str, recipe: str) -> None:
    model = CAUSAL[name].make()
    expected = logits(model, padded_batch())
    bits = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _ in range(2):
        places = {id(parameter): parameter.data_ptr() for parameter in model.parameters()}
        steps: list[tuple[int, int]] = []

        def progress(stage: str, done: int, total: int, steps: list[tuple[int, int]] = steps) -> None:
            if stage == "originals":
                steps.append((done, total))

        accelpatch.patch(model, recipe, progress=progress)
        assert threads() == []
        assert steps == [(done + 1, len(steps)) for done in range(len(steps))]
        assert steps
        accelpatch.unpatch(model)
        moved = [id(p) for p in model.parameters() if p.data_ptr() != places[id(p)]]
        assert len(moved) >= 2 * 4
        assert all(parameter.equal(bits[name]) for name, parameter in model.named_parameters())
        assert logits(model, padded_batch()).equal(expected)


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("loaded_in", [False, True], ids=["", "loaded"])
@pytest.mark.parametrize("patched_in", [False, True], ids=["", "patched"])
def test_in_inference_mode(loaded_in: bool, patched_in: bool) -> None:
    with torch.inference_mode(loaded_in):
        model = CAUSAL["llama"].make()
    expected = logits(model, padded_batch())
    with torch.inference_mode(patched_in):
        accelpatch.patch(model, "int8")
    accelpatch.unpatch(model)
    assert {parameter.is_inference() for parameter in model.parameters()} == {loaded_in}
    assert logits(model, padded_batch()).equal(expected)


def test_copies_lie_on_the_cpu_whatever_the_default_device_is() -> None:
    given = [torch.randn(3), torch.randn(1 << 21)]
    with torch.device("meta"), HostCopies(given) as copies:
        copies.finish(lambda *step: None)
        assert all(copies.of(one).device.type == "cpu" and copies.of(one).equal(one) for one in given)


@pytest.mark.each_value
@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("step", ["start_chunk", "finish_chunk"])
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
@pytest.mark.parametrize(
    "error",
    [MemoryError("full"), OSError("cannot"), RuntimeError("can't allocate memory"), torch.OutOfMemoryError("pinned")],
    ids=["memory", "mapping", "allocator", "device"],
)  # fmt: skip
def test_a_copy_that_fails_half_way_changes_nothing(
    error: Exception, verify: bool, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CAUSAL["llama"].make()
    before, expected = snapshot(model), logits(model, padded_batch())
    with monkeypatch.context() as patching:
        asked = failing(patching, 5, error, step)
        with pytest.raises(
            PatchError, match=r"could not be copied to host memory .*nothing was changed.*none"
        ) as caught:
            accelpatch.patch(model, "int8", verify=verify)
    assert caught.value.__cause__ is error
    assert len(asked) > 5
    assert threads() == []
    assert snapshot(model) == before
    assert logits(model, padded_batch()).equal(expected)
    accelpatch.patch(model, "int8", verify=verify)


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("stage", ["capture", "build and verify", "check", "originals"])
def test_an_interrupt_ends_the_thread(stage: str) -> None:
    model = CAUSAL["llama"].make()
    before, expected = snapshot(model), logits(model, padded_batch())

    def progress(now: str, done: int, total: int) -> None:
        if now == stage and done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        accelpatch.patch(model, "int8", progress=progress)
    assert threads() == []
    assert snapshot(model) == before
    assert logits(model, padded_batch()).equal(expected)


@pytest.mark.usefixtures("as_on_a_device")
def test_an_interrupt_while_copies_are_asked_for_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    model, real = CAUSAL["llama"].make(), host_copies._chunks

    def chunks(pairs: host_copies.Pieces) -> Iterator[host_copies.Pieces]:
        for count, chunk in enumerate(real(pairs)):
            if count == 20:
                raise KeyboardInterrupt
            yield chunk

    monkeypatch.setattr(host_copies, "_chunks", chunks)
    before = snapshot(model)
    with pytest.raises(KeyboardInterrupt):
        accelpatch.patch(model, "int8", verify=False)
    assert threads() == []
    assert snapshot(model) == before


@pytest.mark.parametrize("recipe, keep", [("exact", "cpu"), ("int8", "none"), ("int8", "cpu")])
def test_nothing_is_copied_that_need_not_be(recipe: str, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (recipe, keep) != ("int8", "cpu"):  # a CPU's originals stay where they are
        monkeypatch.setattr(host_copies, "on_a_device", lambda parameter: True)
    asked = failing(monkeypatch, 0, MemoryError())
    accelpatch.patch(CAUSAL["llama"].make(), recipe, keep_original=keep)
    assert asked == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_originals_of_a_gpu_come_back(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "CHUNK", 1 << 12)
    model: nn.Module = CAUSAL["llama"].make(torch.bfloat16).to("cuda")
    bits = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for parameter in model.parameters():  # still under way when the patch begins
            torch.cuda._sleep(1_000_000)
            with torch.no_grad():
                parameter.mul_(2).mul_(0.5)
        for _ in range(2):
            accelpatch.patch(model, recipe)
            kept = [c.old.weight for c in model.accelpatch.changes if isinstance(c.old, nn.Linear)]
            assert {weight.device.type for weight in kept} == {"cpu"}
            accelpatch.unpatch(model)
            assert all(p.is_cuda and p.equal(bits[name]) for name, p in model.named_parameters())
