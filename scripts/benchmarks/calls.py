"""Topics that time calls of models, patched and not: every path, encoder-decoders, and models of no known family.

Each figure is how often the patched model does what the unpatched one does once in the same time: the ratio of the
medians over the turns, in which every engine runs once, in an order that changes from turn to turn.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from accelpatch.bench.timing import once
from scripts.benchmarks import call_models
from scripts.benchmarks.call_models import NEW, OTHERS, PATHS, SIZES, TEXTS, Call
from scripts.benchmarks.engines import STOCK, by_tokens, freed, in_turn, patched, plain, random_model, shaped, turns
from scripts.benchmarks.harness import TINY, Option, Table, Topic, cases, common

WARM_UP = 3  # calls
Found = dict[str, Any]


def timed(
    base: Any, calls: Mapping[str, Call], asked: argparse.Namespace, *, recipes: Mapping[str, Any] | None = None,
    first: Mapping[str, Call] | None = None, peers: Mapping[str, Any] | None = None, compare: bool = False,
    **options: Any,
) -> list[Found]:  # fmt: skip
    """A row a call, of the model as it is and patched by each recipe, verified; then how the calls ran.

    first: the same calls for one token, with which a row says what a step of generate() takes. peers: other engines
    that answer the calls as a model does. compare: whether a row
    says how far the outputs are from the unpatched model's. options: those of patch().
    """
    recipes = recipes or {recipe: recipe for recipe in asked.recipes}
    engines = {STOCK: base}
    engines |= {name: patched(base, recipe, name, **options).model for name, recipe in recipes.items()}
    engines |= peers or {}
    printed = Table(f"times {STOCK}, {turns(asked.repeats, WARM_UP)}")
    for name, call in calls.items():
        runs = {(engine, one): partial(once, partial(one, model), torch.device(asked.device))
                for engine, model in engines.items() for one in (call, (first or {}).get(name)) if one}  # fmt: skip
        found = in_turn(runs, asked.repeats, WARM_UP, alternating=True)
        middle = {key: 1e3 * statistics.median(seconds) for key, seconds in found.items()}
        every = [1e3 * one for one in found[STOCK, call]]
        row: Found = {"path": name, f"{STOCK}, ms": middle[STOCK, call], "its ends, ms": (min(every), max(every))}
        row |= {f"{engine}, times": middle[STOCK, call] / middle[engine, call] for engine in engines if engine != STOCK}
        if first:
            row |= {f"{engine}, ms a step": (middle[engine, call] - middle[engine, first[name]]) / (asked.tokens - 1)
                    for engine in engines}  # fmt: skip
        if compare:
            row |= {f"{engine}, differs": differs(call(engines[engine]), call(base)) for engine in recipes}
        printed.add(row)
        printed.rows[-1]["seconds"] = {engine: found[engine, call] for engine in engines}
    for name in recipes:
        print(f"  {name}: {dict(engines[name].accelpatch.report().paths)}", flush=True)
    del engines
    freed()
    return printed.rows


def paths(asked: argparse.Namespace) -> Found:
    """A table a model."""
    rows = []
    if asked.cases:
        sizes = SIZES[torch.device(asked.device).type] if "ids" in asked.cases else []
        calls = {f"model(ids), {b} x {n} ids": call_models.forward(b, n) for b, n in sizes}
        rows += timed(random_model(asked), calls | {name: PATHS[name] for name in asked.cases if name != "ids"}, asked)
    for name in asked.others:
        shape, calls = OTHERS[name]
        rows += timed(shaped(shape, asked), {f"{shape}, {what}": call for what, call in calls.items()}, asked)
    return {"rows": rows}


def encoder_decoder(asked: argparse.Namespace) -> Found:
    """A table a shape, whose engines are in memory together."""
    rows = []
    for shape in dict.fromkeys(TEXTS[name].shape for name in asked.cases):
        texts = {name: TEXTS[name] for name in asked.cases if TEXTS[name].shape == shape}
        calls, first = (
            {name: text.call(asked.prompt, new) for name, text in texts.items()} for new in (asked.tokens, 1)
        )
        model = shaped(shape, asked)
        peers = {name: import_module(f"scripts.benchmarks.{name}").Whisper(model) for name in asked.peers}
        rows += timed(model, calls, asked, first=first, peers=peers)
    return {"rows": rows}


def multimodal(asked: argparse.Namespace) -> Found:
    """A row a model and recipe: steps behind a picture, and those of its language model by itself."""
    printed = Table(f"generate(), {asked.tokens} tokens behind a picture")
    for name in asked.cases:
        whole = shaped(name, asked)
        given = call_models.picture(whole)
        ids = given.pop("ids")
        with torch.device(asked.device):
            alone = AutoModelForCausalLM.from_config(whole.config.text_config, dtype=whole.dtype).eval()
        alone.generation_config.eos_token_id = None
        for recipe in asked.recipes:
            found = [
                by_tokens(patched(base, recipe, f"{recipe}, {what}").model, ids, asked.tokens, asked.repeats, **options)
                for what, base, options in ((name, whole, given), ("its language model", alone, {}))
            ]
            rates = [one["tok/s"] for one in found]
            printed.add({"model": name, "recipe": recipe, "tok/s": rates[0], "its language model, tok/s": rates[1],
                         "ratio": rates[0] / rates[1], "by": found[0]["by"]})  # fmt: skip
            freed()
    return {"rows": printed.rows}


class Encoder(torch.nn.Module):
    """A model of no library: layers that see every place."""

    def __init__(self, size: int, depth: int, heads: int):
        super().__init__()
        self.blocks = torch.nn.ModuleList([call_models.Layer(size, heads, place) for place in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def compiled(asked: argparse.Namespace) -> Found:
    """Each recipe with each mode of torch.compile; how far the outputs are from the unpatched model's too."""
    rows = []
    recipes = {f"{recipe}, compile: {mode}": {"extends": recipe, "runtime": {"compile": mode}}
               for recipe in asked.recipes for mode in asked.modes}  # fmt: skip
    sizes = {"size": 64, "depth": 2, "heads": 4} if asked.tiny else {"size": 2048, "depth": 16, "heads": 16}
    dtype, device = getattr(torch, asked.dtype), torch.device(asked.device)
    for case in asked.cases:
        torch.manual_seed(0)
        with device:
            x, ids = torch.randn(1, asked.prompt, sizes["size"], dtype=dtype), torch.randint(0, 500, (1, asked.prompt))
            encoder = case == "encoder"
            base: Any = Encoder(**sizes) if encoder else call_models.OwnModel(call_models.OwnConfig(**sizes))
            base = base.to(dtype).eval()
        call = torch.no_grad()(
            (lambda model, x=x: model(x)) if encoder else
            (lambda model, ids=ids: plain(model, ids, asked.tokens, pad_token_id=0))
        )  # fmt: skip
        samples = [{"x": x}] if encoder else None
        rows += timed(base, {case: call}, asked, recipes=recipes, compare=True, inputs=samples)
    return {"rows": rows}


