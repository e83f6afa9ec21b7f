"""Draws of many requests in one step: their distribution, and that each depends on its own request alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from accelpatch.serving.draws import COLDEST, Draw, _Drawn, _key, drawn, noise, processors, top_k_of

DRAWS = 40_000


def frequencies(scores: torch.Tensor, temperature: float, top_p: float, top_k: int) -> torch.Tensor:
    """How often each token of scores[V] comes in DRAWS draws, from the keys that a seed makes at as many positions."""
    state: Any = SimpleNamespace(logit_processor_kwargs={"seed": 11})
    keys = []
    for state.position_offset in range(DRAWS):
        keys.append(_key(state))
    many = torch.full((DRAWS,), temperature), torch.full((DRAWS,), top_p)
    tokens = drawn(scores.expand(DRAWS, -1), *many, torch.tensor(keys, dtype=torch.int32), top_k)
    return torch.bincount(tokens, minlength=len(scores)) / DRAWS


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [
        pytest.param(1.0, 1.0, 0, id="as they are"), pytest.param(0.5, 1.0, 0, id="temperature"),
        pytest.param(1.0, 1.0, 4, id="top-k"), pytest.param(1.3, 0.7, 0, id="top-p"),
        pytest.param(1.5, 0.8, 6, id="all three"),
    ],
)  # fmt: skip
def test_frequencies_are_those_of_transformers(temperature: float, top_p: float, top_k: int) -> None:
    torch.manual_seed(3)
    scores = torch.randn(12) * 1.5
    due = TemperatureLogitsWarper(temperature)(None, scores[None]) if temperature != 1.0 else scores[None]
    due = TopKLogitsWarper(top_k)(None, due) if top_k else due
    due = (TopPLogitsWarper(top_p)(None, due) if top_p < 1.0 else due).softmax(-1)[0]
    found = frequencies(scores, temperature, top_p, top_k)
    assert not found[due == 0].any()
    deviation = (due * (1 - due) / DRAWS).sqrt()
    assert ((found - due).abs() <= 4.5 * deviation).all(), (found, due)


def test_noise_is_gumbels() -> None:
    """Its mean is Euler's constant, its variance pi^2 / 6, and neighbours in key and in id do not go together."""
    found = noise(torch.arange(1, 401)[:, None], torch.arange(500))
    assert abs(float(found.mean()) - 0.5772) < 0.01
    assert abs(float(found.var()) - torch.pi**2 / 6) < 0.03
    for one, other in ((found[1:], found[:-1]), (found[:, 1:], found[:, :-1])):
        assert abs(float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])) < 0.01


@pytest.mark.parametrize("captured", [False, True], ids=["on a CPU", "as a graph has it"])
def test_rows_of_one_step(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row gets what it gets alone; one without a seed, or of no request, keeps its scores."""
    torch.manual_seed(0)
    scores, given = torch.randn(4, 50), [Draw(0.9, 1.0, 5), None, Draw(1.7, 0.6, 5), Draw(0.9, 1.0, 6)]
    requests = [_request(one, place) for place, one in enumerate(given)]
    if captured:
        monkeypatch.setattr(_Drawn, "_of_some", _Drawn._of_all)
    together = _applied(processors(20, always=True), scores, requests)
    assert torch.equal(together[1], scores[1])
    for row, request in enumerate(requests):
        alone = _applied(processors(20, always=True), scores[row : row + 1], [request])
        assert torch.equal(together[row], alone[0])
    tokens = together.argmax(-1)
    assert int(tokens[1]) == int(scores[1].argmax())
    assert all(int(token) in scores[row].topk(20).indices for row, token in enumerate(tokens))


@pytest.mark.parametrize("always", [False, True], ids=["on a CPU", "in a graph"])
def test_a_step_without_draws_is_left_as_it_is(always: bool) -> None:
    ours, storage = processors(20, always), torch.zeros(3, 4, dtype=torch.int32)
    for draw in (None, Draw(0.9, 1.0, 5), None):
        ours.prepare_tensor_args([_request(draw, 0)], storage)
        assert ours.do_processing is (always or draw is not None)


def _request(draw: Draw | None, position: int) -> Any:
    kwargs = {} if draw is None else draw.arguments
    return SimpleNamespace(
        state=SimpleNamespace(logit_processor_kwargs=kwargs, position_offset=position),
        has_new_token=True, query_length=1,
    )  # fmt: skip


def _applied(ours: Any, scores: torch.Tensor, requests: list[Any]) -> torch.Tensor:
    lines = torch.zeros(ours.tensors_required, len(scores) + 2, dtype=torch.int32)
    ours.fill_defaults(lines)
    ours.prepare_tensor_args(requests, lines)
    found: torch.Tensor = ours(torch.zeros(len(scores), dtype=torch.int64), scores, lines)
    return found


def test_a_draw_of_a_configuration() -> None:
    assert Draw.of(GenerationConfig(do_sample=False), 3) is None
    assert Draw.of(GenerationConfig(do_sample=True, temperature=1e-30), 3) == Draw(COLDEST, 1.0, 3)
    assert Draw.of(GenerationConfig(do_sample=True), None) != Draw.of(GenerationConfig(do_sample=True), None)
    assert [top_k_of(GenerationConfig(top_k=k)) for k in (None, 0, 7)] == [50, 0, 7]
