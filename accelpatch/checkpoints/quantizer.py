"""transformers' quantizer for patched models: loads saved ones as they were, and quantises float ones while they load.

Float checkpoints come tensor by tensor: each weight is quantised as soon as it is read, so that the result and one
weight more is all that exists. A saved one's parts (q, scale, offset) are loaded in their own dtypes and laid out for
the device, module by module. The rest of the patch is handed in as `finish`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer

from accelpatch.checkpoints.loading_modules import (
    as_saved,
    check_complete,
    from_parts,
    move_in,
    parent_of,
    parts_of,
    quantised,
    stand_in,
    tie,
    whole_names,
    without_weight,
)  # fmt: skip
from accelpatch.checkpoints.quantization_config import AccelpatchConfig
from accelpatch.checkpoints.resume import Store
from accelpatch.checkpoints.saved import METHOD, VERSION, Reading, digest_of
from accelpatch.errors import FOREIGN, AccelpatchError, LoadError
from accelpatch.patching.apply import Built
from accelpatch.patching.entry import Entry
from accelpatch.patching.plan import Plan
from accelpatch.patching.stages import over_weight_bound
from accelpatch.quant.weight import PARTS
from accelpatch.recipe.recipe import Recipe

MakePlan = Callable[[nn.Module, Recipe, torch.device, bool], Plan]  # the last: the weights are quantised already
Finish = Callable[[nn.Module, Plan, list[Built], AccelpatchConfig], None]


@dataclass
class Hooks:
    """What the quantizer is handed: how a plan is made, and how a loaded model's patch is finished."""

    plan: MakePlan
    finish: Finish


_hooks: list[Hooks] = []
PART = rf"\.({'|'.join(PARTS)})$"  # tensors that transformers does not load


