"""`import accelpatch` is enough for from_pretrained of transformers, before that or after it, and imports neither."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import accelpatch
from accelpatch import registration
from accelpatch.checkpoints.saved import METHOD
from tests.support.tiny import CAUSAL

ORDERS = {
    "first": "import accelpatch\nassert not {'torch', 'transformers'} & sys.modules.keys()\nimport transformers",
    "last": "import transformers\ntransformers.AutoModelForCausalLM.from_pretrained\nimport accelpatch",
    "not yet read": "import transformers, accelpatch",
    "again": (
        "import importlib, accelpatch, transformers.quantizers.auto as auto\n"
        "importlib.reload(auto)\nimport transformers"
    ),
    "another thread": (
        "import threading, time\nfirst = threading.Thread(target=lambda: __import__('transformers.quantizers.auto'))\n"
        "first.start()\nwhile 'transformers.quantizers.auto' not in sys.modules: time.sleep(0.001)\n"
        "import accelpatch\nfirst.join()\nimport transformers"
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model that was patched by int8."""
    folder = tmp_path_factory.mktemp("saved") / "tiny-int8"
    model = CAUSAL["llama"].make()
    accelpatch.patch(model, "int8")
    model.save_pretrained(folder)
    return folder


def test_the_name_of_the_method() -> None:
    assert registration.METHOD == METHOD


@pytest.mark.parametrize(
    "order",
    [pytest.param(one, marks=pytest.mark.nightly if one in ("again", "not yet read") else ()) for one in ORDERS],
)
@pytest.mark.smoke
def test_from_pretrained_loads_a_saved_model(order: str, saved: Path) -> None:
    program = (
        f"import sys\n{ORDERS[order]}\nmodel = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "print(model.accelpatch.report().recipe)"
    )
    done = subprocess.run([sys.executable, "-c", program, saved], capture_output=True, text=True)
    assert done.stdout == "int8\n", done.stderr[-2000:]


def test_the_model_card_says_what_to_import(saved: Path) -> None:
    card = (saved / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    program = card.split("```python\n")[1].split("```")[0]
    assert program.startswith("import accelpatch ")
    names: dict[str, object] = {}
    exec(program.replace('"tiny-int8"', repr(str(saved))), names)
    assert hasattr(names["model"], "accelpatch")


def test_a_card_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("my own")
    model = CAUSAL["llama"].make()
    accelpatch.patch(model, "int8", verify=False)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "my own"
