"""Models of random weights, patched or not, that take turns at generate(): medians of first tokens and of steps."""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor

import accelpatch
from accelpatch.bench.generate import generate
from accelpatch.bench.timing import once, synchronize, timing
from accelpatch.models import load

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
How = Callable[[Any, Tensor, int], object]
STOCK = "unpatched"
#: name -> class, configuration, what --tiny changes of it
SHAPES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "shapes.json").read_text())
ENDLESS: dict[str, Any] = {"eos_token_id": None, "forced_eos_token_id": None, "suppress_tokens": None,
                           "begin_suppress_tokens": None}  # fmt: skip


@dataclass(eq=False)
class Engine:
    """call(ids, new): generates so many tokens. most: new tokens of a call at most.

    bytes: of weights that a step reads. cached: of keys and values of a token, where they count too.
    """

    name: str
    model: Any
    call: Callable[[Tensor, int], object]
    bytes: int = 0
    most: int = sys.maxsize
    cached: int = 0
    seconds: dict[str, Any] = field(default_factory=dict)
    gigabytes: float | None = None

    @property
    def device(self) -> torch.device:
        """That of the model."""
        device: torch.device = next(self.model.parameters()).device
        return device


@dataclass(frozen=True)
class Taken:
    """Seconds of the short answers of an engine, and of a step: what a long one takes beyond a short one, a token.

    memory: gigabytes, by what they are.
    """

    first: list[float]
    step: list[float]
    memory: dict[str, float] = field(default_factory=dict)


def shaped(shape: str | dict[str, Any], asked: argparse.Namespace, **changes: Any) -> Any:
    """A model of a shape, or of the name of one, with random weights, made on the device; no token ends a text."""
    shape = SHAPES[shape] if isinstance(shape, str) else shape
    kind: Any = getattr(transformers, shape["class"])
    config = shape["config"] | changes | (shape.get("tiny", {}) if asked.tiny else {})
    torch.manual_seed(0)
    with torch.device(asked.device):
        dtype = getattr(torch, getattr(asked, "dtype", "float32" if asked.tiny else "bfloat16"))
        model = kind._from_config(kind.config_class(**config), dtype=dtype).eval()
    if model.can_generate():
        model.generation_config.update(**ENDLESS)
        model.config.forced_eos_token_id = None
    return model


def random_model(asked: argparse.Namespace, *, dtype: torch.dtype | None = None, endless: bool = True) -> Any:
    """The model of --model, or with --tiny a small one on the CPU. endless: it knows of no token that ends a text."""
    if getattr(asked, "tiny", False):
        return shaped("llama", asked)
    dtype = dtype or getattr(torch, getattr(asked, "dtype", "bfloat16"))
    made: Any = load.random(asked.model, dtype=dtype, device=asked.device)
    if endless:
        made.generation_config.eos_token_id = None
    return made


def stock(base: Any, name: str = STOCK, size: int = 0, how: How = generate) -> Engine:
    """An engine of a model as it is."""
    return Engine(name, base, partial(how, base), size)


def plain(model: Any, ids: Tensor, new: int, **options: Any) -> Tensor:
    """Exactly so many greedy tokens by the model's own generate(), called as programs call it."""
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    made: Tensor = model.generate(input_ids=ids, **(given | options))
    assert getattr(made, "sequences", made).shape[1] == ids.shape[1] + new
    return made


def patched(
    base: Any,
    recipe: Any,
    name: str = "",
    ids: Tensor | None = None,
    *,
    keep: bool = True,
    how: How = generate,
    **options: Any,
) -> Engine:
    """A copy of `base` that is patched as users patch it, verified, the originals freed; what its report says.

    keep: whether `base` stays as it is; it is patched itself otherwise. ids: the prompt of a first token.
    """
    name = name or str(recipe)
    device = next(base.parameters()).device
    before = allocated(device) or 0.0
    model = copy.deepcopy(base) if keep else base
    synchronize(device)
    begun = time.perf_counter()
    accelpatch.patch(model, recipe, keep_original="none", **options)
    synchronize(device)
    seconds = {"patch, s": time.perf_counter() - begun}
    if ids is not None:
        how(model, ids, 1)
        synchronize(device)
        seconds["patch to first token, s"] = time.perf_counter() - begun
    held, report = allocated(device), model.accelpatch.report()
    gigabytes = None if held is None else held - before
    found = Engine(name, model, partial(how, model), report.token_bytes[1], seconds=seconds)
    found.gigabytes = gigabytes if keep else held
    introduce(found)
    return found


