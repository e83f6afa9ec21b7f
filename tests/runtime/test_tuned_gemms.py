"""A file of tuned GEMMs: read, refused for another release or arch, in use while a model is patched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import accelpatch
from accelpatch import device as devices
from accelpatch.errors import PatchError
from accelpatch.pipeline import gemms_of
from accelpatch.recipe import recipe as recipes
from accelpatch.runtime import tuned_gemms
from tests.support import tiny

H200 = devices.KNOWN["sm_90"]
TEXT = "Validator,PT_VERSION,2.13.0\nValidator,ACCELPATCH_ARCH,sm_90\nGemmTunableOp_float_TN,tn_16_8_64,Default,0.01\n"


class Torch:
    """Stands for torch.cuda.tunable, which a build for CPUs has no functions for."""

    def __init__(self) -> None:
        self.state = {"enabled": False, "tuning": True}
        self.files: list[str] = []
        self.takes = True
        self.module: Any = SimpleNamespace(
            get_validators=lambda: (("PT_VERSION", "2.13.0"),),
            is_enabled=lambda: self.state["enabled"], tuning_is_enabled=lambda: self.state["tuning"],
            enable=self._set("enabled"), tuning_enable=self._set("tuning"), read_file=self._read,
        )  # fmt: skip

    def _set(self, name: str) -> Callable[[bool], None]:
        return lambda value: self.state.__setitem__(name, value)

    def _read(self, file: str) -> bool:
        self.files.append(Path(file).read_text())
        return self.takes


@pytest.fixture
def torch_(monkeypatch: pytest.MonkeyPatch) -> Torch:
    made = Torch()
    monkeypatch.setattr(tuned_gemms, "tunable", made.module)
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "tunableop.csv"
    made.write_text(TEXT)
    return made


def test_it_is_on_until_the_last_model_is_unpatched(torch_: Torch, file: Path) -> None:
    found = tuned_gemms.check(file, H200)
    first, second = (tuned_gemms.Applied(found, str(file)) for _ in range(2))
    assert torch_.state == {"enabled": True, "tuning": False}
    assert torch_.files[0] == TEXT.replace("Validator,ACCELPATCH_ARCH,sm_90\n", "")  # which torch does not know
    first.close()
    first.close()
    assert torch_.state["enabled"]
    del second  # as a model that goes without being unpatched
    assert torch_.state == {"enabled": False, "tuning": True}


def test_a_file_that_torch_refuses_leaves_it_off(torch_: Torch, file: Path) -> None:
    torch_.takes = False
    with pytest.raises(PatchError, match="torch refuses"):
        tuned_gemms.Applied(tuned_gemms.check(file, H200), str(file))
    assert torch_.state == {"enabled": False, "tuning": True}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        pytest.param("sm_90", "gfx942", "its arch is gfx942, and here it is sm_90", id="arch"),
        pytest.param("2.13.0", "2.9.0", "its PT_VERSION is 2.9.0, and here it is 2.13.0", id="release"),
        pytest.param("Validator,ACCELPATCH_ARCH,sm_90\n", "", "its arch is not named, and here", id="no arch"),
        pytest.param("PT_VERSION,2.13.0", "PT_VERSION,2.13.0\nValidator,ROCM_VERSION,6", "ROCM_VERSION", id="ROCm"),
    ],
)
def test_a_file_of_another_release_or_arch_is_refused(
    torch_: Torch, file: Path, before: str, after: str, said: str
) -> None:
    file.write_text(TEXT.replace(before, after))
    recipe = recipes.parse(f"extends: exact\nruntime: {{tunableop: {file}}}")
    planned: Any = SimpleNamespace(recipe=recipe, device=H200)
    with pytest.raises(PatchError, match=said):
        gemms_of(planned)
    assert torch_.state["enabled"] is False


@pytest.mark.parametrize("text", ["", "hello", "Validator,PT_VERSION,2\na,b\n", "\0"])
def test_what_is_no_such_file_is_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(PatchError, match="is no file of tuned GEMMs"):
        tuned_gemms.read(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match=r"cannot be read .* run `accelpatch tune tunableop MODEL` again"):
        tuned_gemms.read(tmp_path / "none.csv")


def test_on_a_cpu_the_plan_says_that_it_has_no_effect() -> None:
    model = tiny.make("Llama", **tiny._LLAMA)
    recipe = {"extends": "exact", "runtime": {"tunableop": "tunableop.csv"}}
    assert "runtime.tunableop is set and has no effect here" in accelpatch.plan(model, recipe).report().notes
    accelpatch.patch(model, recipe)  # and the file need not be there
    accelpatch.unpatch(model)


def test_the_file_is_beside_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: int8\nruntime: {tunableop: gemms.csv}")
    assert recipes.load(recipe).runtime.tunableop == str(tmp_path / "gemms.csv")