class AccelpatchQuantizer(HfQuantizer):
    """Holds what is built while one checkpoint loads."""

    quantization_config: AccelpatchConfig

    def __init__(self, quantization_config: AccelpatchConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = bool(kwargs.get("pre_quantized", True)) or quantization_config.stored is not None
        if quantization_config.version != VERSION:
            raise LoadError(
                f"the checkpoint has version {quantization_config.version!r} of accelpatch's format, and this "
                f"accelpatch reads {VERSION}: upgrade it"
            )
        self._entries: dict[str, Entry] = {}  # every path of a quantised site -> its entry
        self._built: dict[str, Built] = {}
        self._failed: dict[str, str] = {}  # path -> why it stays float
        self._digests: dict[str, str] = {}  # path of a site with tied ones -> SHA-256 of its weight
        self._ties: dict[str, str] = {}
        self._error: Exception | None = None
        self._device = torch.device("cpu")
        self._reading: Reading | None = None
        self._ignored: Any = None
        self._store = Store(quantization_config.resume)

    @property
    def is_trainable(self) -> bool:
        """Whether adapters can be trained around the quantised weights."""
        return True

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """A patched model saves itself."""
        return True

    def update_device_map(self, device_map: Any) -> Any:
        """One device: a GPU where the caller says "auto" and there is one."""
        if isinstance(device_map, str):
            device_map = {"": torch.cuda.current_device() if torch.cuda.is_available() else "cpu"}
        places = set((device_map or {"": "cpu"}).values())
        if len(places) > 1 or "disk" in places:
            raise LoadError("a model that is quantised while it loads goes to one device: give device_map one name")
        place = next(iter(places))
        self._device = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
        return device_map

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Bytes an element, for transformers' estimate of the memory that it takes at once."""
        entry = self._entries.get(param_name.rpartition(".")[0])
        if entry is None or entry.choice is None or not param_name.endswith(".weight"):
            return float(param.element_size())
        return entry.choice.resident_after / max(1, param.numel())

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> None:
        tie(model)  # else the plan would take tied weights for several
        self.plan = _hooks[0].plan(model, self.quantization_config.loaded, self._device, self.pre_quantized)
        if self.plan.calibrates and not self.pre_quantized:
            raise LoadError(
                "this recipe calibrates, which a model that is still loading cannot: load it without "
                "quantization_config, then accelpatch.patch(model, recipe), or use accelpatch quantize"
            )
        self._store.check_room(self.plan.resident_bytes, self._device)
        if self.pre_quantized:
            saved, self._packed = self.quantization_config.opened(checkpoint_files)
            self._saved = saved
            self.plan = as_saved(self.plan, saved)
            named = () if self._packed is None else self._packed[0].parts
            parts = {name for entry in quantised(self.plan) for name in parts_of(entry, saved, named)}
            for entry in quantised(self.plan):
                stand_in(model, entry)
            check_complete(model, saved, parts)
            self._reading = Reading(saved, parts, self._device)  # while transformers reads the rest
            self._ignored = model._keys_to_ignore_on_load_unexpected
            model._keys_to_ignore_on_load_unexpected = {
                *(self._ignored or ()), PART, *whole_names(self.plan), *(f"^{re.escape(name)}$" for name in parts)
            }  # fmt: skip
        for entry in quantised(self.plan):
            self._entries |= dict.fromkeys(entry.site.paths, entry)
        # of replaced modules transformers would tie the weights that they no longer have
        self._ties = dict(getattr(model, "all_tied_weights_keys", None) or {})
        model.all_tied_weights_keys = {
            target: source
            for target, source in self._ties.items()
            if not {parent_of(target), parent_of(source)} & self._entries.keys()
        }

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a tensor of a float checkpoint is a weight to be quantised."""
        return param_name.endswith(".weight") and parent_of(param_name) in self._entries

    def get_quantize_ops(self) -> ConversionOps:
        """The operation that takes such a weight."""
        return _Quantise(self)

    def take(self, name: str, weight: Tensor, missing: Any) -> None:
        """Quantise a weight that was just read; an error is raised when all are read (transformers only logs it)."""
        entry = self._entries[parent_of(name)]
        path, members = entry.site.path, (entry.site, *entry.site.tied)
        if missing is not None:
            missing.difference_update(f"{place}.weight" for place in entry.site.paths)
        if self._error is not None or (wrong := self._disagreement(entry, name, weight)):
            self._error = self._error or LoadError(wrong)
            return
        if path in self._built or path in self._failed:
            return
        parameter = nn.Parameter(weight)
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # else one that stays float is made anew
        for member in members:
            member.original._parameters["weight"] = parameter
        try:
            made = self._store.built(entry, weight)
            if problem := over_weight_bound(made, self.plan.recipe):
                self._failed[path] = problem
                return
            self._built[path] = made
            for member in members:
                without_weight(member.original)
            if callable(self.quantization_config.progress):
                self.quantization_config.progress("quantising", len(self._built), len(quantised(self.plan)))
        except (AccelpatchError, *FOREIGN) as error:
            self._error = error

    def _disagreement(self, entry: Entry, name: str, weight: Tensor) -> str:
        """Why a weight is not the one that the configuration speaks of; "" where it is."""
        due = [entry.site.n, entry.site.k]
        if type(entry.site.original).__name__ == "Conv1D":
            due.reverse()
        if list(weight.shape) != due:
            return f"config.json and the weights disagree: {name} is {list(weight.shape)}, and {due} belongs here"
        if entry.site.tied:
            digest = digest_of(weight.cpu())
            if self._digests.setdefault(entry.site.path, digest) != digest:
                names = " and ".join(entry.site.paths)
                return f"config.json ties {names}, and the checkpoint has two weights: set tie_word_embeddings: false"
        return ""

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self._error is not None:
            raise self._error
        self.plan = self.plan.without(self._failed)
        if self._reading is not None:
            self._take_parts(model, self._reading)
        for entry in quantised(self.plan):
            made = self._built.get(entry.site.path)
            if made is None and entry.replacer is not None and entry.replacer.whole:
                continue  # experts, whose weights are now in the model: `finish` replaces them
            if made is None:
                raise LoadError(
                    f"the checkpoint lacks {entry.site.path}.weight: fetch it, or keep the site (replace: keep)"
                )
            move_in(model, made)
        model.all_tied_weights_keys = self._ties
        self.remove_quantization_config(model)
        for part in model.modules():
            vars(getattr(part, "config", None) or part).pop("_is_quantized", None)
        _hooks[0].finish(model.eval(), self.plan, list(self._built.values()), self.quantization_config)
        return model

    def _take_parts(self, model: Any, reading: Reading) -> None:
        try:
            for entry in quantised(self.plan):
                self._built[entry.site.path] = from_parts(entry, self._device, self._saved, reading.take, self._packed)
            reading.finish()
        finally:
            reading.close()
            model._keys_to_ignore_on_load_unexpected = self._ignored


class _Quantise(ConversionOps):
    """Takes a float weight out of transformers' hands."""

    def __init__(self, quantizer: AccelpatchQuantizer):
        self._quantizer = quantizer

    def __deepcopy__(self, memo: Any) -> _Quantise:
        return _Quantise(self._quantizer)

    def convert(self, input_dict: dict[str, Any], missing_keys: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Nothing is left to be set on the model."""
        for name, value in input_dict.items():
            self._quantizer.take(name, value[0] if isinstance(value, list) else value, missing_keys)
        return {}


def register(hooks: Hooks) -> None:
    """Make transformers load these checkpoints; the hooks of the first call stay."""
    if not _hooks:
        _hooks.append(hooks)
        AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = AccelpatchConfig
        AUTO_QUANTIZER_MAPPING[METHOD] = AccelpatchQuantizer
