"""Every way in which a program may call a patched model, timed beside the model that is not patched.

    python scripts/bench_paths.py [--model llama2-7b] [--device cuda] [--dtype bfloat16] [--recipes exact int8 int4]
        [--paths ids generate ...] [--others bert whisper] [--repeats 5] [--json FILE] [--profile PATH]

The model has the named shape and random weights. It is patched as users patch it, verified; only the
originals are freed, to make room for several engines. Each
figure is how often the patched model does what the unpatched one does once in the same time: the ratio of the medians
over `--repeats` turns, in which every engine runs once. Below 1.0 it is slower than unpatched. Paths: `ids` are calls
of model(ids) of several sizes, the others those of `PATHS`; --others: models of other kinds, by one call each.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import accelpatch
from accelpatch.bench.timing import once
from accelpatch.models import load

Call = Callable[[Any], Any]
#: batch x ids of the calls model(ids)
SIZES = {
    "cuda": [(1, 1), (1, 32), (1, 128), (1, 512), (1, 2048), (8, 32), (8, 128), (8, 512), (8, 2048)],
    "cpu": [(1, 1), (1, 32), (1, 128), (1, 512), (8, 16)],
}
NEW = {"cuda": 32, "cpu": 16}  # tokens of a call of generate()


def ids_of(model: Any, batch: int, length: int) -> Tensor:
    """Random ids [batch, length]."""
    size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(5, size, (batch, length), generator=torch.Generator().manual_seed(0))
    return ids.to(next(model.parameters()).device)


def forward(batch: int, length: int) -> Call:
    """model(ids), as who scores or embeds calls it."""

    def call(model: Any) -> Any:
        with torch.no_grad():
            return model(ids_of(model, batch, length)).logits

    return call


def generating(batch: int = 1, prompt: int = 128, **options: Any) -> Call:
    """generate() of exactly so many greedy tokens."""

    def call(model: Any) -> Any:
        ids = ids_of(model, batch, prompt)
        new = NEW[ids.device.type]
        given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "min_new_tokens": new}
        return model.generate(ids, **given, do_sample=False, **options)

    return call


def hooked(model: Any) -> Any:
    """generate() while somebody watches one module."""
    handle = model.get_submodule("model.layers.3.mlp").register_forward_hook(lambda module, args, out: None)
    try:
        return generating()(model)
    finally:
        handle.remove()


def assisted(model: Any) -> Any:
    """generate() with a small model that drafts."""
    if not hasattr(model, "bench_assistant"):
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = 2
        kind = next(model.parameters()).device
        with kind:
            small = type(model)._from_config(config, dtype=model.dtype).eval()
        vars(model)["bench_assistant"] = small
    return generating(assistant_model=vars(model)["bench_assistant"])(model)


PATHS: dict[str, Call] = {
    "generate, prompt 128": generating(),
    "generate, batch 64": generating(batch=64),
    "beams of 4": generating(num_beams=4),
    "sampled": generating(prompt=128, num_beams=1, top_k=50),
    "a forward hook on one module": hooked,
    "an assistant model": assisted,
    "output_scores": generating(return_dict_in_generate=True, output_scores=True),
    "hidden states": generating(return_dict_in_generate=True, output_hidden_states=True),
}


def bert(device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Call]]:
    """An encoder of BERT-base's shape."""
    from transformers import BertConfig, BertForMaskedLM

    with device:
        model = BertForMaskedLM._from_config(BertConfig(), dtype=dtype).eval()
    return model, {f"BERT-base, {b} x {n} ids": forward(b, n) for b, n in ((1, 32), (8, 128))}


