"""A server of a tiny patched model, in a thread of this process, and bare requests to it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from accelpatch import api

NAME = "tiny"
MESSAGES = [{"role": "user", "content": "Hello"}]


@dataclass
class Running:
    """port: of 127.0.0.1. model: the patched one that is served. app: its Server."""

    port: int
    model: Any
    tokenizer: Any
    app: Any

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none") -> Any:
        """An OpenAI client that does not retry."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        """Status and body of a GET, or of a POST of bytes or of an object as JSON."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            if body is None:
                connection.request("GET", path, headers=headers)
            else:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                given = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
                connection.request("POST", path, data, given)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def lone(self, prompt: str, new_tokens: int) -> str:
        """What generate() answers to a prompt as it is, greedily."""
        ids = self.tokenizer(prompt, return_tensors="pt").to(self.model.device)
        made = self.model.generate(**ids, max_new_tokens=new_tokens, do_sample=False)
        return self.tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


@contextmanager
def running(folder: Path | str, recipe: str = "int8", *, key: str | None = None, **limits: Any) -> Iterator[Running]:
    """Context manager: a server, which is stopped as a signal stops it."""
    import uvicorn

    from accelpatch.serving import server
    from accelpatch.serving.app import Served, Server
    from accelpatch.serving.limits import Address, Limits

    address = Address(port=0, api_key=key)
    loaded = api.load(str(folder), recipe)
    app = Server(Served(NAME, loaded.model, loaded.tokenizer, loaded.model.config.max_position_embeddings),
                 Limits(**limits), address)  # fmt: skip
    with server.bound(address) as where:
        runner = uvicorn.Server(uvicorn.Config(app.app, log_level="error", timeout_graceful_shutdown=20))
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [where]}, daemon=True)
        thread.start()
        while not runner.started:
            assert thread.is_alive()
            thread.join(0.01)
        try:
            yield Running(where.getsockname()[1], loaded.model, loaded.tokenizer, app)
        finally:
            runner.should_exit = True
            thread.join(30)
            assert not thread.is_alive()


def until(condition: Any, seconds: float = 20) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
