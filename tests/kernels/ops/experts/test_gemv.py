"""Which experts run by the HIP kernels, and on tiles: limits, libraries, the choice by the number of tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.device import KNOWN, probe
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.codebooks import E8M0
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.layouts.expert_stack import Stack
from accelpatch.kernels.ops.experts import experts
from accelpatch.kernels.ops.experts import gemv as expert_gemv
from accelpatch.kernels.spec import Spec
from accelpatch.kernels.triton import launch

ARCHS = ("sm_90", "gfx942")


@pytest.fixture(autouse=True)
def _buildable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device libraries can be built for every GPU, and Triton is installed."""
    monkeypatch.setattr(launch, "_installed", lambda: True)
    monkeypatch.setattr(libraries, "why_not", lambda name, device: None if device.kind == "cuda" else "no GPU")


def asked(tokens: int = 1, **changes: Any) -> Spec:
    """Qwen3-MoE's experts."""
    given = {"experts": 128, "width": 2048, "inner": 768, "dtype": torch.bfloat16, "bits": 4, "groups": (128, 128),
             "chosen": 8, "offset": "minimum", "tiled": True, "scale_dtype": torch.float16}  # fmt: skip
    return experts.of_shape(**given | changes, tokens=tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "number, chosen, tokens, name",
    [(128, 8, 1, "hip"), (128, 8, 32, "hip"), (128, 8, 33, "triton"), (8, 2, 8, "hip"), (8, 2, 9, "triton"),
     (2, 1, 8, "hip"), (2, 1, 9, "triton")],
)  # fmt: skip
def test_few_tokens_run_by_hip_and_more_by_triton(number: int, chosen: int, tokens: int, name: str, arch: str) -> None:
    spec = asked(tokens, experts=number, chosen=chosen)
    assert dispatch.choose(experts.OP, spec, KNOWN[arch]) == name
    words = replace(spec, options={**spec.options, "tiled": False})
    assert dispatch.choose(experts.OP, words, KNOWN[arch]) == "triton"
    assert dispatch.choose(experts.OP, spec, probe("cpu")) == "torch"


E2M1: dict[str, Any] = {"groups": (32, 32), "offset": "e2m1", "scale_dtype": E8M0}


