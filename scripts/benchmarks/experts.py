"""Models with experts: stock transformers beside exact, int8 and int4; and the kernels of experts by themselves.

    python scripts/bench.py experts [--shapes mixtral qwen3_moe] [--device cuda] [--dtype bfloat16] [--layers 8]
        [--cases 1x128+128 32x128+128 1x512+1] [--recipes exact int8 int4] [--repeats 5] [--only kernels] [--tiles]
        [--kinds "MXFP4 in tiles"] [--tiny]
    python scripts/bench.py experts --only models --shapes gpt_oss mixtral --recipes mxfp4 int4

First each of `--kinds` of weights, with few tokens and many, is held to the float rule, by each implementation that can
run; a failure ends the run. Then the kernels on one layer of each shape, by each of them, with the share of the
device's read limit of the bytes of the experts that are chosen; with `--tiles` for several sizes of Triton's tiles.
Then whole models of random weights, patched as users patch them, with the share of the read limit of the bytes that a
token needs. Stock transformers runs first and last, in the floats that `--dtype` says. The recipe `mxfp4` is `exact`
with experts in MXFP4, as gpt-oss is published. `--tiny` takes sizes that a CPU runs in seconds.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformers

import accelpatch
from accelpatch.bench.read_limit import read_limit
from accelpatch.kernels import dispatch
from accelpatch.kernels.layouts import expert_tiles
from accelpatch.kernels.layouts.expert_stack import Stack
from accelpatch.kernels.ops.experts import experts
from accelpatch.kernels.ops.experts.cases import in_tiles, of_random
from accelpatch.recipe.recipe import parse
from scripts.benchmarks.engines import Taken, answers, figures, freed, patched, stock, title
from scripts.benchmarks.harness import TINY, Case, Option, Table, cases, common, table
from scripts.benchmarks.kernels import check, implementations, timed

COMMON = {"vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False, "eos_token_id": None}
#: shape -> (class, configuration besides the number of layers, (E, H, I, k))
SHAPES: dict[str, tuple[str, dict[str, Any], tuple[int, int, int, int]]] = {
    "mixtral": ("Mixtral", {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                            "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
                (8, 4096, 14336, 2)),
    "qwen3_moe": ("Qwen3Moe", {"hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32,
                               "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "norm_topk_prob": True,
                               "num_experts_per_tok": 8, "intermediate_size": 6144}, (128, 2048, 768, 8)),
    "gpt_oss": ("GptOss", {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
                           "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
                           "num_experts_per_tok": 4}, (32, 2880, 2880, 4)),
    "small": ("Mixtral", {"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 16,
                          "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2},
              (8, 1024, 3584, 2)),
}  # fmt: skip
SMALL = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512}  # fmt: skip
TINY_CASES = [Case(1, 16), Case(3, 16), Case(1, 40, 1)]
MXFP4 = """
name: mxfp4
extends: exact
verify: {bound: 0.3}
rules: [{name: experts, replace: mxfp4_experts, options: {}}]
"""
STOCK, AGAIN = "stock transformers", "stock transformers again"


@dataclass(frozen=True)
class Kind:
    """How experts hold weights. group: values that share a scale, 0 for a row. codes: of a codebook."""

    bits: int
    group: int = 0
    codes: str = ""
    tiled: bool = False


KINDS = {
    "floats": Kind(16), "int8": Kind(8), "4 bits": Kind(4, 128), "4 bits in tiles": Kind(4, 128, tiled=True),
    "4 bits in groups of 64": Kind(4, 64), "4 bits in groups of 64 in tiles": Kind(4, 64, tiled=True),
    "MXFP4": Kind(4, 32, "e2m1"), "MXFP4 in tiles": Kind(4, 32, "e2m1", tiled=True),
}  # fmt: skip
GATES = {"gpt_oss": ("clamped_swiglu", 1.702, 7.0)}  # of the shapes whose gate is not SiLU, with biases
CHECKED = (8, 1024, 512, 2)  # the size of the layer whose numbers are checked
TOKENS = (1, 4, 16, 32, 128, 512)
CASES = [Case(1, 128), Case(32, 128), Case(1, 512, 1)]
WARM_UP = 2
OPTIONS = (
    Option("shapes", ["mixtral", "qwen3_moe"], "Shapes of the models.", SHAPES), cases(CASES),
    *common(device="cuda", dtype="bfloat16", recipes=["exact", "int8", "int4"], repeats=5),
    Option("layers", 8, "Layers of a model."),
    Option("kinds", list(KINDS), "Weights of the kernels that are timed by themselves.", KINDS),
    Option("only", None, "A part alone; the checks come first in any.", ["kernels", "models"]),
    Option("tiles", False, "Time the kernels for one token by many tiles."), TINY,
)  # fmt: skip


def why_not(size: tuple[int, int, int, int], kind: str) -> str | None:
    """Why experts of a size do not lie so; None where they do."""
    held, (_, width, inner, _) = KINDS[kind], size
    for n, k in ((2 * inner, width), (width, inner)):
        if held.group and k % held.group:
            return f"groups of {held.group} do not divide {k}"
        scales = None if held.codes else torch.bfloat16
        if held.tiled and (reason := expert_tiles.unfit(n, k, held.group, scales, held.codes)):
            return reason
    return None


def weights_of(
    size: tuple[int, int, int, int], kind: str, device: torch.device, dtype: torch.dtype, bias: bool = False
) -> list[Stack]:
    """Random weights of one layer of a shape."""
    (number, width, inner, _), held = size, KINDS[kind]
    generator = torch.Generator().manual_seed(1)
    stacks = [
        of_random(generator, dtype, device, held.bits, number, n, k, held.group, bias, False, held.codes)
        for n, k in ((2 * inner, width), (width, inner))
    ]
    return list(in_tiles(stacks[0], stacks[1], inner)) if held.tiled else stacks


def arguments_of(
    size: tuple[int, int, int, int], weights: list[Stack], tokens: int, device: torch.device, dtype: torch.dtype,
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
    device: torch.device, dtype: torch.dtype, kinds: Sequence[str]
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Rows of a large layer of each kind; where all are timed, every case of the operation before."""
    generator = torch.Generator().manual_seed(5)
    for case in dispatch.kernel(experts.OP).cases() if len(kinds) == len(KINDS) else ():
        yield case.id, case.make(generator, dtype, device)
    for kind in kinds:
        weights = weights_of(CHECKED, kind, device, dtype)
        for tokens in (1, 3, 40, 300):
            yield f"{kind}, {tokens} tokens", arguments_of(CHECKED, weights, tokens, device, dtype)


