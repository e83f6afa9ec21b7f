"""Models with experts: stock transformers beside exact, int8 and int4; and the kernels of experts by themselves.

First each of `--kinds` of weights, with few tokens and many, is held to the float rule, by each implementation that can
run; a failure ends the run. Then the kernels on one layer of each shape, with the share of the device's read limit of
the bytes of the experts that are chosen. Then whole models of random weights, patched as users patch them, with the
share of the read limit of the bytes that a token needs. Stock transformers runs first and last. The recipe `mxfp4` is
`exact` with experts in MXFP4, as gpt-oss is published.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

import accelpatch
from accelpatch.bench.read_limit import read_limit
from accelpatch.kernels import dispatch
from accelpatch.kernels.layouts import expert_tiles
from accelpatch.kernels.layouts.expert_stack import Stack
from accelpatch.kernels.ops.experts import experts
from accelpatch.kernels.ops.experts.cases import in_tiles, of_random
from accelpatch.recipe.recipe import parse
from scripts.benchmarks.engines import SHAPES, STOCK, Engine, patched, shaped, stock, turns
from scripts.benchmarks.harness import TINY, Case, Option, Table, cases, common
from scripts.benchmarks.kernels import check, implementations, timed
from scripts.benchmarks.rates import Rates

Size = tuple[int, int, int, int]
#: experts, width, inner width, experts of a token
EXPERTS: dict[str, Size] = {name: tuple(shape["experts"]) for name, shape in SHAPES.items() if "experts" in shape}
#: how experts hold weights: bits, values that share a scale (0: a row), codes of a codebook, whether in tiles
KINDS = {
    "floats": (16, 0, "", False), "int8": (8, 0, "", False),
    "4 bits": (4, 128, "", False), "4 bits in tiles": (4, 128, "", True),
    "4 bits in groups of 64": (4, 64, "", False), "4 bits in groups of 64 in tiles": (4, 64, "", True),
    "MXFP4": (4, 32, "e2m1", False), "MXFP4 in tiles": (4, 32, "e2m1", True),
}  # fmt: skip
GATES = {"gpt_oss": ("clamped_swiglu", 1.702, 7.0)}  # of the shapes whose gate is not SiLU, with biases
CHECKED, SMALL = (8, 1024, 512, 2), (8, 256, 128, 2)  # the layer whose numbers are checked; with --tiny
TOKENS = (1, 4, 16, 32, 128, 512)
AGAIN = f"{STOCK} again"
MXFP4 = """
name: mxfp4
extends: exact
verify: {bound: 0.3}
rules: [{name: experts, replace: mxfp4_experts, options: {}}]
"""
OPTIONS = (
    Option("shapes", ["mixtral", "qwen3_moe"], "Shapes of the models.", EXPERTS),
    cases([Case(1, 128), Case(32, 128), Case(1, 512, 1)]),
    *common(device="cuda", dtype="bfloat16", recipes=["exact", "int8", "int4"], repeats=5),
    Option("layers", 8, "Layers of a model."),
    Option("kinds", list(KINDS), "Weights of the kernels that are timed by themselves.", KINDS),
    Option("only", None, "A part alone; the checks come first in any.", ["kernels", "models"]), TINY,
)  # fmt: skip


def weights_of(
    size: Size, kind: str, device: torch.device, dtype: torch.dtype, bias: bool = False
) -> list[Stack] | str:
    """Random weights of one layer of a shape, or why they do not lie so."""
    (number, width, inner, _), (bits, group, codes, tiled) = size, KINDS[kind]
    shapes = ((2 * inner, width), (width, inner))
    for n, k in shapes:
        if group and k % group:
            return f"groups of {group} do not divide {k}"
        if tiled and (reason := expert_tiles.unfit(n, k, group, None if codes else torch.bfloat16, codes)):
            return reason
    generator = torch.Generator().manual_seed(1)
    stacks = [of_random(generator, dtype, device, bits, number, n, k, group, bias, False, codes) for n, k in shapes]
    return list(in_tiles(stacks[0], stacks[1], inner)) if tiled else stacks


def arguments_of(
    size: Size, weights: list[Stack], tokens: int, device: torch.device, dtype: torch.dtype,
    gate: tuple[str, float, float] = ("silu", 0.0, 0.0),
) -> tuple[Any, ...]:  # fmt: skip
    """Arguments of the operation on one layer of a shape; each token's experts differ."""
    number, width, _, chosen = size
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, width, generator=generator).to(device, dtype)
    ids = torch.stack([torch.randperm(number, generator=generator)[:chosen] for _ in range(tokens)]).to(device)
    routing = torch.rand(tokens, chosen, generator=generator).to(device, dtype)
    return x, ids, routing, *weights[0], *weights[1], *gate, None


