"""Writes a saved patched model as a GGUF file, which llama.cpp and all that is made of it read.

    int8_weight_only    Q8_0                scales repeated for each 32 values; ones that are no float16 are rounded
    int4_weight_only    Q4_0, Q4_1          symmetric, or with a float16 minimum
    gguf_blocks         their own type      Q4_K and others, byte by byte as they came
    float               F32

Codes stay as they are. The file is written by the package gguf. Source: https://github.com/ggml-org/ggml, docs/gguf.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor

from accelpatch.checkpoints.gguf_tensors import ARCHITECTURES, LAYER, MODEL
from accelpatch.checkpoints.saved import Saved
from accelpatch.errors import SaveError
from accelpatch.quant import int4
from accelpatch.quant.weight import PARTS
from accelpatch.recipe import recipe as recipes

GROUP = 32  # values of a block of one level
WRITTEN = ("llama", "qwen2", "qwen3")  # model_type and architecture
NAMES = {**{path: name for name, path in MODEL.items()}, **{path: name for name, path in LAYER.items()}}
KINDS = {"int8_weight_only": "Q8_0", "int4_weight_only": "int4", "gguf_blocks": "blocks"}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # types of tokens
Read = Callable[[str], Tensor]
Blocks = tuple[Tensor, str]  # uint8[N, row bytes], and GGUF's name of their type


def write(path: Path, folder: Path, config: Mapping[str, Any], saved: Saved, tensor: Read) -> list[str]:
    """Write the file; what it says otherwise than the source. Raises SaveError for what it cannot hold."""
    architecture, notes = str(config["model_type"]), list[str]()
    check(config, saved)
    writer = gguf.GGUFWriter(path, architecture, use_temp_file=True)
    for name, value in _facts(config).items():
        {int: writer.add_uint32, float: writer.add_float32}[type(value)](f"{architecture}.{name}", value)
    notes += _tokenizer(writer, folder, config)
    rounded = 0.0
    for name, blocks, form, away in _tensors(config, saved, tensor):
        rounded = max(rounded, away)
        writer.add_tensor(name, blocks.contiguous().numpy(), raw_dtype=gguf.GGMLQuantizationType[form])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return notes + ([f"scales are rounded to float16, by {rounded:.1e} of themselves at most"] if rounded else [])


def check(config: Mapping[str, Any], saved: Saved) -> None:
    """Raise SaveError for a model or a layer that is not written."""
    kind, rotary = config.get("model_type"), dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if kind not in WRITTEN:
        raise SaveError(f"a model of type {kind} is not written as GGUF: {', '.join(WRITTEN)} are")
    if rotary.get("rope_type", "default") != "default":
        raise SaveError(
            f"rotary frequencies of the type {rotary['rope_type']} are not written as GGUF, default ones are"
        )
    for path, replacer in saved.sites.items():
        if replacer not in KINDS:
            raise SaveError(
                f"{path} is replaced by {replacer}, which GGUF does not hold: {', '.join(KINDS)} are written"
            )


def _facts(config: Mapping[str, Any]) -> dict[str, int | float]:
    heads = int(config["num_attention_heads"])
    rotary = config.get("rope_parameters") or {}
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    return {
        "context_length": int(config["max_position_embeddings"]), "embedding_length": int(config["hidden_size"]),
        "block_count": int(config["num_hidden_layers"]), "feed_forward_length": int(config["intermediate_size"]),
        "attention.head_count": heads, "attention.head_count_kv": int(config.get("num_key_value_heads") or heads),
        "attention.key_length": width, "attention.value_length": width, "rope.dimension_count": width,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]), "vocab_size": int(config["vocab_size"]),
        "rope.freq_base": float(rotary.get("rope_theta") or config.get("rope_theta") or 10000.0),
    }  # fmt: skip


def _tensors(config: Mapping[str, Any], saved: Saved, tensor: Read) -> Iterator[tuple[str, Tensor, str, float]]:
    """(GGUF's name, data, type, how far scales were rounded) of each tensor."""
    forms = _forms(config)
    parts_of = {f"{path}.{part}" for path in saved.sites for part in PARTS}
    for path, replacer in saved.sites.items():
        parts = {part: tensor(f"{path}.{part}") for part in PARTS if f"{path}.{part}" in saved.tensors}
        away = 0.0
        if replacer == "gguf_blocks":
            blocks, form = parts["q"], forms(path)
        else:
            blocks, form, away = _of_one_level(path, replacer, parts)
        tied = path == "lm_head" and bool(config.get("tie_word_embeddings"))
        yield _name("model.embed_tokens" if tied else path, "weight"), _permuted(config, path, blocks), form, away
    for name in saved.tensors:
        if name not in parts_of:
            path, _, kind = name.rpartition(".")
            yield _name(path, kind), _permuted(config, path, tensor(name).float()), "F32", 0.0


def _forms(config: Mapping[str, Any]) -> Callable[[str], str]:
    """The type of a site's blocks, which its rule in the recipe says."""
    rules = recipes.parse(str(config["quantization_config"]["recipe"])).rules

    def form(path: str) -> str:
        found = (one for one in rules if one.replace == "gguf_blocks" and one.match.fits_name(path))
        rule = next(found, None)
        if rule is None:
            raise SaveError(
                f"{path} has blocks, and no rule of the recipe says of which type: write the checkpoint again"
            )
        return str(rule.options["form"])

    return form


def _name(path: str, kind: str) -> str:
    """GGUF's name. Raises SaveError for a module that has none."""
    layer, _, inner = path.removeprefix("model.layers.").partition(".")
    known = NAMES.get(inner if layer.isdigit() else path)
    if known is None:
        raise SaveError(f"{path} has no name in GGUF files of such a model")
    return f"blk.{layer}.{known}.{kind}" if layer.isdigit() else f"{known}.{kind}"


def _permuted(config: Mapping[str, Any], path: str, rows: Tensor) -> Tensor:
    """Rows of q and k in rotary pairs, where the architecture's files have them so."""
    heads = int(config["num_attention_heads"])
    if path.endswith(".k_proj"):
        heads = int(config.get("num_key_value_heads") or heads)
    elif not path.endswith(".q_proj"):
        return rows
    if not ARCHITECTURES[str(config["model_type"])].permuted:
        return rows
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def _of_one_level(path: str, replacer: str, parts: Mapping[str, Tensor]) -> tuple[Tensor, str, float]:
    """Blocks of 32 values, their type, and how far scales were rounded. Raises SaveError for what these cannot hold."""
    q, scale, offset = parts["q"], parts["scale"], parts.get("offset")
    k = q.shape[1] * (1 if replacer == "int8_weight_only" else 2)
    group = k // scale.shape[1]
    if "order" in parts or group % GROUP:
        why = "its columns are in another order" if "order" in parts else f"its groups are of {group} values"
        raise SaveError(f"{path} cannot be written as GGUF, whose blocks have {GROUP} values in order: {why}")
    if offset is not None and not offset.is_floating_point():
        raise SaveError(f"{path} has zero points, and GGUF's blocks minima: quantise it by the recipe int4")
    floats = [one.repeat_interleave(group // GROUP, 1) for one in (scale, offset) if one is not None]
    halves = [one.to(torch.float16) for one in floats]
    away = max(float((a.float() - b.float()).abs().div(b.float().abs().clamp(min=1e-30)).max())
               for a, b in zip(halves, floats, strict=True))  # fmt: skip
    if not all(bool(one.isfinite().all()) for one in halves) or away > 1e-3:
        raise SaveError(f"{path} has scales that float16 does not hold, and GGUF's are float16")
    head = [one[:, :, None].view(torch.uint8) for one in halves]
    if replacer == "int8_weight_only":
        return torch.cat((*head, q.unflatten(1, (-1, GROUP)).view(torch.uint8)), 2).flatten(1), "Q8_0", away
    first, last = int4.unpack(q).view(torch.uint8).unflatten(1, (-1, 2, GROUP // 2)).unbind(2)
    blocks = torch.cat((*head, first | last << 4), 2).flatten(1)
    return blocks, "Q4_0" if offset is None else "Q4_1", away


def _tokenizer(writer: Any, folder: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """Write a byte-level BPE vocabulary; notes of what is not written."""
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    model = tokenizer.get("model", {})
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        yield "no vocabulary is in the file: a tokenizer.json with byte-level BPE is written, and this folder has none"
        return
    size = int(config["vocab_size"])
    tokens, kinds = [f"[PAD{at}]" for at in range(size)], [UNUSED] * size
    for token, at in model["vocab"].items():
        tokens[at], kinds[at] = token, NORMAL
    for one in tokenizer.get("added_tokens", ()):
        tokens[one["id"]], kinds[one["id"]] = one["content"], CONTROL if one.get("special") else USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(before := _before(config))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in model["merges"]])
    for name, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id)):
        if isinstance(given := config.get(f"{name}_token_id"), int):
            add(given)
    yield f"text is split as {before!r} before its tokens: see that the model was trained so"


def _before(config: Mapping[str, Any]) -> str:
    """llama.cpp's name of how text is split before BPE, by the family and the vocabulary's size."""
    if config["model_type"] != "llama":
        return "qwen2"
    return {49152: "smollm", 128256: "llama-bpe"}.get(int(config["vocab_size"]), "default")
