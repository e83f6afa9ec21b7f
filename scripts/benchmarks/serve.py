"""A server under the load of many users: `accelpatch serve` beside transformers' own server of the original.

    python scripts/bench.py serve [--model NAME_OR_FOLDER] [--cases int8 stock ...] [--users 64] [--requests 1000]
        [--stock-requests 1000] [--rounds 4] [--words 16-64] [--new 16-64] [--checked 40] [--alone 5] [--device cpu]
        [--tokenizer FOLDER]

Cases: a recipe is `accelpatch serve --recipe`; `stock` is `transformers serve`, which answers one request after
another, and `stock-batching` the same with `--continuous-batching`. All servers are started, each in a process of its
own, and one at a time gets requests: a part of them in each round, so that what others do on the machine meets all of
them. Requests are in chat form, as `accelpatch bench serve` sends them. `--stock-requests` gives transformers' slower
servers the first ones alone. With `--tokenizer` the model is one of shapes.json, such as 7b, with random weights. The
memory is that of the server's process after a quarter of the requests and at the end. CPU time is the figure to read
where others use the machine.

Of a recipe's answers `--checked` ones are compared with generate() of the model patched here: `equal` to it, or equal
up to a near tie (two logits within 0.001 of each other), or `others`, which must be none. `--alone` requests are then
sent one at a time, in turn with generate() here: `overhead` is what the server adds to the median of its seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoTokenizer

import accelpatch
from accelpatch.serving.load import Answer, Asked, Load, drawn
from accelpatch.serving.load import run as run_load
from scripts.benchmarks.engines import shaped
from scripts.benchmarks.harness import Option, common, device_of, table

CASES = ("int8", "stock", "stock-batching")  # recipes; stock: transformers' own server
NEAR = 1e-3  # logits that are as near decide by the order of sums
OPTIONS = (
    *common(device="cpu"),
    Option("cases", CASES, "Recipes, and `stock` and `stock-batching` for transformers' own server."),
    Option("model", "smollm2-135m", "A model's name or folder."),
    Option("tokenizer", "", "A tokenizer's folder: --model is then a shape, such as 7b, with random weights."),
    Option("users", 64, "Users, each of which sends its next request when the last one is answered."),
    Option("requests", 1000, "Requests in all."),
    Option("stock-requests", 0, "Requests of each of transformers' servers, 0 for as many."),
    Option("rounds", 4, "Rounds in which all servers get a part of them."),
    Option("words", "16-64", "Fewest and most words of a prompt."),
    Option("new", "16-64", "Fewest and most tokens to ask for."),
    Option("checked", 40, "Answers of a recipe's server to compare with generate()."),
    Option("alone", 5, "Requests that are sent one at a time."),
)  # fmt: skip


@dataclass
class Server:
    """url: without /v1. name: of the model in requests. pid: its process."""

    url: str
    name: str
    pid: int

    def cpu_seconds(self) -> float:
        """CPU time of the process up to now."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> float:
        """Resident memory of the process in MB."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def ask(self, asked: Asked) -> str:
        """The answer to one greedy request, which is not streamed."""
        body = {"model": self.name, "messages": [{"role": "user", "content": asked.prompt}], "temperature": 0,
                "max_tokens": asked.new_tokens}  # fmt: skip
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            return str(json.load(answer)["choices"][0]["message"]["content"])


@contextmanager
def serving(case: str, folder: str, device: torch.device) -> Iterator[Server]:
    """Context manager: a server of a case, in a process that is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    ours = ["accelpatch", "serve", folder, "--recipe", case, "--engine", "transformers", "--port", str(port)]
    theirs = ["transformers.cli.transformers", "serve", folder, "--port", str(port), "--host", "127.0.0.1"]
    if case == "stock-batching":
        theirs.append("--continuous-batching")
        if device.type == "cpu":  # where it would take most of the memory: as many pages as ours
            theirs += ["--cb-block-size", "16", "--cb-num-blocks", "1024"]
    words = theirs if case.startswith("stock") else ours
    command = [sys.executable, "-m", *words, "--device", str(device), "--dtype", dtype]
    with tempfile.TemporaryFile() as said, subprocess.Popen(command, stdout=said, stderr=said) as process:
        try:
            server = Server(f"http://127.0.0.1:{port}", folder, process.pid)
            until_it_answers(server, process, said)
            yield server
        finally:
            process.terminate()


