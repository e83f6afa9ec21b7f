"""Fine-tuning runs of a tiny model: what they leave, how they go on after a stop, and what stops them."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from accelpatch import api
from accelpatch.errors import LoadError, RecipeError, SaveError, TrainingError
from accelpatch.training import configuration, prepare, trainer
from accelpatch.training.folder import WHOLE, Folder
from tests.cli.conftest import byte_tokenizer, save_model
from tests.support.one_thread import _one_thread  # noqa: F401

pytest.importorskip("trl", reason="TRL is not installed: pip install 'accelpatch[train]'")
peft = pytest.importorskip("peft")

STEPS = 6
ROWS = [{"prompt": f"{one}+{one}=", "completion": str(2 * one)} for one in range(40)]
PREFERRED = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "?"} for row in ROWS]
TALKS = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": f"I am {one}"}] * 2}
    for one in range(10)
]  # fmt: skip
TEXTS = [{"text": f"one two {one}"} for one in range(20)]


def quiet(text: str) -> None:
    """Shows nothing."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "tiny", tokenizer=byte_tokenizer()))


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    return str(save_model(tmp_path_factory.mktemp("models") / "plain", tokenizer=tokenizer))


def settings(model: str, name: str = "lora", **changes: Any) -> configuration.Configuration:
    values = {
        "model": model, "schedule.max_steps": STEPS, "batch.size": 4, "checkpoint.every": 2, "evaluation.every": 3,
        "evaluation.answers": 2, "evaluation.max_new_tokens": 4, "adapter.rank": 4, "optimizer.learning_rate": 1e-2,
    }  # fmt: skip
    return configuration.load(name).with_values(values | changes)


def finetune(out: Path, wanted: Any, data: Any = ROWS, say: Callable[[str], None] = quiet, **options: Any) -> Any:
    return api.finetune(out, wanted, data=data, device="cpu", say=say, progress=False, **options)


@pytest.fixture(scope="module")
def done(model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[str]]:
    """The folder, the result and the lines of a run that nothing stopped."""
    out, said = tmp_path_factory.mktemp("runs") / "done", []
    return out, finetune(out, settings(model), say=said.append), said


def test_what_a_run_leaves(done: tuple[Path, dict[str, Any], list[str]]) -> None:
    out, result, said = done
    assert {path.name for path in out.iterdir()} >= {
        "finetune.yaml", "log.jsonl", "checkpoints", "adapter_config.json", "adapter_model.safetensors", "result.json"
    }  # fmt: skip
    assert json.loads((out / "result.json").read_text()) == result
    assert (result["steps"], result["rows"], result["exact_before"]) == (STEPS, 36, 0.0)
    assert result["tokens_per_second"] > 0
    assert result["peak_memory"] > 1e8
    losses = [one["loss"] for one in Folder(out).log() if "loss" in one]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    assert [one["step"] for one in Folder(out).log() if "eval_loss" in one] == [3, 6]
    assert any(line.startswith("held-out answers that are exact, after training") for line in said)
    assert not list(out.glob(".*"))


