"""What a call computes from the sizes of pictures alone: once, and not within its graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from accelpatch.runtime.graphs.constants import Constants
from tests.support.refusing import Refused, RefusingGraph

SIZES = torch.tensor([[1, 4, 6], [2, 2, 2]])


def captured(constants: Constants, program: Callable[[], Any]) -> Any:
    """What a program returns as a graph, which may read nothing on the host."""
    made: list[Any] = []

    def within() -> None:
        with constants:
            made.append(program())

    RefusingGraph(within, torch.device("cpu"), None)
    return made[-1]


def by_lists(sizes: Tensor, x: Tensor) -> Tensor:
    lengths = [t * h * w for t, h, w in sizes.tolist()]
    return torch.cat([part * len(part) for part in x[: sum(lengths)].split(lengths)])


def by_rows(sizes: Tensor, x: Tensor) -> Tensor:
    return torch.stack([x[: h * w, t:].sum() for t, h, w in sizes])


def by_index(sizes: Tensor, x: Tensor) -> Tensor:
    lengths = torch.repeat_interleave(sizes[:, 1] * sizes[:, 2], sizes[:, 0])
    edges = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    order = torch.arange(int(edges[-1])).flip(0)
    return x[order[order != 3], :] + len(torch.unique_consecutive(edges))


def by_mask(sizes: Tensor, x: Tensor) -> Tensor:
    mask = torch.zeros(len(x), len(x), dtype=torch.bool, device=x.device)
    for end in torch.tensor([int(t * h * w) for t, h, w in sizes]).cumsum(0):
        mask[:end, :end] = True
    return torch.where(mask, x @ x.T, 0)


def by_numbers(sizes: Tensor, x: Tensor) -> Tensor:
    most = sizes.max().item()
    return x[:most] if bool((sizes > 1).any()) else x


@pytest.mark.parametrize("program", [by_lists, by_rows, by_index, by_mask, by_numbers])
def test_programs_that_read_sizes_on_the_host(program: Callable[[Tensor, Tensor], Tensor]) -> None:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    run = lambda: program(SIZES, x)  # noqa: E731
    with pytest.raises(Refused):
        captured(Constants([]), run)
    constants = Constants([SIZES])
    due = run()
    assert torch.equal(constants.learn(run), due)
    assert torch.equal(captured(constants, run), due)
    x.mul_(2).add_(1)  # a graph reads what lies there when it is replayed
    assert torch.equal(captured(constants, run), run())


def test_what_is_written_is_computed_again() -> None:
    def program() -> Tensor:
        total, other = torch.arange(3), torch.arange(3)
        total += SIZES[0]
        total[:2].mul_(2)
        return total + other  # [1, 5, 8] by the first line, [2, 10, 8] by the second

    constants = Constants([SIZES])
    for _ in range(2):
        assert constants.learn(program).tolist() == [2, 11, 10]
        with constants:
            assert program().tolist() == [2, 11, 10]


def test_memory_for_kernels_is_new_each_time() -> None:
    """A kernel writes by addresses, and torch does not count that."""
    buffers: list[Tensor] = []

    def program() -> None:
        buffers.extend((torch.zeros(3), torch.zeros(3), torch.zeros_like(SIZES), SIZES.new_zeros(3), torch.empty(3)))

    constants = Constants([SIZES])
    constants.learn(program)
    with constants:
        program()
    assert len({one.data_ptr() for one in buffers}) == len(buffers)


def test_lists_and_random_numbers_are_new_each_time() -> None:
    def program() -> tuple[list[int], Tensor]:
        edges = SIZES[:, 0].tolist()
        edges.append(9)
        return edges, torch.rand(3) + torch.rand_like(SIZES.float())[:1]

    constants = Constants([SIZES])
    first, second = constants.learn(program), None
    with constants:
        second = program()
    assert first[0] == second[0] == [1, 2, 9]
    assert not torch.equal(first[1], second[1])


def test_what_depends_on_more_than_sizes_cannot_be_captured() -> None:
    x = torch.ones(3)
    run = lambda: SIZES * int(x.sum() * SIZES[0, 1])  # noqa: E731
    constants = Constants([SIZES])
    assert torch.equal(constants.learn(run), SIZES * 12)
    with pytest.raises(Refused):
        captured(constants, run)


def test_an_index_on_the_host_is_copied_before_the_capture() -> None:
    """As on a GPU: what is indexed lies on another device than the index."""
    x = torch.empty(6, 2, device="meta")
    moved: list[Tensor] = []
    constants = Constants([SIZES])

    def program() -> Tensor:
        index = torch.arange(int(SIZES[0, 2])).flip(0)
        moved.append(constants._indexed(Tensor.__getitem__, (x, (index, slice(None))))[1][0])
        return x[index, :]

    assert constants.learn(program).shape == (6, 2)
    with constants:
        program()
    assert [one.device.type for one in moved] == ["meta", "meta"]


def test_another_program_than_the_one_that_was_run() -> None:
    """What the run before did not compute is computed."""
    constants = Constants([SIZES])
    constants.learn(lambda: SIZES.sum().item())
    with constants:
        assert (SIZES * 2).tolist() == [[2, 8, 12], [4, 4, 4]]
