"""The native decode step with int8 activations against its model, module by module, in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from accelpatch.device import probe
from accelpatch.kernels.compiling import libraries
from accelpatch.kernels.cpu import native_library
from accelpatch.kernels.cpu.decode_step import DecodeStep
from accelpatch.kernels.layouts.cpu_pack import Pack
from accelpatch.kernels.layouts.w8a8_pack import W8A8Pack
from accelpatch.kernels.ops.linear import w8a8_linear
from accelpatch.quant import int8
from tests.kernels.cpu.test_step import BASE, column, decode, expected, tiny, tokens
from tests.support.stepping import Quantize, as_int8, build, rounded

reason = libraries.why_not("cpu", probe("cpu"))
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no native library: {reason}")
LENGTH = 24
#: the static scale of all activations
STATIC = {"dynamic": None, "static": 0.03}


def quantize(static: float | None) -> Quantize:
    """W8A8 packs of the layers' weights; the embedding and the head, which have a row a word, stay int8 alone."""

    def made(weight: Tensor, bias: Tensor | None) -> Pack:
        if weight.shape[0] == BASE["vocab_size"]:
            return as_int8(weight, bias)
        q, scale = int8.quantize(weight, group_size=None)
        return W8A8Pack.pack(q, scale, static, bias=bias)

    return made


class Int8Activations(nn.Module):
    """A linear layer by the reference of w8a8_linear, in x's precision."""

    def __init__(self, pack: W8A8Pack):
        super().__init__()
        self.pack = pack

    def forward(self, x: Tensor) -> Tensor:
        q, scale, _ = self.pack.unpack()
        bias = None if self.pack.bias is None else self.pack.bias.to(x.dtype)
        return w8a8_linear.reference(x, q, scale, self.pack.static_scale, bias)


def by_modules(model: PreTrainedModel, step: DecodeStep, ids: Tensor, pads: Tensor) -> list[Tensor]:
    """Each sequence's logits in float64, with the step's weights and int8 activations, without its padding."""
    exact = rounded(copy.deepcopy(model), step, torch.float64)
    for layer, packed in zip(exact.get_decoder().layers, step.layers, strict=True):
        assert packed is not None
        for name, pack in packed.linears.items():
            owner = layer.self_attn if name in ("q", "k", "v", "o") else layer.mlp
            if isinstance(pack, W8A8Pack):
                setattr(owner, f"{name}_proj", Int8Activations(pack))
    with torch.no_grad():
        return [exact(row[pad:][None]).logits[0] for row, pad in zip(ids, pads.tolist(), strict=True)]


def errors(found: Tensor, due: list[Tensor]) -> Tensor:
    """The largest error of each token's logits, by the largest logit."""
    largest = max(float(part.abs().max()) for part in due)
    parts = [(row[-len(part) :].double() - part).abs().amax(-1) for row, part in zip(found, due, strict=True)]
    return torch.cat(parts) / largest


@pytest.fixture(params=native_library.ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param not in native_library.isas():
        pytest.skip(f"this machine has no {request.param}")
    native_library.use_isa(request.param)
    yield
    native_library.use_isa(None)


@pytest.mark.parametrize("static", STATIC.values(), ids=STATIC)
@pytest.mark.parametrize("family", ["llama", "llama-odd-sizes", "qwen2-bias", "qwen3-qk-norm", "gemma2"])
def test_step_computes_what_its_modules_do(isa: None, family: str, static: float | None) -> None:
    """A value at a tie may be rounded to another integer where float32 and float64 differ: few tokens, and little."""
    model, pads = tiny(family), column(0, 5, 9)
    step = build(model, quantize(static), 4, LENGTH)
    ids = torch.randint(1, 131, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    found = decode(step, ids, pads)
    off = errors(found, by_modules(model, step, ids, pads))
    assert float(off.median()) < 1e-5
    assert float(off.max()) < 0.05
    floats = errors(found, expected(model, step, ids, pads, torch.float64))
    assert float(floats.median()) > 1e-3, "the activations were not rounded"


def test_paths_threads_and_neighbours_give_the_same_integers() -> None:
    """Paths differ in float32 norms and softmax, and so at ties; within one path no bit changes."""
    model, before = tiny("llama"), torch.get_num_threads()
    ids = tokens(8)
    for name in native_library.isas():
        native_library.use_isa(name)
        try:
            results = []
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                results.append(decode(build(model, quantize(None), 8, LENGTH), ids, torch.zeros(8, dtype=torch.int64)))
            alone = decode(build(model, quantize(None), 8, LENGTH), ids[5:6], column(0))
        finally:
            torch.set_num_threads(before)
            native_library.use_isa(None)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])
        assert torch.equal(alone[0], results[0][5])


def test_weights_of_different_forms_in_one_step() -> None:
    """q, k and v of one input in three forms, and gate and up in two."""
    kinds = iter((quantize(None), as_int8, quantize(0.03), as_int8, quantize(0.03), as_int8, quantize(None)) * 2)

    def made(weight: Tensor, bias: Tensor | None) -> Pack:
        return as_int8(weight, bias) if weight.shape[0] == BASE["vocab_size"] else next(kinds)(weight, bias)

    model, ids, pads = tiny("llama"), tokens(3), column(0, 0, 0)
    step = build(model, made, 4, LENGTH)
    off = errors(decode(step, ids, pads), by_modules(model, step, ids, pads))
    assert float(off.median()) < 1e-5
    assert float(off.max()) < 0.05