def chosen_bytes(args: tuple[Any, ...]) -> int:
    """Bytes of the experts that a call reads, each once."""
    number, hit = args[3].shape[0], len(args[1].unique())
    return sum(one.nbytes for one in args[3:11] if one is not None) * hit // number


@contextmanager
def tiles(bits: int, rows: tuple[int, int], warps: int) -> Iterator[None]:
    """The kernels for few tokens by other tiles."""
    from accelpatch.kernels.triton import experts as kernels

    kind = {4: kernels.INT4, 8: kernels.INT8}.get(bits, kernels.FLOAT)
    up, down = ({kind: kernels.Rows(one, warps)} for one in rows)
    with mock.patch.dict(kernels.GATE_UP, up), mock.patch.dict(kernels.DOWN, down):
        yield


def kernels(asked: argparse.Namespace, limit: float) -> list[dict[str, Any]]:
    """Times of one layer's experts."""
    device, dtype = torch.device(asked.device), getattr(torch, asked.dtype)
    printed = Table("the experts of one layer; shares of the read limit")
    for shape, kind in itertools.product(asked.shapes, asked.kinds):
        size = (8, 256, 128, 2) if asked.tiny else SHAPES[shape][2]
        if reason := why_not(size, kind):
            print(f"{shape}, {kind}: {reason}", flush=True)
            continue
        weights = weights_of(size, kind, device, dtype, bias=shape in GATES)
        for tokens in TOKENS[: 3 if asked.tiny else None]:
            args = arguments_of(size, weights, tokens, device, dtype, *([GATES[shape]] if shape in GATES else []))
            for by, form in forms_of(args, kind, device, asked.tiles and tokens == 1):
                with nullcontext() if form is None else tiles(KINDS[kind].bits, *form):
                    seconds = _seconds(args, by, device)
                label = None if form is None else f"rows {form[0][0]} and {form[0][1]}, {form[1]} warps"
                printed.add({"shape": shape, "weights": kind, "by": by, "tokens": tokens, "tile": label,
                             "taken, us": 1e6 * seconds, "share": chosen_bytes(args) / seconds / limit})  # fmt: skip
        del args, weights
    return printed.rows


