"""``accelpatch run``: load a model, patch it, answer a prompt, and print a summary of the patch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import console, generation, options, ranks
from . import draft as drafts
from . import prompt as prompts
from .generation import Answer, Rate, Sampling
from .options import DeviceOption, DtypeOption, JsonOption, PluginOption, StatisticsOption

if TYPE_CHECKING:
    from torch import Tensor

    from accelpatch.report import Report

ORIGINAL = "original"
NO_ADAPTER = ""  # no folder has this name
DEFAULT_PROMPT = "What is the capital of France?"


@dataclass(frozen=True)
class Outcome:
    """The answer of one model, its rate, and why the answer is empty, if it is."""

    answer: Answer
    rate: Rate
    empty: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        plain = {"answer": self.answer.text, "tokens": self.answer.tokens, "ended": self.answer.ended}
        return plain | {"empty_because": self.empty, "tokens_per_second": self.rate.per_second}


def run(
    model: options.ModelArgument = options.DEFAULT_MODEL,
    recipe: options.OwnRecipeOption = None,
    prompt: Annotated[str, typer.Option(help="Prompt text; - reads it from stdin.")] = DEFAULT_PROMPT,
    system: options.SystemOption = None,
    raw: Annotated[bool, typer.Option("--raw", help="Give the model the prompt without its chat template.")] = False,
    chat: Annotated[bool, typer.Option("--chat", hidden=True, help="Fail without a chat template.")] = False,
    adapter: options.AdapterOption = None,
    draft: drafts.DraftOption = None,
    statistics: StatisticsOption = None,
    max_new_tokens: options.MaxNewTokensOption = 128,
    temperature: options.TemperatureOption = 0.0,
    top_p: options.TopPOption = None,
    top_k: options.TopKOption = None,
    seed: options.SeedOption = 0,
    stop: options.StopOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    verify: options.VerifyOption = "auto",
    compare: Annotated[bool, typer.Option("--compare", help="Also answer with the unpatched model.")] = False,
    tp: ranks.TensorParallelOption = 1,
    plugin: PluginOption = None,
    json: JsonOption = False,
) -> None:
    """Load MODEL, patched with a recipe, or a saved patched one as it is, and answer a prompt.

    A model with a chat template is chatted with; --raw gives it the prompt as it is.
    """
    chosen = generation.sampling(max_new_tokens, temperature, top_p, top_k, seed, stop or ())
    text = _text(prompt, system, raw, chat)
    options.check_generation(model, recipe, max_new_tokens, original=compare or tp > 1, adapters=adapter, draft=draft)
    ranks.start(tp, text if prompt == "-" else None, {"--compare": compare, "--adapter": adapter, "--draft": draft})
    options.prepare(recipe or options.DEFAULT_RECIPE, plugin)
    given: Any = {"recipe": recipe, "statistics": statistics, "verify": verify}
    loaded = _opened(model, dtype, device, adapter, None if compare else given | ranks.argument(tp))
    ids = _encode(loaded, text, system, raw, chat, max_new_tokens)
    chosen = replace(chosen, draft=drafts.opened(draft, loaded.model, dtype, device, given))
    respond = partial(_respond, ids=ids, sampling=chosen, compare=compare, raw=raw, json=json)
    _print(model, text, loaded.model, *_answers(loaded, adapter, respond, given if compare else None), json)


def _answers(
    loaded: Any, folders: list[Path] | None, respond: Callable[..., Outcome], patch: dict[str, Any] | None
) -> tuple[Outcome | None, dict[str, Outcome]]:
    """The answer of the original (None without `patch`), and the answers of the patched model."""
    before = None if patch is None else _before(loaded, respond, patch)
    return before, _with_each(loaded, folders, respond)


def _before(loaded: Any, respond: Callable[..., Outcome], patch: dict[str, Any]) -> Outcome:
    """The answer of the original, which this patches afterwards."""
    answered = respond(loaded, name=ORIGINAL)
    options.patch(loaded.model, **patch)
    return answered


def _opened(model: str, dtype: str, device: str, adapters: list[Path] | None, patch: dict[str, Any] | None) -> Any:
    """The loaded model, patched unless `patch` is None; the chat template is the adapter's, if that has one."""
    patched: Any = None if patch is None else partial(options.open_patched, **patch)
    loaded = (patched or options.open_model)(model, dtype=dtype, device=device)
    options.check_adapters(adapters, loaded.tokenizer)
    return loaded


def _with_each(loaded: Any, folders: list[Path] | None, respond: Callable[..., Outcome]) -> dict[str, Outcome]:
    """Adapter's name -> answer with it; without adapters NO_ADAPTER -> the model's answer."""
    loaded, names = options.with_adapters(loaded, folders)
    found = {}
    for name in names or [NO_ADAPTER]:
        if names:
            loaded.model.set_adapter(name)
        found[name] = respond(loaded, name=f"adapter {name}" if names else "patched", headed=len(names) > 1)
    return found


