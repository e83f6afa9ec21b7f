"""One fine-tuning run from a configuration to a folder: load, patch, answer, train, answer, save, draw."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from accelpatch import from_files
from accelpatch import progress as bars
from accelpatch.errors import FOREIGN, LoadError, SaveError
from accelpatch.progress import Progress
from accelpatch.training import answers, configuration, examples, plot, trainer
from accelpatch.training.configuration import DEFAULT, WITH_DATA, Configuration
from accelpatch.training.examples import Examples
from accelpatch.training.folder import PLOT, Folder
from accelpatch.training.prepare import Run, check_packages, prepare

Say = Callable[[str], None]
MADE = ".made"  # the folder in the run's where the result is written before it is moved into place


def finetune(
    out: str | Path, settings: str | Path | Mapping[str, Any] | Configuration | None = None, *,
    data: Sequence[Mapping[str, Any]] | None = None, device: Any = None, overwrite: bool = False,
    say: Say | None = None, progress: Progress | bool | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Fine-tune a model as a configuration says, by TRL and PEFT, into the folder `out`; a stopped run goes on there.

    settings: a bundled configuration's name, a YAML file or a mapping, see `accelpatch.training.configuration.KEYS`;
    default: "lora" with data, else "puzzles". data: rows in place of its file: mappings of `text`, `prompt` and
    `completion`, or `messages`. say: gets each line of the log; default: print. The result is that of result.json:
    losses, exact matches from 0 to 1 before and after, steps, seconds, tokens a second, memory in bytes. Raises
    RecipeError, LoadError, SaveError and TrainingError.
    """
    check_packages()
    named = (DEFAULT if data is None else WITH_DATA) if settings is None else settings
    wanted = named if isinstance(named, Configuration) else configuration.load(named)
    run = prepare(wanted, Path(out), data)
    with bars.shown(progress) as shown:
        return _carried_out(run, device, overwrite, say or print, shown)


def _carried_out(run: Run, device: Any, overwrite: bool, say: Say, progress: Progress) -> dict[str, Any]:
    from accelerate import PartialState

    where = _device(device)
    state = PartialState(cpu=where.type == "cpu")
    if state.is_main_process:
        run.folder.claim(run.settings, run.data, overwrite=overwrite)
    state.wait_for_everyone()
    speak: Say = say if state.is_main_process else _nothing
    last = run.folder.last()
    if last is not None:
        speak(f"going on from step {last.name.rpartition('-')[2]} of a run that was stopped")
    name, recipe = run.settings["model"], run.settings["recipe"]
    if recipe != "none" and from_files.is_patched(name):
        speak(f"{name} is a saved patched model: it is trained as it is, without the recipe {recipe}")
        recipe = "none"
    loaded = from_files.load(
        name, None if recipe == "none" else recipe,
        dtype=trainer.precision_of(run.settings, where), device=where, progress=progress,
    )  # fmt: skip
    if loaded.tokenizer is None:
        raise LoadError(f"{name} has no tokenizer, and training needs one")
    made = examples.make(
        run.train, run.held_out, loaded.tokenizer, template=run.settings["data.template"],
        max_length=_max_length(loaded.model, run.settings["data.max_length"]), too_long=run.settings["data.too_long"],
    )  # fmt: skip
    for note in made.notes:
        speak(note)
    return Training(run, loaded, made, speak, progress, state).carry_out(last)


def _nothing(text: str) -> None:
    """Says nothing: of several processes one alone speaks."""


def _device(given: Any) -> torch.device:
    if given is not None:
        return torch.device(given)
    local = os.environ.get("LOCAL_RANK", "0")  # of torchrun and accelerate launch
    cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1")
    return torch.device(f"cuda:{local}" if torch.cuda.is_available() and not cpu else "cpu")


def _max_length(model: Any, wanted: int) -> int:
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return min(wanted, context) if isinstance(context, int) else wanted


