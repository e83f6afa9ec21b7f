"""What scripts/bench_generate.py times: stock generate() before and after a patch, and peers in loops of their own.

The peers' loop is gpt-fast's: one token's step over a static cache, compiled by torch and captured, and no look at the
tokens between steps. "compiled" has the settings of `torch.compile(mode="reduce-overhead")`; "tuned" searches for the
best form of each kernel on top, as gpt-fast and torchao ask for. torchao quantises the weights of four of them; without
it they are left out. Each engine states its settings itself: those that torchao sets would hold for all of them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import accelpatch
from accelpatch.bench.timing import synchronize
from accelpatch.fusion.cache_name import CACHE

STATIC = {"cache_implementation": "static"}
# peers in a loop of their own: bits of their weights
LOOPS = {
    "compiled": None, "tuned": None, "torchao-int8": 8, "torchao-int8-tuned": 8, "torchao-int4": 4,
    "torchao-int4-tuned": 4,
}  # fmt: skip


@dataclass
class Engine:
    """call(ids, new): generates so many tokens. bytes: of weights a token reads. seconds: set-up, by what it was."""

    name: str
    model: Any
    call: Callable[[Tensor, int], Tensor]
    bytes: int
    seconds: dict[str, float] = field(default_factory=dict)


def generating(model: Any, **options: Any) -> Callable[[Tensor, int], Tensor]:
    """Exactly so many greedy tokens after ids by the model's own generate()."""

    def call(ids: Tensor, new: int) -> Tensor:
        made: Tensor = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            **options,
        )  # fmt: skip
        assert made.shape[1] == ids.shape[1] + new
        return made

    return call


def stock(base: nn.Module, name: str) -> Engine:
    """Hugging Face's generate(): "eager", or "static", which it compiles."""
    return Engine(f"HF {name}", base, generating(base, **(STATIC if name == "static" else {})), read_bytes(base))


def ours(base: nn.Module, recipe: str, ids: Tensor, verify: bool = True) -> Engine:
    """A patched copy of `base`, after its first token; verified, as users patch."""
    model: Any = copy.deepcopy(base)
    synchronize(ids.device)
    begun = time.perf_counter()
    accelpatch.patch(model, recipe, verify=verify, keep_original="none")
    synchronize(ids.device)
    patched = time.perf_counter()
    call = generating(model)
    call(ids, 1)
    synchronize(ids.device)
    seconds = {"patch": patched - begun, "patch to first token": time.perf_counter() - begun}
    return Engine(
        f"accelpatch {recipe}" + ("" if verify else ", verify=False"),
        model,
        call,
        model.accelpatch.report().token_bytes[1],
        seconds,
    )


def looping(base: nn.Module, name: str, room: int) -> Engine:
    """A peer of LOOPS, for sequences of up to `room` tokens. Raises ImportError where torchao is not there."""
    model: Any = base
    if LOOPS[name]:
        model = copy.deepcopy(base)
        quantise(model, LOOPS[name])
    return Engine(f"{name} loop", model, Loop(model, room, name.endswith("tuned")), read_bytes(model))


def quantise(model: nn.Module, bits: int | None) -> None:
    """torchao's weight-only form of every linear layer, the head too."""
    from torchao import quantization as ao

    own: dict[str, Any] = {"set_inductor_config": False}
    four = {"group_size": 128, "int4_packing_format": "tile_packed_to_4d", **own}
    ao.quantize_(model, ao.Int8WeightOnlyConfig(**own) if bits == 8 else ao.Int4WeightOnlyConfig(**four))


class Loop:
    """Greedy decoding by a compiled step over a static cache; the prompt runs uncompiled.

    searched: whether the compiler tries variants of each kernel, and takes its own for products of one row.
    """

    def __init__(self, model: Any, room: int, searched: bool):
        from transformers import StaticCache

        self._model, self._cache = model, StaticCache(config=model.config, max_cache_len=room)
        options: dict[str, Any] = {"triton.cudagraphs": True, "coordinate_descent_tuning": searched}
        self._step = torch.compile(self._next, options=options)

    def _next(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._run(tokens, positions), positions + 1

    def _run(self, tokens: Tensor, positions: Tensor) -> Tensor:
        given = {"position_ids": positions, CACHE: self._cache, "use_cache": True, "logits_to_keep": 1}
        outputs = self._model(tokens, **given)
        best: Tensor = outputs.logits[:, -1:].argmax(-1)
        return best

    @torch.inference_mode()
    def __call__(self, ids: Tensor, new: int) -> Tensor:
        """ids[B, L] and `new` tokens after it."""
        self._cache.reset()
        positions = torch.arange(ids.shape[1], device=ids.device)[None].expand(ids.shape[0], -1)
        made = [ids, self._run(ids, positions)]
        tokens, places = made[-1].clone(), positions[:, -1:].clone() + 1
        for _ in range(new - 1):
            torch.compiler.cudagraph_mark_step_begin()
            tokens, places = (one.clone() for one in self._step(tokens, places))
            made.append(tokens)
        return torch.cat(made, 1)


def read_bytes(model: nn.Module) -> int:
    """What a token reads of a model's weights: all but the rows of the embedding that it does not use."""
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    every = sum(held(p) for p in model.parameters())
    tied = model.get_output_embeddings().weight is embedding  # type: ignore[operator]
    return every if tied else every - held(embedding)


def held(tensor: Any) -> int:
    """Bytes of a tensor, or of all the tensors that one of torchao's holds."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(held(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return int(tensor.numel() * tensor.element_size())


def cached_bytes(model: Any) -> int:
    """Bytes of keys and values of one token in 16 bits."""
    config = model.config.get_text_config(decoder=True)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(config.num_hidden_layers * 2 * config.num_key_value_heads * size * 2)
