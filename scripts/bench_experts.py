"""Models with experts: stock transformers beside exact, int8 and int4; and the kernels of experts by themselves.

    python scripts/bench_experts.py [--shapes mixtral qwen3_moe] [--device cuda] [--dtype bfloat16] [--layers 8]
        [--recipes exact int8 int4] [--new 128] [--repeats 5] [--only kernels] [--tiles] [--tiny] [--json FILE]

First every kind of weight, with few tokens and many, is held to the float rule, by each implementation that can run; a
failure ends the run. Then the kernels on one layer of each shape, by each of them, with the share of the device's read
limit of the bytes of the experts that are chosen; with `--tiles` for several sizes of Triton's tiles. Then whole models
of random weights, patched as users patch them: decoding at batch 1 and 32 and a prompt of 512, with the share of the
read limit of the bytes that a token needs. Stock transformers runs first and last. `--tiny` takes sizes that a CPU runs
in seconds.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

import accelpatch
from accelpatch.bench.generate import Shape, generate, prompt_ids
from accelpatch.bench.read_limit import read_limit
from accelpatch.bench.timing import measure, measure_replays, once
from accelpatch.device import probe
from accelpatch.kernels import dispatch
from accelpatch.kernels.check import parity
from accelpatch.kernels.layouts.expert_stack import Stack
from accelpatch.kernels.ops.experts import experts
from accelpatch.kernels.ops.experts.cases import in_tiles, of_random

COMMON = {"vocab_size": 32000, "max_position_embeddings": 4096, "tie_word_embeddings": False, "eos_token_id": None}
#: shape -> (class, configuration besides the number of layers, (E, H, I, k))
SHAPES: dict[str, tuple[str, dict[str, Any], tuple[int, int, int, int]]] = {
    "mixtral": ("Mixtral", {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                            "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
                (8, 4096, 14336, 2)),
    "qwen3_moe": ("Qwen3Moe", {"hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32,
                               "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "norm_topk_prob": True,
                               "num_experts_per_tok": 8, "intermediate_size": 6144}, (128, 2048, 768, 8)),
    "small": ("Mixtral", {"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 16,
                          "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2},
              (8, 1024, 3584, 2)),
}  # fmt: skip
LARGE = ("mixtral", "qwen3_moe")
TINY = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512}  # fmt: skip
STOCK = "stock transformers"
KINDS = {"floats": 16, "int8": 8, "4 bits": 4, "4 bits in tiles": 4}
TILED = "4 bits in tiles"
CHECKED = (8, 1024, 512, 2)  # the size of the layer whose numbers are checked
TOKENS = (1, 4, 16, 32, 128, 512)
SIZES, TINY_SIZES = (128, 32, 512), (16, 3, 40)  # prompt before decoding, batch, prompt whose time is taken


def weights_of(size: tuple[int, int, int, int], kind: str, device: torch.device, dtype: torch.dtype) -> list[Stack]:
    """Random weights of one layer of a shape."""
    number, width, inner, _ = size
    generator, bits = torch.Generator().manual_seed(1), KINDS[kind]
    group = 128 if bits == 4 else 0
    stacks = [
        of_random(generator, dtype, device, bits, number, n, k, group, False, False)
        for n, k in ((2 * inner, width), (width, inner))
    ]
    return list(in_tiles(stacks[0], stacks[1], inner)) if kind == TILED else stacks


def arguments_of(
    size: tuple[int, int, int, int], weights: list[Stack], tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[Any, ...]:
    """Arguments of the operation on one layer of a shape; each token's experts differ."""
    number, width, _, chosen = size
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, width, generator=generator).to(device, dtype)
    ids = torch.stack([torch.randperm(number, generator=generator)[:chosen] for _ in range(tokens)]).to(device)
    routing = torch.rand(tokens, chosen, generator=generator).to(device, dtype)
    return x, ids, routing, *weights[0], *weights[1], "silu", 0.0, 0.0, None


def checked(device: torch.device, dtype: torch.dtype) -> list[str]:
    """What is over the float rule: every case of the operation, and rows of a large layer, by all that can run."""
    bad = []
    kernel, generator = dispatch.kernel(experts.OP), torch.Generator().manual_seed(5)
    cases = [(case.id, case.make(generator, dtype, device)) for case in kernel.cases()]
    cases += [
        (f"{kind}, {tokens} tokens", arguments_of(CHECKED, weights, tokens, device, dtype))
        for kind, weights in ((kind, weights_of(CHECKED, kind, device, dtype)) for kind in KINDS)
        for tokens in (1, 3, 40, 300)
    ]
    for (name, args), by in ((case, by) for case in cases for by in implementations(case[1], device)):
        with dispatch.forced(by):
            made = kernel.op(*args)
        found = parity.check(experts.OP, args, (made,))[0]
        part = found.error / found.bound if found.bound else 0.0
        print(f"{name} by {by}: {part:.0%} of the float rule's bound", flush=True)
        bad += [f"{name} by {by}: {found.reason}"] * (not found.ok)
    return bad


