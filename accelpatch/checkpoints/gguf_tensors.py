"""Tensors of a GGUF file under the model's names, quantised as they are stored: nothing is rounded, nothing unpacked.

    Q8_0               int8_weight_only: codes, float16 scales, groups of 32
    Q4_0, Q4_1         int4_weight_only, symmetric or with a float16 minimum, groups of 32; as embeddings, gguf_blocks
    Q5_0, Q5_1, IQ4_NL, Q2_K to Q6_K, IQ4_XS   gguf_blocks: the file's own bytes
    F32, F16, BF16     floats

Rows of q and k that llama.cpp permuted for rotary pairs are put back in the model's order; a row is whole blocks.
Source: https://github.com/ggml-org/ggml, docs/gguf.md; the names are those of gguf-py's tensor_mapping.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelpatch.checkpoints.foreign import Packed
from accelpatch.checkpoints.saved import Saved, SavedTensor, bytes_of
from accelpatch.errors import KernelError, LoadError
from accelpatch.models import gguf_rotary
from accelpatch.models.gguf_header import TYPES, Header, read_header
from accelpatch.quant.blocks import FORMS, GgufBlocks, canonical, not_finite

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ONE_LEVEL = {"Q8_0": "int8_weight_only", "Q4_0": "int4_weight_only", "Q4_1": "int4_weight_only"}
BLOCKS = "gguf_blocks"  # the replacer of blocks that stay as they are
AS_BLOCKS = "blocks_"  # before a form: of a tensor whose blocks stay, though their form has one level


class Architecture(NamedTuple):
    """What is so in an architecture's files. permuted: rows of q and k in rotary pairs. more: norms as 1 + weight.
    layer: names of a layer's tensors that are other ones than LAYER's."""

    permuted: bool = False
    more: bool = False
    layer: Mapping[str, str] = {}


FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
#: GGUF's architecture -> what is so in its files
ARCHITECTURES = {
    "llama": Architecture(permuted=True), "qwen2": Architecture(), "qwen3": Architecture(),
    "gemma2": Architecture(more=True, layer=FOUR_NORMS),
    "gemma3": Architecture(more=True, layer=FOUR_NORMS),
    "phi3": Architecture(layer={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
}  # fmt: skip
MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
OF_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)")
OF_MODEL = re.compile(r"(\w+)\.(weight|bias)")
FETCH = "fetch the file again"


class Placed(NamedTuple):
    """A tensor's place in the file. name: GGUF's. form: its type. heads: of permuted rows, 0 for none."""

    name: str
    form: str
    shape: tuple[int, ...]
    start: int
    size: int
    heads: int = 0


@dataclass(frozen=True)
class GgufFile:
    """A file's header and its tensors by the model's names; those of a quantised weight are `PATH.FORM`."""

    path: Path
    header: Header
    tensors: Mapping[str, Placed]

    @property
    def sites(self) -> dict[str, tuple[str, str]]:
        """Dotted path of a quantised module -> (its replacer's name, its form)."""
        found = {}
        for name, placed in self.tensors.items():
            path, _, part = name.rpartition(".")
            if placed.form in FORMS:
                found[path] = (
                    BLOCKS if part.startswith(AS_BLOCKS) else ONE_LEVEL.get(placed.form, BLOCKS),
                    placed.form,
                )
        return found

    @property
    def saved(self) -> Saved:
        """The tensors, as the loading of a checkpoint takes them."""
        listed = {name: SavedTensor(self.path, one.form, one.shape, "") for name, one in self.tensors.items()}
        return Saved({path: replacer for path, (replacer, _) in self.sites.items()}, listed, self.opened)

    @contextmanager
    def opened(self, path: Path) -> Iterator[GgufFile]:
        """This file, whose `get_tensor` opens it for each tensor."""
        yield self

    def floats(self) -> dict[str, Tensor]:
        """The tensors that are not quantised."""
        return {name: self.get_tensor(name) for name, placed in self.tensors.items() if placed.form in FLOATS}

    def get_tensor(self, name: str) -> Tensor:
        """A tensor: floats, or blocks uint8[N, row bytes], with rows in the model's order. Raises LoadError."""
        placed = self.tensors[name]
        try:
            raw = self.raw(placed)
        except OSError as error:
            raise LoadError(f"{self.path}: {placed.name} cannot be read ({error}): {FETCH}") from error
        rows = placed.shape[0]
        values = raw.view(FLOATS[placed.form]).view(placed.shape) if placed.form in FLOATS else raw.view(rows, -1)
        if placed.form in FORMS and (bad := not_finite(values, placed.form)):
            raise LoadError(f"{self.path}: {placed.name}: the scale of block {bad} is NaN or infinite: {FETCH}")
        if ARCHITECTURES[str(self.header.values["general.architecture"])].more and placed.name.endswith("norm.weight"):
            values = values - 1
        if placed.heads:
            pairs = values.view(placed.heads, rows // placed.heads // 2, 2, -1)
            values = pairs.transpose(1, 2).reshape(values.shape)
        return values

    def raw(self, placed: Placed) -> Tensor:
        """The bytes of a tensor. Raises OSError where the file has become shorter."""
        raw = torch.empty(placed.size, dtype=torch.uint8)
        with self.path.open("rb") as file:
            file.seek(placed.start)
            if (count := file.readinto(bytes_of(raw))) < placed.size:
                raise OSError(f"the file ends after {count} of its {placed.size} bytes")
        return raw


def open_gguf(path: Path) -> GgufFile:
    """Read the header of a GGUF file and find its tensors' places. Raises LoadError, which names file and tensor."""
    header = read_header(path)
    architecture = header.values.get("general.architecture")
    if architecture not in ARCHITECTURES:
        read = ", ".join(ARCHITECTURES)
        raise LoadError(f"{path}: the architecture {architecture!r} is not read as it is stored ({read} are): "
                        "give another recipe, which unpacks the file to float")  # fmt: skip
    names = [name for name, _, _ in header.tensors]
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise LoadError(f"{path} has two tensors of one name, {twice[0]}: {FETCH}")
    tied, size = "output.weight" not in names, path.stat().st_size
    found: dict[str, Placed] = {}
    for (name, kind, shape), offset in zip(header.tensors, header.offsets, strict=True):
        if name not in gguf_rotary.TENSORS:
            placed = _placed(path, header, name, kind, shape, offset, size)
            found[_model_name(path, placed, tied, ARCHITECTURES[architecture].layer)] = placed
    if sum(one.size for one in found.values()) > size:
        raise LoadError(f"{path}: its tensors overlap: {FETCH}")
    return GgufFile(path, header, found)


def _placed(path: Path, header: Header, name: str, kind: int, shape: list[int], offset: int, size: int) -> Placed:
    form, values, bytes_ = TYPES.get(kind, (f"type {kind}", 1, 0))
    if form not in FORMS and form not in FLOATS:
        read = ", ".join((*FORMS, *FLOATS))
        raise LoadError(f"{path}: {name} is {form}, and {read} are read as they are stored: give another recipe, such "
                        "as int8, which unpacks the file to float")  # fmt: skip
    if not 1 <= len(shape) <= 2 or min(shape) < 1 or (form in FORMS and len(shape) != 2):
        raise LoadError(f"{path}: {name} has the shape {shape}, which no {form} weight here has: {FETCH}")
    if shape[-1] % values:
        raise LoadError(f"{path}: {name} has rows of {shape[-1]}, no whole number of {form} blocks: {FETCH}")
    due, start = math.prod(shape) // values * bytes_, header.start + offset
    if start + due > size:
        raise LoadError(f"{path}: {name} ends at byte {start + due}, and the file has {size}: it is truncated: {FETCH}")
    return Placed(name, form, tuple(shape), start, due, _heads(path, header, name, shape[0]))


def _heads(path: Path, header: Header, name: str, rows: int) -> int:
    """How many heads the permuted rows of a tensor belong to; 0 where they are in the model's order."""
    architecture = str(header.values["general.architecture"])
    part = name.split(".")[-2] if name.count(".") == 3 else ""
    if not ARCHITECTURES[architecture].permuted or part not in ("attn_q", "attn_k"):
        return 0
    every = header.values.get(f"{architecture}.attention.head_count")
    heads = header.values.get(f"{architecture}.attention.head_count_kv", every) if part == "attn_k" else every
    if type(heads) is not int or heads < 1 or rows % (2 * heads):
        raise LoadError(f"{path}: {name} has {rows} rows for {heads!r} heads (attention.head_count): {FETCH}")
    return heads


def _model_name(path: Path, placed: Placed, tied: bool, layer: Mapping[str, str]) -> str:
    """The model's name of a tensor. Raises LoadError for one that none of these models has."""
    inner, outer = OF_LAYER.fullmatch(placed.name), OF_MODEL.fullmatch(placed.name)
    module = layer.get(inner[2], LAYER.get(inner[2])) if inner else MODEL.get(outer[1]) if outer else None
    if module is None:
        raise LoadError(f"{path}: {placed.name} is no tensor of a model that is read as it is stored: give another "
                        "recipe, which unpacks the file to float")  # fmt: skip
    where = f"model.layers.{int(inner[1])}.{module}" if inner else module
    kind = placed.name.rpartition(".")[2]
    if placed.form in FLOATS:
        return f"{where}.{kind}"
    if kind != "weight":
        raise LoadError(f"{path}: {placed.name} is {placed.form}, and a bias is float: {FETCH}")
    embedding = placed.name == "token_embd.weight"
    part = AS_BLOCKS if embedding and placed.form in ("Q4_0", "Q4_1") else ""  # there is no 4-bit embedding
    return f"{'lm_head' if embedding and tied else where}.{part}{placed.form}"


def weight(tensors: Mapping[str, Tensor | None], _: Mapping[str, Any], n: int, k: int) -> Any:
    """The quantised weight [n, k] of a site, from the one of its parts that is there."""
    part, q = next((part, q) for part, q in tensors.items() if q is not None)
    form = part.removeprefix(AS_BLOCKS)
    due = k // FORMS[form].values * FORMS[form].bytes
    if k % FORMS[form].values or list(q.shape) != [n, due]:
        shape = [len(q), q.shape[1] // FORMS[form].bytes * FORMS[form].values]
        raise KernelError(f"weight is {shape}, and {[n, k]} belongs here: the file's tensors and metadata disagree")
    return canonical(q, form) if part in ONE_LEVEL else GgufBlocks(q, form)


GGUF = Packed((*FORMS, *(f"{AS_BLOCKS}{form}" for form in ("Q4_0", "Q4_1"))), weight)