def forms_of(args: tuple[Any, ...], kind: str, device: torch.device, tiles: bool) -> list[tuple[str, Any]]:
    """(implementation, rows and warps of Triton's tiles, None for its own) to take the time of.

    On a GPU torch's is left out: it asks the host which experts run.
    """
    names = [name for name in implementations(experts.OP, args, device) if device.type == "cpu" or name != "torch"]
    made: list[tuple[str, Any]] = [(name, None) for name in names]
    if tiles and "triton" in names and not KINDS[kind].tiled:
        rows = itertools.product((2, 4, 8, 16), (2, 4, 8, 16))
        made += [("triton", form) for form in itertools.product(rows, (1, 2, 4, 8))]
    return made


def _seconds(args: tuple[Any, ...], by: str, device: torch.device) -> float:
    def call() -> Any:
        with dispatch.forced(by):
            return experts.experts(*args)

    return timed(call, device).median


def model_of(shape: str, asked: argparse.Namespace) -> Any:
    """A model of random weights, the same for every engine."""
    prefix, config, _ = SHAPES[shape]
    config = COMMON | config | {"num_hidden_layers": asked.layers} | (SMALL if asked.tiny else {})
    torch.manual_seed(0)
    with torch.device(asked.device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, asked.dtype))
        try:
            made = getattr(transformers, f"{prefix}ForCausalLM")(getattr(transformers, f"{prefix}Config")(**config))
        finally:
            torch.set_default_dtype(before)
        with torch.no_grad():
            for parameter in made.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return made.eval()


def engine(shape: str, recipe: str, asked: argparse.Namespace) -> tuple[int, dict[Case, Taken]]:
    """Bytes that a token needs, and what was taken, of one shape by one recipe, or by stock transformers."""
    model = model_of(shape, asked)
    one = stock(model, recipe, accelpatch.plan(model, "exact").report().token_bytes[0])
    if recipe not in (STOCK, AGAIN):
        one = patched(model, parse(MXFP4) if recipe == "mxfp4" else recipe, recipe, keep=False)
        sites = model.accelpatch.report().sites
        left = [site for site in sites if site.role == "experts" and site.replacer is None]
        print(f"{shape} by {recipe}: {len(left)} sites of experts left", flush=True)
    taken = {
        case: answers({"": one}, case.ids(model), case.new, asked.repeats, WARM_UP)[""] for case in asked.cases
    }  # fmt: skip
    size = one.bytes
    del model, one
    freed()
    return size, taken


def models(asked: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Every shape by stock transformers, by each recipe, and by stock transformers again."""
    found = dict[str, Any]()
    for shape in asked.shapes:
        made = {name: engine(shape, name, asked) for name in (STOCK, *asked.recipes, AGAIN)}
        for case in asked.cases:
            read = {name: float(size) for name, (size, _) in made.items()} if case.batch == 1 else None
            taken = {name: one[case] for name, (_, one) in made.items()}
            about = f"{shape}, {asked.layers} layers, {asked.dtype}, {title(case, asked.repeats, WARM_UP)}"
            rows = figures(case, taken, [STOCK, "exact"], limit=limit, read=read)
            found[f"{shape} {case}"] = table(rows, about)
    return found


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Check, then the parts that were asked for."""
    found, device = dict[str, Any](), torch.device(asked.device)
    check(experts.OP, calls_to_check(device, getattr(torch, asked.dtype), asked.kinds), device)
    limit = read_limit(device).bytes_per_second
    print(f"read limit {limit / 1e9:.0f} GB/s")
    if asked.tiny and asked.cases == CASES:
        asked.cases = TINY_CASES
    if asked.only != "models":
        found["kernels"] = kernels(asked, limit)
    return found | ({} if asked.only == "kernels" else models(asked, limit))
