"""3-bit weights: packing, bounded errors, models patched, saved and undone, and GPTQ's checkpoints both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import accelpatch
from accelpatch import api
from accelpatch.device import KNOWN
from accelpatch.errors import KernelError
from accelpatch.kernels.ops.linear import int3_linear
from accelpatch.quant import int3, packed_formats, packing
from accelpatch.quant.formats import dequantize
from accelpatch.recipe import methods
from accelpatch.recipe.recipe import parse
from tests.support.exports import saved
from tests.support.simulated import greedy, logits
from tests.support.tiny import CAUSAL, full_batch, padded_batch, snapshot

SYMMETRIC = parse("""name: int3-symmetric
extends: int3
rules:
  - name: linear
    options: {symmetric: true, group_size: [32]}
""")


def weight(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(2))


def words_of(codes: list[int]) -> list[int]:
    """Code after code of 3 bits as words of 32 bits, as one long number has them."""
    number = sum(code << 3 * place for place, code in enumerate(codes))
    return [number >> 32 * place & 0xFFFFFFFF for place in range(len(codes) * 3 // 32)]


def test_eight_codes_lie_in_three_bytes_low_bits_first() -> None:
    codes = [1, 2, 3, 4, 5, 6, 7, 0]
    due = sum(code << 3 * place for place, code in enumerate(codes)).to_bytes(3, "little")
    assert bytes(int3_linear.pack(torch.tensor([codes])).view(torch.uint8)[0].tolist()) == due


def test_pack_and_unpack_are_inverse() -> None:
    q = torch.randint(-128, 128, (4, 96), generator=torch.Generator().manual_seed(1)).to(torch.int8)
    u = int3_linear.unpack(q)
    assert (int(u.min()), int(u.max()), u.shape) == (0, 7, (4, 256))
    assert torch.equal(int3_linear.pack(u), q)


@pytest.mark.parametrize("kind", ["minimum", "symmetric", "zero_point"])
@pytest.mark.parametrize("group_size", [128, 32, 8], ids=str)
def test_error_is_bounded_by_the_step(kind: str, group_size: int) -> None:
    w = weight(7, 128)
    made = int3.quantize(w, group_size=group_size, **({} if kind == "minimum" else {kind: True}))
    assert (made.n, made.k, made.w.shape, made.kind == "none") == (7, 128, (7, 48), kind == "symmetric")
    step = made.scale.float().abs().repeat_interleave(group_size, dim=1)
    allowed = (0.5 if kind == "minimum" else 1.0) * step + w.abs() * 2.0**-9
    assert bool(((dequantize(made) - w).abs() <= allowed).all())


@pytest.mark.parametrize("kind", ["minimum", "symmetric", "zero_point"])
def test_grid_points_are_exact(kind: str) -> None:
    u = torch.randint(0, 8, (5, 64), generator=torch.Generator().manual_seed(0))
    u[:, ::32], u[:, 1::32] = 0, 7
    shift = {"minimum": -0.75, "symmetric": -1.0, "zero_point": -0.5}[kind]
    made = int3.quantize(u * 0.25 + shift, group_size=32, **({} if kind == "minimum" else {kind: True}))
    assert torch.equal(dequantize(made), u * 0.25 + shift)
    assert torch.equal(int3_linear.unpack(made.w), u.to(torch.int8))


@pytest.mark.parametrize(
    ("k", "group", "words"), [(60, 12, "eight weights in three bytes"), (64, 24, "does not divide")], ids=["K", "group"]
)
def test_bad_sizes(k: int, group: int, words: str) -> None:
    with pytest.raises(KernelError, match=words):
        int3.quantize(weight(4, k), group_size=group)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_patched_saved_loaded_and_undone(method: str, tmp_path: Path) -> None:
    model: Any = CAUSAL["llama"].make()
    before, batch = snapshot(model), padded_batch()
    accelpatch.patch(model, methods.by_method(methods.of_bits(3), method, 8, 64), progress=False)
    report = model.accelpatch.report()
    assert [site.replacer for site in report.sites].count("int3_weight_only") == 14
    assert report.verification.failures == []
    tokens = greedy(model, batch)
    assert model.accelpatch.report().paths["native step"] > 0
    model.save_pretrained(tmp_path / "int3")
    assert greedy(accelpatch.load(str(tmp_path / "int3")).model, batch).equal(tokens)
    accelpatch.unpatch(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("arch", ["gfx942", "sm_90"])
def test_a_gpu_reads_3_bits_under_half_precision_alone(arch: str) -> None:
    plans = [
        accelpatch.plan(CAUSAL["llama"].make(dtype), "int3", device=KNOWN[arch])
        for dtype in (torch.bfloat16, torch.float32)
    ]
    ours, kept = [
        [entry.choice.kernel for entry in plan.replaced if entry.replacer.name == "int3_weight_only"] for plan in plans
    ]
    assert (set(ours), len(ours), kept) == ({"hip"}, 14, [])
    assert "no GPU kernel reads it here" in str(plans[1])


def test_gptq_both_ways(tmp_path: Path) -> None:
    source = saved(SYMMETRIC, tmp_path / "ours")
    made = api.export(source, "gptq")
    assert made.format == "gptq"
    path = "model.layers.0.mlp.down_proj"
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (source, made.folder))
    codes = int3_linear.unpack(ours[f"{path}.q"])
    assert [one & 0xFFFFFFFF for one in theirs[f"{path}.qweight"][:, 5].tolist()] == words_of(codes[5].tolist())
    assert [one & 0xFFFFFFFF for one in theirs[f"{path}.qzeros"][0].tolist()] == words_of([3] * len(codes))  # 4 - 1
    one, other = (
        logits(accelpatch.load(str(folder), dtype=torch.float32).model, full_batch())
        for folder in (source, made.folder)
    )
    torch.testing.assert_close(other, one, rtol=0, atol=1e-5 * float(one.abs().max()))


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_zero_points_of_gptq(version: str) -> None:
    """Asymmetric and with act-order; of v1 a zero point may be 8, which it stores as 7."""
    generator = torch.Generator().manual_seed(3)
    n, k, groups = 32, 96, 3
    codes = torch.randint(0, 8, (n, k), generator=generator, dtype=torch.uint8)
    first = version == "gptq"
    zeros = torch.randint(0, 8, (n, groups), generator=generator, dtype=torch.uint8) + first
    scale = torch.rand(n, groups, generator=generator).half() + 0.1
    order = torch.randperm(k, generator=generator)
    of_input = torch.empty(k, dtype=torch.int32)
    of_input[order] = torch.arange(k, dtype=torch.int32) // 32
    held = packing.gptq(packing.Coded(3, codes, scale, zeros, of_input), first)
    config = {"bits": 3, "sym": False, "checkpoint_format": version}
    made = packed_formats.gptq(held, config, n, k)
    wide = scale.float()[:, of_input.long()]
    assert torch.equal(dequantize(made), (codes.float() - zeros.float()[:, of_input.long()]) * wide)


@pytest.mark.parametrize(("n", "k"), [(40, 64), (32, 72)], ids=["N", "K"])
def test_words_that_are_not_whole(n: int, k: int) -> None:
    with pytest.raises(KernelError, match="no multiple of the 32 codes"):
        packed_formats.gptq({}, {"bits": 3}, n, k)
