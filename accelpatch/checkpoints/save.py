"""Saves a patched model: its weights as they are, bit for bit, in files that do not depend on the device (saved.py)."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelpatch.checkpoints import card
from accelpatch.checkpoints.replaced_folder import replaced_folder
from accelpatch.checkpoints.saved import METHOD, RECIPE, VERSION
from accelpatch.checkpoints.target import check_folder, check_new, is_own, shard_size, unfinished_folder
from accelpatch.checkpoints.writing import Shards
from accelpatch.errors import SaveError
from accelpatch.modules.attention_settings import unnamed
from accelpatch.modules.packed_weight import PackedWeight
from accelpatch.modules.quantized_module import QuantizedModule
from accelpatch.modules.replacement import PATH
from accelpatch.quant.weight import PARTS
from accelpatch.recipe.recipe import Match, Recipe, Rule, dump

SHARD = "5GB"  # bytes of a file, unless the caller says another size
#: weight files of an older checkpoint: transformers' names, and nobody else's
WEIGHTS = re.compile(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?")


def save(
    model: Any, folder: str | Path, plan: Any, *, max_shard_size: int | str = SHARD,
    more: Sequence[Callable[[Path], Any]] = (), verified: str = "",
) -> None:  # fmt: skip
    """Write a patched transformers model into `folder`, all or nothing; other files that lie there stay.

    plan: the Plan that the model was patched by. Tied weights are written once. max_shard_size: bytes, or such as
    "5GB". more: write further files, such as a tokenizer's. verified: the digest of what computed while the model was
    verified, "" where it was not. Raises SaveError, also where rounded weights would take the place of float ones.
    """
    most, target, recipe = shard_size(max_shard_size), Path(folder), recipe_of(plan)
    if adapters := [name for name, _ in model.named_modules() if name.endswith(("lora_A", "lora_B"))]:
        raise SaveError(f"{adapters[0]} is an adapter: save it by its own save_pretrained, and the model without it")
    planned = {entry.site.path for entry in plan.replaced}
    if lost := next((path for path in _quantised(model) if path not in planned), None):
        why = "is quantised and failed verification, so that it is no part of what is saved"
        raise SaveError(f"{lost} {why}: load the model with verify=False to save it all the same")
    floats = target.is_dir() and not is_own(target) and any(WEIGHTS.fullmatch(one.name) for one in target.iterdir())
    if floats and any(entry.replacer.rounds for entry in plan.replaced):
        raise SaveError(f"{target} holds float weights, which rounded ones cannot bring back: name another folder")
    with replaced_folder(target, lambda name: not WEIGHTS.fullmatch(name)) as made, torch.no_grad():
        config = unnamed(copy.deepcopy(model.config))
        config.architectures = [type(model).__name__]
        config.dtype = str(model.dtype).removeprefix("torch.")
        config.quantization_config = description(recipe) | ({"verified": verified} if verified else {})
        if not _is_tied(model):  # whatever the configuration said when they were still one
            config.tie_word_embeddings = False
            config.get_text_config(decoder=True).tie_word_embeddings = False
        config.save_pretrained(made)
        if model.can_generate():
            model.generation_config.save_pretrained(made)
        (made / RECIPE).write_text(dump(recipe), encoding="utf-8")
        for write in more:
            write(made)
        if not (target / card.FILE).exists():
            card.write(made, target.name, model, recipe.name)
        whole = [entry.site.path for entry in plan.replaced if entry.replacer.whole]
        write_weights(model, made, {entry.site.path: entry.replacer.name for entry in plan.replaced}, most, whole)


def recipe_of(plan: Any) -> Recipe:
    """The recipe by which a saved model comes back: the plan's own, after rules for weights that another library
    quantised, which are saved in the format that took them over."""
    formats: dict[tuple[str, str], list[Any]] = {}
    for entry in plan.replaced:
        if entry.as_stored:
            formats.setdefault((entry.replacer.name, repr(entry.site.stored.options)), []).append(entry)
    rules = []
    for place, entries in enumerate(formats.values()):
        first, own = entries[0], {id(entry) for entry in entries}
        others = [entry.site.path for entry in plan.entries if id(entry) not in own]
        match = Match(name=tuple(dict.fromkeys(_pattern(entry.site.path, others) for entry in entries)))
        rules.append(Rule(match, first.replacer.name, dict(first.site.stored.options), name=f"stored{place}"))
    return replace(plan.recipe, rules=(*rules, *plan.recipe.rules))


def _pattern(path: str, others: Sequence[str]) -> str:
    """A glob for a path in every layer, where that matches none of the others; else the path itself."""
    pattern = re.sub(r"\d+", "*", path)
    return path if any(fnmatchcase(other, pattern) for other in others) else pattern


def _is_tied(model: Any) -> bool:
    """Whether the embeddings of input and output are one weight."""
    one, other = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(one, QuantizedModule) and isinstance(other, QuantizedModule):
        return one.weight_owner is other.weight_owner
    return other is not None and one._parameters.get("weight") is other._parameters.get("weight")


def forget(folder: Path) -> None:
    """Remove the finished weights of an interrupted run, once `folder` is written."""
    shutil.rmtree(unfinished_folder(folder), ignore_errors=True)


def check(folder: Path, max_shard_size: int | str, overwrite: bool) -> None:
    """Raise SaveError, before anything slow, where `folder` cannot be written so. overwrite: see `check_new`."""
    shard_size(max_shard_size)
    check_folder(folder)
    check_new(folder, overwrite)


def description(recipe: Recipe) -> dict[str, Any]:
    """What config.json says of a checkpoint's format, as its quantization_config."""
    return {"quant_method": METHOD, "version": VERSION, "recipe": dump(recipe)}


