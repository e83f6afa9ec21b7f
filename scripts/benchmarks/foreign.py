"""Checkpoints that others quantised beside the project's own recipes, and bitsandbytes' own nf4: new tokens a second.

Folders of the named shape with random codes are written to a temporary folder and loaded as users load them
(accelpatch.load). Of the project's own, int4 (in groups of 128) and int8 have the same head, and exact rounds nothing.
Each loaded model's captured step is first held to its module path: the same tokens. Every engine runs once in each of
`--repeats` turns. --bitsandbytes: the nf4 folder by transformers and bitsandbytes, stock generate().
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

import accelpatch
from accelpatch.kernels.codebooks import CODEBOOKS
from accelpatch.recipe import recipe
from scripts.benchmarks.engines import (
    Engine,
    among_the_best,
    freed,
    introduce,
    patched,
    random_model,
    shaped,
    stock,
    turns,
)
from scripts.benchmarks.harness import TINY, Case, Option, cases, common
from scripts.benchmarks.rates import Rates

THEIRS = "bitsandbytes"
GROUP, BLOCK, NESTED = 128, 64, 256
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq"}
#: kind -> its quantization_config
CONFIGS: Mapping[str, dict[str, Any]] = {
    "gptq": _GPTQ | {"sym": True, "desc_act": False},
    "gptq, act-order": _GPTQ | {"sym": False, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "nf4": {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
    },
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}  # fmt: skip
NF4 = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "nested_blocksize": NESTED,
       "nested_dtype": "float32", "nested_offset": 0.04}  # fmt: skip
OPTIONS = (
    *common(model="llama2-7b", device="cuda", repeats=5), cases(CONFIGS, "Kinds of checkpoints."),
    Option("layers", None, "Fewer layers than the model has.", kind=int),
    Option("own", ["int4"], "Own formats beside them; ratios are to the first.", ["int4", "int8", "exact"]),
    Option("batch", [1], "Sequences at once."),
    Option("bitsandbytes", False, "Time bitsandbytes' own nf4 too."), Option("new", 128, "New tokens."), TINY,
)  # fmt: skip
SMALL = {  # --tiny: every format's groups divide these widths
    "class": "LlamaForCausalLM",
    "config": {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip
RECIPE = """
name: own
extends: exact
verify: {bound: 0.3}
rules: [{name: linear, match: {role: linear}, replace: REPLACER, options: {group_size: GROUPS}}]
"""
REPLACERS = {"int4": ("int4_weight_only", "[128, 64]"), "int8": ("int8_weight_only", "null")}


def write(folder: Path, kind: str, model: Any) -> None:
    """Write a checkpoint of a kind, with random codes, in the shapes of a model on the device."""
    folder.mkdir(parents=True)
    config = model.config.to_dict() | {"quantization_config": CONFIGS[kind], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator(model.device).manual_seed(1)
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("proj.weight"):
            path = name.removesuffix(".weight")
            parts = parts_of(kind, path, *tensor.shape, generator)
            state |= {f"{path}.{part}": one.cpu() for part, one in parts}
        else:
            state[name] = tensor.cpu()
    save_torch_state_dict(state, folder)


def act_order(path: str, k: int) -> Tensor:
    """g_idx of act-order; layers of one input have the same one, as GPTQ makes it from that input."""
    place = path.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
    seed = sum(ord(one) * (at + 1) for at, one in enumerate(place))
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    return torch.empty(k, dtype=torch.int32).index_put_((order,), torch.arange(k, dtype=torch.int32) // GROUP)


def parts_of(kind: str, path: str, n: int, k: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer[n, k], by what follows its name."""
    here: Any = {"device": generator.device}

    def words(rows: int, columns: int, dtype: torch.dtype = torch.int32) -> Tensor:
        made = torch.randint(-(2**31), 2**31, (rows, columns), generator=generator, dtype=torch.int32, **here)
        return made.view(dtype)

    def uniform(low: float, high: float, *size: int) -> Tensor:
        return torch.rand(size, generator=generator, **here) * (high - low) + low

    if kind.startswith("gptq"):
        ordered = kind.endswith("act-order")
        yield "qweight", words(k // 8, n)
        zeros = 0x66667777 if ordered else 0x77777777  # v1 has them less one
        yield "qzeros", torch.full((k // GROUP, n // 8), zeros, dtype=torch.int32, **here)
        yield "scales", uniform(0.002, 0.004, k // GROUP, n).half()
        yield "g_idx", act_order(path, k) if ordered else torch.arange(k, dtype=torch.int32) // GROUP
    elif kind == "awq":
        yield "qweight", words(k, n // 8)
        yield "qzeros", torch.full((k // GROUP, n // 8), 0x78787878, dtype=torch.int32, **here)
        yield "scales", uniform(0.002, 0.004, k // GROUP, n).half()
    elif kind == "nf4":
        text = list(json.dumps(NF4 | {"shape": [n, k]}).encode())
        yield "weight", words(n * k // 8, 1, torch.uint8).view(-1, 1)
        yield "weight.absmax", words(1, -(-n * k // BLOCK // 4), torch.uint8).flatten()[: n * k // BLOCK]
        yield "weight.quant_map", torch.tensor(CODEBOOKS["nf4"])
        yield "weight.nested_absmax", torch.full((-(-n * k // BLOCK // NESTED),), 0.02)
        yield "weight.nested_quant_map", torch.linspace(-1, 1, 256)
        yield "weight.quant_state.bitsandbytes__nf4", torch.tensor(text, dtype=torch.uint8)
    elif kind == "nvfp4":
        yield "weight", words(n, k // 8, torch.uint8)
        yield "weight_scale", uniform(200, 400, n, k // 16).to(torch.float8_e4m3fn)
        yield "weight_scale_2", torch.tensor(2e-5)
    else:
        codes = torch.randn(n, k, generator=generator, **here) * 100
        yield "weight", codes.clamp_(-448, 448).to(torch.float8_e4m3fn)
        yield "weight_scale_inv", uniform(1e-4, 2e-4, -(-n // 128), -(-k // 128))


def model_of(asked: argparse.Namespace) -> Any:
    """The model in floats, of as many layers as are asked for."""
    base = shaped(SMALL, asked) if asked.tiny else random_model(asked, endless=False)
    base.model.layers = base.model.layers[: asked.layers]
    base.config.num_hidden_layers = len(base.model.layers)
    if getattr(base.config, "layer_types", None):
        base.config.layer_types = base.config.layer_types[: asked.layers]
    return base


def own(name: str, base: Any) -> Engine:
    """The model by one of the project's own formats."""
    how: Any = name
    if name in REPLACERS:
        replacer, groups = REPLACERS[name]
        how = recipe.parse(RECIPE.replace("REPLACER", replacer).replace("GROUPS", groups), source="own")
    return patched(base, how, f"{name}, own", keep=False)


def engines(asked: argparse.Namespace, folder: Path) -> list[Engine]:
    """Own formats, each checkpoint as it is loaded, and bitsandbytes' own nf4."""
    base = model_of(asked)
    folders = {kind: folder / kind.replace(", ", "-") for kind in asked.cases}
    for kind, place in folders.items():
        write(place, kind, base)
        print(f"{kind}: {sum(one.stat().st_size for one in place.iterdir()) / 1e9:.2f} GB are written", flush=True)
    made = [own(asked.own[0], base), *(own(name, model_of(asked)) for name in asked.own[1:])]
    for kind, place in folders.items():
        loaded = accelpatch.load(str(place), dtype=torch.bfloat16, device=asked.device)
        made.append(stock(loaded.model, kind))
        introduce(made[-1])
        freed()
    if asked.bitsandbytes:
        from transformers import AutoModelForCausalLM

        options: Any = {"dtype": torch.bfloat16, "device_map": {"": asked.device}}
        made.append(stock(AutoModelForCausalLM.from_pretrained(folder / "nf4", **options).eval(), THEIRS))
        made[-1].most = min(asked.new, 24)
    return made


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Write, load, check, time."""
    every = [Case(batch, 128, asked.new) for batch in asked.batch]
    with tempfile.TemporaryDirectory() as folder:
        made = engines(asked, Path(folder))
    ids = Case(1, 128, asked.new).ids(made[0].model)
    if bad := [one.name for one in made if one.name != THEIRS and not among_the_best(one, ids)]:
        sys.exit(f"other tokens, so nothing is timed: {', '.join(bad)}")
    printed = Rates(turns(asked.repeats, 2), [made[0].name])
    printed.in_turn(made, every, asked.repeats, 2)
    return {"rows": printed.rows}
