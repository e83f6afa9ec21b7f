"""accelpatch chat: messages from a pipe, and from a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import Cli, environment

CHAT = ("--recipe", "exact", "--max-new-tokens", "12")


def chat(cli: Cli, model: str, *lines: str, status: int = 0) -> tuple[list[str], str]:
    """The lines that a conversation prints on stdout, and all of stderr."""
    result = cli("chat", model, *CHAT, input="".join(f"{line}\n" for line in lines))
    assert result.exit_code == status, result.output
    return result.stdout.splitlines(), result.stderr


def saved(cli: Cli, model: str, file: Path, *lines: str) -> list[dict[str, str]]:
    """The messages of a conversation."""
    chat(cli, model, *lines, f"/save {file}")
    found: list[dict[str, str]] = json.loads(file.read_text())
    return found


def test_history_is_part_of_the_prompt(cli: Cli, model: str, tmp_path: Path) -> None:
    messages = saved(cli, model, tmp_path / "a.json", "Hello", "Hello")
    assert [one["role"] for one in messages] == ["user", "assistant", "user", "assistant"]
    assert messages[1]["content"] != messages[3]["content"]
    raw = "".join(f"[{one['role']}] {one['content']}\n" for one in messages[:3]) + "[assistant] "
    run = cli("run", model, *CHAT, "--json", "--raw", "--prompt", raw)
    assert json.loads(run.stdout)["answer"] == messages[3]["content"]


def test_reset_forgets_all_but_the_system_message(cli: Cli, model: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    text = f"Hello\n/reset\nHello\n/save {file}\n/exit\nnever read\n"
    result = cli("chat", model, *CHAT, "--system", "Be brief.", input=text)
    system, user, answer = json.loads(file.read_text())
    assert (system, user) == ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"})
    assert result.stdout == f"{answer['content']}\n" * 2


def test_messages_of_several_lines(cli: Cli, model: str, tmp_path: Path) -> None:
    lines = ["a\\", "b", '"""', "/c", "", "d", '"""', "", " /e", "last\\"]
    messages = saved(cli, model, tmp_path / "a.json", *lines[:-1])
    assert [one["content"] for one in messages[::2]] == ["a\nb", "/c\n\nd", " /e"]
    assert len(chat(cli, model, "last\\")[0]) >= 1  # the end of the input ends a message too


def test_save_writes_over_nothing_unless_it_is_to(cli: Cli, model: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("mine")
    _, errors = chat(cli, model, "Hello", f"/save {file}", f"/save {tmp_path}/no/b.json", "/save", status=1)
    assert f"error: {file} is there already; /save! {file} writes over it" in errors
    assert "b.json cannot be written: No such file or directory" in errors
    assert "/save needs the name of a file" in errors
    _, errors = chat(cli, model, f"/save {tmp_path}", f"/save! {tmp_path}", status=1)
    assert errors.count(f"error: {tmp_path} is a folder: name a file") == 2
    assert [one.name for one in tmp_path.iterdir()] == [file.name]
    assert file.read_text() == "mine"
    chat(cli, model, "Hello", f"/save! {file}")
    assert len(json.loads(file.read_text())) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_stats_help_and_what_is_no_command(cli: Cli, model: str) -> None:
    printed, errors = chat(cli, model, "/stats", "Hello", "/stats", "/help", "/rest", status=1)
    assert printed[:2] == ["last answer  none yet", "context      0 of 256 tokens in use"]
    prompt = len("[user] Hello\n[assistant] ")
    assert "last answer  12 tokens" in printed
    assert "tokens/s     not measured: the answer is shorter than 64 tokens" in printed
    assert f"context      {prompt + 12} of 256 tokens in use" in printed
    assert any(line.startswith("/reset") for line in printed)
    assert "error: there is no command /rest; /help lists them" in errors


def test_older_messages_leave_a_full_context(cli: Cli, model: str, tmp_path: Path) -> None:
    messages = [one * 60 for one in "abcd"]
    file = tmp_path / "a.json"
    _, errors = chat(cli, model, *messages, "e" * 300, "f", f"/save {file}", status=1)
    assert errors.count("older messages were left out)") == 3  # from the third on: c, d and f
    assert "(the context is full: 2 older messages were left out)" in errors
    assert "tokens long, and the model's context 256: shorten it" in errors
    assert [one["content"] for one in json.loads(file.read_text())[::2]] == [*messages, "f"]


def test_an_answer_that_the_length_ends_is_said_to(cli: Cli, model: str) -> None:
    assert "(ended after 12 tokens" in chat(cli, model, "Hello")[1]


def test_a_model_that_cannot_chat(cli: Cli, no_template_model: str, bare_model: str) -> None:
    for model, words in {no_template_model: "no chat template", bare_model: "no tokenizer"}.items():
        result = cli("chat", model, input="Hello\n")
        assert result.exit_code == 1
        assert words in result.stderr


def test_bytes_that_are_no_text(cli: Cli, model: str) -> None:
    result = cli("chat", model, *CHAT, input=b"caf\xe9\n")
    assert result.exit_code == 1
    assert "what stdin holds is not UTF-8 text" in result.stderr


def test_saved_models_and_sampling(cli: Cli, model: str, tmp_path: Path) -> None:
    assert cli("quantize", model, "--out", str(tmp_path / "saved")).exit_code == 0
    arguments = ("chat", str(tmp_path / "saved"), "--max-new-tokens", "12", "--temperature", "1.5")
    one, same, other = (cli(*arguments, "--seed", seed, input="Hello\n").stdout for seed in "112")
    assert one == same
    assert one != other
    assert cli("chat", model, "--top-k", "5").exit_code == 2


@pytest.fixture
def command(endless_model: str) -> list[str]:
    """Answers that go on until they are interrupted."""
    arguments = ["chat", endless_model, "--recipe", "exact", "--max-new-tokens", "100000"]
    return [sys.executable, "-m", "accelpatch", *arguments]


def test_ctrl_c_ends_an_answer_and_keeps_what_was_said(command: list[str], tmp_path: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=environment(), cwd=tmp_path, **pipes)  # type: ignore[call-overload]
    process.stdin.write(b"Hello\n")
    process.stdin.flush()
    assert process.stdout.read(1) != b""  # the answer has begun
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(b"/save a.json\n", timeout=60)
    assert process.returncode == 0, errors
    assert b"(interrupted)" in errors
    user, answer = json.loads((tmp_path / "a.json").read_text())
    assert user["content"] == "Hello"
    assert len(answer["content"]) > 0


def test_a_terminal(command: list[str], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """A message, Ctrl-C in its answer, Ctrl-C at the next prompt, Ctrl-D."""
    controller, terminal = pty.openpty()
    program = "import os, sys; os.login_tty(0); os.execv(sys.argv[1], sys.argv[1:])"  # Ctrl-C of its terminal is SIGINT
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    process = subprocess.Popen(
        [sys.executable, "-c", program, *command], env=environment() | {"TERM": "dumb"}, cwd=tmp_path, **streams
    )
    request.addfinalizer(process.kill)
    os.close(terminal)

    def until(words: str, again: bytes = b"") -> str:
        """What is shown up to some words. again: what is pressed every five seconds while nothing comes."""
        seen, ends = b"", time.monotonic() + 120
        while words.encode() not in seen:
            left = max(0.0, ends - time.monotonic())
            if select.select([controller], [], [], min(left, 5.0) if again else left)[0]:
                seen += os.read(controller, 1)
            else:
                assert again, seen
                assert left, seen
                os.write(controller, again)
        return seen.decode(errors="replace")

    until("> ")
    os.write(controller, b"Hello\n")
    until("Hello\r\n")
    os.read(controller, 1)  # the answer has begun
    os.write(controller, b"\x03")
    until("(interrupted)\r\n> ")
    os.write(controller, b"\x03")  # readline loses one that comes between its prompt and its wait for keys
    until("(Ctrl-D or /exit ends)\r\n> ", again=b"\x03")
    os.write(controller, b"\x04")
    assert process.wait(timeout=60) == 0
    os.close(controller)