def calls_to_check(
    device: torch.device, dtype: torch.dtype, kinds: Sequence[str], size: Size
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Rows of a large layer of each kind; where all are timed, every case of the operation before."""
    generator = torch.Generator().manual_seed(5)
    for case in dispatch.kernel(experts.OP).cases() if len(kinds) == len(KINDS) else ():
        yield case.id, case.make(generator, dtype, device)
    for kind in kinds:
        weights: Any = weights_of(size, kind, device, dtype)
        for tokens in (1, 3, 40, 300)[: 3 if size == SMALL else None]:
            yield f"{kind}, {tokens} tokens", arguments_of(size, weights, tokens, device, dtype)


def kernels(asked: argparse.Namespace, limit: float) -> list[dict[str, Any]]:
    """Times of one layer's experts. On a GPU torch's are left out: they ask the host which experts run."""
    device, dtype = torch.device(asked.device), getattr(torch, asked.dtype)
    printed = Table("the experts of one layer; shares of the read limit")
    for shape, kind in itertools.product(asked.shapes, asked.kinds):
        size = SMALL if asked.tiny else EXPERTS[shape]
        weights = weights_of(size, kind, device, dtype, bias=shape in GATES)
        if isinstance(weights, str):
            print(f"{shape}, {kind}: {weights}", flush=True)
            continue
        for tokens in TOKENS[: 3 if asked.tiny else None]:
            args = arguments_of(size, weights, tokens, device, dtype, *([GATES[shape]] if shape in GATES else []))
            read = sum(one.nbytes for one in args[3:11] if one is not None) * len(args[1].unique()) // size[0]
            for by in implementations(experts.OP, args, device):
                if device.type == "cpu" or by != "torch":
                    with dispatch.forced(by):
                        seconds = timed(partial(dispatch.kernel(experts.OP).op, *args), device).median
                    printed.add({"shape": shape, "weights": kind, "by": by, "tokens": tokens,
                                 "taken, us": 1e6 * seconds, "share": read / seconds / limit})  # fmt: skip
    return printed.rows


def engine(shape: str, recipe: str, asked: argparse.Namespace) -> Engine:
    """A model by a recipe, or by stock transformers; its bytes are what a token needs."""
    model = shaped(shape, asked, num_hidden_layers=asked.layers)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    if recipe in (STOCK, AGAIN):
        return stock(model, recipe, accelpatch.plan(model, "exact").report().token_bytes[0])
    return patched(model, parse(MXFP4) if recipe == "mxfp4" else recipe, recipe, keep=False)


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Check, then the parts that were asked for."""
    found, device = dict[str, Any](), torch.device(asked.device)
    checked = calls_to_check(device, getattr(torch, asked.dtype), asked.kinds, SMALL if asked.tiny else CHECKED)
    check(experts.OP, checked, device)
    limit = read_limit(device).bytes_per_second
    print(f"read limit {limit / 1e9:.0f} GB/s")
    if asked.only != "models":
        found["kernels"] = kernels(asked, limit)
    for shape in asked.shapes if asked.only != "kernels" else ():
        about = f"{shape}, {asked.layers} layers, {asked.dtype}, {turns(asked.repeats, 2)}; shares for batch 1"
        printed = Rates(about, [STOCK, "exact"], limit=limit)
        makers = [partial(engine, shape, name, asked) for name in (STOCK, *asked.recipes, AGAIN)]
        printed.alone(makers, asked.cases, asked.repeats, 2)
        found[shape] = printed.rows
    return found