def write_weights(
    model: nn.Module, folder: Path, replacers: dict[str, str], most: int, whole: Sequence[str] = ()
) -> None:
    """Write the weight files. replacers: dotted path of a replaced site -> its replacer's name. whole: paths of sites
    that were replaced with all that is in them."""
    found = list(tensors_of(model))
    names = [name for path, module, name in found for name in ([f"{path}.{p}" for p in PARTS] if module else [name])]
    with Shards(folder, names, most) as shards:
        for path, module, name in found:
            if module is not None:
                given = {f"{path}.{part}": tensor for part, tensor in module.canonical().tensors().items()}
                shards.add(given, (path, replacers[str(vars(module)[PATH])]))
            else:
                shards.add({name: _float(model, name)})
        for path in whole:
            shards.add({}, (path, replacers[path]))
        shards.finish()


def _quantised(model: nn.Module) -> Iterator[str]:
    """Paths of the sites whose quantised weights a model holds."""
    for module in model.modules():
        owns = isinstance(module, QuantizedModule) and module.source is None and not module.inherited
        if owns or hasattr(module, "saved_tensors"):
            yield str(vars(module)[PATH])


def tensors_of(model: nn.Module) -> Iterator[tuple[str, QuantizedModule | None, str]]:
    """(path, quantised module, "") of those that own a weight, and ("", None, name) of all other tensors, each once."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        in_parts = isinstance(module, QuantizedModule)
        if in_parts and module.source is None and not module.inherited:
            yield path, module, ""
        elif isinstance(module, PackedWeight) and (module.inherited if in_parts else module.is_packed):
            yield "", None, _join(path, "weight")  # what the recipe says of the module's own place is not its format
        own = {**module._parameters, **module._buffers}
        if hasattr(module, "saved_tensors"):  # experts
            yield from (("", None, _join(path, name)) for name in module.saved_tensors())
        for name, tensor in own.items():
            left_out = name in module._non_persistent_buffers_set or name in getattr(module, "own_buffers", ())
            if tensor is not None and not left_out and id(tensor) not in seen:
                seen.add(id(tensor))
                yield "", None, _join(path, name)


def _float(model: nn.Module, name: str) -> Tensor:
    path, _, own = name.rpartition(".")
    module: Any = model.get_submodule(path)
    tensor: Tensor = module.saved_tensors()[own] if hasattr(module, "saved_tensors") else getattr(module, own)
    return tensor.detach()


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