def introduce(engine: Engine) -> None:
    """Say what the report of a patched model says."""
    report = engine.model.accelpatch.report()
    checked = report.verification
    over = f"{len(checked.failures)} sites over their bound {list(checked.failures[:3])}" if checked else "not verified"
    fused = f", {checked.fused_layers} layers fused" if checked else ""
    size = f", {engine.gigabytes:.2f} GB" if engine.gigabytes else ""
    taken = f"{sum(report.seconds.values()):.1f} s, " if report.seconds else ""
    print(f"{engine.name}: {taken}{over}{fused}{size}; {'; '.join(report.notes)}", flush=True)


def among_the_best(engine: Engine, ids: Tensor, new: int = 8) -> bool:
    """Whether each token of a patched model's steps is, by its own modules and no cache, the best one or as good.

    Of random weights a wrong one is some four standard deviations of the logits off, which roundings never are.
    """
    with torch.inference_mode():
        tokens = generate(engine.model, ids, new)
        logits = engine.model(tokens[:, :-1], use_cache=False).logits[:, ids.shape[1] - 1 :].float()
    chosen = logits.gather(-1, tokens[:, ids.shape[1] :, None])[..., 0]
    gap = float(((logits.max(-1).values - chosen) / logits.std(-1)).max())
    print(f"{engine.name}: tokens of steps are within {gap:.3f} standard deviations of the best", flush=True)
    return gap < 0.25


def allocated(device: torch.device | str, *, peak: bool = False) -> float | None:
    """GB in use on a GPU, or the most since the last reset; None on a CPU."""
    if torch.device(device).type != "cuda":
        return None
    if peak:
        return torch.cuda.max_memory_allocated(device) / 1e9
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device) / 1e9


def freed() -> None:
    """Collect what a model that went left: a patched model and its handle hold each other."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def in_turn(
    calls: Mapping[K, Callable[[], T]], repeats: int, warmup: int, *, alternating: bool = False
) -> dict[K, list[T]]:
    """What every call returned in each of `repeats` turns, after `warmup` turns that do not count.

    alternating: whether the order changes from turn to turn, and so who runs behind whom.
    """
    found: dict[K, list[T]] = {name: [] for name in calls}
    for turn in range(-warmup, repeats):
        for name in list(calls)[::-1] if alternating and turn % 2 else calls:
            made = calls[name]()
            if turn >= 0:
                found[name].append(made)
    return found


class Clock:
    """A streamer that notes when each token comes; the first is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """All tokens are there."""


def by_tokens(model: Any, ids: Tensor, new: int, repeats: int, **options: Any) -> dict[str, Any]:
    """Tokens a second of greedy generate(), from the first new token of a call to its last, and how steps ran.

    The median of the calls after the first, which captures, and their spread. options: those of generate().
    """
    seconds = []
    for _ in range(repeats + 1):
        clock = Clock()
        plain(model, ids, new, streamer=clock, **options)
        seconds.append((clock.times[-1] - clock.times[1]) / (len(clock.times) - 2))
    taken, paths = timing(seconds[1:]), dict[str, int]()
    if handle := getattr(model, "accelpatch", None):
        none = ("captured step", "modules: a prompt")
        paths = {
            way: n for way, n in handle.report().paths.items() if "prefill" not in way and not way.startswith(none)
        }
    way = max(paths, key=lambda path: paths[path], default="modules")
    return {"tok/s": len(ids) / taken.median, "spread": taken.spread, "by": way}


def ids_of(model: Any, batch: int, length: int) -> Tensor:
    """Random ids [batch, length] on the model's device."""
    size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(5, size, (batch, length), generator=torch.Generator().manual_seed(0))
    return ids.to(next(model.parameters()).device)


def answers(
    engines: Mapping[K, Engine],
    prompts: Tensor | Mapping[K, Tensor],
    new: int,
    repeats: int,
    warmup: int,
    short: int = 1,
) -> dict[K, Taken]:
    """Every engine once a turn: an answer of `short` tokens, and one of `new`; no second one where they are as many."""

    def answer(engine: Engine, ids: Tensor) -> tuple[float, float]:
        long = min(new, engine.most)
        first = once(lambda: engine.call(ids, short), ids.device)
        if long <= short:
            return first, 0.0
        return first, (once(lambda: engine.call(ids, long), ids.device) - first) / (long - short)

    def call(key: K) -> Callable[[], tuple[float, float]]:
        return lambda: answer(engines[key], prompts if isinstance(prompts, Tensor) else prompts[key])

    pairs = in_turn({key: call(key) for key in engines}, repeats, warmup)
    return {key: Taken(*(list(column) for column in zip(*found, strict=True))) for key, found in pairs.items()}


def turns(repeats: int, warmup: int) -> str:
    """What the figures of a table are."""
    return f"median of {repeats} after {warmup} to warm up"
