"""``accelpatch chat``: a conversation with a patched model, on a terminal, or from stdin with one message a line."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from accelpatch.errors import AccelpatchError

from . import console, generation, options
from . import prompt as prompts
from .conversation import Conversation
from .generation import Answer
from .message_input import Ended, Reader, interrupts
from .options import DeviceOption, DtypeOption, PluginOption, StatisticsOption

KEYS = "/help lists commands, Ctrl-D ends."
MOST = 512  # tokens of an answer; fewer where the context is short
HELP = """\
/reset        forget the conversation; the system message stays
/save FILE    write the messages as JSON; /save! FILE over a file that is there
/adapter NAME answer with another adapter, of those given by --adapter
/stats        tokens and rate of the last answer, and the context in use
/help         this list
/exit         end, as Ctrl-D does; Ctrl-C ends an answer
A line that ends in \\ goes on in the next one; lines between two lines of \"\"\" are one message."""


def chat(
    model: options.ModelArgument = options.DEFAULT_MODEL,
    recipe: options.OwnRecipeOption = None,
    system: options.SystemOption = None,
    adapter: options.AdapterOption = None,
    statistics: StatisticsOption = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Generate at most this many tokens an answer; default: 512.")
    ] = None,
    temperature: options.TemperatureOption = 0.0,
    top_p: options.TopPOption = None,
    top_k: options.TopKOption = None,
    seed: options.SeedOption = 0,
    stop: options.StopOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    verify: options.VerifyOption = "auto",
    plugin: PluginOption = None,
) -> None:
    """Chat with MODEL, patched with a recipe, or with a saved patched one; /help lists what can be typed.

    With stdin from a file or a pipe each line is a message, and the answers alone are printed on stdout.
    """
    sampling = generation.sampling(max_new_tokens or MOST, temperature, top_p, top_k, seed, stop or ())
    options.check_system(system)
    options.check_generation(model, recipe, max_new_tokens or 1, adapters=adapter)
    options.prepare(recipe or options.DEFAULT_RECIPE, plugin)
    loaded = options.open_patched(
        model, recipe=recipe, dtype=dtype, device=device, statistics=statistics, verify=verify
    )
    options.check_adapters(adapter, prompts.tokenizer_of(loaded))
    prompts.check_template(loaded.tokenizer)
    loaded, _ = options.with_adapters(loaded, adapter)
    report = loaded.model.accelpatch.report()
    console.note(f"{model}, {report.recipe}: {report.replaced} of {len(report.sites)} sites replaced. {KEYS}")
    failed = _converse(Conversation(loaded, sampling, system), Reader())
    if failed and not sys.stdin.isatty():
        raise typer.Exit(1)


def _converse(conversation: Conversation, reader: Reader) -> bool:
    """Answer messages until there are no more; returns whether any could not be answered."""
    failed = False
    while True:
        try:
            message = reader.message()
        except Ended:
            return failed
        try:
            if message.startswith("/") and "\n" not in message:
                if not _command(conversation, *message.partition(" ")[::2]):
                    return failed
            elif message.strip():
                _answer(conversation, message)
        except AccelpatchError as error:
            console.print_error(str(error))
            failed = True
        except KeyboardInterrupt:  # a second Ctrl-C, before the first has ended the answer
            console.note("\n(interrupted; the message is forgotten)")


def _answer(conversation: Conversation, message: str) -> None:
    with interrupts() as interrupted:
        answer = conversation.answer(message, generation.write_stdout, interrupted)
    print(flush=True)
    if conversation.dropped:
        console.note(f"(the context is full: {conversation.dropped} older messages were left out)")
    if (empty := answer.empty_because()) is not None:
        console.note(f"(the answer is empty: {empty})")
    elif answer.ended == "length":
        console.note(f"(ended after {answer.tokens} tokens: --max-new-tokens, or the end of the context)")
    elif answer.ended == "interrupted":
        console.note("(interrupted)")


def _command(conversation: Conversation, name: str, rest: str) -> bool:
    """Run a command (a line that begins with /); returns False for /exit."""
    if name == "/exit":
        return False
    if name == "/help":
        print(HELP)
    elif name == "/reset":
        conversation.reset()
        console.note("(the conversation begins anew)")
    elif name == "/stats":
        _print_stats(conversation)
    elif name == "/adapter":
        console.note(f"(answers are those of the adapter {conversation.set_adapter(rest.strip())} from here on)")
    elif name in ("/save", "/save!"):
        if not rest.strip():
            raise AccelpatchError(f"{name} needs the name of a file")
        path = Path(os.path.expanduser(rest.strip()))
        conversation.save(path, replace=name == "/save!")
        console.note(f"({len(conversation.messages)} messages are in {path})")
    else:
        raise AccelpatchError(f"there is no command {name}; /help lists them, and a space before the / makes it text")
    return True


def _print_stats(conversation: Conversation) -> None:
    last: Answer | None = conversation.last
    answer = [("last answer", "none yet")]
    if last is not None:
        answer = [("last answer", f"{last.tokens} tokens"), ("tokens/s", str(last.rate))]
    limit = "" if conversation.limit is None else f" of {conversation.limit}"
    console.print_facts([*answer, ("context", f"{conversation.used}{limit} tokens in use")])
