"""examples/ray_serve.py where ray is installed: two replicas, one of which is killed in the middle."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'ray[serve]'")
EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_serve.py"


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    """Of two replicas of the tiny model."""
    from ray import serve

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {"PYTHONPATH": os.pathsep.join([str(EXAMPLE.parents[1]), *sys.path]), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", runtime_env={"env_vars": variables})
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(runpy.run_path(str(EXAMPLE))["application"](str(folder), "int8", 2))
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def ask(url: str) -> dict[str, Any]:
    """An answer; a request that fails is sent again."""
    body = json.dumps({"prompt": "Hello", "max_new_tokens": 8}).encode()
    end = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as answer:
                return dict(json.load(answer))
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < end
            time.sleep(0.2)


@pytest.mark.slow
def test_ray_serve(url: str) -> None:
    """A replica is killed while it answers: none of its users' requests is lost, and another one takes its place."""
    processes = {ask(url)["process"] for _ in range(12)}
    assert len(processes) == 2
    done, killed = list[dict[str, Any]](), min(processes)

    def user(_: int) -> None:
        for _ in range(10):
            done.append(ask(url))

    with ThreadPoolExecutor(4) as users:
        asking = [users.submit(user, one) for one in range(4)]
        while len(done) < 8:
            assert not all(one.done() for one in asking)
            time.sleep(0.01)
        os.kill(killed, signal.SIGKILL)
        end = time.monotonic() + 60
        for one in asking:
            one.result()
    assert len(done) == 40
    assert len({one["text"] for one in done}) == 1
    while len(alive := {ask(url)["process"] for _ in range(8)}) < 2 or killed in alive:
        assert time.monotonic() < end
    print(f"two replicas again {time.monotonic() - end + 60:.1f} s after one was killed")
