"""What transformers, torch and PEFT define is found to be theirs, in each release that the suite runs on."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

import pytest
from torch import nn
from transformers import activations, cache_utils
from transformers.generation.utils import GenerationMixin

from accelpatch.models.families import FAMILIES
from accelpatch.own_code import Reached
from accelpatch.runtime.code_watch import CACHED, CACHES, LOOP

MORE = ("bert", "vit", "t5", "bart", "whisper", "clip", "gpt_oss", "qwen2_5_vl", "llava", "mamba", "deepseek_v3")
TYPES = sorted({name.removesuffix("_text") for family in FAMILIES for name in family.model_types} | {*MORE})


def classes(module: ModuleType) -> list[Any]:
    every = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, nn.Module)]
    return [one for one in every if one.__module__ == module.__name__]


def reasons(every: list[Any], roots: tuple[str, ...] = ("forward",)) -> dict[str, str]:
    found = {one.__name__: Reached(one, roots).reason for one in every}
    assert found
    return {name: reason for name, reason in found.items() if reason is not None}


@pytest.mark.smoke
@pytest.mark.parametrize("name", TYPES)
def test_models_of_transformers(name: str) -> None:
    place = f"transformers.models.{name}.modeling_{name}"
    if importlib.util.find_spec(place) is None:
        pytest.skip(f"no {place} in this transformers")
    assert reasons(classes(importlib.import_module(place))) == {}


@pytest.mark.smoke
def test_activations_modules_of_torch_and_caches() -> None:
    of_torch = [one for one in vars(nn).values() if isinstance(one, type) and issubclass(one, nn.Module)]
    assert len(of_torch) > 100
    assert reasons([*classes(activations), *of_torch]) == {}
    assert reasons([*CACHES, cache_utils.StaticCache], CACHED) == {}
    assert Reached(GenerationMixin, LOOP, deep=False).reason is None


@pytest.mark.parametrize("tuner", ["lora.layer", "ia3.layer", "boft.layer", "vera.layer", "oft.layer"])
def test_adapters_of_peft(tuner: str) -> None:
    assert reasons(classes(importlib.import_module(f"peft.tuners.{tuner}"))) == {}
