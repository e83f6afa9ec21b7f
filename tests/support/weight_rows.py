"""Rows of docs/patched-models.md about weights and adapters."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accelpatch
from accelpatch.errors import PatchError
from tests.support.lora import config, peft
from tests.support.packed import patch
from tests.support.rows import REACH, adapted, off, out, row, stock, undo
from tests.support.tiny import full_batch


@row("`model.generate`")
def _run(model: Any, form: str, folder: Path) -> None:
    assert model.generate(**full_batch(), max_new_tokens=3, do_sample=False).shape == (3, 12)
    undo(model)
    assert torch.equal(out(model), out(stock(form)))


@row("train the model")
def _train(model: Any, form: str, folder: Path) -> None:
    batch = full_batch() | {"labels": full_batch()["input_ids"]}
    model.train()
    model(**batch).loss.backward()
    trained = {name for name, one in model.named_parameters() if one.grad is not None and float(one.grad.abs().max())}
    assert {name for name in trained if "norm" in name}
    due = {name for name, _ in model.named_parameters() if "embed" not in name}
    assert trained >= due
    undo(model)
    model(**batch).loss.backward()


@row("train a copy of a part")
def _train_copy(model: Any, form: str, folder: Path) -> None:
    model = adapted(model, modules_to_save=["lm_head"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("modules_to_save" in name)
    model(**full_batch(), labels=full_batch()["input_ids"]).loss.backward()
    (learnt,) = [p for p in model.parameters() if p.requires_grad]
    assert learnt.grad is not None
    undo(model)
    assert next(p for p in model.parameters() if p.requires_grad) is learnt


@row("train adapters")
def _train_adapters(model: Any, form: str, folder: Path) -> None:
    model = adapted(model).train()
    model(**full_batch(), labels=full_batch()["input_ids"]).loss.backward()
    learnt = {name: one.grad.clone() for name, one in model.named_parameters() if one.requires_grad}
    assert len(learnt) == 8
    assert all(bool(one.any()) for one in learnt.values())
    undo(model)
    assert {name for name, one in model.named_parameters() if one.grad is not None} == set(learnt)


@row("add, switch, delete adapters")
def _adapters(model: Any, form: str, folder: Path) -> None:
    model = adapted(model)
    model.add_adapter("other", config(use_dora=True))
    model.set_adapter("other")
    model.delete_adapter("default")
    due = out(model)
    scaled = peft.get_peft_model(
        patch(stock(form), form),
        peft.IA3Config(
            target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
        ),
    ).eval()
    assert "ia3_l" in "".join(name for name, _ in scaled.named_parameters())
    for one, expected in ((model, due), (scaled, out(scaled))):
        undo(one)
        assert (out(one) - expected).norm() / expected.norm() < REACH[form]


@row("add adapters of single parameters")
def _single_parameters(model: Any, form: str, folder: Path) -> None:
    options: dict[str, Any] = {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight"]}
    if form != "exact":
        before = out(model)
        with pytest.raises(PatchError, match="which is packed and no parameter"):
            peft.get_peft_model(model, config(**options))
        assert torch.equal(out(model), before)
        undo(model)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, config(**options)).eval()
    due = out(model)
    if form == "exact":
        undo(model)
    assert off(model, stock(form)) > 0.05
    assert (out(model) - due).norm() < 1e-4 * due.norm()


def _base(model: Any) -> torch.Tensor:
    layer = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    weight: torch.Tensor = layer.model.layers[0].self_attn.q_proj.weight.clone().float()
    return weight


def _near(one: torch.Tensor, other: torch.Tensor, form: str) -> bool:
    """Within what the format rounds away."""
    share = {"exact": 1e-6, "compact": 1e-6, "int8": 0.015, "int4": 0.16, "fp8": 0.05}[form]
    return bool((one - other).norm() <= share * other.norm())


@row("merge an adapter")
def _merge(model: Any, form: str, folder: Path) -> None:
    before = _base(model)
    merged, due = adapted(model).merge_and_unload(), adapted(stock(form)).merge_and_unload()
    assert not _near(_base(due), before, form)
    assert _near(_base(merged), _base(due), form)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelpatch.unpatch(merged)
    assert ["rounded" in str(one.message) for one in caught] == ([] if form in ("exact", "compact") else [True])
    assert _near(_base(merged), _base(due), form)
    assert off(merged, due) < REACH[form]


@row("unmerge an adapter")
def _unmerge(model: Any, form: str, folder: Path) -> None:
    model, due = adapted(model), _base(stock(form))
    model.merge_adapter()
    assert not _near(_base(model), due, form)
    model.unmerge_adapter()
    found = _base(model)
    assert (found - due).norm() <= {"int8": 0.02, "int4": 0.25, "fp8": 0.08}.get(form, 0.01) * due.norm()
    with model.disable_adapter():
        assert off(model, stock(form)) < REACH[form]


@row("start an adapter from the weight")
def _residual(model: Any, form: str, folder: Path) -> None:
    for start in ("pissa", "olora"):
        found = adapted(patch(stock(form), form), init_lora_weights=start)
        assert not _near(_base(found), _base(stock(form)), form)
        assert off(found, stock(form)) < REACH[form]


@row("save an adapter")
def _save_adapter(model: Any, form: str, folder: Path) -> None:
    model = adapted(model, modules_to_save=["norm"])
    model.save_pretrained(folder)
    again = peft.PeftModel.from_pretrained(stock(form), folder).eval()
    assert off(again, model) < REACH[form]


@row("write into a weight")
def _write(model: Any, form: str, folder: Path) -> None:
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data *= 0
    assert not model.model.layers[0].mlp.down_proj.weight.any()
    undo(model)
    assert not model.model.layers[0].mlp.down_proj.weight.any()


@row("replace a packed weight")
def _replace(model: Any, form: str, folder: Path) -> None:
    layer = model.model.layers[0].mlp.down_proj
    new = nn.Parameter(torch.zeros_like(layer.weight))
    if form == "exact":
        layer.weight = new
        undo(model)
        assert model.model.layers[0].mlp.down_proj.weight is new
        return
    with pytest.raises(PatchError, match="packed and cannot be replaced"):
        layer.weight = new
    undo(model)
    model.model.layers[0].mlp.down_proj.weight = new


@row("train a packed weight")
def _train_packed(model: Any, form: str, folder: Path) -> None:
    if form != "exact":
        with pytest.raises(PatchError, match="cannot be trained"):
            model.model.layers[0].mlp.down_proj.weight.requires_grad_()
    undo(model)
    model.model.layers[0].mlp.down_proj.weight.requires_grad_()


@row("save the model")
def _save(model: Any, form: str, folder: Path) -> None:
    with pytest.raises(PatchError, match="unpatch"):
        model.model.save_pretrained(folder)
    assert list(folder.iterdir()) == []
    model.save_pretrained(folder / "patched")
    assert off(accelpatch.load(str(folder / "patched")).model, model) < REACH[form]
    undo(model)
    model.save_pretrained(folder / "plain")
    assert not hasattr(type(model).from_pretrained(folder / "plain").config, "quantization_config")


@row("`state_dict()`")
def _state(model: Any, form: str, folder: Path) -> None:
    names = {name.rpartition(".")[2] for name in model.state_dict()}
    assert names <= ({"weight"} if form in ("exact", "compact") else {"weight", "q", "scale", "offset"})
    undo(model)
    assert list(model.state_dict()) == list(stock(form).state_dict())


@row("`load_state_dict`")
def _load(model: Any, form: str, folder: Path) -> None:
    other = stock(form)
    for parameter in other.parameters():
        parameter.data *= 0.5
    model.load_state_dict(other.state_dict())
    assert off(model, other) < REACH[form]
    model.load_state_dict(patch(copy.deepcopy(other), form).state_dict())
    undo(model)
    assert off(model, other) < REACH[form]