def differs(found: Tensor, due: Tensor) -> float:
    """Of tokens the part that is another one, of outputs the relative root mean square error."""
    if not found.is_floating_point():
        return (found != due).float().mean().item()
    return ((found - due).float().square().mean() / due.float().square().mean()).sqrt().item()


MEASURED = common(device="cuda", dtype="bfloat16", recipes=["exact", "int8", "int4"], repeats=5)
TOPICS = {
    "paths": Topic(
        "Every way in which a program may call a patched model, timed beside the model that is not patched.\n\n"
        "The model has the named shape and random weights. It is patched as users patch it, verified; only the\n"
        "originals are freed, to make room for several engines. Below 1.0 a path is slower than unpatched. Cases:\n"
        f"`ids` are calls of model(ids) of several sizes; calls of generate() make {NEW['cuda']} tokens on a GPU and\n"
        f"{NEW['cpu']} on a CPU. --others: models of other kinds, by one call each.",
        (*common(model="llama2-7b"), *MEASURED,
         cases(["ids", *PATHS], "The calls of the language model to time; ids is model(ids)."),
         Option("others", list(OTHERS), "Models of other kinds to time, by one call each.", OTHERS), TINY),
        paths,
    ),
    "encoder_decoder": Topic(
        "Time generate() of encoder-decoders, speech and text, patched and not.\n\n"
        "Each model has the named shape and random weights, and no token ends a text: Whisper-large-v3 (30 s of\n"
        "sound, batch 1 and 16) and Flan-T5-XL (greedy, and beams of 4); for CPUs Whisper-base, T5-small and Marian.\n"
        "They are patched as users patch them, verified; the calls are stock ones. A step is what a token beyond the\n"
        "first takes.",
        (cases(["whisper", "whisper-16", "t5", "t5-beams"], "The calls to time.", TEXTS),
         Option("tokens", 64, "New tokens of a call."), Option("prompt", 128, "Tokens of the encoder's text."),
         Option("peers", [], "Other engines beside Whisper on a CPU, in 8 bits.", choices=["ctranslate2"]),
         *MEASURED, TINY),
        encoder_decoder,
    ),
    "multimodal": Topic(
        "Time the steps of models that see, behind a picture, beside those of their language model by itself.\n\n"
        "Both have random weights and are patched as users patch them, verified. The language model gets as many ids\n"
        "as the words and the picture are.",
        (cases(["Llava-1.5-7B", "Gemma-3-4B"], "The models to time."),
         Option("tokens", 64, "New tokens of a call."), *MEASURED, TINY),
        multimodal,
    ),
    "compiled": Topic(
        "Time models of no known family, eager and patched, with and without torch.compile (`runtime: compile`).\n\n"
        "`generates` is a language model of a class that no library has, with transformers' cache and generate();\n"
        "`encoder` is a plain module of layers that does not generate. Both have random weights. A call is a prompt\n"
        "and `--tokens` new ones, or one forward. Outputs of every engine are compared with the unpatched model's.",
        (cases(["generates", "encoder"], "What the model does."),
         Option("modes", ["off", "default", "reduce-overhead"], "Values of runtime: compile."),
         Option("tokens", 64, "New tokens of a call."), Option("prompt", 128, "Tokens of a prompt, or of a forward."),
         *common(device="cuda", dtype="bfloat16", recipes=["exact", "int8"], repeats=5), TINY),
        compiled,
    ),
}  # fmt: skip
