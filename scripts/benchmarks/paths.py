"""Every way in which a program may call a patched model, timed beside the model that is not patched.

    python scripts/bench.py paths [--model llama2-7b] [--device cuda] [--dtype bfloat16] [--recipes exact int8 int4]
        [--cases ids generate ...] [--others bert whisper] [--repeats 5]

The model has the named shape and random weights. It is patched as users patch it, verified; only the originals are
freed, to make room for several engines. Each figure is how often the patched model does what the unpatched one does
once in the same time: the ratio of the medians over `--repeats` turns, in which every engine runs once, in an order
that changes from turn to turn. Below 1.0 it is slower than unpatched. Cases: `ids` are calls of model(ids) of several
sizes; --others: models of other kinds, by one call each.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.bench.timing import once
from scripts.benchmarks.engines import STOCK, in_turn, patched, random_model
from scripts.benchmarks.harness import TINY, Option, Table, cases, common

Call = Callable[[Any], Any]
#: batch x ids of the calls model(ids)
SIZES = {
    "cuda": [(1, 1), (1, 32), (1, 128), (1, 512), (1, 2048), (8, 32), (8, 128), (8, 512), (8, 2048)],
    "cpu": [(1, 1), (1, 32), (1, 128), (1, 512), (8, 16)],
}
NEW = {"cuda": 32, "cpu": 16}  # tokens of a call of generate()
WARM_UP = 3  # calls


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


def generating(batch: int = 1, **options: Any) -> Call:
    """generate() of exactly so many greedy tokens after a prompt of 128."""

    def call(model: Any) -> Any:
        ids = ids_of(model, batch, 128)
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
        with next(model.parameters()).device:
            vars(model)["bench_assistant"] = type(model)._from_config(config, dtype=model.dtype).eval()
    return generating(assistant_model=vars(model)["bench_assistant"])(model)


PATHS: dict[str, Call] = {
    "generate, prompt 128": generating(),
    "generate, batch 64": generating(batch=64),
    "beams of 4": generating(num_beams=4),
    "sampled": generating(num_beams=1, top_k=50),
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
    return model, {
        "Whisper-base, 30 s of sound": lambda model: model.generate(
            sound, max_new_tokens=NEW[device.type], do_sample=False
        )
    }


LARGE: dict[str, int] = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096
}  # fmt: skip


def bert_large(device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Call]]:
    """An encoder of BERT-large's shape, with masks as a tokenizer makes them."""
    from transformers import BertConfig, BertModel

    def call(batch: int, length: int, least: int | None = None) -> Call:
        lengths = torch.randint(least or length, length + 1, (batch,), generator=torch.Generator().manual_seed(0))
        mask = (torch.arange(length) < lengths[:, None]).long().to(device)

        def run(model: Any) -> Any:
            with torch.no_grad():
                made = model(ids_of(model, batch, length), attention_mask=mask).last_hidden_state
            return made * mask[..., None]  # what is at padded places is nobody's

        return run

    with device:
        model = BertModel._from_config(BertConfig(**LARGE), dtype=dtype).eval()
    sizes = ((1, 32), (8, 64), (32, 128), (16, 512), (64, 512))
    calls = {f"BERT-large, {b} x {n} ids": call(b, n) for b, n in sizes}
    return model, calls | {"BERT-large, 64 texts of 8 to 512 ids": call(64, 512, least=8)}


def vit_large(device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Call]]:
    """A vision encoder of ViT-large's shape."""
    from transformers import ViTConfig, ViTModel

    def call(batch: int) -> Call:
        pictures = torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0)).to(device, dtype)

        def run(model: Any) -> Any:
            with torch.no_grad():
                return model(pictures).last_hidden_state

        return run

    with device:
        model = ViTModel._from_config(ViTConfig(**LARGE), dtype=dtype).eval()
    return model, {f"ViT-large, {batch} pictures": call(batch) for batch in (1, 8, 32, 64)}