def whisper(device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Call]]:
    """A speech model of Whisper-base's shape."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    shape = {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048}
    heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
    with device:
        model: Any = WhisperForConditionalGeneration._from_config(WhisperConfig(**shape, **heads), dtype=dtype).eval()
    model.generation_config.update(eos_token_id=None, pad_token_id=50256, suppress_tokens=None)
    sound = torch.randn(1, 80, 3000, generator=torch.Generator().manual_seed(0)).to(device, dtype)

    def transcribe(model: Any) -> Any:
        return model.generate(sound, max_new_tokens=NEW[device.type], do_sample=False)

    return model, {"Whisper-base, 30 s of sound": transcribe}


OTHERS = {"bert": bert, "whisper": whisper}


def paths(asked: argparse.Namespace) -> dict[str, Call]:
    """What is timed of the language model."""
    kind = torch.device(asked.device).type
    found = {f"model(ids), {b} x {n} ids": forward(b, n) for b, n in SIZES[kind] if "ids" in asked.paths}
    return found | {name: PATHS[name] for name in asked.paths if name != "ids"}


def table(base: nn.Module, calls: dict[str, Call], asked: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a path; also printed."""
    engines: dict[str, Any] = {"unpatched": base}
    for recipe in asked.recipes:
        engines[recipe] = accelpatch.patch(copy.deepcopy(base), recipe, keep_original="none")
        lost = engines[recipe].accelpatch.report().verification.failures
        print(f"{recipe}: {len(lost)} sites over their bound {lost[:2]}", flush=True)
    device, rows = next(base.parameters()).device, []
    print("\n| path | unpatched, ms | " + " | ".join(asked.recipes) + " |\n" + "| --- " * (len(engines) + 1) + "|")
    for name, call in calls.items():
        times: dict[str, list[float]] = {engine: [] for engine in engines}
        for model in engines.values():
            for _ in range(3):
                call(model)
        for turn in range(asked.repeats):  # who runs behind whom changes from turn to turn
            for engine, model in list(engines.items())[:: 1 - 2 * (turn % 2)]:
                times[engine].append(once(lambda m=model, c=call: c(m), device))
        middle = {engine: statistics.median(found) for engine, found in times.items()}
        ratios = [middle["unpatched"] / middle[recipe] for recipe in asked.recipes]
        print(
            f"| {name} | {1e3 * middle['unpatched']:.1f} | " + " | ".join(f"{r:.2f}" for r in ratios) + " |", flush=True
        )
        rows.append({"path": name, "seconds": times})
    if asked.profile:
        profiled(engines, calls[asked.profile])
    return rows


def profiled(engines: dict[str, Any], call: Call) -> None:
    """Where the host's time goes, by function."""
    import cProfile
    import pstats

    for name, model in engines.items():
        profile = cProfile.Profile()
        profile.runcall(call, model)
        print(f"\n{name}")
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama2-7b", help="The model whose shape is used (default: %(default)s).")
    parser.add_argument("--device", default="cuda", help="The device to run on (default: %(default)s).")
    parser.add_argument("--dtype", default="bfloat16", help="The type of the weights (default: %(default)s).")
    parser.add_argument("--recipes", nargs="*", default=["exact", "int8", "int4"],
                        help="The recipes to patch with (default: %(default)s).")  # fmt: skip
    parser.add_argument("--paths", nargs="*", default=["ids", *PATHS], choices=["ids", *PATHS],
                        help="The calls of the language model to time; ids is model(ids) (default: all).")  # fmt: skip
    parser.add_argument("--others", nargs="*", default=list(OTHERS), choices=list(OTHERS),
                        help="Models of other kinds to time, by one call each (default: all).")  # fmt: skip
    parser.add_argument("--repeats", type=int, default=5, help="Timed turns of each engine (default: %(default)s).")
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write all figures to this file.")
    parser.add_argument("--profile", metavar="PATH", help="Print where the host's time goes in this one of the paths.")
    return parser.parse_args()


def models(asked: argparse.Namespace) -> Iterable[tuple[nn.Module, dict[str, Call]]]:
    """One after the other, each with its calls."""
    device, dtype = torch.device(asked.device), getattr(torch, asked.dtype)
    if asked.paths:
        base: Any = load.random(asked.model, dtype=dtype, device=device)
        base.generation_config.eos_token_id = None
        yield base, paths(asked)
        del base
    for name in asked.others:
        asked.profile = None
        yield OTHERS[name](device, dtype)


def main() -> None:
    """Print, and write what was asked for."""
    asked = arguments()
    device = torch.device(asked.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"{asked.model}, {asked.dtype}, {name}, torch {torch.__version__}", flush=True)
    rows = [row for model, calls in models(asked) for row in table(model, calls, asked)]
    if asked.json:
        asked.json.write_text(json.dumps({"run": {k: str(v) for k, v in vars(asked).items()}, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
