"""Topics that compare recipes through generate(): prompts and decoding, OPT's, long prompts, and every fused family.

A topic makes its engines and gives them to the table of rates.py.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from accelpatch.bench import plot
from accelpatch.bench.read_limit import read_limit
from accelpatch.models.family import FAMILIES
from accelpatch.runtime.generation.patched_model import RUNTIME
from scripts.benchmarks.engines import SHAPES, STOCK, Engine, patched, plain, random_model, shaped, stock, turns
from scripts.benchmarks.harness import PLOT, TINY, Case, Option, Topic, bars, cases, common
from scripts.benchmarks.rates import Rates

PROMPT_AND_BATCHES = [Case(1, 2048, 1), Case(1, 128, 64), Case(32, 128, 64)]
AGAIN = f"{STOCK} again"
Found = dict[str, Any]


def recipes(asked: argparse.Namespace) -> Found:
    """The unpatched model, and one patched by each recipe, in turn."""
    base = random_model(asked, endless=False)
    printed = Rates(f"{asked.model}, {turns(asked.repeats, 2)}", [STOCK, asked.recipes[0]])
    engines = [stock(base), *(patched(base, recipe) for recipe in asked.recipes)]
    printed.in_turn(engines, asked.cases, asked.repeats, 2)
    return {"rows": printed.rows}


def prompt(asked: argparse.Namespace) -> Found:
    """Stock, each recipe, and stock again, one after the other."""
    printed = Rates(f"{asked.model}, {turns(asked.repeats, 1)}", [STOCK])

    def engine(name: str) -> Engine:
        model = random_model(asked, endless=False)
        return stock(model, name) if name in (STOCK, AGAIN) else patched(model, name, keep=False)

    names = (STOCK, *asked.recipes, AGAIN)
    printed.alone([partial(engine, name) for name in names], asked.cases, asked.repeats, 1)
    return {"rows": printed.rows}


def opt(asked: argparse.Namespace) -> Found:
    """A table a model: as transformers runs it in float16, and patched in place."""
    if asked.plot:
        plot.check(asked.plot)
    found: Found = {}
    for name in asked.models:
        model = opt_model(name, asked)
        printed = Rates(f"{name}, {turns(asked.repeats, 2)}", ["float16"])
        makers = [partial(stock, model, "float16"), partial(patched, model, "smoothquant-opt", "int8", keep=False)]
        printed.alone(makers, asked.cases, asked.repeats, 2)
        found[name] = printed.rows
        layers = sum(site.replacer == "int8_opt" for site in model.accelpatch.report().sites)
        print(f"{name}: {layers} layers in int8", flush=True)
        del model, makers
    if asked.plot:
        columns = ("weights, GB", "peak, GB", "first token, ms", "ms a step")
        panels = {f"{head}, {case}": {f"{name} {row['engine']}": [row[head]] for name, rows in found.items()
                                      for row in rows if row["case"] == str(case) and row.get(head)}
                  for head, case in zip(columns, (asked.cases[0],) * 3 + (asked.cases[-1],), strict=True)}  # fmt: skip
        bars({name: one for name, one in panels.items() if one}, f"OPT, {asked.facts['device']}", asked.plot, "int8")
    return {"models": found}


def opt_model(name: str, asked: argparse.Namespace) -> Any:
    """Random weights, with a residual stream as a trained model has it."""
    given = argparse.Namespace(model=name, device=asked.device, tiny=False)
    model = random_model(given, dtype=torch.float16, endless=False)
    decoder = model.model.decoder
    torch.nn.init.normal_(decoder.embed_positions.weight)
    with torch.no_grad():
        for layer in decoder.layers:
            for last in (layer.self_attn.out_proj, layer.fc2):
                last.weight.div_((2 * len(decoder.layers)) ** 0.5)
    return model


EXPERTS = ("mixtral", "olmoe", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")  # bench.py experts has them
FUSED = [one.name for one in FAMILIES if one.layer and one.name not in EXPERTS and "_vl_" not in one.name]
FIRST, BY_MODULES = "llama", "one layer by modules"


def family_model(name: str, asked: argparse.Namespace) -> Any:
    """A model of a family with random weights, made on the device."""
    prefix = next(one for one in FAMILIES if one.name == name).classes
    shape, suffix = SHAPES["families"], "LMHeadModel" if name == "gpt2" else "ForCausalLM"
    widths = shape["more"].get(name, {}) | {"num_hidden_layers": asked.layers}
    return shaped(shape | {"class": f"{prefix}{suffix}"}, asked, **widths)


def families(asked: argparse.Namespace) -> Found:
    """A row a family; the last column is bytes times rate, over Llama's."""
    case = Case(1, 64, 160)
    limit = read_limit(torch.device(asked.device)).bytes_per_second
    about = f"{asked.layers} layers, {asked.recipe}, {turns(asked.repeats, 1)}"
    printed = Rates(about, [FIRST], short=32, limit=limit)

    def engine(name: str) -> Engine:
        model = family_model(FIRST if name == BY_MODULES else name, asked)
        made = patched(model, asked.recipe, name, keep=False, how=plain)
        runtime: Any = vars(model)[RUNTIME]
        if name == BY_MODULES:
            runtime.unfuse({asked.layers // 2: "planted"})
        reasons = [f"{site.path}: {site.by_modules}" for site in model.accelpatch.report().sites if site.by_modules]
        print(*reasons[:1], sep="\n", end="\n" * bool(reasons))
        return made

    names = dict.fromkeys([FIRST, *asked.cases, BY_MODULES])
    printed.alone([partial(engine, name) for name in names], [case], asked.repeats, 1)
    first, rows = printed.rows[0]["share of its limit"], printed.rows
    ratios = {row["engine"]: round(row["share of its limit"] / first, 3) for row in rows}
    print("\nbytes times rate, over Llama's:", ", ".join(f"{name} {ratio}" for name, ratio in ratios.items()))
    return {"rows": rows, "bytes_times_rate": ratios}


TOPICS = {
    "recipes": Topic(
        "The unpatched model beside recipes: prompts, decoding, memory.\n\n"
        "The model has random weights and is patched as users patch it, verified, calibrated on its own text. Every\n"
        "engine runs once a turn. Ratios are to the unpatched model and to the first recipe. The linear layers by\n"
        "themselves, by every implementation, are the topic `rows`.",
        (*common(model="llama2-7b", device="cuda", dtype="bfloat16", repeats=5,
                 recipes=["exact", "int8", "smoothquant", "smoothquant-static", "fp8"]), cases(PROMPT_AND_BATCHES),
         TINY),
        recipes,
    ),
    "prompt": Topic(
        "Time to the first token of long prompts, and the memory that they take: stock transformers beside recipes.\n\n"
        "A model of random weights generates one token by stock generate(): with transformers' SDPA, patched, and by\n"
        "stock again. Memory is the peak, and that beyond the weights and the cache of the prompt.",
        (*common(model="llama2-7b", device="cuda", dtype="bfloat16", recipes=["flash"], repeats=5),
         cases([Case(1, length, 1) for length in (2048, 8192, 32768)]), TINY),
        prompt,
    ),
    "opt": Topic(
        "OPT in float16 beside OPT in int8 from end to end: memory, prompts and decoding.\n\n"
        "Each model has the named shape and random weights. It is timed as transformers runs it, then patched in\n"
        "place by smoothquant-opt. As in a trained model, the residual stream is larger than what a layer adds to it:\n"
        "embeddings of positions have a standard deviation of 1, what is added is divided by sqrt(2 layers).",
        (Option("models", ["opt-1.3b", "opt-2.7b", "opt-6.7b", "opt-13b"], "Models of the catalog."),
         cases([Case(1, 2048, 1), Case(1, 128, 64), Case(16, 128, 64)]), *common(device="cuda", repeats=5), PLOT),
        opt,
    ),
    "families": Topic(
        "Decode rates of every fused family, beside Llama's at the same bytes.\n\n"
        "Each model has the widths of Llama-2-7B and random bf16 weights. A rate is that of the difference of an\n"
        "answer of 160 tokens and one of 32. Bytes times rate over Llama's: 1 is as near to the read limit as Llama\n"
        "is. `one layer by modules` is Llama with a layer that is not fused, as if it had been over its bound.",
        (cases(FUSED, "Families beside Llama."), Option("recipe", "exact", "The recipe to patch with."),
         Option("layers", 8, "Layers of each model."), *common(device="cuda", repeats=3), TINY),
        families,
    ),
}  # fmt: skip
