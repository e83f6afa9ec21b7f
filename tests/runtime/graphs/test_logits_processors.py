"""Logits processors inside the sampler's program: the scores that transformers' own give, at every length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as stock
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from accelpatch.runtime.graphs.sampler import Sampler, Unknown
from accelpatch.runtime.graphs.step import Batch
from tests.support.encoder_decoders import StrictGraph

WORDS, TIMES = 20, 30  # ids of words with the end last; of timestamps, behind <|notimestamps|>
END, NOT, VOCABULARY = WORDS - 1, WORDS, WORDS + 1 + TIMES
CPU = torch.device("cpu")


def timestamps(begin: int, **changes: Any) -> Any:
    config = {"no_timestamps_token_id": NOT, "eos_token_id": END, "bos_token_id": 0, "max_initial_timestamp_index": 5}
    return stock.WhisperTimeStampLogitsProcessor(SimpleNamespace(**config | changes), begin_index=begin)


CASES: dict[str, Callable[[int], list[Any]]] = {
    "suppressed": lambda length: [stock.SuppressTokensLogitsProcessor([1, 4, -1, 999])],
    "suppressed first": lambda length: [stock.SuppressTokensAtBeginLogitsProcessor([*range(12), 999], length)],
    "suppressed second": lambda length: [stock.SuppressTokensAtBeginLogitsProcessor(range(12), length + 1)],
    "forced first": lambda length: [stock.ForcedBOSTokenLogitsProcessor(7)],
    "forced first, from the end": lambda length: [stock.ForcedBOSTokenLogitsProcessor(-2)],
    "forced last": lambda length: [stock.ForcedEOSTokenLogitsProcessor(length + 12, [END, 5])],
    "timestamps": lambda length: [timestamps(length)],
    "timestamps from anywhere": lambda length: [timestamps(length, max_initial_timestamp_index=None)],
    "timestamps as likely as they are": lambda length: [timestamps(length, _detect_timestamp_from_logprob=False)],
    "timestamps behind some tokens": lambda length: [timestamps(max(length - 3, 0))],
    "timestamps later": lambda length: [timestamps(length + 2)],
    "all": lambda length: [
        stock.MinLengthLogitsProcessor(length + 3, torch.tensor([END])),
        stock.ForcedEOSTokenLogitsProcessor(length + 30, END),
        stock.SuppressTokensAtBeginLogitsProcessor([3, 4], length),
        stock.SuppressTokensLogitsProcessor([1, 2]),
        timestamps(length),
    ],
}


def begun(length: int) -> Tensor:
    """ids[3, length], of words and timestamps."""
    return torch.randint(0, VOCABULARY, (3, length), generator=torch.Generator().manual_seed(length))


def logits(steps: int) -> Iterator[Tensor]:
    draws = torch.Generator().manual_seed(3)
    for step in range(steps):
        yield torch.randn(3, VOCABULARY, generator=draws) * (1 if step % 3 else 4)


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("name", CASES)
def test_scores_are_those_of_transformers(name: str, length: int) -> None:
    processors, ids = LogitsProcessorList(CASES[name](length)), begun(length)
    criteria = [EosTokenCriteria(torch.tensor([END])), MaxLengthCriteria(99)]
    sampler, batch = Sampler(processors, criteria, False, length, ids), Batch(3, VOCABULARY, CPU)
    graph = batch.graph_of(sampler, lambda program: StrictGraph(program, CPU, None))
    batch.begin(length, torch.tensor(length))
    batch.begin_sampling(sampler, length, torch.tensor([END]))
    changed = False
    for given in logits(40):
        due = processors(ids, given.clone())
        changed = changed or not torch.equal(due, given)
        batch.logits.copy_(given)
        assert torch.equal(sampler.scores(batch), due)
        unfinished = batch.unfinished.clone()
        graph.replay()
        chosen = torch.where(unfinished, due.argmax(-1), END)
        assert torch.equal(batch.tokens, chosen)
        ids = torch.cat([ids, chosen[:, None]], dim=1)
        batch.slot.add_(1)
    assert changed == (not name.startswith("forced first") or length == 1)


def test_one_program_serves_other_ids_and_lengths() -> None:
    made = []
    for ids, length in (([1, 2], 1), ([3], 5)):
        processors = [
            stock.SuppressTokensLogitsProcessor(ids),
            stock.SuppressTokensAtBeginLogitsProcessor(ids, length),
        ]
        made.append(Sampler(processors, [], False, length).key)
    assert made[0] == made[1]
    assert Sampler([stock.SuppressTokensLogitsProcessor([1])], [], False, 1).key != made[0]
    mine, other = (Sampler([timestamps(1, eos_token_id=end)], [], False, 1, begun(1)).key for end in (END, 3))
    assert mine != other


def test_a_forced_id_outside_the_vocabulary_is_said() -> None:
    sampler = Sampler([stock.ForcedBOSTokenLogitsProcessor(VOCABULARY)], [], False, 1)
    batch = Batch(1, VOCABULARY, CPU)
    sampler.make_tables(batch)
    with pytest.raises(IndexError, match="outside a vocabulary of 51"):
        batch.begin_sampling(sampler, 1, None)


class Own(stock.SuppressTokensLogitsProcessor):
    """A program's own."""


@pytest.mark.parametrize(
    "processors",
    [
        pytest.param([Own([1])], id="a class of its own"),
        pytest.param(
            [stock.TemperatureLogitsWarper(0.5), stock.SuppressTokensLogitsProcessor([1])], id="after warping"
        ),
        pytest.param([timestamps(1), timestamps(1)], id="timestamps twice"),
        pytest.param([timestamps(1, eos_token_id=[3, 4])], id="several ends"),
        pytest.param([stock.SuppressTokensLogitsProcessor([1]), stock.WhisperNoSpeechDetection(3, 1)], id="not first"),
    ],
)
def test_the_host_runs_what_no_program_holds(processors: list[Any]) -> None:
    with pytest.raises(Unknown, match=type(processors[-1]).__name__):
        Sampler(processors, [], False, 1, begun(1))


def test_without_the_ids_before_timestamps_are_the_hosts() -> None:
    with pytest.raises(Unknown, match="WhisperTimeStamp"):
        Sampler([timestamps(1)], [], False, 1)


def test_what_reads_the_first_scores_is_called_with_them() -> None:
    detection = stock.WhisperNoSpeechDetection(3, 1)
    sampler = Sampler([detection, timestamps(1)], [], False, 1, begun(1))
    assert sampler.watching == [detection]
    scores = next(logits(1))
    assert torch.equal(detection(begun(1), scores), scores)
    assert math.isclose(float(detection.no_speech_prob[0]), float(scores[0].softmax(-1)[3]), rel_tol=1e-6)
