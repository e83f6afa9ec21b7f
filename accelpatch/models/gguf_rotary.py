"""Rotary embedding in a GGUF file's metadata and tensors, as transformers' `rope_parameters`.

    rope.scaling.type    none, linear (also where a factor alone is given), yarn, longrope
    rope_factors_*       longrope's divisors of the frequencies, for short and for long texts
    rope_freqs           divisors of the frequencies, of which the metadata says nothing; those of Llama 3 are known

Source: https://github.com/ggml-org/llama.cpp, src/llama-model.cpp, src/llama-context.cpp and convert_hf_to_gguf.py.
"""

from __future__ import annotations

import math
from typing import Any

from accelpatch.errors import LoadError
from accelpatch.models.gguf_header import BESIDE, Metadata, same
from accelpatch.models.gguf_keys import OF_FAMILY
from accelpatch.models.guard import explained

FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
TENSORS = (FREQS, LONG, SHORT)  # they belong to the configuration
KEPT = ("rope_theta", "partial_rotary_factor")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
NEAR = 1e-4  # of divisors that were computed in float32


def complete(config: Any, file: Metadata) -> None:
    """Set base and scaling of the frequencies. Raises LoadError for what transformers has no parameters for."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = "full_attention" in rope  # Gemma 3: layers with a sliding window have frequencies of their own
    own = rope["full_attention"] if nested else rope
    if rope:
        _base(own, "rope.freq_base", file)
        _base(rope.get("sliding_attention", own) if nested else own, "rope.freq_base_swa", file, only=not nested)
    if (scaling := _scaling(own, file)) is None:
        return
    if not rope:
        file.refuse("rope.scaling.type")
    if own.get("rope_type") != scaling["rope_type"]:
        own = {name: own[name] for name in KEPT if name in own}
    config.rope_parameters = {**rope, "full_attention": own | scaling} if nested else own | scaling
    if hasattr(config, "original_max_position_embeddings") and "original_max_position_embeddings" in scaling:
        config.original_max_position_embeddings = scaling["original_max_position_embeddings"]  # Phi-3
    with explained(f"{file.path}: its rotary scaling does not fit {type(config).__name__}"):
        config.standardize_rope_params()
        config.validate_rope()


def check_scaled(config: Any, file: Metadata) -> None:
    """Raise LoadError where a file scales its frequencies, and the configuration in its folder does not."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = {one.get("rope_type", "default") for one in (rope, *rope.values()) if isinstance(one, dict)}
    scaled = _of_tensors(file) or file.facts.get("rope.scaling.type") == "longrope"
    if kinds <= {"default"} and (scaled or not same(_factor(file), 1.0)):
        what = next(iter(_of_tensors(file)), f"{file.architecture}.rope.scaling")
        raise LoadError(f"{file.path}: {what} scales the rotary frequencies, and config.json beside it does not: put "
                        "the model's own there")  # fmt: skip


def _base(parameters: dict[str, Any], name: str, file: Metadata, *, only: bool = False) -> None:
    """Set the base that the file has. only: it must be the one that is there."""
    if name not in file.facts:
        return
    base = file.number(name)
    if base <= 0 or (only and not same(base, parameters.get("rope_theta"))):
        file.refuse(name)
    parameters["rope_theta"] = base if not same(base, parameters.get("rope_theta")) else parameters["rope_theta"]


def _of_tensors(file: Metadata) -> list[str]:
    """The tensors that scale the frequencies."""
    return [name for name, _, _ in file.header.tensors if name in TENSORS and not file.of(OF_FAMILY)]


def _factor(file: Metadata) -> float:
    """By how much positions are compressed; 0 is none, as in llama.cpp."""
    if file.facts.get("rope.scaling.type") == "none":
        return 1.0
    return file.number("rope.scaling.factor", file.number("rope.scale_linear", 1.0)) or 1.0


