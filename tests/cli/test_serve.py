"""`accelpatch serve` as a process: docs/serving.md, a signal in the middle of a stream, and what is refused first."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from accelpatch import api
from accelpatch import device as devices
from accelpatch.cli import app
from accelpatch.models import embedded
from tests.cli.conftest import Cli, byte_tokenizer, environment, save_model

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def test_the_page_and_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands and its program run on a tiny model; SIGTERM in the middle of a stream lets the stream end."""
    save_model(tmp_path / "smollm2-135m", context=4096, tokenizer=byte_tokenizer())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(embedded.VARIABLE, str(tmp_path / "smollm2-135m"))
    start, measure = (line for block in blocks("sh") for line in block.splitlines())
    batch, program = blocks("python")
    command = [sys.executable, "-m", *shlex.split(start), "--port", "0"]
    env = environment() | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        said = ""
        while "serving" not in said:
            line = server.stderr.readline()
            assert line, said
            said += line
        (port,) = re.findall(r"127\.0\.0\.1:(\d+)/v1", said)
        threading.Thread(target=server.stderr.read, daemon=True).start()
        _until_it_listens(int(port))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(program.replace("8000", port), {})
            exec(batch, {})
        assert "continuous batching, native rows" in printed.getvalue()
        found = CliRunner().invoke(app, shlex.split(measure.replace("8000", port))[1:])
        assert found.exit_code == 0, found.output
        assert "answered            40 in" in found.stdout
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        asked: Any = {"model": "smollm2-135m", "prompt": "Once", "max_tokens": 2000, "temperature": 0, "stream": True}
        chunks = iter(client.completions.create(**asked))
        next(chunks)
        server.send_signal(signal.SIGTERM)
        assert [one.choices[0].finish_reason for one in chunks][-1] == "length"
        assert server.wait(30) in (0, -signal.SIGTERM)


def _until_it_listens(port: int) -> None:
    end = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_port_in_use(cli: Cli, model: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = cli("serve", model, "--port", str(taken.getsockname()[1]), "--engine", "transformers")
    assert found.exit_code == 1
    assert "cannot listen on 127.0.0.1 port" in found.stderr
    assert "give another --port" in found.stderr


def test_a_model_that_does_not_fit(cli: Cli, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by the plan: nothing is loaded."""
    small = replace(devices.probe("cpu"), memory=100_000)
    monkeypatch.setattr(devices, "probe", lambda _: small)
    monkeypatch.setattr(api, "load", lambda *_, **__: pytest.fail("loaded"))
    found = cli("serve", model, "--port", "0", "--engine", "transformers", "--device", "cpu")
    assert found.exit_code == 1
    assert re.search(r"needs \d+\.\d [kM]B with this recipe, and .* has 100\.0 kB", " ".join(found.stderr.split()))


def test_a_host_without_a_key(cli: Cli, model: str) -> None:
    found = cli("serve", model, "--host", "0.0.0.0")
    assert found.exit_code == 1
    assert "can be reached from other machines and no API key is set" in " ".join(found.stderr.split())
