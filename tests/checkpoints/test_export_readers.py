"""What `export` writes, read by the formats' own packages, where they are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import accelpatch
from accelpatch import api
from tests.cli.conftest import byte_tokenizer
from tests.support.checkpoints import logits, opened
from tests.support.exports import RECIPES, saved

#: recipe -> how far logits may be from ours, of the largest: activations are rounded in other steps
COMPRESSED = {"int4 symmetric": 1e-5, "int8": 1e-5, "mixed": 1e-5, "smoothquant": 0.1, "smoothquant-static": 0.1,
              "fp8": 0.1}  # fmt: skip


@pytest.mark.parametrize(("recipe", "apart"), COMPRESSED.items(), ids=COMPRESSED)
def test_transformers_with_compressed_tensors_sees_the_same_model(recipe: str, apart: float, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors", reason="reads what is written: pip install compressed-tensors")
    source = saved(RECIPES.get(recipe, recipe), tmp_path / "ours")
    theirs: Any = opened(api.export(source, "compressed-tensors").folder, dtype=torch.float32)
    one, other = logits(accelpatch.load(str(source), dtype=torch.float32).model), logits(theirs)
    torch.testing.assert_close(other, one, rtol=0, atol=apart * float(one.abs().max()))


@pytest.mark.parametrize(
    ("recipe", "to"),
    [("int4 symmetric", "gptq"), ("kept", "gptq"), ("int4 symmetric", "awq")],
    ids=["gptq", "gptq with layers that stay", "awq"],
)
def test_gptqmodel_sees_the_same_model(recipe: str, to: str, tmp_path: Path) -> None:
    gptqmodel = pytest.importorskip("gptqmodel", reason="reads what is written: pip install gptqmodel")
    source = saved(RECIPES[recipe], tmp_path / "ours")
    made = api.export(source, to)
    byte_tokenizer().save_pretrained(made.folder)  # it wants one
    options = {"device": "cpu", "backend": gptqmodel.BACKEND.AUTO, "dtype": torch.float16}
    theirs = gptqmodel.GPTQModel.load(str(made.folder), **options)
    one, other = logits(accelpatch.load(str(source), dtype=torch.float32).model), logits(theirs.model).float()
    torch.testing.assert_close(other, one, rtol=0, atol=0.01 * float(one.abs().max()))  # its kernels run in 16 bits
