"""Statistics that were not measured, so that smoothing factors go far from one; and models smoothed by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import accelpatch
from accelpatch.models.family import norm_of
from accelpatch.models.fingerprint import fingerprint
from accelpatch.models.smoothing import SmoothingGroup, smoothing_groups
from accelpatch.patching.site import LINEAR_ROLES
from accelpatch.quant.calibration import ChannelStatistics, Statistics
from accelpatch.quant.smoothing import Channels, SiteStatistics
from accelpatch.replacers.smoothing import site_statistics

# of |x|: with alpha 0.65 the factors of the tiny models' weights lie between 0.01 and 100
LEAST, MOST = 1e-3, 1e3


class CharacterTokenizer:
    """A tokenizer of one id a character, from 2 on."""

    def __init__(self, size: int = 150):
        self.size = size

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [2 + ord(one) % self.size for one in text]}


def linear_sites(model: nn.Module) -> dict[str, int]:
    """Path -> inputs of each linear layer that calibration sees."""
    sites = (entry.site for entry in accelpatch.plan(model, "smoothquant").entries)
    return {site.path: site.k for site in sites if site.role in LINEAR_ROLES and site.k is not None}


def figures(k: int, seed: int, least: float = LEAST, most: float = MOST) -> ChannelStatistics:
    """Largest magnitudes from `least` to `most`, evenly spread in their logarithm, in an order of the seed's."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.linspace(torch.tensor(least).log(), torch.tensor(most).log(), k)  # type: ignore[arg-type]
    absmax = exponents.exp()[torch.randperm(k, generator=generator)]
    rows = (torch.randn(8, k, generator=generator) * absmax / 4).bfloat16()
    return ChannelStatistics(absmax, absmax / 2, (absmax / 4).square(), rows)


def made_up(model: nn.Module, least: float = LEAST, most: float = MOST) -> Statistics:
    """Statistics of every linear layer of the model."""
    sites = {path: figures(k, at, least, most) for at, (path, k) in enumerate(linear_sites(model).items())}
    return Statistics(sites, fingerprint(model), 1000)


def smoothing_of(model: nn.Module, statistics: Statistics | None = None) -> dict[str, SiteStatistics]:
    """Path -> factors and divisors by the recipe smoothquant."""
    plan = accelpatch.plan(model, "smoothquant")
    return site_statistics(plan, plan.groups, statistics or made_up(model), lambda done, total: None)


def smoothed(model: Any, found: Mapping[str, SiteStatistics], dtype: torch.dtype) -> Any:
    """A copy of the model in a dtype with the smoothing in its float weights."""
    made = eager(copy.deepcopy(model).to(dtype))
    for path, one in found.items():
        module: Any = made.get_submodule(path)
        turned = type(module).__name__ == "Conv1D"
        with torch.no_grad():
            if one.factors is not None:
                module.weight.mul_(one.factors.to(dtype)[:, None] if turned else one.factors.to(dtype))
            if one.divisors is not None:
                _divide(module, one.divisors.to(dtype), turned)
    return made


def _divide(module: Any, divisors: Tensor, turned: bool) -> None:
    kind, weight = norm_of(module), module.weight
    plus = 1.0 if kind is not None and kind.plus_one else 0.0
    by = divisors[:, None] if weight.dim() == 2 and not turned else divisors
    weight.copy_((weight + plus) / by - plus)
    if getattr(module, "bias", None) is not None:
        module.bias.div_(divisors)


class InFloat64(TorchFunctionMode):
    """Norms, softmax and the rest stay in float64 where a model casts to float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        wide = [torch.float64 if one is torch.float32 else one for one in args]
        named = {key: torch.float64 if one is torch.float32 else one for key, one in (kwargs or {}).items()}
        return func(*wide, **named)


def eager(model: Any) -> Any:
    """The model with experts that take float64: torch's grouped product does not."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def channels_of(model: nn.Module, group: SmoothingGroup) -> tuple[Channels, int, Tensor]:
    """How a group's channels lie, the inputs of its consumers, and the rows of its source."""
    sizes = {entry.site.path: (entry.site.n, entry.site.k) for entry in accelpatch.plan(model, "exact").entries}
    channels, k = Channels(group.rows, group.size), sizes[group.consumers[0]][1]
    assert k is not None
    n = sizes[group.source][0] or k
    return channels, k, channels.places(n, k)


@contextmanager
def hooked(model: nn.Module, paths: Any, hook: Callable[[str], Any], kind: str = "forward_hook") -> Iterator[None]:
    """Context manager: hooks on modules of the model; `hook` makes one for a path."""
    handles = [getattr(model.get_submodule(path), f"register_{kind}")(hook(path)) for path in paths]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def kinds(model: nn.Module) -> list[str]:
    """The kind of each group in a model."""
    return [group.kind for group in smoothing_groups(model)]


def calibrated(model: nn.Module) -> Statistics:
    """Statistics of some hundred tokens, all of the vocabulary's among them."""
    ids = torch.randint(0, 150, (640,), generator=torch.Generator().manual_seed(9))
    text = "".join(map(chr, ids + 150))
    return accelpatch.calibrate(model, [text], tokenizer=CharacterTokenizer(), samples=16, length=40)
