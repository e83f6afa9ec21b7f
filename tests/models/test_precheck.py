"""What is known of a model before it is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelpatch.errors import LoadError
from accelpatch.models import hub, precheck
from accelpatch.models.catalog import resolve

FOREIGN = Path(__file__).parents[1] / "fixtures/foreign"


def folder(place: Path, config: dict[str, Any]) -> str:
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    return str(place)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        pytest.param({"max_position_embeddings": 96}, 96, id="llama"),
        pytest.param({"n_positions": 64}, 64, id="gpt2"),
        pytest.param({"max_position_embeddings": 8, "text_config": {"max_position_embeddings": 32}}, 32, id="of text"),
        pytest.param({"n_layer": 2}, None, id="bloom has none"),
        pytest.param({"max_position_embeddings": "96"}, None, id="no number"),
    ],
)
def test_context_of_a_folder(tmp_path: Path, config: dict[str, Any], length: int | None) -> None:
    assert precheck.context_length(precheck.check(folder(tmp_path / "model", config))) == length


def test_context_of_a_gguf_file_and_of_the_configuration_beside_it(tmp_path: Path) -> None:
    file = FOREIGN / "gguf-q4_k_m" / "model.gguf"
    length = precheck.context_length(precheck.check(str(file)))
    assert length is not None
    folder(tmp_path, {"max_position_embeddings": length + 7})
    (tmp_path / "model.gguf").write_bytes(file.read_bytes())
    assert precheck.context_length(precheck.check(str(tmp_path))) == length + 7
    assert precheck.context_length(precheck.check(str(tmp_path / "model.gguf"))) == length


def test_context_by_name() -> None:
    assert precheck.context_length(precheck.check("smollm2-135m")) == 8192
    assert precheck.context_length(precheck.check("owner/unknown")) is None


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.gguf").write_text("no such thing")
    for name, words in {"empty": "no config.json", "text.gguf": "does not begin as", "missing": "no such file"}.items():
        with pytest.raises(LoadError, match=words):
            precheck.check(str(tmp_path / name))


def test_a_model_of_the_hub_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LoadError, match="owner/unknown is not complete"):
        precheck.check_fetched(resolve("owner/unknown"))
    precheck.check_fetched(resolve(folder(tmp_path / "model", {})))


def test_it_loads_no_torch() -> None:
    code = "import sys; from accelpatch.models import hub, precheck; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