@pytest.mark.parametrize("arch", ARCHS)
def test_codes_of_e2m1_run_by_hip(arch: str) -> None:
    assert dispatch.choose(experts.OP, asked(**E2M1), KNOWN[arch]) == "hip"


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "8 bits": ({"bits": 8}, "its weights have 8 bits, and the kernels read 4"),
    "dtype": ({"dtype": torch.float32}, "its activations are bfloat16 or float16, not torch.float32"),
    "activation": ({"activation": "gelu"}, "its activation is gelu, and that of the kernels is silu"),
    "bias": ({"biased": True}, "it has biases"),
    "chosen": ({"chosen": 65}, "65 experts a token are more than 64"),
    "scales": ({"scale_dtype": torch.float32}, "its scales are float16 or bfloat16, not torch.float32"),
    "groups": ({"groups": (128, 96)}, "its groups are 32, 64, 128 times a power of two"),
    "width": ({"inner": 704}, "multiples of 16 rows by 128 columns, not 2048 x 704"),
    "size": ({"inner": 1 << 20}, "its sizes are beyond 32-bit indices"),
    "groups of e2m1": (E2M1 | {"groups": (32, 64)}, "its groups are 32 of a longer row, not 64 of 768"),
    "scales of e2m1": (E2M1 | {"scale_dtype": torch.float32}, "its scales are torch.float8_e8m0fnu"),
    "words": ({"tiled": False}, "its weights lie in words, not in tiles"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_reasons(reason: str) -> None:
    changes, due = REASONS[reason]
    assert due in str(expert_gemv.why_not(asked(**changes), KNOWN["sm_90"]))
    assert (expert_gemv.why_not_tiles(asked(**changes), KNOWN["sm_90"]) is None) == (reason in ("words", "chosen"))


def test_its_libraries() -> None:
    assert expert_gemv.libraries(asked()) == ("experts_int4_bf16_minimum",)
    both = asked(groups=(64, 32), dtype=torch.float16, offset="none")
    assert expert_gemv.libraries(both) == ("experts_int4_64_fp16_none", "experts_int4_32_fp16_none")
    assert expert_gemv.libraries(asked(groups=(2048, 768))) == ("experts_int4_bf16_minimum",)
    assert expert_gemv.libraries(asked(**E2M1)) == ("experts_int4_32_bf16_e2m1",)


def canonical(
    n: int, k: int, group: int = 32, dtype: torch.dtype = torch.float16, offset: bool = True
) -> dict[str, Tensor | None]:
    scale = torch.rand(2, n, k // group).to(dtype)
    held = {"q": torch.randint(-128, 128, (2, n, k // 2), dtype=torch.int8), "scale": scale, "bias": None}
    return {**held, "offset": -8 * scale if offset else None}


@pytest.mark.parametrize(
    "up, down, fits",
    [
        (canonical(256, 256), canonical(256, 128), True),
        (canonical(256, 256, 128, offset=False), canonical(256, 128, offset=False), True),
        (canonical(256, 256, dtype=E8M0, offset=False), canonical(256, 128, dtype=E8M0, offset=False), True),
        (canonical(256, 256), canonical(256, 128, offset=False), False),
        (canonical(256, 256, dtype=torch.float32), canonical(256, 128, dtype=torch.float32), False),
        (canonical(192, 256), canonical(256, 96), False),
        (canonical(256, 256) | {"offset": torch.full((2, 256, 8), 1e-9)}, canonical(256, 128), False),
    ],
    ids=["minimum", "none", "e2m1", "offsets of one alone", "float32 scales", "width", "offsets beyond 16 bits"],
)
def test_what_lies_in_tiles(up: Any, down: Any, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "probe", lambda device: KNOWN["sm_90"])
    cuda = torch.device("cuda", 0)
    made = experts.tiles_for(up, down, "silu", torch.bfloat16, cuda)
    assert (made is not None) == fits
    assert experts.tiles_for(up, down, "gelu", torch.bfloat16, cuda) is None
    assert experts.tiles_for(up, down, "silu", torch.bfloat16, torch.device("cpu")) is None
    for stack, given, interleaved in zip(made or (), (up, down), (True, False), strict=False):
        q, scale, offset, _ = stack.canonical(0, interleaved=interleaved)
        assert torch.equal(q, given["q"])
        assert torch.equal(scale.float(), given["scale"].float())
        assert scale.dtype == given["scale"].dtype
        assert (offset is None) == (given["offset"] is None)
        assert offset is None or torch.equal(offset, given["offset"])


def _tiles() -> list[Any]:
    up, down = (
        Stack.of_tiles(*(canonical(n, k)[name] for name in experts.TABLES), interleaved=interleaved)  # type: ignore[arg-type]
        for n, k, interleaved in ((256, 128, True), (128, 128, False))
    )
    x, ids = torch.zeros(1, 128), torch.zeros(1, 1, dtype=torch.int64)
    return [x, ids, torch.ones(1, 1), *up, *down, "silu"]


@pytest.mark.parametrize(
    "at, change, message",
    [
        (3, lambda w: w[:, :, :-1], "the tiles of"),
        (3, lambda w: w.short(), "are int8"),
        (4, lambda scale: scale[..., :1], "scales and offsets are"),
        (4, lambda scale: scale.flatten(3), "tiles have a scale"),
        (5, lambda offset: offset.float(), "of one dtype"),
        (7, lambda w: Stack(torch.zeros(2, 128, 16, dtype=torch.int32)).w, "or both in tiles"),
    ],
    ids=["rows", "dtype", "table", "dimensions", "offset", "words"],
)
def test_tiles_that_do_not_fit_are_errors(at: int, change: Any, message: str) -> None:
    args = _tiles()
    assert experts.experts(*args).shape == (1, 128)
    args[at] = change(args[at])
    with pytest.raises(KernelError, match=message):
        experts.experts(*args)
