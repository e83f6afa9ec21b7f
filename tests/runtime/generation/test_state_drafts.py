"""MTP heads and DFlash over captured steps that leave hidden states: tokens as without drafts, transformers' drafts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.report import DRAFTED
from accelpatch.report import DRAFTS_ACCEPTED as ACCEPTED
from accelpatch.report import NO_DRAFTS as NONE
from accelpatch.runtime.graphs import kv_cache
from tests.support.assisting import mixed, paced, target
from tests.support.drafting import as_on_a_gpu, generate, row, stock
from tests.support.state_drafts import dflash_assistant, with_mtp_heads, write_mtp_heads

generators = pytest.importorskip("transformers.generation.candidate_generator")
pytestmark = pytest.mark.skipif(
    not hasattr(generators, "DFlashTokenCandidateGenerator"), reason="this transformers has neither"
)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.3, "top_k": 20},
    "repetition": {"repetition_penalty": 1.2},
    "scores": {"output_scores": True, "output_logits": True, "min_new_tokens": 12, "eos_token_id": list(range(50))},
    "several-ends": {"eos_token_id": list(range(30))},
}


def counts(model: Any) -> dict[str, int]:
    return dict(model.accelpatch.report().paths)


def loops(model: Any) -> list[str]:
    return [path for path in counts(model) if path.startswith((NONE, "stock loop"))]


@pytest.fixture(scope="module", params=[1, 2])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    folder = tmp_path_factory.mktemp("heads")
    write_mtp_heads(folder, request.param)
    return folder, request.param


@pytest.mark.parametrize("way", WAYS)
def test_mtp_heads(way: str, checkpoint: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    plain = with_mtp_heads(*checkpoint)
    model = accelpatch.patch(with_mtp_heads(*checkpoint), "exact", verify=False)
    for numbers in (None, mixed()):
        paced(monkeypatch, numbers)
        for ids in (row(30), row(1)):
            due = generate(plain, ids, max_new_tokens=30, **WAYS[way])
            made = generate(model, ids, max_new_tokens=30, use_mtp=True, **WAYS[way])
            assert torch.equal(made.sequences, due.sequences)
            for name in ("scores", "logits") if "output_scores" in WAYS[way] else ():
                torch.testing.assert_close(torch.stack(made[name]), torch.stack(due[name]), rtol=1e-4, atol=1e-4)
            for mine, its in zip(made.past_key_values.layers, due.past_key_values.layers, strict=True):
                torch.testing.assert_close(mine.keys, its.keys, rtol=1e-4, atol=1e-4)
    made = counts(model)
    assert made[ACCEPTED] > (3 if way == "greedy" else 0), made
    assert loops(model) == []


@pytest.mark.parametrize("gpu", [True, False], ids=["captured", "transformers' own loop"])
def test_heads_are_read_once_and_draft_what_transformers_does(
    gpu: bool, checkpoint: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where none of our steps run: the classes of a patched model's norms and layers make no heads."""
    from transformers.modeling_layers import MtpModel

    if gpu:
        as_on_a_gpu(monkeypatch)
    paced(monkeypatch)
    plain = with_mtp_heads(*checkpoint)
    model = accelpatch.patch(with_mtp_heads(*checkpoint), "exact", verify=False)
    read, drafted = [], []
    whole, forward = MtpModel.from_pretrained.__func__, MtpModel.forward  # type: ignore[attr-defined]

    def reading(cls: Any, *args: Any, **kwargs: Any) -> Any:
        read.append(1)
        return whole(cls, *args, **kwargs)

    def drafting(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = forward(self, *args, **kwargs)
        drafted[-1].append((kwargs["full_input_ids"].shape[1], made[0].tolist()))
        return made

    monkeypatch.setattr(MtpModel, "from_pretrained", classmethod(reading))
    monkeypatch.setattr(MtpModel, "forward", drafting)
    for one in (plain, model, model):
        drafted.append([])
        generate(one, row(7), max_new_tokens=30, use_mtp=True)
    assert len(read) == 2
    assert drafted[1] == drafted[2]
    due = dict(drafted[0])
    both = [(length, made) for length, made in drafted[1] if length in due]
    assert len(both) > 5
    assert all(due[length] == made for length, made in both)


@pytest.mark.parametrize("way", WAYS)
def test_dflash(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its candidates are an oracle's, so that some are accepted; those that it made itself are transformers' own."""
    as_on_a_gpu(monkeypatch)
    model = target()
    plain, draft, own = stock(model), dflash_assistant(model.config), []
    plain_candidates = generators.DFlashTokenCandidateGenerator.get_candidates
    ids = row(20)
    due = generate(model, ids, max_new_tokens=30, **WAYS[way]).sequences
    right = itertools.cycle([3, 0, 5, 1])

    def candidates(self: Any, input_ids: Any, **kwargs: Any) -> Any:
        found, logits = plain_candidates(self, input_ids, **kwargs)
        length = input_ids.shape[1]
        if found.shape[1] == length:
            return found, logits
        own[-1].append((length, found[0, length:].tolist()))
        known = torch.nn.functional.pad(due, (0, 10), value=1)[:, : length + 5].clone()
        known[:, length + next(right) :] += 1
        return known % 160, None

    monkeypatch.setattr(generators.DFlashTokenCandidateGenerator, "get_candidates", candidates)
    given = {"assistant_model": draft, "speculation_type": "dflash", "max_new_tokens": 30}
    for numbers in (None, mixed()):
        paced(monkeypatch, numbers)
        own.append([])
        assert torch.equal(generate(model, ids, **given, **WAYS[way]).sequences, due)
    own.append([])
    generate(plain, ids, **given, **WAYS[way])
    theirs = dict(own[2])
    both = [(length, made) for round in own[:2] for length, made in round if length in theirs]
    assert len(both) > 1
    assert all(theirs[length] == made for length, made in both)
    assert counts(model)[ACCEPTED] > (0 if way == "several-ends" else 5)
    assert loops(model) == []


def test_a_cache_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(kv_cache, "SMALLEST", 8)
    paced(monkeypatch)
    model = target()
    due = generate(model, row(3), max_new_tokens=60)
    given = {"assistant_model": dflash_assistant(model.config), "speculation_type": "dflash"}
    assert torch.equal(generate(model, row(3), max_new_tokens=60, **given).sequences, due.sequences)
    assert loops(model) == []
    limited = target(more=", max_length: 40")
    due = generate(limited, row(3), max_new_tokens=37)
    assert torch.equal(generate(limited, row(3), max_new_tokens=37, **given).sequences, due.sequences)


def test_what_runs_transformers_own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    model = target()
    given = {"assistant_model": dflash_assistant(model.config), "speculation_type": "dflash"}
    due = generate(model, row()).sequences
    assert torch.equal(generate(model, row(), **given).sequences, due)
    assert loops(model) == [f"{NONE}DFlash"]
    as_on_a_gpu(monkeypatch)
    model = target()
    assert torch.equal(generate(model, row(), prefill_chunk_size=4, **given).sequences, due)
    assert loops(model) == [f"{NONE}a prompt in parts has the hidden states of its last part alone"]
    assert DRAFTED not in counts(model)
    with pytest.raises(ValueError, match="num_mtp_layers"):
        generate(model, row(), use_mtp=True)


def test_a_prompt_lookup_goes_before_mtp_heads(checkpoint: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    model = accelpatch.patch(with_mtp_heads(*checkpoint), "exact", verify=False)
    due = generate(model, row(30)).sequences
    assert torch.equal(generate(model, row(30), use_mtp=True, prompt_lookup_num_tokens=3).sequences, due)


@pytest.mark.parametrize("gpu", [True, False], ids=["captured", "transformers' own loop"])
def test_heads_beside_a_quantised_head(
    gpu: bool, checkpoint: tuple[Path, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpu:
        as_on_a_gpu(monkeypatch)
    model = accelpatch.patch(with_mtp_heads(*checkpoint), "int8", verify=False)
    due = generate(model, row(30)).sequences
    for _ in range(2):
        assert torch.equal(generate(model, row(30), use_mtp=True).sequences, due)


def test_a_cache_that_holds_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    model = target()
    given = {"assistant_model": dflash_assistant(model.config), "speculation_type": "dflash"}
    first = generate(model, row(9), **given)
    ids = torch.cat([first.sequences, row(1)], 1)
    due = generate(model, ids).sequences
    assert torch.equal(generate(model, ids, past_key_values=first.past_key_values, **given).sequences, due)
    assert loops(model) == [f"{NONE}the cache holds tokens whose hidden states are not known"]
