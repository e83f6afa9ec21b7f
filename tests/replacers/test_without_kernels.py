"""A CPU without native kernels: what stays, what is said before anything is read, and the float rule of what runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import accelpatch
from accelpatch.device import probe
from accelpatch.errors import AccelpatchError, LibraryError, LoadError
from accelpatch.kernels import dispatch
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.ops.linear.int8_linear import int8_linear
from accelpatch.quant import int8
from accelpatch.recipe.recipe import parse
from tests.support.checkpoints import logits, opened, saved
from tests.support.packed import plain

ROUNDING = ("int8", "int4", "smoothquant")
FORGET = (dispatch.forget, native_library.say_where_missing.cache_clear, native_library.native.cache_clear)
NOTHING = "without native CPU kernels it would be slower than the original (there is no C++ compiler here"


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No compiler, and nothing loaded."""
    for name in ("CXX", "ACCELPATCH_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    monkeypatch.setattr(libraries, "_loaded", {})
    monkeypatch.setattr(libraries, "_failed", {})
    for forget in FORGET:
        forget()
    yield
    for forget in FORGET:
        forget()


@pytest.mark.parametrize("recipe", ROUNDING)
def test_a_plan_keeps_what_would_be_slower(bare: None, recipe: str) -> None:
    planned = accelpatch.plan(plain("llama"), recipe)
    assert [entry.site.path for entry in planned.replaced if entry.replacer and entry.replacer.rounds] == []
    kept = [entry for entry in planned.entries if entry.reason and entry.reason.startswith(NOTHING)]
    assert len(kept) >= 14, "seven linear layers in each of two layers, and the head"


def test_a_patch_says_what_helps_and_computes_as_before(bare: None, capsys: pytest.CaptureFixture[str]) -> None:
    model = plain("llama")
    before = logits(model)
    accelpatch.patch(model, "int8")
    said = capsys.readouterr().err
    assert said.count("no C++ compiler") == 1
    assert "install one" in said
    torch.testing.assert_close(logits(model), before)


def test_it_is_an_error_where_the_recipe_says_so(bare: None) -> None:
    recipe = "name: strict\nrules:\n  - match: {role: q_proj}\n    replace: int8_weight_only\n    otherwise: error\n"
    with pytest.raises(AccelpatchError, match="slower than the original"):
        accelpatch.plan(plain("llama"), parse(recipe))


def test_it_is_said_before_anything_is_read(bare: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LoadError):
        accelpatch.load(str(tmp_path / "no model"), "int8")
    assert "no C++ compiler" in capsys.readouterr().err


@pytest.mark.skipif(libraries.why_not("cpu", probe("cpu")) is not None, reason="needs a C++ compiler")
@pytest.mark.parametrize("recipe", ["int8", "int4"])
def test_what_was_saved_loads_within_the_float_rule(
    request: pytest.FixtureRequest, tmp_path: Path, recipe: str
) -> None:
    made = logits(saved(plain("llama"), recipe, tmp_path / "saved"))
    request.getfixturevalue("bare")
    model = accelpatch.load(str(tmp_path / "saved")).model
    report = model.accelpatch.report()
    assert report.verification.failures == []
    assert {site.kernel for site in report.sites if site.replacer == f"{recipe}_weight_only"} == {"torch"}
    torch.testing.assert_close(logits(model), made, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(libraries.why_not("cpu", probe("cpu")) is not None, reason="needs a C++ compiler")
def test_a_damaged_library_is_named_and_not_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(plain("llama"), "int8", tmp_path / "saved")
    library = libraries.export("cpu", probe("cpu"), tmp_path / "kernels") / libraries.LIBRARY
    library.write_bytes(library.read_bytes()[:-1])
    monkeypatch.setenv("ACCELPATCH_KERNELS", str(tmp_path / "kernels"))
    for load in (lambda folder: accelpatch.load(str(folder)), opened):
        monkeypatch.setattr(libraries, "_loaded", {})
        monkeypatch.setattr(libraries, "_failed", {})
        with pytest.raises(LibraryError) as error:
            load(tmp_path / "saved")
        assert str(error.value).startswith(str(library))
        assert "safetensors" not in str(error.value)


@pytest.mark.parametrize("m", [1, 2, 7])
def test_the_fallback_rounds_once(m: int) -> None:
    """Each result is the float32 nearest to the exact one of the weight's own values."""
    generator = torch.Generator().manual_seed(m)
    x, weight = torch.randn(m, 1536, generator=generator), torch.randn(48, 1536, generator=generator)
    q, scale = int8.quantize(weight, group_size=128)
    with dispatch.forced("torch"):
        y = int8_linear(x, q, scale, None)
    exact = x.double() @ (q.double().view(48, 12, 128) * scale.double()[:, :, None]).view(48, 1536).T
    torch.testing.assert_close(y, exact.float(), rtol=0, atol=0)
