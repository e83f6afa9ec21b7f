"""The device libraries that a plan names: what its replacements launch and nothing else; a patch builds them first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import accelpatch
from accelpatch import api
from accelpatch.device import KNOWN, probe
from accelpatch.errors import KernelError
from accelpatch.kernels.compiling import libraries
from accelpatch.patching.replacer import Choice
from accelpatch.patching.site import Site
from accelpatch.replacers import registry
from tests.support.tiny import CAUSAL

ATTENTION = "decode_attention_fp16_128"
INT4 = ("gemv_int4_fp16_minimum", "gemv_int8_fp16_rows")
HERE = replace(KNOWN["sm_90"], index=0)


@pytest.mark.parametrize(
    "arch, recipe, needed",
    [
        ("sm_90", "exact", (ATTENTION, "gemv_fp16")),
        ("sm_90", "int8", (ATTENTION, "gemv_int8_fp16_rows")),
        ("sm_90", "int4", (ATTENTION, *INT4, "int4_gemm_fp16")),
        ("sm_80", "int4", (ATTENTION, *INT4)),
        ("gfx942", "int4", (ATTENTION, *INT4)),
    ],
)
def test_a_plan_names_what_it_launches(arch: str, recipe: str, needed: tuple[str, ...]) -> None:
    assert accelpatch.plan_from_config("llama2-7b", recipe, arch=arch).libraries == needed


@pytest.mark.parametrize(
    "name, options, needed",
    [
        ("int4_weight_only", {"group_size": 32}, ("gemv_int4_32_bf16_minimum",)),
        ("int3_weight_only", {"group_size": 64, "symmetric": True}, ("gemv_int3_bf16_g64_none",)),
        ("int4_weight_only", {"group_size": 64, "symmetric": True}, ("gemv_int4_64_bf16_none",)),
        ("fp8_weight_only", {}, ("gemv_fp8_bf16_e4m3fn",)),
        ("compact", {}, ("gemv_compact",)),
        ("gemv", {}, ("gemv_bf16",)),
        ("nf4_weight_only", {}, ("gemv_int4_64_bf16_nf4",)),
        ("mxfp4_weight_only", {}, ("gemv_int4_32_bf16_e2m1",)),
        ("int8_weight_only", {"group_size": 32}, ()),  # by Triton or torch
    ],
    ids=["int4 g32", "int3 g64", "int4 g64", "fp8", "compact", "gemv", "nf4", "mxfp4", "int8 g32"],
)
def test_libraries_of_a_format(name: str, options: dict[str, Any], needed: tuple[str, ...]) -> None:
    layer = nn.Linear(256, 48, bias=False, device="meta", dtype=torch.bfloat16)
    site = Site("at", layer, "q_proj", ("Linear",), 48, 256, 2 * 48 * 256, dtype="bfloat16")
    choice = registry()[name].propose(site, options, KNOWN["sm_90"])
    assert isinstance(choice, Choice)
    assert choice.libraries == needed


@pytest.mark.skipif(libraries.why_not("cpu", probe("cpu")) is not None, reason="needs a C++ compiler")
def test_a_plan_for_a_cpu_names_the_one(tiny_llama: LlamaForCausalLM) -> None:
    assert accelpatch.plan(tiny_llama, "int8").libraries == ("cpu",)


def test_a_tied_head_has_its_library(tiny_llama: LlamaForCausalLM) -> None:
    tiny_llama.config.tie_word_embeddings = True
    tiny_llama.lm_head.weight = tiny_llama.model.embed_tokens.weight
    plan = accelpatch.plan(tiny_llama.bfloat16(), "int8", device=KNOWN["sm_90"])
    assert "gemv_int8_bf16_rows" in next(e for e in plan.replaced if e.site.role == "head").choice.libraries


def test_a_patch_builds_them_before_it_touches_the_model(
    tiny_llama: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\necho error: a broken compiler >&2\n[ $1 = --version ]\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("NVCC", str(compiler))
    monkeypatch.setenv("ACCELPATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ACCELPATCH_KERNELS", raising=False)
    for table in ("_loaded", "_failed"):
        monkeypatch.setattr(libraries, table, {})
    model = tiny_llama.bfloat16()
    before = {name: (type(module), id(module)) for name, module in model.named_modules()}
    with pytest.raises(KernelError, match=r"kernel library \w+ for sm_90 was not built: .*(\n.*)*a broken compiler"):
        api.patch(model, "int8", device=HERE)
    assert {name: (type(module), id(module)) for name, module in model.named_modules()} == before
    assert not hasattr(model, "accelpatch")
    again = accelpatch.plan(model, "int8", device=HERE)  # with what is left
    assert again.libraries == ()
    assert any("was not built" in note for note in again.report().notes)


@pytest.mark.parametrize("name", CAUSAL)
def test_every_family_can_be_planned_for_a_gpu(name: str) -> None:
    plan = accelpatch.plan(CAUSAL[name].make().bfloat16(), "exact", device=KNOWN["sm_90"])
    fused = [entry for entry in plan.replaced if entry.choice is not None and entry.choice.fused]
    assert all(entry.choice is not None and len(entry.choice.libraries) <= 1 for entry in fused)
