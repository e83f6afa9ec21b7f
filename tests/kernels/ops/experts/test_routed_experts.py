"""Which experts take norm and choice into their launches, what is refused, and ties among equal logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from accelpatch.device import KNOWN
from accelpatch.errors import KernelError
from accelpatch.kernels import dispatch
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.layouts.expert_stack import Stack
from accelpatch.kernels.ops.experts import experts, routed_experts
from accelpatch.kernels.spec import Spec
from accelpatch.modules import quantized_experts
from accelpatch.modules.experts import Experts, ExpertsForm
from accelpatch.modules.quantized_experts import PARTS
from tests.support.tiny import EXPERTS

OP = routed_experts.OP
HALF = torch.bfloat16


@pytest.fixture(autouse=True)
def _buildable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device libraries can be built for every GPU."""
    monkeypatch.setattr(libraries, "why_not", lambda name, device: None if device.kind == "cuda" else "no GPU")


def asked(tokens: int = 1, norm: torch.dtype = HALF, logits: torch.dtype = HALF, **changes: Any) -> Spec:
    """Qwen3-MoE's experts."""
    given = {"experts": 128, "width": 2048, "inner": 768, "dtype": HALF, "bits": 4, "groups": (128, 128),
             "chosen": 8, "offset": "minimum", "tiled": True, "scale_dtype": torch.float16}  # fmt: skip
    made = experts.of_shape(**given | changes, tokens=tokens)  # type: ignore[arg-type]
    return replace(made, op=OP, options={**made.options, "norm_dtype": norm, "logits_dtype": logits})


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "norm": ({"norm": torch.float32}, "its norm's weight is torch.float32, and x torch.bfloat16"),
    "logits": ({"logits": torch.float64}, "its logits are torch.float64"),
    "experts": ({"experts": 1025}, "1025 experts are more than the 1024 that a kernel chooses from"),
    "width": ({"width": 16512}, "its tokens have 16512 values, and a norm inside takes up to 16384"),
    "words": ({"tiled": False}, "its weights lie in words, not in tiles"),
}


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize("reason", REASONS)
def test_reasons(reason: str, arch: str) -> None:
    changes, due = REASONS[reason]
    assert dispatch.choose(OP, asked(), KNOWN[arch]) == "hip"
    assert due in str(routed_experts.hip_why_not(asked(**changes), KNOWN[arch]))
    assert dispatch.choose(OP, asked(**changes), KNOWN[arch]) == "operations"


@pytest.mark.parametrize("tokens, name", [(32, "hip"), (33, "operations")])
def test_many_tokens_are_not_read_one_by_one(tokens: int, name: str) -> None:
    assert dispatch.choose(OP, asked(tokens), KNOWN["sm_90"]) == name
    assert routed_experts.hip_why_not(asked(tokens), KNOWN["sm_90"]) is None


def arguments() -> list[Any]:
    case = next(case for case in routed_experts.cases() if case.id == "w4-e4-h128-i128-t1-k2-g32-silu-tiles")
    return list(case.make(torch.Generator().manual_seed(1), HALF, torch.device("cpu")))


@pytest.mark.parametrize(
    "at, change, message",
    [
        (4, lambda logits: logits[:, :3], r"logits are \[T, 4\], one an expert"),
        (4, lambda logits: logits.expand(2, 4), "x and logits have a row for each token"),
        (5, lambda top_k: 5, "5 of 4 experts cannot be chosen"),
        (1, lambda weight: weight[:-1], "weight is float"),
        (0, lambda x: x[0], "x is float"),
    ],
    ids=["experts", "tokens", "top_k", "norm", "x"],
)
def test_arguments_that_do_not_fit(at: int, change: Any, message: str) -> None:
    args = arguments()
    args[at] = change(args[at])
    with pytest.raises(KernelError, match=message):
        routed_experts.routed_experts(*args)


def test_of_equal_logits_the_reference_takes_the_first() -> None:
    args = arguments()
    equal, first = torch.zeros(1, 4, dtype=HALF), torch.tensor([[1.0, 1.0, 0.0, 0.0]], dtype=HALF)
    made = [routed_experts.reference(*args[:4], logits, 2, True, False, *args[8:]) for logits in (equal, first)]
    assert torch.equal(*made)


def tiles(up: Any, down: Any, *_: Any) -> Any:
    one, other = (Stack.of_tiles(*(held[part] for part in PARTS), interleaved=held is up) for held in (up, down))
    return one, other


def test_what_a_module_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose weights lie in tiles, as on a GPU; others have a reason."""

    def held(bits: int, packable: bool = False) -> Experts:
        original = EXPERTS["mixtral"].make(hidden_size=128, intermediate_size=128).model.layers[0].mlp.experts
        weights: dict[str, Any] = {}
        for name, (n, k) in {"gate_up_proj": (256, 128), "down_proj": (128, 128)}.items():
            scale = torch.rand(4, n, 1, dtype=torch.float16 if bits == 4 else torch.float32)
            q = torch.zeros(4, n, k * bits // 8, dtype=torch.int8)
            weights[name] = {"q": q, "scale": scale, "offset": None, "bias": None}
        return quantized_experts.quantised(original, ExpertsForm("silu"), weights, bits, packable)

    def answer(module: Experts) -> str:
        return str(module.why_not_routed(2, HALF))

    assert "no GPU" in answer(held(4))
    monkeypatch.setattr(routed_experts, "probe", lambda device: KNOWN["sm_90"])
    assert "its weights lie in words" in answer(held(4))
    assert "its weights have 8 bits" in answer(held(8))
    monkeypatch.setattr(quantized_experts, "tiles_for", tiles)
    assert held(4).why_not_routed(2, HALF) is None
    assert "its activations are" in str(held(4).why_not_routed(2, torch.float32))
    assert Experts.why_not_routed(held(4), 2, HALF) == "its experts are not 4-bit codes"
