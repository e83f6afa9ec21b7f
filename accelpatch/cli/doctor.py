"""``accelpatch doctor``: installed packages, devices and compilers, and what a missing one is needed for."""

from __future__ import annotations

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import typer

from . import console, doctor_env, doctor_fault, facts
from .options import JsonOption

# What each optional package or compiler is needed for; shown if it is missing.
NEEDED_FOR = {
    "g++": "compiling kernels for this CPU where accelpatch came without them (Debian: apt install g++)",
    "clang++": "compiling kernels for AMD GPUs where hipcc is missing",
    "hipcc": "compiling kernels for AMD GPUs (part of ROCm)",
    "nvcc": "compiling kernels for NVIDIA GPUs (pip install nvidia-cuda-nvcc, or the CUDA toolkit)",
    "triton": "Triton kernels on AMD and NVIDIA GPUs (accelpatch[triton]; ROCm builds of torch bring their own)",
    "peft": "LoRA adapters (accelpatch[peft])",
    "trl": "accelpatch finetune (accelpatch[train])",
    "matplotlib": "accelpatch bench --plot (accelpatch[plot])",
}
COMPILERS = ("g++", "clang++", "hipcc", "nvcc")
PACKAGES = ("triton", "peft", "trl", "matplotlib")
REQUIRED = ("accelpatch", "transformers", "accelerate", "safetensors", "gguf")
# Variables that change what accelpatch, torch or transformers do; shown if they are set.
VARIABLES = (
    "ACCELPATCH_CACHE", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS",
    "TRANSFORMERS_VERBOSITY", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
    "HSA_OVERRIDE_GFX_VERSION", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CC", "CXX", "NVCC", "HIPCC",
    "CUDA_HOME", "ROCM_PATH", "TRITON_INTERPRET", "NO_COLOR",
)  # fmt: skip


commands = typer.Typer(help="Show what is here and what is missing; advise; find a fault.", invoke_without_command=True)
commands.command("env")(doctor_env.env)
commands.command("fault", context_settings=doctor_fault.CONTEXT)(doctor_fault.fault)


@commands.callback()
def doctor(context: typer.Context, json: JsonOption = False) -> None:
    """Show packages, devices, compilers and cache, and what a missing one is needed for. Takes ten seconds at most.

    `env` shows the settings of the environment that matter, and `fault` finds the kernel behind a memory fault.
    """
    if context.invoked_subcommand is not None:
        return
    found = examine()
    console.print_result(json, found, _lines(found))


def examine() -> dict[str, Any]:
    """All facts as plain data, gathered in parallel; each takes at most ``facts.TIMEOUT`` seconds."""
    with ThreadPoolExecutor(max_workers=2 + len(COMPILERS)) as pool:
        torch = pool.submit(facts.torch_facts)
        cache = pool.submit(facts.cache_facts)
        compilers = {name: pool.submit(facts.compiler, name) for name in COMPILERS}
        python = {"version": platform.python_version(), "executable": sys.executable, "system": platform.platform()}
        return {
            "python": python,
            "packages": {name: facts.version(name) for name in REQUIRED},
            "torch": torch.result(),
            "compilers": {name: future.result() for name, future in compilers.items()},
            "optional": {name: facts.version(name) for name in PACKAGES},
            "cache": cache.result(),
            "environment": {
                name: value for name, value in sorted(os.environ.items())
                if name in VARIABLES or name.startswith("ACCELPATCH_")
            },
        }  # fmt: skip


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    python, torch, cache = found["python"], found["torch"], found["cache"]
    lines = [("python", f"{python['version']} at {python['executable']}, {python['system']}")]
    lines += [
        (name, text or f"missing: reinstall accelpatch, which needs {name}") for name, text in found["packages"].items()
    ]
    if "problem" in torch:
        lines.append(("torch", f"problem: {torch['problem']}"))
    else:
        lines.append(("torch", f"{torch['version']}, {torch['build']}, {torch['threads']} threads"))
    for device in torch.get("devices", []):
        memory = f"{device['memory'] / 2**30:.1f} GiB"
        lines.append(
            (f"device {device['torch_device']}", f"{device['name']}: {device['vendor']} {device['arch']}, {memory}")
        )
    if "cpu_kernels" in torch:
        lines.append(("cpu kernels", torch["cpu_kernels"]))
    for group in ("compilers", "optional"):
        lines += [(name, text or f"missing; needed for {NEEDED_FOR[name]}") for name, text in found[group].items()]
    if "problem" in cache:
        lines.append(("cache", f"problem: {cache['problem']}"))
    else:
        lines.append(("cache", f"{cache['root']}: {cache['entries']} entries, {cache['bytes'] / 1e6:.1f} MB"))
    lines += [(f"${name}", value) for name, value in found["environment"].items()]
    return lines