def test_the_plot(done: tuple[Path, dict[str, Any], list[str]]) -> None:
    pytest.importorskip("matplotlib")
    assert (done[0] / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_plain_peft_loads_the_adapter(done: tuple[Path, dict[str, Any], list[str]], model: str) -> None:
    ids = torch.arange(3, 40)[None]
    alone = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        before = alone(ids).logits
        plain = peft.PeftModel.from_pretrained(alone, done[0]).eval()(ids).logits
        ours, names = api.attach(api.load(model, "exact").model, [done[0]])
        torch.testing.assert_close(ours(ids).logits, plain, rtol=1e-4, atol=1e-4)
    assert names == ["done"]
    assert (plain - before).abs().max() > 1e-3


class Stop(Exception):
    """In place of a kill."""


def test_a_stopped_run_goes_on_and_ends_as_one_that_was_not(
    done: tuple[Path, dict[str, Any], list[str]], model: str, tmp_path: Path
) -> None:
    def stop(text: str) -> None:
        if text.startswith("step 5"):
            raise Stop

    with pytest.raises(Stop):
        finetune(tmp_path / "out", settings(model), say=stop)
    (tmp_path / "out/checkpoints/checkpoint-4" / WHOLE).unlink()  # as if the kill had come while it was written
    said: list[str] = []
    result = finetune(tmp_path / "out", settings(model), say=said.append)
    assert said[0] == "going on from step 2 of a run that was stopped"
    assert result["resumed_from"] == 2
    assert result["exact_before"] == 0.0
    for key in ("loss", "eval_loss"):
        assert result[key] == pytest.approx(done[1][key], rel=1e-4)
    lines = [(one["step"], "loss" in one) for one in Folder(tmp_path / "out").log()]
    assert len(lines) == len(set(lines))
    assert [step for step, trained in lines if trained] == [1, 2, 3, 4, 5, 6]


def test_a_run_that_was_stopped_after_its_last_step(
    done: tuple[Path, dict[str, Any], list[str]], model: str, tmp_path: Path
) -> None:
    def stop(text: str) -> None:
        if text.startswith("held-out answers that are exact, after"):
            raise Stop

    with pytest.raises(Stop):
        finetune(tmp_path / "out", settings(model), say=stop)
    result = finetune(tmp_path / "out", settings(model))
    assert (result["resumed_from"], result["steps"]) == (STEPS, STEPS)
    for key in ("loss", "eval_loss"):
        assert result[key] == pytest.approx(done[1][key], rel=1e-4)


def test_a_folder_with_another_run_or_anything_else_is_left_alone(
    done: tuple[Path, dict[str, Any], list[str]], model: str, tmp_path: Path
) -> None:
    before = sorted((path.name, path.stat().st_mtime_ns) for path in done[0].iterdir())
    with pytest.raises(SaveError, match=r"other settings \(batch.size: 4, 2; before, now\)"):
        finetune(done[0], settings(model, **{"batch.size": 2}))
    with pytest.raises(SaveError, match=r"other settings \(the data; before, now\)"):
        finetune(done[0], settings(model), data=ROWS[1:])
    with pytest.raises(SaveError, match=r"this run, finished: accelpatch run MODEL --adapter"):
        finetune(done[0], settings(model))
    assert sorted((path.name, path.stat().st_mtime_ns) for path in done[0].iterdir()) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    for overwrite in (False, True):
        with pytest.raises(SaveError, match="holds no fine-tuning run"):
            finetune(tmp_path / "mine", settings(model), overwrite=overwrite)
    with pytest.raises(SaveError, match="is a file"):
        finetune(tmp_path / "mine" / "thesis.tex", settings(model))
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "x"


def test_overwrite_begins_anew_and_keeps_what_is_not_its_own(model: str, tmp_path: Path) -> None:
    finetune(tmp_path / "out", settings(model, **{"schedule.max_steps": 1}))
    (tmp_path / "out" / "notes.txt").write_text("mine")
    result = finetune(tmp_path / "out", settings(model, **{"schedule.max_steps": 2}), overwrite=True)
    assert (result["steps"], result["resumed_from"]) == (2, None)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("where", ["loss", "weight"])
def test_what_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(
    where: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelpatch.training.run_log import RunLog

    at = {"loss": 2, "weight": 3}[where]  # a weight that turns NaN in step 3 is seen in the loss of step 4, or saved
    stock = RunLog.on_step_end

    def poisoned(self: Any, args: Any, state: Any, control: Any, model: Any = None, **given: Any) -> None:
        stock(self, args, state, control, model=model, **given)
        if state.global_step == at + (where == "weight"):
            with torch.no_grad():
                next(one for one in model.parameters() if one.requires_grad).fill_(float("nan"))

    monkeypatch.setattr(RunLog, "on_step_end", poisoned)
    changes = {"checkpoint.every": 1} if where == "loss" else {"checkpoint.every": 2}
    with pytest.raises(TrainingError, match=r"is nan at step \d, so the run stopped") as error:
        finetune(tmp_path / "out", settings(model, **changes))
    good = {"loss": 1, "weight": 2}[where]
    assert f"the last good checkpoint, of step {good}, is kept" in str(error.value)
    assert Folder(tmp_path / "out").whole()[-1] == good


def test_a_loss_that_is_nan_is_named(model: str, tmp_path: Path) -> None:
    changes = {"optimizer.learning_rate": 1e30, "schedule.warmup_steps": 0, "checkpoint.every": 100}
    with pytest.raises(TrainingError, match=r"(loss|grad norm) is (nan|inf) at step 2.*there is no checkpoint yet"):
        finetune(tmp_path / "out", settings(model, **changes))


def test_a_full_disk(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the second checkpoint: the first one is kept, and the run goes on from there once there is room."""
    from transformers import Trainer

    stock = Trainer._save_optimizer_and_scheduler

    def full(self: Any, folder: str) -> None:
        if self.state.global_step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        stock(self, folder)

    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", full)
    with pytest.raises(SaveError) as error:
        finetune(tmp_path / "out", settings(model))
    monkeypatch.undo()
    assert "No space left on device); the checkpoint of step 2 is whole. Free some space" in str(error.value)
    assert finetune(tmp_path / "out", settings(model))["resumed_from"] == 2


@pytest.mark.parametrize(
    ("name", "data", "changes"),
    [
        pytest.param("qlora", TALKS, {}, id="qlora, messages"),
        pytest.param("qlora", TEXTS, {"batch.packing": True, "data.max_length": 64}, id="qlora, packed texts"),
        pytest.param("lora", ROWS, {"recipe": "int8", "data.template": "none"}, id="lora around int8, no template"),
        pytest.param("dpo", PREFERRED, {}, id="dpo"),
    ],
)
def test_other_ways(name: str, data: Any, changes: Any, model: str, tmp_path: Path) -> None:
    result = finetune(tmp_path / "out", settings(model, name, **{"schedule.max_steps": 2} | changes), data=data)
    assert result["steps"] == 2
    assert result["loss"] > 0
    assert result["chat_template"] == ("text" not in data[0] and changes.get("data.template") != "none")
    peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "out")


def test_every_weight(model: str, tmp_path: Path) -> None:
    finetune(tmp_path / "out", settings(model, "full", **{"schedule.max_steps": 2}))
    loaded, stock = (AutoModelForCausalLM.from_pretrained(one).state_dict() for one in (tmp_path / "out", model))
    assert set(loaded) == set(stock)
    assert not [name for name in stock if torch.equal(loaded[name], stock[name])]


def test_messages_without_a_chat_template(plain_model: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no chat template, and messages need one"):
        finetune(tmp_path / "out", settings(plain_model), data=TALKS)
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    named = settings(plain_model, **{"data.template": str(tmp_path / "chat.jinja"), "schedule.max_steps": 1})
    finetune(tmp_path / "other", named, data=TALKS)
    assert (tmp_path / "other" / "chat_template.jinja").read_text().startswith("{% for m in messages %}<")


def test_rows_that_are_too_long(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's context is 256 tokens, less than data.max_length."""
    stock, trained = trainer.make, []
    monkeypatch.setattr(trainer, "make", lambda *given: trained.append(stock(*given)) or trained[-1])
    long = [*ROWS[:20], {"prompt": "a", "completion": "b" * 300}, {"prompt": "c" * 400, "completion": "d"}]
    with pytest.raises(LoadError, match=r"line 21 has 3\d\d tokens, and a row may have 256 \(lines 21, 22\)"):
        finetune(tmp_path / "out", settings(model, **{"data.held_out": 0}), data=long)
    said: list[str] = []
    changes = {"data.too_long": "cut", "data.held_out": 0, "schedule.max_steps": 1}
    result = finetune(tmp_path / "cut", settings(model, **changes), data=long, say=said.append)
    assert said[:2] == [
        "line 21: cut to 256 tokens", "line 22: left out, for the prompt alone has 256 tokens or more"
    ]  # fmt: skip
    assert result["rows"] == 21
    assert max(map(len, trained[-1].train_dataset["input_ids"])) == 256
    assert result["eval_loss"] is None


def test_what_cannot_be(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="method full trains every weight"):
        finetune(tmp_path / "out", settings(model, "full", recipe="int8"))
    with pytest.raises(LoadError, match="no rows to train on"):
        finetune(tmp_path / "out", settings(model), data=[])
    with pytest.raises(LoadError, match="row 1: it has nothing"):
        finetune(tmp_path / "out", settings(model), data=[{}])
    monkeypatch.setattr(prepare, "NEEDED", ("trl", "no-such-package"))
    with pytest.raises(TrainingError, match=r"needs no-such-package; .*pip install 'accelpatch\[train\]'"):
        finetune(tmp_path / "out", settings(model))
    assert not (tmp_path / "out").exists()
