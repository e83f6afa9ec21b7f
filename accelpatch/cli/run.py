"""``accelpatch run``: load a model, patch it, answer a prompt, and print a summary of the patch."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import console, options
from .options import DeviceOption, DtypeOption, JsonOption, PluginOption, StatisticsOption

if TYPE_CHECKING:
    from torch import Tensor

    from accelpatch.report import Report

DEFAULT_PROMPT = "What is the capital of France?"


@dataclass(frozen=True)
class Answer:
    """The answer to a prompt. tokens: their number; decode_seconds: from the first new token to the last."""

    text: str
    tokens: int
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float | None:
        """Decode speed of this one answer; None for fewer than two tokens."""
        return (self.tokens - 1) / self.decode_seconds if self.tokens > 1 else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"answer": self.text, "tokens": self.tokens, "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters; temperature 0 is greedy decoding."""

    max_new_tokens: int
    temperature: float
    seed: int


def run(
    model: options.ModelArgument = options.DEFAULT_MODEL,
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", metavar="NAME|FILE", help="As elsewhere; default: int8.")
    ] = None,
    prompt: Annotated[str, typer.Option(help="Prompt text; - reads it from stdin.")] = DEFAULT_PROMPT,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template to the prompt.")] = False,
    statistics: StatisticsOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Generate at most this many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="Sampling temperature; 0 decodes greedily.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Random seed for sampling.")] = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    compare: Annotated[bool, typer.Option("--compare", help="Also answer with the unpatched model.")] = False,
    plugin: PluginOption = None,
    json: JsonOption = False,
) -> None:
    """Load MODEL, patched with a recipe, or a saved patched one as it is, and answer a prompt."""
    text = _text(prompt)
    options.prepare(recipe or options.DEFAULT_RECIPE, plugin)
    from . import prompt as prompts

    opened = options.open_model if compare else partial(options.open_patched, recipe=recipe, statistics=statistics)
    loaded, where = opened(model, dtype=dtype, device=device)
    ids = prompts.encode(prompts.tokenizer_of(loaded), text, chat=chat).to(where)
    network = loaded.model
    prompts.check_fits(network, ids.shape[1], max_new_tokens)
    sampling = Sampling(max_new_tokens, temperature, seed)
    before = None
    if compare:
        before = _answer(loaded, ids, sampling, heading="original", json=json)
        options.patch(network, recipe, statistics)
    after = _answer(loaded, ids, sampling, heading="patched" if compare else None, json=json)
    report = network.accelpatch.report()
    if json:
        console.print_json(_document(model, text, report, before, after))
    else:
        console.print_facts(_facts(model, report, before, after))


def _text(prompt: str) -> str:
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()  # arguments that are not valid text contain surrogates, which cannot be encoded
    except UnicodeError:
        raise typer.BadParameter("the prompt is not UTF-8 text", param_hint="--prompt") from None
    if not text.strip():
        raise typer.BadParameter("the prompt is empty", param_hint="--prompt")
    return text


def _answer(loaded: Any, ids: Tensor, sampling: Sampling, *, heading: str | None, json: bool) -> Answer:
    """Generate an answer to ids [1, L], streamed to stdout unless ``json``."""
    import torch

    from . import prompt as prompts

    if heading and not json:
        print(f"--- {heading}")
    stream = prompts.TextStream(loaded.tokenizer, prompts.write_nothing if json else prompts.write_stdout)
    torch.manual_seed(sampling.seed)
    choice: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if sampling.temperature > 0:
        choice = {"do_sample": True, "temperature": sampling.temperature}
    with torch.inference_mode():
        loaded.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=sampling.max_new_tokens,
            streamer=stream, **choice,
        )  # fmt: skip
    end = time.perf_counter()
    if not json:
        print("\n", flush=True)
    return Answer(stream.text, len(stream.tokens), end - (stream.first_token_at or end))


def _document(model: str, prompt: str, report: Report, before: Answer | None, after: Answer) -> dict[str, Any]:
    document: dict[str, Any] = {"model": model, "recipe": report.recipe, "device": report.device, "prompt": prompt}
    document |= after.to_dict()
    if before is not None:
        document["original"] = before.to_dict()
    return document | {"report": report.to_dict()}


def _facts(model: str, report: Report, before: Answer | None, after: Answer) -> list[tuple[str, str]]:
    from accelpatch.report import human, ratio

    token = report.token_bytes
    speed = _speed(after) if before is None else f"{_speed(before)} -> {_speed(after)}"
    facts = [
        ("model", model),
        ("recipe", report.recipe),
        ("device", report.device),
        ("sites replaced", f"{report.replaced} of {len(report.sites)}"),
        ("bytes a token", f"{human(token[0])} -> {human(token[1])} ({ratio(token)})"),
        ("tokens/s", f"{speed} (decode, this answer)"),
    ]
    if before is not None:
        facts.append(("answers", "the same" if before.text == after.text else "differ"))
    return facts + verification_facts(report) + [("note", text) for text in report.notes]


def _speed(answer: Answer) -> str:
    rate = answer.tokens_per_second
    return f"{rate:.1f}" if rate is not None else "not measured (one token)"


def verification_facts(report: Report) -> list[tuple[str, str]]:
    """The summary's rows about verification, also printed by ``bench``."""
    from accelpatch.report import verification_line

    if report.verification is None:
        return [("verified", "no")]
    return [("verified", "\n".join(verification_line(report.verification).removeprefix("verified: ").split("; ")))] + [
        ("kept", failure) for failure in report.verification.failures
    ]