def implementations(args: tuple[Any, ...], device: torch.device) -> list[str]:
    """Those that can run a call, the one that would be chosen first."""
    spec, here = dispatch.kernel(experts.OP).spec(*args), probe(device)
    order = dispatch.order(experts.OP, spec, here)
    return [name for name in order if dispatch.why_not(experts.OP, name, spec, here) is None]


def chosen_bytes(args: tuple[Any, ...]) -> int:
    """Bytes of the experts that a call reads, each once."""
    number, hit = args[3].shape[0], len(args[1].unique())
    return sum(one.nbytes for one in args[3:11] if one is not None) * hit // number


@contextmanager
def tiles(bits: int, rows: tuple[int, int], warps: int) -> Iterator[None]:
    """The kernels for few tokens by other tiles."""
    from accelpatch.kernels.triton import experts as kernels

    kind = {4: kernels.INT4, 8: kernels.INT8}.get(bits, kernels.FLOAT)
    before = kernels.GATE_UP[kind], kernels.DOWN[kind]
    kernels.GATE_UP[kind], kernels.DOWN[kind] = (kernels.Rows(one, warps) for one in rows)
    try:
        yield
    finally:
        kernels.GATE_UP[kind], kernels.DOWN[kind] = before


def kernels(asked: argparse.Namespace, limit: float) -> list[dict[str, Any]]:
    """Times of one layer's experts."""
    device, dtype, found = torch.device(asked.device), getattr(torch, asked.dtype), list[dict[str, Any]]()
    for shape, kind in itertools.product(asked.shapes, KINDS):
        size = (8, 256, 128, 2) if asked.tiny else SHAPES[shape][2]
        weights = weights_of(size, kind, device, dtype)
        for tokens in TOKENS[: 3 if asked.tiny else None]:
            args = arguments_of(size, weights, tokens, device, dtype)
            for by, form in forms_of(args, kind, device, asked.tiles and tokens == 1):
                with nullcontext() if form is None else tiles(KINDS[kind], *form):
                    seconds = _seconds(args, by, device)
                share = chosen_bytes(args) / seconds / limit
                label = "" if form is None else f", rows {form[0][0]} and {form[0][1]}, {form[1]} warps"
                print(f"{shape}, {kind} by {by}, {tokens} tokens{label}: {1e6 * seconds:.1f} us, "
                      f"{share:.0%} of the read limit", flush=True)  # fmt: skip
                found.append({"shape": shape, "kind": kind, "by": by, "tokens": tokens, "tile": form,
                              "seconds": seconds, "share": share})  # fmt: skip
        del args, weights
    return found


def forms_of(args: tuple[Any, ...], kind: str, device: torch.device, tiles: bool) -> list[tuple[str, Any]]:
    """(implementation, rows and warps of Triton's tiles, None for its own) to take the time of.

    On a GPU torch's is left out: it asks the host which experts run.
    """
    names = [name for name in implementations(args, device) if device.type == "cpu" or name != "torch"]
    made: list[tuple[str, Any]] = [(name, None) for name in names]
    if tiles and "triton" in names and kind != TILED:
        rows = itertools.product((2, 4, 8, 16), (2, 4, 8, 16))
        made += [("triton", form) for form in itertools.product(rows, (1, 2, 4, 8))]
    return made


def _seconds(args: tuple[Any, ...], by: str, device: torch.device) -> float:
    def call() -> Any:
        with dispatch.forced(by):
            return experts.experts(*args)

    if device.type == "cuda":
        return measure_replays(call).median
    return measure(call, device=device, repeats=5).median


def model_of(shape: str, asked: argparse.Namespace) -> Any:
    """A model of random weights, the same for every engine."""
    prefix, config, _ = SHAPES[shape]
    config = COMMON | config | {"num_hidden_layers": asked.layers} | (TINY if asked.tiny else {})
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


def timed(model: Any, shape: Shape, asked: argparse.Namespace) -> tuple[float, float]:
    """Median seconds of a generate() call for one token, and of the further tokens."""
    device = torch.device(asked.device)
    ids = prompt_ids(model.config.vocab_size, shape).to(device)
    first, more = list[float](), list[float]()
    for turn in range(asked.repeats + 2):
        one = once(lambda: generate(model, ids, 1), device)
        rest = once(lambda: generate(model, ids, shape.new), device) - one if shape.new > 1 else 0.0
        if turn > 1:
            first.append(one)
            more.append(rest)
    return statistics.median(first), statistics.median(more)


