"""What a run shows and writes while it trains, and what stops it: a callback of transformers' Trainer."""

from __future__ import annotations

import json
import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import TrainerCallback

from accelpatch.errors import TrainingError
from accelpatch.training.folder import LOG, WHOLE, Folder

LINES = 20  # that a run prints, about, besides those of evaluations
KEPT = ("loss", "eval_loss", "learning_rate", "grad_norm")


class RunLog(TrainerCallback):
    """Draws the bar, prints and writes the log, marks whole checkpoints, and stops at a loss that is not finite.

    say: prints a line. main: whether this is the process that shows and writes, of several that train together.
    """

    def __init__(self, folder: Folder, say: Callable[[str], None], main: bool):
        self.seconds, self.tokens = 0.0, 0  # of this process's steps, without evaluations and checkpoints
        self._folder, self._say, self._main = folder, say, main
        self._bar: Any = None
        self._begun = self._seconds_before = 0.0
        self._tokens_before = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        # disable=None: where stderr is no terminal
        self._bar = tqdm(
            total=state.max_steps, initial=state.global_step, desc="training", unit="step", leave=False,
            disable=None if self._main else True,
        )  # fmt: skip

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seconds += time.perf_counter() - self._begun
        self._bar.update(1)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **given: Any) -> None:
        found = {key: float(logs[key]) for key in KEPT if key in logs}
        if not found:
            return
        for key in ("loss", "eval_loss", "grad_norm"):
            if not math.isfinite(found.get(key, 0.0)):
                raise TrainingError(self._not_finite(key, found[key], state.global_step))
        line = {"step": state.global_step, **found, "memory": memory()}
        if "loss" in found:
            line["tokens_per_second"] = self._rate(int(logs.get("num_tokens", 0)))
        if self._main:
            self.write(line)
            self._show(line, state.max_steps)

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
        """Mark the checkpoint that was just written. Raises TrainingError where what trains is not finite."""
        trained = [one for one in model.parameters() if one.requires_grad]
        if not all(bool(torch.isfinite(one).all()) for one in trained):
            raise TrainingError(self._not_finite("a weight", math.nan, state.global_step))
        if self._main:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / WHOLE).touch()

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()

    def _rate(self, tokens: int) -> float:
        """Tokens a second since the last line of the log."""
        new, seconds = tokens - self._tokens_before, self.seconds - self._seconds_before
        self.tokens = self._tokens_before = tokens
        self._seconds_before = self.seconds
        return new / seconds if seconds > 0 else 0.0

    def write(self, line: dict[str, Any]) -> None:
        """Append a line to the log."""
        with (self._folder.path / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _show(self, line: dict[str, Any], total: int) -> None:
        step = line["step"]
        if "loss" in line:
            self._bar.set_postfix_str(f"loss {line['loss']:.4f}, {line['tokens_per_second']:.0f} tokens/s")
        if "eval_loss" in line:
            self._print(f"step {step} of {total}: evaluation loss {line['eval_loss']:.4f}")
        elif step == 1 or step % max(1, total // LINES) == 0:
            self._print(
                f"step {step} of {total}: loss {line['loss']:.4f}, {line['tokens_per_second']:.0f} tokens/s, "
                f"{line['memory'] / 1e9:.1f} GB"
            )

    def _print(self, text: str) -> None:
        self._bar.clear()
        self._say(text)
        self._bar.refresh()

    def _not_finite(self, what: str, value: float, step: int) -> str:
        whole = self._folder.whole()
        kept = (
            f"the last good checkpoint, of step {whole[-1]}, is kept in {self._folder.checkpoints}"
            if whole
            else "there is no checkpoint yet"
        )
        return (
            f"{what.replace('_', ' ')} is {value} at step {step}, so the run stopped; {kept}. Set a smaller "
            "optimizer.learning_rate, or precision=float32, in a new folder"
        )


def memory() -> int:
    """The most bytes that this process has held so far: of the GPU's memory where it uses one, else of the host's."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
