"""A native step over pages has the bits of the one over a static cache, wherever the tokens of the texts lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.device import probe
from accelpatch.errors import KernelError
from accelpatch.kernels.compiling import libraries as builder
from accelpatch.kernels.cpu.decode_step import DecodeStep
from accelpatch.kernels.cpu.paged_step import PagedStep
from tests.kernels.cpu.test_step import FAMILIES, LENGTH, isa, tiny  # noqa: F401
from tests.support.stepping import FORMATS, build

reason = builder.why_not("cpu", probe("cpu"))
pytestmark = pytest.mark.skipif(reason is not None, reason=f"no native library: {reason}")
TOKENS = 300  # that the pages hold


def over_pages(step: DecodeStep) -> PagedStep:
    """The same weights over pages, which hold NaN until something is written."""
    sizes = [layer.kv_heads(step.shape.head_dim) for layer in step.layers if layer is not None]
    keys, values = ([torch.full((TOKENS, n, step.shape.head_dim), torch.nan) for n in sizes] for _ in range(2))
    return PagedStep(step.shape, step.layers, step.embedding, step.head, step.final_norm, keys, values)


def joined(places: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """slots, starts, index of texts whose tokens lie at these places."""
    lengths = torch.tensor([len(one) for one in places])
    ends = lengths.cumsum(0)
    return ends - 1, ends - lengths, torch.cat(places)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_of_a_static_cache(isa: None, family: str) -> None:  # noqa: F811
    """Three texts, the second of which begins later and the third of which ends sooner."""
    step = build(tiny(family), FORMATS["int8"], 3, LENGTH)
    paged, steps = over_pages(step), 70
    generator = torch.Generator().manual_seed(1)
    where = torch.randperm(TOKENS, generator=generator)[: 3 * steps].view(3, steps)
    ids = torch.randint(131, (3, steps), generator=generator)
    begins, ends = [0, 5, 0], [steps, steps, 40]
    for t in range(steps):
        live = [row for row in range(3) if begins[row] <= t < ends[row]]
        first = torch.tensor(begins)
        slots = torch.full((3,), t)
        due = step(ids[:, t], slots, torch.minimum(first, slots), (slots - first).clamp_min(0))[live]
        places = [where[row, begins[row] : t + 1] for row in live]
        positions = torch.tensor([t - begins[row] for row in live])
        at, starts, index = joined(places)
        assert torch.equal(paged.run(ids[live, t], at, starts, positions, index), due), t


def test_only_the_new_tokens_places_are_written() -> None:
    paged = over_pages(build(tiny("llama"), FORMATS["int8"], 2, LENGTH))
    one = torch.zeros(1, dtype=torch.int64)
    assert paged.run(one + 5, one, one, one, one + 17).isfinite().all()
    for pages in (*paged.keys, *paged.values):
        assert isinstance(pages, Tensor)
        assert pages.isfinite().any(-1).any(-1).nonzero().flatten().tolist() == [17]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"index": [TOKENS]}, id="a place behind the pages"),
        pytest.param({"index": [-1]}, id="a place before them"),
        pytest.param({"slots": [1]}, id="a slot behind the index"),
        pytest.param({"starts": [1]}, id="no slot"),
        pytest.param({"positions": [-1]}, id="a position"),
    ],
)
def test_what_is_out_of_range_is_refused(change: dict[str, list[int]]) -> None:
    paged = over_pages(build(tiny("llama"), FORMATS["int8"], 2, LENGTH))
    names = ("tokens", "slots", "starts", "positions", "index")
    given: dict[str, Any] = {name: torch.tensor(change.get(name, [0])) for name in names}
    with pytest.raises(KernelError, match="a step of 1 texts"):
        paged.run(**given)


def test_other_faults() -> None:
    step = build(tiny("llama"), FORMATS["int8"], 2, LENGTH)
    paged, one = over_pages(step), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(IndexError, match="a token is out of range"):
        paged.run(one + 131, one, one, one, one)
    with pytest.raises(KernelError, match="int64"):
        paged.run(one.int(), one, one, one, one)
    with pytest.raises(KernelError, match="as tokens are"):
        paged.run(one, one.repeat(2), one, one, one)
    with pytest.raises(KernelError, match="arguments do not fit"):
        paged(one, one, one, one)
    held = list(paged.keys)
    with pytest.raises(KernelError, match="the step's cache is"):
        PagedStep(
            step.shape, step.layers, step.embedding, step.head, step.final_norm, [held[0][:9], *held[1:]], paged.values
        )
