"""examples/: each program runs as its first lines say, on tiny models."""

from __future__ import annotations

import ast
import io
import json
import runpy
import sys
import threading
import urllib.request
from http.server import HTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import accelpatch
from accelpatch.cli import app
from accelpatch.recipe.recipe import parse
from tests.cli.conftest import byte_tokenizer, save_model
from tests.support import plugins

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
GPTQ = ROOT / "tests" / "fixtures" / "foreign" / "gptq-4bit-g32"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("examples") / "tiny", tokenizer=byte_tokenizer()))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(name: str, *words: str) -> None:
    """In this process, as `python examples/NAME WORDS`."""
    before, sys.argv = sys.argv, [name, *words]
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        sys.argv = before


def answer(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_quantise_and_chat(tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\nAnd now?\n\n"))
    run("quantise_and_chat.py", tiny, "--recipe", "int8", "--tokens", "4")
    printed = answer(capsys)
    assert "modules replaced; failures of verification: none" in printed
    assert printed.count("> ") == 3
    assert all(printed.split("> ")[1:3])


def test_your_own_script(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It does not know the package, and prints what it prints without it."""
    words = ["--model", tiny, "--tokens", "4"]
    run("your_own_script.py", *words)
    plain = answer(capsys)
    tree = ast.parse((EXAMPLES / "your_own_script.py").read_text())
    assert {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names} == {
        "argparse", "torch",
    }  # fmt: skip
    found = CliRunner().invoke(app, ["exec", "--recipe", "exact", str(EXAMPLES / "your_own_script.py"), *words])
    assert found.exit_code == 0, found.output
    assert found.stdout == plain
    assert f"accelpatch: {tiny} patched with exact: " in found.stderr


def test_lora_on_int4(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("peft", reason="PEFT is not installed: pip install 'accelpatch[peft]'")
    run("lora_on_int4.py", tiny, "--steps", "30", "--out", "adapter")
    with_it, without = (float(line.split(": ")[-1]) for line in answer(capsys).splitlines() if line.startswith("int4"))
    assert with_it < without - 0.1
    assert Path("adapter/adapter_model.safetensors").is_file()


def test_gptq_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    vocabulary = json.loads((GPTQ / "config.json").read_text())["vocab_size"]
    byte_tokenizer(vocabulary - 3).save_pretrained("tokenizer")
    run("gptq_checkpoint.py", str(GPTQ), "--tokenizer", "tokenizer", "--prompt", "!!", "--tokens", "3")
    printed = answer(capsys)
    assert printed.count("int4_weight_only") >= 7
    assert "!!" in printed.splitlines()[-1]


def test_serve(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request and its answer; `--port 0` is any free port."""
    got: list[dict[str, str]] = []

    def once(server: HTTPServer) -> None:
        def ask() -> None:
            asked = json.dumps({"prompt": "Hello", "max_new_tokens": 4}).encode()
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}", asked, timeout=60) as reply:
                got.append(json.load(reply))

        client = threading.Thread(target=ask)
        client.start()
        server.handle_request()
        client.join()
        server.server_close()

    monkeypatch.setattr(HTTPServer, "serve_forever", once)
    run("serve.py", tiny, "--recipe", "int4", "--port", "0")
    assert len(got) == 1
    assert got[0]["text"]


def my_gemv(model: str, *words: str) -> dict[str, Any]:
    """The report of `accelpatch run MODEL` with the recipe and the plugin of one's own kernel."""
    given = ["--recipe", str(EXAMPLES / "my_gemv.yaml"), "--plugin", str(EXAMPLES / "my_gemv.py")]
    words = ("--prompt", "The sea is", "--max-new-tokens", "4", "--device", "cpu", "--json", *words)
    found = CliRunner().invoke(app, ["run", model, *given, *words])
    plugins.forget()
    assert found.exit_code == 0, found.output
    report: dict[str, Any] = json.loads(found.stdout)["report"]
    return report


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_my_gemv(tiny: str, dtype: str) -> None:
    report = my_gemv(tiny, "--dtype", dtype)
    assert report["verification"]["failures"] == []
    taken = [site for site in report["sites"] if site["kernel"] == "my_gemv"]
    assert len(taken) == 15
    assert all(site["kernel_error"] is not None for site in taken)


@pytest.mark.slow
def test_my_gemv_on_smollm2(smollm2: Path) -> None:
    report = my_gemv("smollm2-135m", "--verify", "quick")
    assert report["verification"]["failures"] == []
    assert sum(site["kernel"] == "my_gemv" for site in report["sites"]) == 211


def test_scaled_add(capsys: pytest.CaptureFixture[str]) -> None:
    run("scaled_add.py")
    assert float(answer(capsys).split()[-1]) < 1e-6


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: make gate runs test_own_kernels.py")
def test_my_gemv_triton(tiny: str) -> None:
    """On a CPU it has a reason: its numbers are in test_own_kernels.py."""
    assert accelpatch.load_plugin(EXAMPLES / "my_gemv_triton.py") == ("my_gemv_triton",)
    model = AutoModelForCausalLM.from_pretrained(tiny)
    text = (EXAMPLES / "my_gemv.yaml").read_text().replace("kernel: my_gemv", "kernel: my_gemv_triton")
    sites = accelpatch.plan(model, parse(text.replace("otherwise: error", "otherwise: keep"))).report().sites
    plugins.forget()
    reasons = {site.reason for site in sites if site.role == "q_proj"}
    assert any("my_gemv_triton: it runs on GPUs" in str(reason) for reason in reasons)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_each_is_short_and_tested(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 50
    tests = Path(__file__), *Path(__file__).parent.glob("*/test_*_example.py")
    assert any(f"def test_{path.stem}(" in one.read_text() for one in tests)
    assert f"examples/{path.name}" in (ast.get_docstring(ast.parse(path.read_text())) or "")