def _scaling(parameters: dict[str, Any], file: Metadata) -> dict[str, Any] | None:
    """What rope_parameters say besides the base; None for frequencies that are not scaled."""
    kind, factor, tensors = file.facts.get("rope.scaling.type", "linear"), _factor(file), _of_tensors(file)
    if kind not in ("none", "linear", "yarn", "longrope") or factor < 0:
        file.refuse("rope.scaling.type" if factor >= 0 else "rope.scaling.factor")
    if LONG in tensors or SHORT in tensors:
        return _longrope(kind, factor, tensors, file)
    if kind == "longrope":
        file.refuse("rope.scaling.type")  # its divisors are tensors, which the file has not
    _only("rope.scaling.attn_factor", (1.0,), file)
    _only("rope.scaling.yarn_log_multiplier", (0.0,), file)
    default = 0.1 * math.log(factor) + 1.0 if kind == "yarn" and factor > 1 else 1.0
    # llama.cpp multiplies by this key where it reads it at all, and its converter writes what transformers replaces
    _only("rope.scaling.yarn_attn_factor", (default,), file)
    if FREQS in tensors:
        if not same(factor, 1.0):
            file.refuse("rope.scaling.factor")
        return _llama3(parameters, file)
    if same(factor, 1.0):
        return None
    _only("rope.scaling.yarn_ext_factor", (-1.0, 1.0 if kind == "yarn" else 0.0), file)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    betas = {name: file.number(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")
             if f"rope.scaling.yarn_{name}" in file.facts}  # fmt: skip
    return {"rope_type": "yarn", "factor": factor, **_original(file), **betas}


def _only(name: str, neutral: tuple[float, ...], file: Metadata) -> None:
    """Raise LoadError for a key with a value that changes something."""
    if name in file.facts and not any(same(file.number(name), one) for one in neutral):
        file.refuse(name)


def _original(file: Metadata) -> dict[str, int]:
    """The length that the model was first trained with."""
    name = "rope.scaling.original_context_length"
    if (length := file.number(name, file.number("context_length", 0))) < 1:
        file.refuse(name)
    return {"original_max_position_embeddings": int(length)}


def _longrope(kind: str, factor: float, tensors: list[str], file: Metadata) -> dict[str, Any]:
    if kind not in ("linear", "longrope") or (kind == "linear" and not same(factor, 1.0)) or FREQS in tensors:
        file.refuse("rope.scaling.type")
    if lacking := {LONG, SHORT} - set(tensors):
        raise LoadError(f"{file.path} has no {min(lacking)}, which belongs to the other one: {BESIDE}")
    given: dict[str, Any] = {"short_factor": file.floats(SHORT), "long_factor": file.floats(LONG)}
    if "rope.scaling.attn_factor" in file.facts:
        given["attention_factor"] = file.number("rope.scaling.attn_factor")
    if not same(factor, 1.0):
        given["factor"] = factor
    return {"rope_type": "longrope", **_original(file), **given}


def _llama3(parameters: dict[str, Any], file: Metadata) -> dict[str, Any] | None:
    """Llama 3's parameters, where the divisors are those that they give; None where all are 1."""
    divisors = file.floats(FREQS)
    factor, base = max(divisors), parameters.get("rope_theta", 10000.0)
    due = [_divisor(base ** (at / len(divisors)), factor) for at in range(len(divisors))]
    if not all(math.isclose(one, other, rel_tol=NEAR) for one, other in zip(divisors, due, strict=True)):
        raise LoadError(f"{file.path}: {FREQS} scales the rotary frequencies, which the file's metadata does not "
                        f"describe: {BESIDE}")  # fmt: skip
    return None if same(factor, 1.0) else {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _divisor(length: float, factor: float) -> float:
    """Llama 3's divisor of the frequency 1 / length."""
    waves = LLAMA3["original_max_position_embeddings"] / (2 * math.pi * length)
    smooth = (waves - LLAMA3["low_freq_factor"]) / (LLAMA3["high_freq_factor"] - LLAMA3["low_freq_factor"])
    smooth = min(max(smooth, 0.0), 1.0)
    return 1 / ((1 - smooth) / factor + smooth)
