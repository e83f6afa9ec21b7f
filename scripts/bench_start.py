"""Seconds from patch() to the first token in processes that have just begun, and where they go.

    python scripts/bench_start.py [--model llama2-7b] [--recipes exact compact int8 int4]
        [--turns cold warm defaults again] [--prompt 128] [--top 30] [--json FILE]

Every turn of a recipe is a process of its own. They all make their model (the named shape, random bf16 weights, on the
device) side by side, and then take the timed part one after the other, the rest of them idle. `cold`: Triton's cache of
compiled kernels is empty, the device library is there. `warm`: the same with the cache that the cold turn has filled.
Both without verification and with the originals freed. `defaults`: after these, patch() with no option at all; kernels
that only verification runs are compiled in it, and read from the disk. `again`: the same once more.

Where the time goes is sampled beside the timed part: seconds within each function, with all that it calls, and on each
line of ours, with what it calls elsewhere. What is used first is loaded on the line that uses it; the slowest steps,
and the median of a stage's, say how much that is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
OURS = str(ROOT / "accelpatch")
sys.path.insert(0, str(ROOT))

TURNS = ("cold", "warm", "defaults", "again")
VERIFIED = TURNS[2:]
SLOWEST = 8  # steps that are printed
EVERY = 0.004  # seconds between two looks at the stack
READY, GO = "ready", "go\n"


class Samples(threading.Thread):
    """Seconds within functions of the thread that started this one, counted from one look to the next."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seconds: dict[str, float] = defaultdict(float)
        self.lines: dict[str, float] = defaultdict(float)
        self._watched, self._over = threading.get_ident(), threading.Event()

    def run(self) -> None:
        """Look until `stop`."""
        last = time.perf_counter()
        while not self._over.wait(EVERY):
            frame = sys._current_frames().get(self._watched)
            now = time.perf_counter()
            stack = _stack(frame)
            for name in {_name(one) for one in stack if not one.f_code.co_filename.startswith("<")}:
                self.seconds[name] += now - last
            ours = next((one for one in stack if one.f_code.co_filename.startswith(OURS)), None)
            if ours is not None:
                self.lines[f"{_name(ours)}:{ours.f_lineno}"] += now - last
            last = now

    def stop(self) -> dict[str, dict[str, float]]:
        """No more looks; what was found, the most first."""
        self._over.set()
        self.join()
        found = {"within": self.seconds, "lines": self.lines}
        return {name: dict(sorted(each.items(), key=lambda item: -item[1])) for name, each in found.items()}


class Steps:
    """Seconds from each word of a patch's progress to the next."""

    def __init__(self) -> None:
        self.taken: dict[str, list[float]] = defaultdict(list)
        self._last = time.perf_counter()

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.perf_counter()
        self.taken[stage].append(now - self._last)
        self._last = now

    def recorded(self) -> dict[str, Any]:
        """Of each stage how many steps there were, and their median; of all of them the slowest."""
        slowest = sorted(((s, f"{stage} {n}") for stage, all_ in self.taken.items() for n, s in enumerate(all_)))
        medians = {stage: (len(all_), sorted(all_)[len(all_) // 2]) for stage, all_ in self.taken.items()}
        return {"steps, median": medians, "slowest": {name: s for s, name in slowest[: -SLOWEST - 1 : -1]}}


def _stack(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _name(frame: FrameType) -> str:
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_code.co_name}"


def child(asked: argparse.Namespace, recipe: str, turn: str) -> None:
    """One turn: make ready, say so, wait for the word, and print the figures as a line of JSON."""
    import torch

    import accelpatch
    from accelpatch.bench.generate import Shape, prompt_ids
    from accelpatch.bench.timing import synchronize
    from accelpatch.models import load

    device = torch.device(asked.device)
    model: Any = load.random(asked.model, dtype=torch.bfloat16, device=device)
    model.generation_config.eos_token_id = None
    ids = prompt_ids(model.config.vocab_size, Shape(1, asked.prompt, 1)).to(device)
    options: dict[str, Any] = {} if turn in VERIFIED else {"verify": False, "keep_original": "none"}
    synchronize(device)
    print(READY, flush=True)
    sys.stdin.readline()

    where: dict[str, dict[str, float]] = {}
    samples, times = Samples(), [time.perf_counter()]
    samples.start()
    steps = Steps()
    accelpatch.patch(model, recipe, progress=steps, **options)
    synchronize(device)
    times.append(time.perf_counter())
    for new in (1, 1, 2):
        model.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        synchronize(device)
        times.append(time.perf_counter())
        where = where or samples.stop()
    names = ("patch", "first token", "the next call", "a call for two")
    seconds = {name: after - before for name, before, after in zip(names, times, times[1:], strict=False)}
    report = model.accelpatch.report()
    found = {"recipe": recipe, "turn": turn, "together": times[2] - times[0], "seconds": seconds}
    found |= {"stages": report.seconds, **steps.recorded(), "paths": dict(report.paths), "where": where}
    print(json.dumps(found))


def begun(asked: argparse.Namespace, recipe: str, turn: str, kernels: str) -> subprocess.Popen[str]:
    """A child process on its way; Triton keeps its kernels in `kernels`."""
    command = [sys.executable, __file__, "--child", recipe, turn, "--model", asked.model, "--device", asked.device]
    return subprocess.Popen(
        [*command, "--prompt", str(asked.prompt)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TRITON_CACHE_DIR": kernels},
    )  # fmt: skip


def taken(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The figures of a child that is ready, now that it may go."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(GO)
    process.stdin.flush()
    made: dict[str, Any] = json.loads(process.stdout.readline() or '{"recipe": "", "turn": "no result"}')
    process.communicate()
    return made


def measured(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of every turn, printed as they come; a recipe's processes are gone before the next one's begin."""
    found = []
    for recipe in asked.recipes:
        with tempfile.TemporaryDirectory() as kernels:
            processes = [begun(asked, recipe, turn, kernels) for turn in asked.turns]
            for process in processes:
                assert process.stdout is not None
                while (line := process.stdout.readline()) and line.strip() != READY:
                    print(line, end="", flush=True)
            for process in processes:
                made = taken(process)
                where = made.pop("where", {})
                print(json.dumps(made), flush=True)
                for kind, each in where.items():
                    print(f"  {kind}", flush=True)
                    for name, seconds in list(each.items())[: asked.top]:
                        print(f"  {seconds:7.3f} s  {name}", flush=True)
                found.append({**made, "where": where})
    return found


def main() -> None:
    """Time, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama2-7b", help="The model whose shape is used (default: %(default)s).")
    parser.add_argument("--device", default="cuda", help="The device to run on (default: %(default)s).")
    parser.add_argument("--prompt", type=int, default=128, help="Tokens of the prompt (default: %(default)s).")
    parser.add_argument("--recipes", nargs="*", default=["exact", "compact", "int8", "int4"],
                        help="The recipes to patch with (default: %(default)s).")  # fmt: skip
    parser.add_argument("--turns", nargs="*", default=TURNS, choices=TURNS,
                        help="The processes of each recipe, in this order (default: all four).")  # fmt: skip
    parser.add_argument("--top", type=int, default=30, help="Functions and lines to print (default: %(default)s).")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write all figures to this file.")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked, *asked.child)
        return
    found = measured(asked)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