#: name -> (name of the shape, configuration of the text, of the tower, sections of the rotary frequencies)
VISION_LANGUAGE: dict[str, tuple[str, dict[str, Any], dict[str, Any], list[int]]] = {
    "qwen2.5-vl": (
        "Qwen2.5-VL-3B",
        {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
        {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048},
        [16, 24, 24],
    ),
    "qwen2.5-vl-0.5b": (
        "Qwen2.5-VL of 0.5B",
        {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
        {"depth": 4, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": 896,
         "fullatt_block_indexes": [3]},
        [8, 12, 12],
    ),
}  # fmt: skip


def qwen_vl(name: str, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Call]]:
    """A model of VISION_LANGUAGE: a picture of 32 x 32 patches, which are 256 tokens, and 34 tokens of text."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    said, text, tower, sections = VISION_LANGUAGE[name]
    axes = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    text |= {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True, "rope_parameters": axes}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=tower)
    with device:
        model: Any = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 1000, (1, 290), generator=draw)
    picture = config.image_token_id
    ids[0, 10], ids[0, 11:267], ids[0, 267] = config.vision_start_token_id, picture, config.vision_end_token_id
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "image_grid_thw": torch.tensor([[1, 32, 32]])}
    given |= {"mm_token_type_ids": (ids == picture).int()}
    given = {key: one.to(device) for key, one in given.items()}
    pixels = torch.randn(1024, 1176, generator=draw).to(device, dtype)

    def call(new: int) -> Call:
        count = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
        return lambda model: model.generate(**given, pixel_values=pixels, **count)

    return model, {f"{said}, a picture, {new} tokens": call(new) for new in (1, 64)}


OTHERS = {"bert": bert, "bert-large": bert_large, "vit-large": vit_large, "whisper": whisper}
OTHERS |= {name: partial(qwen_vl, name) for name in VISION_LANGUAGE}
CASES = {"ids": None, **PATHS}
OPTIONS = (
    *common(model="llama2-7b", device="cuda", dtype="bfloat16", recipes=["exact", "int8", "int4"], repeats=5),
    cases(CASES, "The calls of the language model to time; ids is model(ids)."),
    Option("others", list(OTHERS), "Models of other kinds to time, by one call each.", OTHERS), TINY,
)  # fmt: skip


def timed(base: nn.Module, calls: dict[str, Call], asked: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a path."""
    engines = {STOCK: base} | {recipe: patched(base, recipe).model for recipe in asked.recipes}
    device = next(base.parameters()).device
    printed = Table(f"times unpatched, medians of {asked.repeats} after {WARM_UP} to warm up")
    for name, call in calls.items():
        for model in engines.values():
            for _ in range(WARM_UP):
                call(model)
        runs = {engine: partial(once, partial(call, model), device) for engine, model in engines.items()}
        found = in_turn(runs, asked.repeats, 0, alternating=True)
        middle = {engine: statistics.median(seconds) for engine, seconds in found.items()}
        ratios = {f"{recipe}, times": middle[STOCK] / middle[recipe] for recipe in asked.recipes}
        printed.add({"path": name, f"{STOCK}, ms": 1e3 * middle[STOCK]} | ratios)
        printed.rows[-1]["seconds"] = found
    return printed.rows


def models(asked: argparse.Namespace) -> Iterable[tuple[nn.Module, dict[str, Call]]]:
    """One after the other, each with its calls."""
    device, dtype = torch.device(asked.device), getattr(torch, asked.dtype)
    if asked.cases:
        sizes = {f"model(ids), {b} x {n} ids": forward(b, n) for b, n in SIZES[device.type] if "ids" in asked.cases}
        yield random_model(asked), sizes | {name: PATHS[name] for name in asked.cases if name != "ids"}
    for name in asked.others:
        yield OTHERS[name](device, dtype)


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """A table a model."""
    return {"rows": [row for model, calls in models(asked) for row in timed(model, calls, asked)]}