def until_it_answers(server: Server, process: subprocess.Popen[bytes], said: Any) -> None:
    """Wait for the server, and for its first answer, with what it sets up then."""
    while True:
        try:
            urllib.request.urlopen(f"{server.url}/health", timeout=5).close()
            break
        except OSError:
            if process.poll() is not None:
                said.seek(0)
                sys.exit(f"the server ended: {said.read().decode()[-2000:]}")
            time.sleep(0.5)
    server.ask(Asked("Hello", 4))


@dataclass
class Measured:
    """What came of a server's requests. seconds, cpu: from the first request of a round to its last answer, all rounds
    together. memory: in MB, after each request."""

    server: Server
    requests: list[Asked]
    seconds: float = 0.0
    cpu: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    def round(self, users: int, number: int, of: int) -> None:
        """Send the requests of a round."""
        bounds = [len(self.requests) * one // of for one in (number, number + 1)]
        before = self.server.cpu_seconds()
        answers = run_load(
            Load(self.server.url, self.server.name, users), self.requests[slice(*bounds)], 0,
            lambda *_: self.memory.append(self.server.memory()),
        )  # fmt: skip
        self.cpu += self.server.cpu_seconds() - before
        self.seconds += max(one.ended for one in answers)
        self.answers += answers
        for failure, count in Counter(one.failure for one in answers if one.failure is not None).most_common(3):
            print(f"{count} requests failed: {failure[:400]}", file=sys.stderr)

    def row(self) -> dict[str, Any]:
        """Of the table."""
        good = [one for one in self.answers if one.failure is None]
        tokens = sum(one.tokens for one in good)
        firsts = [one.first for one in good if one.first is not None]
        return {
            "answered": len(good), "failed": len(self.answers) - len(good),
            "tokens": tokens, "tok/s": tokens / self.seconds, "tok/s of CPU time": tokens / self.cpu,
            "to the first token, ms": 1000 * median(firsts) if firsts else None,
            "MB after a quarter": self.memory[len(self.memory) // 4], "MB at the end": self.memory[-1],
        }  # fmt: skip


class Alone:
    """generate() of the model patched in this process."""

    def __init__(self, folder: str, case: str, device: torch.device):
        dtype = "float32" if device.type == "cpu" else "bfloat16"
        loaded = accelpatch.load(folder, dtype=dtype, device=device)
        self._tokenizer = loaded.tokenizer
        self._model: Any = accelpatch.patch(loaded.model, case, keep_original="none")

    def tokens(self, asked: Asked) -> tuple[list[int], list[int]]:
        """Ids of the prompt, and of the answer."""
        chat = [{"role": "user", "content": asked.prompt}]
        ids = self._tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = ids.to(self._model.device)
        made = self._model.generate(**ids, max_new_tokens=asked.new_tokens, do_sample=False)[0].tolist()
        prompt: list[int] = ids["input_ids"][0].tolist()
        return prompt, made[len(prompt) :]

    def compared(self, asked: Asked, text: str) -> str:
        """`equal`, `equal up to a near tie` or `others` of a served answer."""
        prompt, tokens = self.tokens(asked)
        if text == self._text(tokens):
            return "equal"
        same = max(n for n in range(len(tokens)) if text.startswith(self._text(tokens[:n])))
        with torch.no_grad():
            logits = self._model(torch.tensor([prompt + tokens], device=self._model.device)).logits[0].float()
        ranked = logits[len(prompt) - 1 : len(prompt) + same].topk(2).values
        gaps = (ranked[:, 0] - ranked[:, 1])[-2:]  # the piece of text before may end within a character
        return "equal up to a near tie" if float(gaps.min()) < NEAR else "others"

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def overhead(server: Server, alone: Alone, requests: list[Asked]) -> dict[str, Any]:
    """Columns on requests that are sent one at a time, in turn with generate() here."""
    served, local = [], []
    for one in requests:
        begin = time.perf_counter(), server.cpu_seconds()
        server.ask(one)
        served.append((time.perf_counter() - begin[0], server.cpu_seconds() - begin[1]))
        begin = time.perf_counter(), time.process_time()
        alone.tokens(one)
        local.append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    seconds, cpu = (median(one[at] for one in served) / median(one[at] for one in local) - 1 for at in (0, 1))
    return {"overhead alone, share": seconds, "overhead alone by CPU time, share": cpu}


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """All cases: on a CPU in rounds, on a GPU, where each takes a share of the free memory, one after the other."""
    device, rows = device_of(asked), list[dict[str, Any]]()
    words, new = (tuple(map(int, text.split("-"))) for text in (asked.words, asked.new))
    requests = [
        replace(one, prompt=f"{at}: {one.prompt}") for at, one in enumerate(drawn(asked.requests, words, new, 0))
    ]
    together = [asked.cases] if device.type == "cpu" else [[case] for case in asked.cases]
    with tempfile.TemporaryDirectory() as made:
        folder = asked.model if Path(asked.model).is_dir() else saved(asked, made)
        for cases in together:
            rows += served(asked, cases, folder, device, requests)
    for row in rows:
        row[f"times {asked.cases[-1]}"] = row["tok/s"] / rows[-1]["tok/s"]
        row[f"times {asked.cases[-1]} by CPU time"] = row["tok/s of CPU time"] / rows[-1]["tok/s of CPU time"]
    return {"serve": table(rows, f"{asked.requests} requests by {asked.users} users")}


def served(
    asked: argparse.Namespace, cases: list[str], folder: str, device: torch.device, requests: list[Asked]
) -> list[dict[str, Any]]:
    """A row of each case, whose servers run at the same time and get their requests in turn."""
    found, rows = {}, []
    with ExitStack() as alive:
        for case in cases:
            some = requests[: asked.stock_requests or None] if case.startswith("stock") else requests
            found[case] = Measured(alive.enter_context(serving(case, folder, device)), some)
        for number in range(asked.rounds):
            for one in found.values():
                one.round(asked.users, number, asked.rounds)
            table([{"round": number + 1, "server": case} | one.row() for case, one in found.items()])
        for case, one in found.items():
            row = {"server": case} | one.row()
            if not case.startswith("stock"):
                pairs = list(zip(requests, one.answers, strict=True))
                row |= checked(one.server, Alone(folder, case, device), asked, pairs)
            rows.append(row)
    return rows


def checked(
    server: Server, alone: Alone, asked: argparse.Namespace, found: list[tuple[Asked, Answer]]
) -> dict[str, Any]:
    """Columns on the answers beside those of generate()."""
    some = found[:: max(1, len(found) // asked.checked)][: asked.checked]
    kinds = [alone.compared(one, answer.text) for one, answer in some if answer.failure is None]
    row: dict[str, Any] = {kind: kinds.count(kind) for kind in ("equal", "equal up to a near tie", "others")}
    others = [Asked(f"Alone {one.prompt}", 64) for one, _ in found[: asked.alone]]  # whose prompts no page holds yet
    return row | overhead(server, alone, others)


def saved(asked: argparse.Namespace, folder: str) -> str:
    """The folder, with the model that was asked for in it."""
    if asked.tokenizer:
        tokenizer: Any = AutoTokenizer.from_pretrained(asked.tokenizer)
        how = argparse.Namespace(device=asked.device, dtype="bfloat16", tiny=False)
        model = shaped(asked.model, how, vocab_size=len(tokenizer))
    else:
        loaded = accelpatch.load(asked.model)
        model, tokenizer = loaded.model, loaded.tokenizer
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
