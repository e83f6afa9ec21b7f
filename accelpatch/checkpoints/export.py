"""Writes what accelpatch saved in a format of others, which needs no accelpatch to be read.

The files alone are read, a tensor at a time: no model is loaded. All that the format cannot hold is found before
anything is written. Heads and embeddings, which those formats hold as floats, become floats.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter

from accelpatch.checkpoints import card, export_gguf
from accelpatch.checkpoints.export_formats import BITS, BLOCKS, FLOATS, FORMATS, KINDS, Format, Group, Layer, groups_of
from accelpatch.checkpoints.replaced_folder import replaced_folder
from accelpatch.checkpoints.save import SHARD
from accelpatch.checkpoints.saved import RECIPE, Saved, one_by_one, read
from accelpatch.checkpoints.target import check_empty, check_folder, own_config, shard_size
from accelpatch.checkpoints.writing import INDEX, Shards
from accelpatch.errors import KernelError, LoadError, SaveError
from accelpatch.models import checkpoint
from accelpatch.models.catalog import resolve
from accelpatch.models.load import from_config, silent
from accelpatch.quant import fp8_blocks, packing
from accelpatch.quant.formats import dequantize, weight_of
from accelpatch.quant.weight import PARTS

#: of a layer in any of the formats; headers reserve room for these names
NAMES = (
    "qweight", "qzeros", "scales", "g_idx", "weight", "weight_packed", "weight_scale", "weight_shape",
    "weight_zero_point", "weight_g_idx", "weight_global_scale", "weight_scale_inv", "input_scale",
)  # fmt: skip
WRITTEN = ("config.json", "quantize_config.json", RECIPE, checkpoint.CHECKSUMS, INDEX)  # anew, or of accelpatch alone
LEFT_OUT = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".py")  # weights of any kind, and code
GGUF = "gguf"  # a further format, which is no key of FORMATS
Read = Callable[[str], Tensor]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Exported:
    """What was written. size: bytes of its weights. notes: what is other than in the source."""

    folder: Path
    format: str
    layers: int
    size: int
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"folder": str(self.folder), "format": self.format, "layers": self.layers, "bytes": self.size,
                "notes": list(self.notes)}  # fmt: skip


@dataclass
class _Source:
    """A saved patched model. floats: paths of quantised heads and embeddings -> names of their float weights. kept:
    linear layers inside that are not quantised. heads: the head, where it is a linear layer."""

    folder: Path
    config: dict[str, Any]
    saved: Saved
    dtype: torch.dtype = torch.float32
    layers: list[Layer] = field(default_factory=list)
    floats: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)


def export(
    source: str | Path, to: str, out: str | Path | None = None, *, max_shard_size: int | str = SHARD,
    progress: Progress | None = None,
) -> Exported:  # fmt: skip
    """Write the saved patched model in the folder `source` in another format into the folder `out`, all or nothing.

    to: a key of FORMATS, or gguf. out: new or empty; default: next to the source, with the format in its name. Raises
    LoadError for a source that is none, and SaveError for what the format cannot hold or the disk does not.
    """
    folder, target = _places(source, to, out)
    shard_size(max_shard_size)
    found = _opened(folder)
    if to == GGUF:
        return _as_gguf(found, target)
    form = FORMATS[to]
    with one_by_one(found.saved) as tensor:
        _sort(found, tensor)
        groups = groups_of(found.layers)
        if reason := form.why_not(found.layers, groups):
            raise SaveError(f"{folder} cannot be written as {to}: {reason}")
        notes = [*_notes(found, groups), *_rounded(found, form, tensor)]
        with replaced_folder(target, lambda _: False) as made:
            _copy(folder, made)
            _write_config(found, form, groups, made)
            names = [*found.saved.tensors, *(f"{one.path}.{name}" for one in found.layers for name in NAMES)]
            with Shards(made, names, shard_size(max_shard_size), facts=False) as shards:
                for done, tensors in enumerate(_tensors(found, form, groups, tensor)):
                    shards.add(tensors)
                    (progress or silent)("exporting", done + 1, len(found.saved.tensors))
                shards.finish()
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    return Exported(target, str(form.config(groups, (), ()).get("format", to)), len(found.layers), size, tuple(notes))


def _places(source: str | Path, to: str, out: str | Path | None) -> tuple[Path, Path]:
    """The folder that is read, and the one that is written, which is new or empty."""
    if to not in (*FORMATS, GGUF):
        raise SaveError(f"--to is {to!r}: it is one of {', '.join((*FORMATS, GGUF))}")
    place = resolve(str(source))
    if place.kind != "folder":
        raise LoadError(f"{source} is no folder of a saved patched model: `accelpatch quantize` writes one")
    folder = Path(place.location)
    target = folder.with_name(f"{folder.name}-{to}") if out is None else Path(out)
    check_folder(target)
    check_empty(target)
    return folder, target


def _as_gguf(found: _Source, target: Path) -> Exported:
    export_gguf.check(found.config, found.saved)
    with one_by_one(found.saved) as tensor, replaced_folder(target, lambda _: False) as made:
        notes = export_gguf.write(made / "model.gguf", found.folder, found.config, found.saved, tensor)
        _copy(found.folder, made)
        config = {key: value for key, value in found.config.items() if key != "quantization_config"}
        (made / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    size = (target / "model.gguf").stat().st_size
    return Exported(target, GGUF, len(found.saved.sites), size, tuple(notes))


def _opened(folder: Path) -> _Source:
    config = own_config(folder)
    checkpoint.check_weights(folder, silent)
    return _Source(folder, config, read(folder / name for name in checkpoint.shard_names(folder)))


def _sort(found: _Source, tensor: Read) -> None:
    """Sort the sites into layers and floats. Raises SaveError for what is neither, before anything is written."""
    conversions = get_checkpoint_conversion_mapping(str(found.config["model_type"])) or ()
    if any(isinstance(one, WeightConverter) for one in conversions):
        raise SaveError(f"{found.folder}: its experts lie in other tensors than in the checkpoints that others read")
    model: Any = from_config(str(found.folder))
    found.dtype = model.dtype
    modules, head, embedding = dict(model.named_modules()), model.get_output_embeddings(), model.get_input_embeddings()
    for path, replacer in found.saved.sites.items():
        module = modules.get(path)
        if module is None:
            raise LoadError(f"{found.folder}: {path} is in no model that config.json describes: write it again")
        if replacer not in KINDS:
            known = ", ".join(KINDS.values())
            raise SaveError(f"{path} is replaced by {replacer}, which is not exported: {known} are")
        if isinstance(module, nn.Embedding) or module is head:
            tied = module is head and found.config.get("tie_word_embeddings")
            own = next(name for name, one in modules.items() if one is embedding) if tied else path
            found.floats[path] = f"{own}.weight"
        elif type(module) is not nn.Linear:
            raise SaveError(f"{path} is no nn.Linear but {type(module).__name__}, which readers of others do not know")
        else:
            found.layers.append(_layer(path, KINDS[replacer], found.saved, tensor))
    if not found.layers:
        name = str(found.config["quantization_config"].get("recipe", "")).partition("\n")[0].removeprefix("name: ")
        raise SaveError(f"{found.folder} has no quantised linear layer (recipe {name}): nothing to export")
    paths = {one.path for one in found.layers}
    others = [name for name, one in modules.items() if isinstance(one, nn.Linear) and name not in paths]
    found.heads = [name for name in others if modules[name] is head]
    found.kept = [name for name in others if modules[name] is not head]


def _layer(path: str, kind: str, saved: Saved, tensor: Read) -> Layer:
    parts = {part: saved.tensors.get(f"{path}.{part}") for part in PARTS}
    q, scale = parts["q"], parts["scale"]
    if q is None or scale is None or len(q.shape) != 2 or len(scale.shape) != 2:
        raise LoadError(f"{path} has no matrix of codes with scales: write the checkpoint again")
    n, k = q.shape[0], q.shape[1] * 8 // (4 if kind in FLOATS else BITS.get(kind, 8))
    if kind == BLOCKS:
        return Layer(path, kind, n, k, fp8_blocks.SIZE, form=q.dtype)
    grouped = kind in (*BITS, *FLOATS)
    if scale.shape[0] != n or not scale.shape[1] or k % scale.shape[1] or (not grouped and scale.shape[1] != 1):
        raise LoadError(f"{path}.scale is {list(scale.shape)} for a weight {[n, k]}: write the checkpoint again")
    zeros = False
    if parts["offset"] is not None:
        with _refused(path):
            if kind in FLOATS:
                packing.one_factor(tensor(f"{path}.offset"))
                return Layer(path, kind, n, k, k // scale.shape[1])
            zeros = packing.has_zero_points(tensor(f"{path}.scale"), tensor(f"{path}.offset"), BITS.get(kind, 4))
    return Layer(
        path, kind, n, k, k // scale.shape[1], zeros, parts["input_scale"] is not None, parts["order"] is not None,
        q.dtype,
    )  # fmt: skip


def _notes(found: _Source, groups: Sequence[Group]) -> Iterator[str]:
    for path, name in found.floats.items():
        yield f"{path} is {KINDS[found.saved.sites[path]]} in the source and float here ({name})"
    for group in groups:
        if group.kind == "nvfp4":
            yield "scales of inputs are left out: activations stay floats here"
        if group.kind == BLOCKS:
            yield "readers choose whether to round inputs: transformers does, and `fp8_blocks` where its option says so"
        sizes = {one.group_size for one in found.layers if one.path in group.paths}
        if group.kind in BITS and len(sizes) > 1 and group.group_size > 0:
            yield f"groups of {', '.join(map(str, sorted(sizes)))} inputs are written as groups of {group.group_size}"


def _rounded(found: _Source, form: Format, tensor: Read) -> Iterator[str]:
    """What float16 scales round. Raises SaveError where they cannot hold one."""
    most = 0.0
    for layer in found.layers if form.half else ():
        scale = tensor(f"{layer.path}.scale").float()
        with _refused(layer.path):
            away = (packing.half(scale).float() - scale).abs() / torch.where(scale == 0, 1.0, scale).abs()
        most = max(most, float(away.max()))
    if most:
        yield f"scales are rounded to float16, by {most:.1e} of themselves at most"


@contextmanager
def _refused(path: str) -> Iterator[None]:
    """Context manager: what cannot be packed is an error of the export, which names the layer."""
    try:
        yield
    except KernelError as error:
        raise SaveError(f"{path} has {error}") from error


def _tensors(found: _Source, form: Format, groups: Sequence[Group], tensor: Read) -> Iterator[dict[str, Tensor]]:
    """All tensors of the new checkpoint, those of a layer together."""
    of_layer = {path: group for group in groups for path in group.paths}
    parts_of = {f"{path}.{part}" for path in found.saved.sites for part in PARTS}
    for path, group in of_layer.items():
        parts = _parts(path, found.saved, tensor)
        yield {f"{path}.{name}": one.contiguous() for name, one in form.tensors(parts, group, found.dtype).items()}
    for path, name in found.floats.items():
        parts = _parts(path, found.saved, tensor)
        yield {name: _float(KINDS[found.saved.sites[path]], parts, found.dtype)}
    for name in found.saved.tensors:
        if name not in parts_of:
            yield {name: tensor(name)}


def _parts(path: str, saved: Saved, tensor: Read) -> dict[str, Any]:
    return {part: tensor(f"{path}.{part}") for part in PARTS if f"{path}.{part}" in saved.tensors}


def _float(kind: str, parts: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """The float weight of a quantised one."""
    return dequantize(weight_of(kind, parts), dtype)


def _copy(folder: Path, made: Path) -> None:
    """The tokenizer's files, generation_config.json and others that are neither weights nor code."""
    for file in sorted(folder.iterdir()):
        left = file.name in WRITTEN or file.suffix in LEFT_OUT or file.name[0] == "." or card.is_ours(file)
        if file.is_file() and not left:
            shutil.copyfile(file, made / file.name)


def _write_config(found: _Source, form: Format, groups: Sequence[Group], made: Path) -> None:
    described = form.config(groups, found.kept, found.heads)
    config: Mapping[str, Any] = {**found.config, "quantization_config": described}
    (made / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if form.name == "gptq":  # which older readers look for
        text = json.dumps({key: value for key, value in described.items() if key != "quant_method"}, indent=2)
        (made / "quantize_config.json").write_text(text + "\n", encoding="utf-8")
