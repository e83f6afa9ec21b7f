"""What a step leaves behind its model: as torch does it, by the Triton kernel on a GPU or through the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.errors import KernelError
from accelpatch.kernels.ops.step import step_end
from tests.support.interpreted import DEVICE, HERE, here, interpret, needs_triton


@needs_triton
@pytest.mark.skipif(HERE, reason="the tests below run as they are")
def test_through_the_interpreter() -> None:
    interpret(__file__)


def state_of(vocabulary: int, capacity: int, slots: list[int]) -> list[Tensor]:
    """scores, slot, positions and mask, each in the middle of a longer tensor of its kind, which must stay as it is."""
    kind, rows = {"dtype": torch.int64, "device": DEVICE}, len(slots)
    held = [
        torch.full((rows + 2, vocabulary), float("nan"), device=DEVICE)[1:-1],
        torch.tensor([7, *slots, 7], **kind)[1:-1],  # type: ignore[call-overload]
        torch.arange(rows + 2, **kind)[:, None][1:-1],  # type: ignore[call-overload]
        torch.zeros(rows + 2, capacity, **kind)[1:-1],  # type: ignore[call-overload]
    ]
    for row, slot in zip(held[3], slots, strict=True):
        row[slot // 2 : slot] = 1
    return held


def whole(part: Tensor) -> Tensor:
    """All that lies in the memory of a tensor."""
    return torch.as_strided(part, (part.untyped_storage().nbytes() // part.itemsize,), (1,), 0)


@here
@pytest.mark.parametrize("slot, capacity", [(0, 1), (0, 64), (37, 64), (63, 64)], ids=str)
@pytest.mark.parametrize("rows, vocabulary", [(1, 32000), (3, 1025), (2, 7), (8, 1024), (130, 5)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_same_as_torch(rows: int, vocabulary: int, slot: int, capacity: int, dtype: torch.dtype) -> None:
    from accelpatch.kernels.triton import step_end as kernel

    drawn = torch.randn(rows, 2, vocabulary, generator=torch.Generator().manual_seed(5)).to(DEVICE, dtype)
    drawn[0, 1, -1], drawn[-1, 1, 0] = float("nan"), float("-inf")
    slots = [max(0, slot - row) for row in range(rows)]
    for logits in (drawn[:, 1], drawn[:, 1].T.contiguous().T):  # of one token of several; of columns that lie apart
        found = []
        for run in (step_end.reference_, kernel.end_step_):
            state = state_of(vocabulary, capacity, slots)
            run(logits, *state)
            found.append([whole(one) for one in state])
            assert state[1].tolist() == [one + 1 for one in slots]
            assert all(row[one] for row, one in zip(state[3], slots, strict=True))
        for due, mine in zip(*found, strict=True):
            torch.testing.assert_close(mine, due, rtol=0, atol=0, equal_nan=True)


@here
@pytest.mark.parametrize("slot", [-1, 64], ids=str)
def test_a_slot_that_is_not_there_is_not_written(slot: int) -> None:
    from accelpatch.kernels.triton import step_end as kernel

    state = state_of(7, 64, [0, 0])
    state[1].fill_(slot)
    kernel.end_step_(torch.zeros(2, 7, device=DEVICE), *state)
    assert not whole(state[3]).any()


def test_on_a_cpu() -> None:
    scores, slot, positions = torch.zeros(2, 3), torch.tensor([1, 2]), torch.tensor([[1], [0]])
    mask = torch.tensor([[1, 0, 0], [0, 0, 0]])
    step_end.end_step_(torch.ones(2, 3, dtype=torch.bfloat16), scores, slot, positions, mask)
    assert (scores.tolist(), slot.tolist(), positions.tolist()) == ([[1.0] * 3] * 2, [2, 3], [[2], [1]])
    assert mask.tolist() == [[1, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    "change",
    [
        {"scores": torch.zeros(2, 4)},
        {"positions": torch.zeros(1, 1).long()},
        {"mask": torch.zeros(2, 3)},
        {"slot": torch.zeros(1).long()},
    ],
    ids=["another-vocabulary", "positions-of-one-row", "a-mask-of-floats", "one-slot"],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "logits": torch.zeros(2, 3), "scores": torch.zeros(2, 3), "slot": torch.zeros(2).long(),
        "positions": torch.zeros(2, 1).long(), "mask": torch.zeros(2, 3).long(),
    }  # fmt: skip
    with pytest.raises(KernelError):
        step_end.end_step_(**(given | change))
