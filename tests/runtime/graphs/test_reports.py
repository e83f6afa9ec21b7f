"""Reports of captured steps: read beside the model's next step, and before the next choice can write over them."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.runtime.generation import graph_loop, speculation
from accelpatch.runtime.graphs import capture
from accelpatch.runtime.graphs.capture import EagerGraph
from accelpatch.runtime.graphs.sampler import Reports
from tests.support.drafting import as_on_a_gpu, assert_same, generate, oracle, pair, row, stock
from tests.support.streaming import Calling
from tests.support.tiny import CAUSAL

gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
NEW = 12


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is queued and taken, in turn: "model", "verify" and "choose" for programs, "send" and "take" for reports."""
    found: list[str] = []
    names = {"advance": "model", "verify": "verify"}

    class Noted(EagerGraph):
        def __init__(self, program: Any, device: torch.device, pool: Any):
            super().__init__(program, device, pool)
            self._name = names.get(program.__name__, "choose")

        def replay(self) -> None:
            found.append(self._name)
            super().replay()

    class Seen(Reports):
        def send(self) -> None:
            found.append("send")
            super().send()

        def wait(self) -> torch.Tensor:
            found.append("take")
            return super().wait()

    as_on_a_gpu(monkeypatch)
    monkeypatch.setitem(capture.GRAPHS, "cpu", Noted)  # type: ignore[arg-type]
    monkeypatch.setattr(graph_loop, "Reports", Seen)
    monkeypatch.setattr(speculation, "Reports", Seen)
    return found


def patched() -> Any:
    return accelpatch.patch(CAUSAL["llama"].make(), "exact", verify=False)


def decoding(order: list[str]) -> list[str]:
    """What came after the prompt."""
    return order[order.index("send") - 1 :]


def test_the_model_runs_on_while_a_report_is_read(order: list[str]) -> None:
    generate(patched(), row(), max_new_tokens=NEW)
    assert decoding(order) == ["choose", "send", *["model", "take", "choose", "send"] * (NEW - 1), "take"]


def test_after_an_end_nothing_is_chosen(order: list[str]) -> None:
    model = patched()
    end = int(generate(model, row(), max_new_tokens=NEW).sequences[0, 9 + 4])
    order.clear()
    made = generate(model, row(), max_new_tokens=NEW, eos_token_id=end).sequences.shape[1] - 9
    assert 1 < made < NEW
    assert decoding(order) == ["choose", "send", *["model", "take", "choose", "send"] * (made - 1), "model", "take"]


def test_after_an_end_no_random_number_is_drawn(order: list[str]) -> None:
    model, left = patched(), []
    options = {"do_sample": True, "eos_token_id": list(range(75)), "max_new_tokens": NEW}
    for one in (model, stock(model)):
        made = generate(one, row(), **options).sequences.shape[1] - 9
        assert 1 < made < NEW
        left.append(torch.get_rng_state())
    assert torch.equal(*left)
    assert order.count("model") == made


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 4}], ids=["together", "one-by-one"])
@pytest.mark.parametrize("right", [0, 3, 7, -1, None], ids=str)
def test_each_report_is_taken_before_the_next_choice(
    right: int | None, options: dict[str, Any], order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafting, plain = pair()
    due = generate(plain, row(), max_new_tokens=40, **options)
    oracle(monkeypatch, due.sequences, itertools.repeat(right) if right is not None else itertools.cycle([-1, 2, 5]))
    order.clear()
    assert_same(generate(drafting, row(), max_new_tokens=40, **options), due)
    reports = [one for one in decoding(order) if one not in ("model", "verify")]
    assert reports == ["choose", "send", "take"] * (len(reports) // 3)
    assert ("verify" in order) == (right != -1)


@pytest.mark.parametrize("speculate", [False, True], ids=["plain", "drafting"])
def test_after_an_exception_in_a_streamer(speculate: bool, order: list[str]) -> None:
    def fail() -> None:
        raise RuntimeError("the reader is gone")

    model = pair()[not speculate]
    due = generate(model, row(), max_new_tokens=NEW)
    with pytest.raises(RuntimeError, match="the reader is gone"):
        generate(model, row(), max_new_tokens=NEW, streamer=Calling(fail))
    assert_same(generate(model, row(), max_new_tokens=NEW), due)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_what_is_taken_stays(device: str) -> None:
    report = torch.tensor([5, 1], device=device)
    reports, taken = Reports(report), []
    for token in range(100):
        report[0] = token
        reports.send()
        taken.append(reports.wait())
    assert [one.tolist() for one in taken] == [[token, 1] for token in range(100)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_neither_waits_for_the_other() -> None:
    report, behind = torch.tensor([5, 1], device="cuda"), torch.cuda.Event()
    with torch.cuda.stream(torch.cuda.Stream()):
        reports = Reports(report)
        assert reports._copy_stream is not None
        other = torch.zeros(1, device="cuda") + 1  # loads what is timed below
        reports.send()
        reports.wait()
        with torch.cuda.stream(reports._copy_stream):
            torch.cuda._sleep(200_000_000)  # the copy comes late
        reports.send()
        other = torch.zeros(1, device="cuda") + 1
        behind.record()
        behind.synchronize()
        assert not reports._copy_stream.query()
        assert (int(other), reports.wait().tolist()) == (1, [5, 1])
        reports.send()
        torch.cuda._sleep(200_000_000)  # and what is behind the choice takes its time
        assert reports.wait().tolist() == [5, 1]
        assert not torch.cuda.current_stream().query()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("index", [0, 1])
def test_threads_streams_and_exceptions_on_a_gpu(index: int) -> None:
    if index >= torch.cuda.device_count():
        pytest.skip("needs another GPU")
    model = accelpatch.patch(CAUSAL["llama"].make(torch.bfloat16).cuda(index), "int8", verify=False)
    ids, wrong = row().cuda(index), []
    due = generate(model, ids, max_new_tokens=40).sequences
    torch.cuda.synchronize(index)

    def fail() -> None:
        raise RuntimeError("the reader is gone")

    def many() -> None:
        with torch.cuda.stream(torch.cuda.Stream(index)):
            for _ in range(5):
                with pytest.raises(RuntimeError, match="the reader is gone"):
                    generate(model, ids, max_new_tokens=40, streamer=Calling(fail))
                wrong.append(not torch.equal(generate(model, ids, max_new_tokens=40).sequences, due))

    threads = [threading.Thread(target=many) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert wrong == [False] * 15
