"""The record of one benchmark: everything needed to judge its figures and to repeat it."""

from __future__ import annotations

import datetime
import platform
import shlex
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from accelpatch.bench.generate import Figures, Shape
from accelpatch.bench.read_limit import ReadLimit
from accelpatch.device import Device, probe
from accelpatch.report import Report, human, table

DRAFTED = "patched, with drafts"


@dataclass(frozen=True)
class Setting:
    """The conditions of a benchmark."""

    model: str
    weights: str  # "checkpoint" or "random"
    dtype: str
    device: Device
    threads: int
    shape: Shape
    repeats: int  # asked for; each model's figures say how many were run
    seconds: float  # the bound on the time of each model
    command: str

    @classmethod
    def of(cls, network: nn.Module, model: str, weights: str, shape: Shape, repeats: int, seconds: float) -> Setting:
        """That of this process. network: the model named `model`."""
        one, command = next(network.parameters()), shlex.join(["accelpatch", *sys.argv[1:]])
        dtype, threads = str(one.dtype).removeprefix("torch."), torch.get_num_threads()
        return cls(model, weights, dtype, probe(one.device), threads, shape, repeats, seconds, command)


def document(
    setting: Setting, report: Report, limit: ReadLimit, original: Figures, patched: Figures, cached_bytes: int,
    drafted: Figures | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The record as plain data for JSON: setting, verification, read limit, and both models' figures.

    cached_bytes: bytes of KV cache per token and sequence; a step reads those of all earlier tokens. drafted: those of
    the patched model with drafts of another one.
    """
    shape = setting.shape
    cache = shape.batch * cached_bytes * (shape.prompt + shape.new // 2)
    before, after = report.token_bytes
    return {
        "command": setting.command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "model": setting.model,
        "weights": setting.weights,
        "dtype": setting.dtype,
        "recipe": report.recipe,
        "device": asdict(setting.device) | {"threads": setting.threads},
        "versions": {
            "python": platform.python_version(), "torch": _version("torch"),
            "transformers": _version("transformers"), "accelpatch": _version("accelpatch"),
        },
        "shape": asdict(setting.shape),
        "repeats": setting.repeats,
        "seconds": setting.seconds,
        "verification": asdict(report.verification) if report.verification else None,
        "read_limit": asdict(limit),
        "cache_bytes": cache,
        "original": _side(original, before, cache, limit),
        "patched": _side(patched, after, cache, limit),
        **({} if drafted is None else {DRAFTED: _side(drafted, after, cache, limit)}),
        "notes": list(report.notes),
    }  # fmt: skip


def _version(package: str) -> str:
    """The installed version of a package; one that runs from a folder has none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed, run from a folder"


def _side(figures: Figures, token_bytes: int, cache: int, limit: ReadLimit) -> dict[str, Any]:
    """One model's figures. Bytes per step: weights and scales, and the KV cache at the mean context length."""
    side, read = figures.to_dict(), token_bytes + cache
    side["token_bytes"] = token_bytes
    side["decode"]["limit_tokens_per_second"] = figures.shape.batch * limit.bytes_per_second / read
    side["decode"]["share_of_read_limit"] = figures.steps_per_second * read / limit.bytes_per_second
    return side


def text(record: dict[str, Any]) -> str:
    """The record as text: the setting, then a table of medians with lowest and highest values."""
    device, shape, limit = record["device"], record["shape"], record["read_limit"]
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    threads = f", {device['threads']} threads" if device["kind"] == "cpu" else ""
    rows = [("", "bytes a token", "decode tokens/s", "of the read limit", "prefill tokens/s")]
    for name in ("original", "patched", *([DRAFTED] if DRAFTED in record else ())):
        side = record[name]
        rows.append((
            name, human(side["token_bytes"]), _spread(side["decode"]["tokens_per_second"]),
            f"{side['decode']['share_of_read_limit']:.0%}", _spread(side["prefill"]["tokens_per_second"]),
        ))  # fmt: skip
    lines = [
        f"command   {record['command']}",
        f"date      {record['date']}",
        f"device    {device['name']} ({device['arch']}{threads})",
        f"versions  {versions}",
        f"model     {record['model']}, {record['weights']} weights, {record['dtype']}; recipe {record['recipe']}",
        f"shape     batch {shape['batch']}, {shape['prompt']} prompt tokens, {shape['new']} new tokens; "
        f"median of {_repeats(record)} (lowest to highest)",
        f"limit     {limit['bytes_per_second'] / 1e9:.1f} GB/s read: {limit['method']}, {human(limit['buffer_bytes'])}",
        f"cache     {human(record['cache_bytes'])} of keys and values are read in a step besides the weights",
        "",
        table(rows),
    ]
    speedup = {
        stage: record["patched"][stage]["tokens_per_second"]["median"]
        / record["original"][stage]["tokens_per_second"]["median"]
        for stage in ("decode", "prefill")
    }
    lines += ["", f"patched against original: decode {speedup['decode']:.2f} x, prefill {speedup['prefill']:.2f} x"]
    if DRAFTED in record:
        with_drafts, without = (record[name]["decode"]["tokens_per_second"]["median"] for name in (DRAFTED, "patched"))
        lines.append(f"with drafts against patched: decode {with_drafts / without:.2f} x")
    return "\n".join(lines + record["notes"])


def _repeats(record: dict[str, Any]) -> str:
    """How many repetitions were run, where that is not what was asked for."""
    run = {name: record[name]["repeats"] for name in ("original", "patched")}
    if set(run.values()) == {record["repeats"]}:
        return str(record["repeats"])
    ran = " and ".join(f"{count} ({name})" for name, count in run.items())
    return f"{ran} of {record['repeats']} repetitions: the rest did not fit {record['seconds']:g} s a model"


def _spread(rate: dict[str, float]) -> str:
    return f"{rate['median']:.1f} ({rate['low']:.1f} to {rate['high']:.1f})"