class Training:
    """The part of a run that has a model. state: accelerate's, of the processes that train together."""

    def __init__(self, run: Run, loaded: Any, made: Examples, say: Say, progress: Progress, state: Any):
        from accelpatch.training.run_log import RunLog

        self.run, self.loaded, self.examples, self.say, self.progress = run, loaded, made, say, progress
        self.state, self.log = state, RunLog(run.folder, say, state.is_main_process)
        self.trainer: Any = None

    def carry_out(self, last: Path | None) -> dict[str, Any]:
        """Train, from the checkpoint `last` on where there is one, and write the result, which is returned."""
        folder, settings = self.run.folder, self.run.settings
        if self.state.is_main_process:
            folder.keep_log(int(last.name.rpartition("-")[2]) if last else -1)
        known = next((one["exact_before"] for one in folder.log() if "exact_before" in one), None)
        before = self._exact("before") if known is None else known
        if before is not None and known is None:
            self.log.write({"step": 0, "exact_before": before})
        begun = time.perf_counter()
        with _disk(folder):
            self.trainer = trainer.make(
                self.loaded.model, self.loaded.tokenizer, settings, self.examples, folder.checkpoints, self.log
            )
            self._train(last)
        result = self._result(before, self._exact("after"), time.perf_counter() - begun, last)
        with _disk(folder):
            if self.state.is_main_process:
                self._save(result)
        self.state.wait_for_everyone()
        return result

    def _train(self, last: Path | None) -> None:
        try:
            with trainer.quiet_names():
                if last is None or not self._at_the_end(last):
                    self.trainer.train(resume_from_checkpoint=None if last is None else str(last))
                if self.examples.held_out and not self._evaluated():
                    self.trainer.evaluate()
        finally:
            self.log.close()

    def _at_the_end(self, last: Path) -> bool:
        """Whether a checkpoint is that of the last step, after which a trainer does one more; it is then loaded."""
        from transformers import TrainerState

        state = TrainerState.load_from_json(str(last / "trainer_state.json"))
        if state.global_step < state.max_steps:
            return False
        self.trainer._load_from_checkpoint(str(last))
        self.trainer.state = state
        return True

    def _evaluated(self) -> bool:
        """Whether the last step was followed by an evaluation."""
        lines, step = self.trainer.state.log_history, self.trainer.state.global_step
        return any("eval_loss" in one and one.get("step") == step for one in lines)

    def _exact(self, when: str) -> float | None:
        """The part of held-out answers that are exact; None where none is asked for, or in another process."""
        questions = self.examples.questions[: self.run.settings["evaluation.answers"]]
        if not questions or not self.state.is_main_process:
            return None
        model = self.loaded.model if self.trainer is None else self.trainer.accelerator.unwrap_model(self.trainer.model)
        most = self.run.settings["evaluation.max_new_tokens"]
        found = answers.score(model, self.loaded.tokenizer, questions, most, self.progress, f"answers {when}")
        self.say(f"held-out answers that are exact, {when} training: {found}")
        for prompt, due, given in found.examples:
            self.say(f"  {prompt!r:.60}: {given!r:.60}" + ("" if given == due.strip() else f", due {due!r:.60}"))
        return found.exact / found.total

    def _result(self, before: Any, after: Any, seconds: float, last: Path | None) -> dict[str, Any]:
        log, state = self.run.folder.log(), self.trainer.state
        trained, evaluated = ([one for one in log if key in one] for key in ("loss", "eval_loss"))
        tail = [one["loss"] for one in trained[-10:]]
        return {
            "method": self.run.settings["method"], "model": self.run.settings["model"],
            "recipe": self.run.settings["recipe"], "rows": len(self.examples.train), "steps": state.global_step,
            "loss": sum(tail) / len(tail) if tail else None,  # the mean of the last ten
            "eval_loss": evaluated[-1]["eval_loss"] if evaluated else None,
            "exact_before": before, "exact_after": after, "seconds": seconds,
            "tokens_per_second": self.log.tokens / self.log.seconds if self.log.seconds else None,
            "peak_memory": max((one["memory"] for one in trained), default=0),
            "resumed_from": None if last is None else int(last.name.rpartition("-")[2]),
            "chat_template": self.examples.chat,
        }  # fmt: skip

    def _save(self, result: dict[str, Any]) -> None:
        """Write the adapter or the model, the tokenizer and the picture; they appear once all are written."""
        made = self.run.folder.path / MADE
        made.mkdir(exist_ok=True)
        self.trainer.accelerator.unwrap_model(self.trainer.model).save_pretrained(made)
        self.loaded.tokenizer.save_pretrained(made)
        if plot.possible():
            title = f"{Path(result['model']).name}, {result['method']}, recipe {result['recipe']}"
            plot.draw(self.run.folder.log(), result, title, made / PLOT)
        else:
            self.say("no plot: it needs matplotlib; pip install 'accelpatch[plot]'")
        self.run.folder.finish(made, result)


@contextmanager
def _disk(folder: Folder) -> Iterator[None]:
    """Context manager: a write that fails, as on a full disk, becomes a SaveError that says what is kept."""
    try:
        yield
    except FOREIGN as error:
        why = _unwritten(error)
        if why is None:
            raise
        steps = folder.whole()
        kept = f"the checkpoint of step {steps[-1]} is whole" if steps else "no checkpoint was whole yet"
        raise SaveError(
            f"{folder.path} cannot be written ({why}); {kept}. Free some space and give the same command: it goes on"
        ) from error


def _unwritten(error: BaseException) -> str | None:
    """Why the disk refused, where that is what an error says; of torch and safetensors by their words."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.strerror
    text = str(error)
    written = "PytorchStreamWriter" in text or "inline_container" in text or "No space left" in text
    return text.splitlines()[0][:120] if written else None
