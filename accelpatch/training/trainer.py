"""A configuration as TRL's trainer: SFTTrainer or DPOTrainer, with PEFT's LoRA, its arguments and its data sets."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from accelpatch.training.configuration import Configuration
from accelpatch.training.examples import Examples


def make(model: Any, tokenizer: Any, settings: Configuration, examples: Examples, folder: Path, log: Any) -> Any:
    """The trainer. folder: where checkpoints go; log: a callback. `model` gets its adapter here."""
    import trl
    from transformers.trainer_callback import PrinterCallback

    config, trainer = (
        (trl.DPOConfig, trl.DPOTrainer) if settings["method"] == "dpo" else (trl.SFTConfig, trl.SFTTrainer)
    )
    options = _arguments(settings, model, bool(examples.held_out)) | {"max_length": examples.max_length}
    if settings["method"] != "dpo":
        options |= _of_sft(settings)
    with quiet_datasets() as data, quiet_names():
        made = trainer(
            model, args=config(str(folder), **options), processing_class=tokenizer, callbacks=[log],
            train_dataset=data.from_list(examples.train),
            eval_dataset=data.from_list(examples.held_out) if examples.held_out else None,
            peft_config=None if settings["method"] == "full" else _lora(settings),
        )  # fmt: skip
    made.remove_callback(PrinterCallback)
    return made


def _arguments(settings: Configuration, model: Any, evaluated: bool) -> dict[str, Any]:
    """Those that SFTConfig and DPOConfig share: transformers' TrainingArguments."""
    on_cpu = model.device.type == "cpu"
    return {
        "num_train_epochs": settings["schedule.epochs"],
        "max_steps": settings["schedule.max_steps"] or -1,
        "per_device_train_batch_size": settings["batch.size"],
        "per_device_eval_batch_size": settings["batch.size"],
        "gradient_accumulation_steps": settings["batch.accumulation"],
        "optim": settings["optimizer.name"],
        "learning_rate": settings["optimizer.learning_rate"],
        "weight_decay": settings["optimizer.weight_decay"],
        "max_grad_norm": settings["optimizer.max_grad_norm"],
        "lr_scheduler_type": settings["schedule.kind"],
        "warmup_steps": settings["schedule.warmup_steps"],
        "gradient_checkpointing": settings["gradient_checkpointing"],
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "pad_to_multiple_of": None,
        "eval_strategy": "steps" if evaluated else "no",
        "eval_steps": settings["evaluation.every"],
        "save_strategy": "steps",
        "save_steps": settings["checkpoint.every"],
        "save_total_limit": settings["checkpoint.keep"] + 1,  # the newest is not known to be whole yet
        "logging_steps": settings["log_every"],
        "logging_nan_inf_filter": False,  # which hides a loss that is not finite
        "seed": settings["seed"],
        "bf16": False,  # autocast; the precision is that of the model
        "use_cpu": on_cpu,
        "dataloader_pin_memory": not on_cpu,
        "report_to": [],
        "disable_tqdm": True,
    }


def _of_sft(settings: Configuration) -> dict[str, Any]:
    packing = settings["batch.packing"]
    return {"packing": packing, "padding_free": packing}


def _lora(settings: Configuration) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=settings["adapter.rank"], lora_alpha=settings["adapter.alpha"], lora_dropout=settings["adapter.dropout"],
        target_modules=settings["adapter.targets"], task_type="CAUSAL_LM",
    )  # fmt: skip


@contextmanager
def quiet_names() -> Iterator[None]:
    """Context manager: hides the warnings of transformers, TRL and PEFT about names that will change; a user can do
    nothing about them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


@contextmanager
def quiet_datasets() -> Iterator[Any]:
    """Context manager: yields the class Dataset, whose bars are hidden for the while."""
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield datasets.Dataset
    finally:
        if shown:
            datasets.enable_progress_bars()


def precision_of(settings: Configuration, device: torch.device) -> str:
    """The dtype in which the base model is loaded: on a CPU "auto" is float32, the fastest one there."""
    given: str = settings["precision"]
    return "float32" if given == "auto" and device.type == "cpu" else given
