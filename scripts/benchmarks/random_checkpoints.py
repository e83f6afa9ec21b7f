"""Folders as GPTQModel, AutoAWQ, bitsandbytes and others write them, with random codes: for speed only."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from accelpatch.kernels.codebooks import CODEBOOKS

GROUP, BLOCK, NESTED = 128, 64, 256
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq"}
#: kind -> its quantization_config
CONFIGS: Mapping[str, dict[str, Any]] = {
    "gptq": GPTQ | {"sym": True, "desc_act": False},
    "gptq, act-order": GPTQ | {"sym": False, "desc_act": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "nf4": {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
    },
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
}  # fmt: skip


def write(folder: Path, kind: str, model: Any) -> int:
    """Write a checkpoint of a kind in the shapes of a model on the device; returns its bytes."""
    folder.mkdir(parents=True)
    config = model.config.to_dict() | {"quantization_config": CONFIGS[kind], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator(model.device).manual_seed(1)
    made = {
        "gptq": _gptq, "gptq, act-order": _gptq, "awq": _awq, "nf4": _nf4, "nvfp4": _nvfp4, "fp8 blocks": _fp8_blocks
    }[kind]  # fmt: skip
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        path = name.removesuffix(".weight")
        if name.endswith("proj.weight"):
            n, k = tensor.shape
            order = orders(path, k, tensor.device) if kind.endswith("act-order") else None
            state |= {f"{path}.{part}": one.cpu() for part, one in made(n, k, generator, order)}
        else:
            state[name] = tensor.cpu()
    save_torch_state_dict(state, folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def orders(path: str, k: int, device: torch.device) -> Tensor:
    """g_idx of act-order; layers of one input have the same one, as GPTQ makes it from that input."""
    place = path.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
    seed = sum(ord(one) * (at + 1) for at, one in enumerate(place))
    order = torch.randperm(k, generator=torch.Generator().manual_seed(seed))
    return (torch.empty(k, dtype=torch.int32).index_put_((order,), torch.arange(k, dtype=torch.int32) // GROUP)).to(
        device
    )


def _words(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randint(
        -(2**31), 2**31, (rows, columns), generator=generator, dtype=torch.int32, device=generator.device
    )


def _scales(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return (torch.rand(rows, columns, generator=generator, device=generator.device) * 0.002 + 0.002).half()


Parts = Iterator[tuple[str, Tensor]]
Maker = Callable[[int, int, torch.Generator, Tensor | None], Parts]


def _gptq(n: int, k: int, generator: torch.Generator, order: Tensor | None) -> Parts:
    groups, device = k // GROUP, generator.device
    yield "qweight", _words(k // 8, n, generator)
    stored = 0x77777777 if order is None else 0x66667777  # v1 has them less one
    yield "qzeros", torch.full((groups, n // 8), stored, dtype=torch.int32, device=device)
    yield "scales", _scales(groups, n, generator)
    yield "g_idx", torch.arange(k, dtype=torch.int32, device=device) // GROUP if order is None else order


def _awq(n: int, k: int, generator: torch.Generator, order: Tensor | None) -> Parts:
    yield "qweight", _words(k, n // 8, generator)
    yield "qzeros", torch.full((k // GROUP, n // 8), 0x78787878, dtype=torch.int32, device=generator.device)
    yield "scales", _scales(k // GROUP, n, generator)


def _nf4(n: int, k: int, generator: torch.Generator, order: Tensor | None) -> Parts:
    device, blocks = generator.device, n * k // BLOCK
    state = {
        "quant_type": "nf4", "blocksize": BLOCK, "dtype": "bfloat16", "shape": [n, k], "nested_blocksize": NESTED,
        "nested_dtype": "float32", "nested_offset": 0.04,
    }  # fmt: skip
    yield "weight", _words(n * k // 8, 1, generator).view(torch.uint8).view(-1, 1)
    yield "weight.absmax", torch.randint(0, 256, (blocks,), generator=generator, dtype=torch.uint8, device=device)
    yield "weight.quant_map", torch.tensor(CODEBOOKS["nf4"], device=device)
    yield "weight.nested_absmax", torch.full((-(-blocks // NESTED),), 0.02, device=device)
    yield "weight.nested_quant_map", torch.linspace(-1, 1, 256, device=device)
    text = json.dumps(state).encode()
    yield "weight.quant_state.bitsandbytes__nf4", torch.tensor(list(text), dtype=torch.uint8, device=device)


def _nvfp4(n: int, k: int, generator: torch.Generator, order: Tensor | None) -> Parts:
    device = generator.device
    yield "weight", _words(n, k // 8, generator).view(torch.uint8)
    scales = torch.rand(n, k // 16, generator=generator, device=device) * 200 + 200
    yield "weight_scale", scales.to(torch.float8_e4m3fn)
    yield "weight_scale_2", torch.tensor(2e-5, device=device)


def _fp8_blocks(n: int, k: int, generator: torch.Generator, order: Tensor | None) -> Parts:
    device = generator.device
    codes = torch.randn(n, k, generator=generator, device=device, dtype=torch.float32).mul_(100).clamp_(-448, 448)
    yield "weight", codes.to(torch.float8_e4m3fn)
    size = (-(-n // 128), -(-k // 128))
    yield "weight_scale_inv", torch.rand(size, generator=generator, device=device) * 1e-4 + 1e-4
