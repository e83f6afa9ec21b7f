"""torch.compile of what no fused layer takes, on a GPU: inside captured steps, and with inductor's own graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import accelpatch
from tests.support.tiny import CAUSAL

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "tie_word_embeddings": False}
KEPT = {"name": "kept", "match": {"role": "layer"}, "replace": "keep", "optional": True}
MODES = ("default", "reduce-overhead")


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _model() -> Any:
    return CAUSAL["llama"].make(torch.float32, **SIZES).cuda()


def _generated(model: Any, rows: int = 1) -> Tensor:
    ids = torch.arange(5, 13, device="cuda").repeat(rows, 1)
    made: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    return made


def _recipe(mode: str, **runtime: Any) -> dict[str, Any]:
    return {"extends": "exact", "rules": [KEPT], "runtime": {"compile": mode, **runtime}}


@pytest.mark.parametrize("graph", ["auto", "off"])
@pytest.mark.parametrize("mode", MODES)
def test_it_generates_the_same_and_is_undone(mode: str, graph: str) -> None:
    model = _model()
    before = _generated(model)
    accelpatch.patch(model, _recipe(mode, graph=graph))
    for _ in range(3):
        assert torch.equal(_generated(model), before)
    paths = model.accelpatch.report().paths
    assert paths["compiled: the model"] > 0, paths
    assert not any(path.startswith("not compiled") for path in paths), paths
    accelpatch.unpatch(model)
    assert torch.equal(_generated(model), before)


@torch.no_grad()
def test_an_encoder_in_inductors_graphs() -> None:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(vocab_size=160, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                        intermediate_size=96)  # fmt: skip
    model: Any = BertModel(config).eval().cuda()
    given = [torch.randint(5, 100, (2, 16), device="cuda") for _ in range(3)]
    due = [model(ids).last_hidden_state for ids in given]
    accelpatch.patch(model, {"extends": "exact", "runtime": {"compile": "reduce-overhead", "graph": "off"}})
    found = [model(ids).last_hidden_state for ids in given for _ in range(4)][::4]
    for one, other in zip(found, due, strict=True):  # all of them are there still
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert model.accelpatch.report().paths["compiled: the model"] > 0
    accelpatch.unpatch(model)
