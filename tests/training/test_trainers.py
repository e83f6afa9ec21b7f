"""transformers' Trainer and TRL's trainers on patched models, unchanged: every adapter learns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

import accelpatch
from tests.support.lora import RECIPES, config, peft
from tests.support.tiny import CAUSAL

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789 +=.?"
COMMON: dict[str, Any] = {
    "max_steps": 2, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True, "logging_steps": 1,
    "learning_rate": 1e-2, "disable_tqdm": True, "dataloader_pin_memory": False,
}  # fmt: skip
SUMS = [(number, 2 * number) for number in range(8)]


def tokenizer() -> Any:
    """One token a character."""
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {character: 3 + at for at, character in enumerate(CHARACTERS)}
    inner = Tokenizer(models.BPE(words, [], unk_token="<pad>"))
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def patched(recipe: Any = "train") -> Any:
    return accelpatch.patch(CAUSAL["llama"].make(eos_token_id=2), RECIPES.get(recipe, recipe), verify=False)


def learns(trainer: Any) -> None:
    """Every adapter parameter changes in training."""
    before = {name: one.detach().clone() for name, one in trainer.model.named_parameters() if one.requires_grad}
    assert before
    assert torch.isfinite(torch.tensor(trainer.train().training_loss))
    same = [name for name, one in trainer.model.named_parameters() if name in before and torch.equal(before[name], one)]
    assert same == []


def sft(folder: Path, model: Any, **changes: Any) -> Any:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"text": f"{one}+{one}={two}"} for one, two in SUMS])
    args = trl.SFTConfig(str(folder), max_length=32, save_strategy="no", bf16=False, **COMMON | changes)
    return trl.SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer(), peft_config=config())


def dpo(folder: Path, model: Any) -> Any:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    rows = [{"prompt": f"{one}+{one}=", "chosen": str(two), "rejected": "?"} for one, two in SUMS]
    args = trl.DPOConfig(str(folder), save_strategy="no", bf16=False, **COMMON)
    data = datasets.Dataset.from_list(rows)
    return trl.DPOTrainer(model, args=args, train_dataset=data, processing_class=tokenizer(), peft_config=config())


def grpo(folder: Path, model: Any) -> Any:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"prompt": f"{one}+{one}="} for one, _ in SUMS])
    length = {"num_generations": 2, "max_completion_length": 6}
    args = trl.GRPOConfig(str(folder), save_strategy="no", bf16=False, **COMMON, **length)

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(set(completion))) + at % 2 for at, completion in enumerate(completions)]

    return trl.GRPOTrainer(
        model, reward_funcs=reward, args=args, train_dataset=data, processing_class=tokenizer(), peft_config=config()
    )


@pytest.mark.parametrize("recipe", ["int8", "train"])
@pytest.mark.parametrize("make", [sft, dpo, grpo])
def test_trl(make: Callable[..., Any], recipe: str, tmp_path: Path) -> None:
    learns(make(tmp_path, patched(recipe)))


def test_packing_of_trl(tmp_path: Path) -> None:
    learns(sft(tmp_path, patched(), packing=True, padding_free=True))


def rows() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, 40, (8, 9), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": one, "labels": one} for one in ids]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_transformers_trainer_saves_what_peft_loads(checkpointing: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = peft.get_peft_model(patched(), config())
    args = TrainingArguments(str(tmp_path), save_steps=2, gradient_checkpointing=checkpointing, **COMMON)
    trainer = Trainer(model, args, train_dataset=rows())
    learns(trainer)
    loaded = peft.PeftModel.from_pretrained(patched(), tmp_path / "checkpoint-2")
    ids = rows()[0]["input_ids"][None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model.eval()(ids).logits, rtol=0, atol=1e-5)


def test_a_saved_folder_trains(tmp_path: Path) -> None:
    patched("int8").save_pretrained(tmp_path / "model")
    args = TrainingArguments(str(tmp_path), save_strategy="no", **COMMON)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.manual_seed(1)
    learns(Trainer(peft.get_peft_model(loaded, config()), args, train_dataset=rows()))


def test_generation_between_steps_is_native(tmp_path: Path) -> None:
    """Of float weights that train, in training mode: the model has no dropout."""
    model = patched("int8")
    args = TrainingArguments(str(tmp_path), save_strategy="no", **COMMON)
    Trainer(model, args, train_dataset=rows()).train()
    assert model.training
    paths = model.accelpatch.report().paths
    paths.clear()
    model.generate(rows()[0]["input_ids"][None], max_new_tokens=4, do_sample=False)
    assert paths["native step"] == 3