def _text(prompt: str, system: str | None, raw: bool, chat: bool) -> str:
    """The prompt. Raises BadParameter if it is empty or not text, and for options that contradict each other."""
    if raw and (chat or system is not None):
        raise typer.BadParameter(f"goes without {'--chat' if chat else '--system'}", param_hint="--raw")
    options.check_system(system)
    try:
        text = (ranks.prompt_of_parent() or sys.stdin.read()) if prompt == "-" else prompt
        text.encode()
    except UnicodeError:
        raise typer.BadParameter("the prompt is not UTF-8 text", param_hint="--prompt") from None
    if not text.strip():
        raise typer.BadParameter("the prompt is empty", param_hint="--prompt")
    return text


def _encode(loaded: Any, text: str, system: str | None, raw: bool, chat: bool, new_tokens: int) -> Tensor:
    """Ids [1, L] of the prompt on the model's device, in the chat template if there is one or an option needs it.

    Raises AccelpatchError if they and the new tokens do not fit the context.
    """
    tokenizer = prompts.tokenizer_of(loaded)
    chat = chat or system is not None or (not raw and prompts.has_template(tokenizer))
    ids = prompts.encode(tokenizer, text, chat=chat, system=system).to(loaded.model.device)
    prompts.check_fits(loaded.model, ids.shape[1], new_tokens)
    return ids


def _respond(
    loaded: Any, *, ids: Tensor, sampling: Sampling, name: str, compare: bool, raw: bool, json: bool,
    headed: bool = False,
) -> Outcome:  # fmt: skip
    """The answer to ids [1, L], streamed to stdout unless `json`.

    headed, compare: print the heading `name` first; compare: also measure the rate by RATE_TOKENS tokens.
    """
    import torch

    if (headed or compare) and not json:
        print(f"--- {name}")
    torch.manual_seed(sampling.seed)
    sampling = replace(sampling, draft=None) if name == ORIGINAL else sampling
    answer = generation.answer(loaded, ids, sampling, (lambda piece: None) if json else generation.write_stdout)
    if not json:
        print("\n", flush=True)
    rate = generation.measured_rate(loaded.model, ids) if compare else answer.rate
    return Outcome(answer, rate, answer.empty_because(raw and prompts.has_template(loaded.tokenizer)))


def _print(
    model: str, text: str, network: Any, before: Outcome | None, answers: dict[str, Outcome], json: bool
) -> None:  # fmt: skip
    """Print the summary, or the JSON document. answers: as of `_with_each`."""
    report = network.accelpatch.report()
    after = list(answers.values())[-1]
    document = {"model": model, "recipe": report.recipe, "device": report.device, "prompt": text} | after.to_dict()
    document |= {} if before is None else {"original": before.to_dict()}
    if list(answers) != [NO_ADAPTER]:
        document["adapters"] = {name: one.to_dict() for name, one in answers.items()}
    console.print_result(json, document | {"report": report.to_dict()}, _facts(model, report, before, after))


def _facts(model: str, report: Report, before: Outcome | None, after: Outcome) -> list[tuple[str, str]]:
    from accelpatch.report import human, ratio

    token = report.token_bytes
    facts = [
        ("model", model),
        ("recipe", report.recipe),
        ("device", report.device),
        ("sites replaced", f"{report.replaced} of {len(report.sites)}"),
        ("bytes a token", f"{human(token[0])} -> {human(token[1])} ({ratio(token)})"),
        ("tokens/s", _rates(before, after)),
    ]
    if before is not None:
        facts.append(("answers", "the same" if before.answer.text == after.answer.text else "differ"))
    for name, one in {"original": before, "answer": after}.items():
        if one is not None and one.empty is not None:
            facts.append((name, f"the answer is empty: {one.empty}"))
    return facts + drafts.facts(report) + verification_facts(report) + [("note", text) for text in report.notes]


def _rates(before: Outcome | None, after: Outcome) -> str:
    rate = after.rate.per_second
    if before is None:
        return f"{after.rate}" if rate is None else f"{after.rate} (decode, this answer)"
    if rate is None or before.rate.per_second is None:
        return str(before.rate if before.rate.per_second is None else after.rate)
    times = rate / before.rate.per_second
    how = f"decode of {generation.RATE_TOKENS} tokens by generate(), after a warm-up"
    return f"{before.rate} -> {after.rate}, {times:.1f} times ({how})"


def verification_facts(report: Report) -> list[tuple[str, str]]:
    """The summary's rows about verification, also printed by ``bench``."""
    from accelpatch.report import verification_line

    if report.verification is None:
        return [("verified", "no")]
    lines = verification_line(report.verification).removeprefix("verified: ").split("; ")
    quality = [("quality", report.quality)] if report.quality else []
    return [("verified", "\n".join(lines)), *quality, *(("kept", one) for one in report.verification.failures)]
