"""Adapters that do not fit a patched model, or that are damaged: a clear error, and the model is what it was."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch.errors import KernelError
from tests.support.lora import RECIPES, adapted, config, logits, peft
from tests.support.tiny import CAUSAL


def patched(recipe: str = "int8", **changes: Any) -> Any:
    return accelpatch.patch(CAUSAL["llama"].make(**changes), RECIPES[recipe], verify=False)


class Intruder:
    """Runs code where somebody unpickles it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder / "intruded"),)


def of_another_base(folder: Path) -> None:
    adapted(patched(hidden_size=32)).save_pretrained(folder)


def pickled(folder: Path) -> None:
    adapted(patched()).save_pretrained(folder)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps({"lora": Intruder(folder)}))


def cut_off(folder: Path) -> None:
    adapted(patched()).save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "another-base": (of_another_base, "size mismatch for .*lora_A"),
    "pickle": (pickled, "(?i)weights_only|unpickl"),
    "cut-off": (cut_off, "(?i)incomplete|metadata|header"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_loaded_says_why_and_leaves_the_model(case: str, tmp_path: Path) -> None:
    make, message = BAD[case]
    make(tmp_path)
    due = logits(patched())
    with pytest.raises(Exception, match=message):  # of torch, safetensors or pickle
        peft.PeftModel.from_pretrained(patched(), tmp_path)
    assert not (tmp_path / "intruded").exists()
    model = adapted(patched())
    with pytest.raises(Exception, match=message):
        model.load_adapter(tmp_path, "bad")
    with model.disable_adapter():
        assert torch.equal(logits(model), due)


def test_rank_zero() -> None:
    model = patched()
    due = logits(model)
    with pytest.raises(ValueError, match="`r` should be a positive integer"):
        peft.get_peft_model(model, config(rank=0))
    assert torch.equal(logits(model), due)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=["nan", "infinity"])
def test_an_adapter_that_is_not_finite_does_not_merge(value: float) -> None:
    model = adapted(patched())
    with torch.no_grad():
        next(one for name, one in model.named_parameters() if "lora_B" in name)[0, 0] = value
    assert not bool(logits(model).isfinite().all())
    with pytest.raises(KernelError, match="not finite"):
        model.merge_adapter()
    with model.disable_adapter():
        assert bool(logits(model).isfinite().all())


def test_a_second_merge_changes_nothing() -> None:
    model = adapted(patched())
    model.merge_adapter()
    due = logits(model)
    with pytest.warns(UserWarning, match="already merged"):
        model.merge_adapter()
    assert torch.equal(logits(model), due)


@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_a_packed_weight_that_asks_for_a_gradient(recipe: str) -> None:
    module = patched(recipe).model.layers[0].self_attn.q_proj
    for ask in (lambda: module.weight.requires_grad_(), lambda: setattr(module.weight, "requires_grad", True)):
        with pytest.raises(accelpatch.errors.PatchError, match=r"cannot be trained; call accelpatch.unpatch\(model\)"):
            ask()
