"""Many requests at once through generate_batch: the original and patched models, and the same as one padded batch.

Prompts are random ids whose lengths lie between the two numbers, and every request gets `--new` greedy tokens. Models
take turns, each with a manager that it keeps (`persistent_manager`), as a server has one; with --no-kept each makes
its own, with new pages and new graphs. The original runs with the attention that `--attention` names; on a GPU, give it
its best settings: `--attention flash_attention_2`. `share of the padded batch` is generate_batch's rate over that of
generate() of the same model on the same prompts, padded on the left. Before anything is timed, each patched model's
tokens are compared with its own padded batch's: `equal tokens` counts those up to the first that differs in a request.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig

import accelpatch
from scripts.benchmarks.engines import in_turn
from scripts.benchmarks.harness import Option, common, device_of, table

PAGE = 16
OPTIONS = (
    *common(device="cpu", repeats=3),
    Option("cases", ("stock", "exact", "int8"), "Recipes, and `stock` for the original."),
    Option("model", "smollm2-135m", "A model's name or folder."),
    Option("requests", 16, "Requests at once."), Option("prompt", "32-256", "Shortest and longest prompt in tokens."),
    Option("new", 64, "Tokens to generate for each."),
    Option("tokens", 256, "Most tokens of a call, prompts in parts."),
    Option("attention", "sdpa", "The original's attention implementation."),
    Option("kept", True, "Keep each model's manager, its pages and its graphs, from call to call."),
)  # fmt: skip


def prompts_of(asked: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    """Fixed random prompts."""
    least, most = map(int, asked.prompt.split("-"))
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(least, most + 1, (asked.requests,), generator=generator).tolist()
    return [torch.randint(5, vocabulary - 5, (n,), generator=generator).tolist() for n in lengths]


def options(asked: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    """Arguments of generate_batch: pages for all requests at once."""
    pages = sum(-(-(len(one) + asked.new) // PAGE) + 1 for one in prompts)
    settings = ContinuousBatchingConfig(block_size=PAGE, num_blocks=2 * pages, max_batch_tokens=asked.tokens)
    if hasattr(settings, "auto_switch_to_flash"):
        settings.auto_switch_to_flash = False
    text = GenerationConfig(max_new_tokens=asked.new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    given = {"generation_config": text, "continuous_batching_config": settings}
    return given | {"persistent_manager": asked.kept}


def padded(model: Any, prompts: list[list[int]], new: int) -> Tensor:
    """generate()'s new tokens [B, new] of the same prompts in one batch."""
    longest = max(map(len, prompts))
    ids, mask = (torch.zeros(len(prompts), longest, dtype=torch.int64, device=model.device) for _ in range(2))
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    found: Tensor = model.generate(
        ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
    )
    return found[:, longest:].cpu()


def batched(model: Any, prompts: list[list[int]], given: dict[str, Any]) -> list[list[int]]:
    """generate_batch's new tokens, by request."""
    done = model.generate_batch(prompts, **given)
    return [one.generated_tokens for one in done.values()]


def same(found: list[list[int]], due: list[list[int]]) -> float:
    """The share of tokens before the first that differs, over all requests."""
    equal = 0
    for one, other in zip(found, due, strict=True):
        equal += next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))
    return equal / sum(map(len, due))


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of a call, and of this process's CPU time in it."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """All models in turn."""
    device, models, calls, equal = device_of(asked), {}, {}, {}
    for name in asked.cases:
        dtype = "float32" if device.type == "cpu" else "bfloat16"
        model: Any = accelpatch.load(asked.model, dtype=dtype, device=device).model
        if name == "stock":
            model.set_attn_implementation(asked.attention)
        else:
            accelpatch.patch(model, name, keep_original="none")
        models[name] = model
    prompts = prompts_of(asked, next(iter(models.values())).config.get_text_config().vocab_size)
    given = options(asked, prompts)
    for name, model in models.items():
        equal[name] = same(batched(model, prompts, given), padded(model, prompts, asked.new).tolist())
        calls[name] = lambda model=model: timed(lambda: batched(model, prompts, given))
        calls[f"{name}, padded"] = lambda model=model: timed(lambda: padded(model, prompts, asked.new))
    found = in_turn(calls, asked.repeats, 0)  # each has run once for the comparison
    wall, cpu = ({name: median(one[at] for one in times) for name, times in found.items()} for at in (0, 1))
    total, first = asked.requests * asked.new, next(iter(models))
    rows = [
        {"model": name, "tok/s": total / wall[name], f"times {first}": wall[first] / wall[name],
         "CPU time, s": cpu[name], f"times {first} by CPU time": cpu[first] / cpu[name],
         "share of the padded batch": wall[f"{name}, padded"] / wall[name], "equal tokens, share": equal[name]}
        for name in models
    ]  # fmt: skip
    about = f"{asked.requests} requests of {asked.prompt} tokens and {asked.new} new ones, median of {asked.repeats}"
    return {"continuous": table(rows, about)}