def engine(shape: str, recipe: str, asked: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Figures of one shape by one recipe, or by stock transformers."""
    model = model_of(shape, asked)
    needed = accelpatch.plan(model, "exact").report().token_bytes[0]
    if recipe != STOCK:
        accelpatch.patch(model, recipe, keep_original="none")
        report = model.accelpatch.report()
        needed = report.token_bytes[1]
        left = [site for site in report.sites if site.role == "experts" and site.replacer is None]
        print(f"{shape} by {recipe}: {report.verification.fused_layers} layers fused, "
              f"{len(left)} sites of experts left, over their bound: {report.verification.failures or 'none'}; "
              f"{'; '.join(report.notes)}", flush=True)  # fmt: skip
    new, (prompt, batch, long) = asked.new, TINY_SIZES if asked.tiny else SIZES
    _, more = timed(model, Shape(1, prompt, new), asked)
    _, batched = timed(model, Shape(batch, prompt, new), asked)
    first, _ = timed(model, Shape(1, long, 1), asked)
    rate = (new - 1) / more
    made = {"tokens_per_second": rate, "bytes": needed, "share": rate * needed / limit,
            "batch_tokens_per_second": batch * (new - 1) / batched, "prompt": first}  # fmt: skip
    del model
    gc.collect()
    if torch.device(asked.device).type == "cuda":
        torch.cuda.empty_cache()
    return made


def models(asked: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Every shape by stock transformers, by each recipe, and by stock transformers again."""
    found, (_, batch, long) = dict[str, Any](), TINY_SIZES if asked.tiny else SIZES
    for shape in asked.shapes:
        made = {name: engine(shape, name, asked, limit) for name in (STOCK, *asked.recipes)}
        made[f"{STOCK} again"] = engine(shape, STOCK, asked, limit)
        base, own = made[STOCK], made.get("exact", made[STOCK])
        print(f"\n{shape}, {asked.layers} layers, {asked.dtype}; beside stock transformers (and beside exact)")
        for name, one in made.items():
            print(
                f"  {name}: {one['tokens_per_second']:.1f} tokens/s "
                f"({one['tokens_per_second'] / base['tokens_per_second']:.2f}; "
                f"{one['tokens_per_second'] / own['tokens_per_second']:.2f}), {one['share']:.0%} of the read limit of "
                f"{one['bytes'] / 1e9:.3f} GB; batch {batch}: "
                f"{one['batch_tokens_per_second']:.0f} tokens/s "
                f"({one['batch_tokens_per_second'] / base['batch_tokens_per_second']:.2f}); prompt of {long}: "
                f"{1e3 * one['prompt']:.2f} ms ({base['prompt'] / one['prompt']:.2f})",
                flush=True,
            )
        found[shape] = made
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES], default=LARGE, help="Shapes of the models.")
    parser.add_argument("--device", default="cuda", help="Where it runs.")
    parser.add_argument("--dtype", default="bfloat16", help="Dtype of weights and activations.")
    parser.add_argument("--layers", type=int, default=8, help="Layers of a model.")
    parser.add_argument("--recipes", nargs="+", default=["exact", "int8", "int4"], help="Recipes beside the stock.")
    parser.add_argument("--new", type=int, default=128, help="New tokens of each sequence.")
    parser.add_argument("--repeats", type=int, default=5, help="Calls of each kind whose median is taken.")
    parser.add_argument("--only", choices=("kernels", "models"), help="A part alone; the checks come first in any.")
    parser.add_argument("--tiles", action="store_true", help="Time the kernels for one token by many tiles.")
    parser.add_argument("--tiny", action="store_true", help="Small sizes, to try the program.")
    parser.add_argument("--json", type=Path, help="A file for all figures.")
    return parser.parse_args()


def main() -> None:
    asked, found = arguments(), dict[str, Any]()
    device = torch.device(asked.device)
    print(f"{probe(device).name}, torch {torch.__version__}, transformers {transformers.__version__}")
    if bad := checked(device, getattr(torch, asked.dtype)):
        sys.exit("over the float rule, so nothing is timed:\n" + "\n".join(bad))
    limit = read_limit(device).bytes_per_second
    print(f"read limit {limit / 1e9:.0f} GB/s")
    if asked.only != "models":
        found["kernels"] = kernels(asked, limit)
    if asked.only != "kernels":
        found["models"] = models(asked, limit)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
