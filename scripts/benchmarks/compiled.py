"""Time models of no known family, eager and patched, with and without torch.compile (`runtime: compile`).

    python scripts/bench.py compiled [--cases generates encoder] [--recipes exact int8]
        [--modes off default reduce-overhead] [--device cuda] [--dtype bfloat16] [--repeats 5]

`generates` is a language model of a class that no library has, with transformers' cache and generate(); `encoder` is a
plain module of layers that does not generate. Both have random weights. A call is a prompt and `--tokens` new ones, or
one forward. Figures are medians over `--repeats` turns in which every engine runs once: milliseconds of a call, and how
many times faster than the unpatched model it is. The outputs of every engine are compared with the unpatched model's.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from accelpatch.bench.timing import once
from scripts.benchmarks.engines import STOCK, freed, in_turn, patched
from scripts.benchmarks.harness import TINY, Option, Table, cases, common

CASES = ("generates", "encoder")
RULES = {"exact": "exact", "int8": "int8"}
OPTIONS = (
    cases(CASES, "What the model does.", choices=CASES),
    Option("modes", ["off", "default", "reduce-overhead"], "Values of runtime: compile."),
    Option("tokens", 64, "New tokens of a call."), Option("prompt", 128, "Tokens of a prompt, or of a forward."),
    *common(device="cuda", dtype="bfloat16", recipes=["exact", "int8"], repeats=5), TINY,
)  # fmt: skip


class OwnConfig(PreTrainedConfig):
    """Of OwnModel."""

    model_type = "benchmark-own"

    def __init__(self, size: int = 2048, depth: int = 16, heads: int = 16, vocab_size: int = 32000, **others: Any):
        self.size, self.depth, self.heads = size, depth, heads
        self.hidden_size, self.num_hidden_layers, self.num_attention_heads = size, depth, heads
        self.vocab_size = vocab_size
        super().__init__(**others)


class Layer(nn.Module):
    """Attention and a squared-ReLU MLP, each with a norm before and a learned scale after."""

    def __init__(self, size: int, heads: int, place: int):
        super().__init__()
        self.heads, self.place = heads, place
        self.before, self.between = nn.LayerNorm(size), nn.LayerNorm(size)
        self.mix, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.wide, self.narrow = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.scale = nn.Parameter(torch.ones(2, size))

    def forward(self, x: Tensor, cache: Any = None, causal: bool = False) -> Tensor:
        rows, length, size = x.shape
        parts = self.mix(self.before(x)).view(rows, length, 3, self.heads, size // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        if cache is not None:
            k, v = cache.update(k, v, self.place)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=causal and length > 1)
        x = x + self.scale[0] * self.out(y.transpose(1, 2).reshape(rows, length, size))
        return x + self.scale[1] * self.narrow(self.wide(self.between(x)).relu().square())


class OwnModel(PreTrainedModel, GenerationMixin):
    """A language model of no family."""

    config_class = OwnConfig
    _supports_sdpa = True

    def __init__(self, config: OwnConfig):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.size)
        self.blocks = nn.ModuleList([Layer(config.size, config.heads, place) for place in range(config.depth)])
        self.head = nn.Linear(config.size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, past_key_values: Any = None, use_cache: bool = True,
        logits_to_keep: int = 0, **others: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        cache = past_key_values if past_key_values is not None or not use_cache else DynamicCache()
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, cache, causal=True)
        return CausalLMOutputWithPast(logits=self.head(x[:, -logits_to_keep:]), past_key_values=cache)


class Encoder(nn.Module):
    """A model of no library: layers that see every place."""

    def __init__(self, size: int, depth: int, heads: int):
        super().__init__()
        self.blocks = nn.ModuleList([Layer(size, heads, place) for place in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def made(case: str, asked: argparse.Namespace) -> tuple[Any, dict[str, Tensor]]:
    """A model with random weights on the device, and the arguments of its call."""
    torch.manual_seed(0)
    sizes = {"size": 64, "depth": 2, "heads": 4} if asked.tiny else {"size": 2048, "depth": 16, "heads": 16}
    dtype = getattr(torch, asked.dtype)
    with torch.device(asked.device):
        if case == "encoder":
            return Encoder(**sizes).to(dtype).eval(), {"x": torch.randn(1, asked.prompt, sizes["size"], dtype=dtype)}
        model = OwnModel(OwnConfig(**sizes, vocab_size=512 if asked.tiny else 32000)).to(dtype).eval()
        ids = torch.randint(0, 500, (1, asked.prompt))
    model.generation_config.eos_token_id = None
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@torch.no_grad()
def called(model: Any, given: dict[str, Tensor], new: int) -> Tensor:
    """The tokens of a call, or the outputs of one forward."""
    if not hasattr(model, "generate"):
        outputs: Tensor = model(**given)
        return outputs
    tokens: Tensor = model.generate(**given, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
    return tokens


def differs(found: Tensor, due: Tensor) -> float:
    """Of tokens the part that is another one, of outputs the relative root mean square error."""
    if not found.is_floating_point():
        return (found != due).float().mean().item()
    return ((found - due).float().square().mean() / due.float().square().mean()).sqrt().item()


def run(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure and print, one case after the other."""
    printed = Table(f"medians of {asked.repeats} calls after 3 to warm up")
    for case in asked.cases:
        base, given = made(case, asked)
        samples = [given] if case == "encoder" else None
        engines = {STOCK: base}
        for recipe in asked.recipes:
            for mode in asked.modes:
                wanted = {"extends": RULES[recipe], "runtime": {"compile": mode}}
                name = f"{recipe}, compile: {mode}"
                engines[name] = patched(base, wanted, name, inputs=samples).model
        due = called(base, given, asked.tokens)
        apart = {name: differs(called(model, given, asked.tokens), due) for name, model in engines.items()}
        calls = {name: partial(called, model, given, asked.tokens) for name, model in engines.items()}
        timed = {name: partial(once, one, torch.device(asked.device)) for name, one in calls.items()}
        found = in_turn(timed, asked.repeats, 3, alternating=True)
        middle = {name: statistics.median(times) for name, times in found.items()}
        for name, times in found.items():
            row = {"case": case, "engine": name, "call, ms": 1e3 * middle[name]}
            row |= {"fastest to slowest, ms": (1e3 * min(times), 1e3 * max(times))}
            printed.add(row | {f"times {STOCK}": middle[STOCK] / middle[name], "differs": apart[name]})
        for name, model in engines.items():
            if name != STOCK:
                print(f"  {case}, {name}: {dict(model.accelpatch.report().paths)}", flush=True)
        del base, engines, calls, timed
        freed()
    return {"rows": printed.rows}
