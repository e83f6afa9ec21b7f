"""The load tool, on a running server and on stand-ins that answer wrongly."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from accelpatch.cli import app
from accelpatch.errors import AccelpatchError
from accelpatch.serving import load, load_record
from tests.support.serving import Running


def bench(*words: str) -> Any:
    found = CliRunner().invoke(app, ["bench", "serve", *words])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found


@contextmanager
def stand_in(*lines: str, status: int = 200, seen: list[Any] | None = None) -> Iterator[str]:
    """Context manager: the URL of a server that answers every POST with these lines of a stream. seen: gets bodies."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            (seen if seen is not None else []).append(body)
            self.send_response(status)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write("".join(f"data: {line}\n\n" for line in lines).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_users_one_after_another(server: Running, tmp_path: Path) -> None:
    words = ("--users", "4", "--requests", "10", "--prompt-words", "2-5", "--new-tokens", "3-9")
    found = bench(server.url, *words, "--json", "--plot", str(tmp_path / "load.png"))
    assert found.exit_code == 0, found.output
    record = json.loads(found.stdout)
    assert (record["answered"], record["failures"], record["model"]) == (10, {}, "tiny")
    asked = load.drawn(10, (2, 5), (3, 9), 0)
    assert record["tokens"] == sum(one.new_tokens for one in asked)
    assert record["tokens_per_second"] == pytest.approx(record["tokens"] / record["seconds"])
    assert len(record["times"]["first_token"]["values"]) == 10
    assert (tmp_path / "load.png").stat().st_size > 10_000


def test_arrivals_and_a_file(server: Running, tmp_path: Path) -> None:
    rows = [{"prompt": "one", "max_tokens": 2}, {"prompt": "two"}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ("--rate", "50", "--requests", "6", "--prompts", str(tmp_path / "rows.jsonl"), "--new-tokens", "4", "--raw")
    found = bench(server.url, *words)
    assert found.exit_code == 0, found.output
    assert "6 requests by 8 users; 50 requests a second" in found.stdout
    assert "answered            6 in" in found.stdout
    assert "to the first token" in found.stdout


def test_a_temperature_is_asked_for() -> None:
    bodies: list[Any] = []
    with stand_in('{"choices": [{"text": "a", "finish_reason": "stop"}]}', seen=bodies) as url:
        for words in ([], ["--temperature", "0.8"]):
            assert bench(url, "--model", "m", "--requests", "1", "--raw", *words).exit_code == 0
    assert [one["temperature"] for one in bodies] == [0, 0.8]


@pytest.mark.parametrize(
    ("lines", "status", "failure"),
    [
        pytest.param(['{"choices": [{"text": "a"}]}'], 200, "the stream ended early", id="early"),
        pytest.param(['{"error": "out of memory"}'], 200, "ValueError: out of memory", id="an error in the stream"),
        pytest.param(["{"], 200, "JSONDecodeError", id="no JSON"),
        pytest.param([], 503, "status 503", id="a status"),
    ],
)
def test_failures_are_counted(lines: list[str], status: int, failure: str) -> None:
    with stand_in(*lines, status=status) as url:
        found = bench(url, "--model", "m", "--requests", "2", "--raw", "--json")
    assert found.exit_code == 1
    (reason,) = json.loads(found.stdout)["failures"].items()
    assert (failure in reason[0], reason[1]) == (True, 2)


def test_times() -> None:
    """A token's time is that between the first and the last piece, whatever came together."""
    answer = load.Answer(1.0, [2.0, 2.5, 4.0], ended=4.5, tokens=5)
    assert (answer.first, answer.per_token) == (1.0, 0.5)
    assert load.Answer(1.0).first is None
    assert load_record.quantiles([3.0, 1.0, 2.0])["median"] == 2.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["localhost:8000"], "is no URL", id="url"),
        pytest.param(["http://127.0.0.1:9", "--prompt-words", "9-3"], "is no length such as 64", id="range"),
        pytest.param(["http://127.0.0.1:9"], "does not answer as a server does", id="no server"),
        pytest.param(["http://127.0.0.1:9", "--plot", "a.txt"], "--plot draws", id="plot"),
    ],
)
def test_wrong_words(words: list[str], said: str) -> None:
    found = bench(*words)
    assert found.exit_code in (1, 2)
    assert said in " ".join(found.stderr.split())


@pytest.mark.parametrize("line", ["", "[]", '{"prompt": ""}', '{"prompt": "a", "max_tokens": 0}', "{"])
def test_a_wrong_file(tmp_path: Path, line: str) -> None:
    (tmp_path / "rows").write_text(line)
    with pytest.raises(AccelpatchError, match=r"rows(:1 is no| has no line)"):
        load.from_file(tmp_path / "rows", 2, 4)
