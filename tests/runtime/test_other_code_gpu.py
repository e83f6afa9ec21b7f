"""Code of others on a GPU: no graph keeps it, and what is its package's own stays captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers.models.llama.modeling_llama as llama
from torch import Tensor, nn

import accelpatch
from accelpatch.runtime.graphs.step import CAPTURED
from tests.runtime.test_other_classes import Prepared, Steered
from tests.support.other_code import scaled
from tests.support.tiny import CAUSAL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
STEPS = 12


def made(**changes: Any) -> Any:
    return CAUSAL["llama"].make(torch.bfloat16, hidden_size=256, intermediate_size=512, **changes).cuda()


@torch.no_grad()
def run(model: Any, ids: Tensor) -> Tensor:
    """Logits of a prompt, and of STEPS - 1 single steps over its cache."""
    made = model(ids)
    found = [made.logits[:, -1]]
    for token in range(3, STEPS + 2):
        made = model(ids[:, :1] * 0 + token, past_key_values=made.past_key_values)
        found.append(made.logits[:, -1])
    return torch.stack(found).float()


def assert_close(model: Any, plain: Any, ids: Tensor) -> None:
    due = run(plain, ids)
    assert (run(model, ids) - due).norm() < 0.03 * due.norm()


def captured(model: Any) -> int:
    paths = model.accelpatch.report().paths
    count = int(paths.get(CAPTURED, 0))
    paths.clear()
    return count


@pytest.mark.parametrize("recipe", ["exact", "flash"])
def test_classes_that_are_changed_and_changed_back(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = made(), accelpatch.patch(made(), recipe)
    ids = torch.arange(20, 29, device="cuda")[None]
    assert_close(model, plain, ids)
    assert captured(model) == STEPS - 1
    for owner, name in ((llama.LlamaRMSNorm, "forward"), (llama, "apply_rotary_pos_emb"), (nn.functional, "silu")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, scaled(getattr(owner, name), 0.5))
            assert_close(model, plain, ids)
            assert captured(model) == 0
        assert_close(model, plain, ids)
        assert captured(model) == STEPS - 1


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_switch_in_a_layer_is_not_kept_by_a_graph(after: bool) -> None:
    plain, model = made(num_hidden_layers=4), made(num_hidden_layers=4)
    for one in (plain,) if after else (plain, model):
        one.model.layers[2].__class__ = Steered
    accelpatch.patch(model, "exact")
    if after:
        model.model.layers[2].__class__ = Steered
    ids = torch.arange(20, 29, device="cuda")[None]
    for steer in (0.0, 2.0, -1.0):
        plain.model.layers[2].steer = model.model.layers[2].steer = steer
        assert_close(model, plain, ids)
        assert captured(model) == STEPS - 1  # three layers in graphs, and the module between them


def test_methods_of_generation() -> None:
    plain, model = made(), made()
    plain.__class__ = model.__class__ = Prepared
    accelpatch.patch(model, "exact")
    ids = torch.arange(20, 29, device="cuda")[None]
    found, due = (one.generate(ids, max_new_tokens=STEPS, do_sample=False) for one in (model, plain))
    assert found.shape == due.shape
    assert captured(model) == STEPS - 1
    assert any(name.startswith("stock loop: Prepared.") for name in _paths(model, ids))


def _paths(model: Any, ids: Tensor) -> dict[str, int]:
    model.generate(ids, max_new_tokens=3, do_sample=False)
    return dict(model.accelpatch.report().paths)
