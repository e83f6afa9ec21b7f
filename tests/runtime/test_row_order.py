"""Rows of a static cache in a new order, layer after layer, as transformers asks for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from accelpatch.runtime.row_order import RowOrder

LAYERS, ROWS, CAPACITY, LENGTH = 3, 4, 6, 5


def layers_of(block: Tensor, shared: bool) -> list[SimpleNamespace]:
    return [SimpleNamespace(keys=k, values=v, block=block if shared else None) for k, v in block]


def due_of(block: Tensor, places: range, rows: Tensor) -> Tensor:
    due = block.clone()
    for place in places:
        due[place, :, :, :, :LENGTH] = block[place, :, :, :, :LENGTH][:, rows]
    return due


@pytest.fixture
def block() -> Tensor:
    return torch.randn(LAYERS, 2, ROWS, 2, CAPACITY, 8)


@pytest.mark.parametrize("shared", [True, False])
def test_all_layers(block: Tensor, shared: bool) -> None:
    layers, order = layers_of(block, shared), RowOrder()
    for rows in (torch.tensor([2, 2, 0, 1]), torch.tensor([3, 1, 1, 0])):
        due = due_of(block, range(LAYERS), rows)
        for place in range(LAYERS):
            order.ask(layers, place, rows, LENGTH)
        assert torch.equal(block, due)


def test_those_that_were_asked_for_alone(block: Tensor) -> None:
    rows, order = torch.tensor([1, 0, 3, 3]), RowOrder()
    due, layers = due_of(block, range(2), rows), layers_of(block, True)
    for place in range(2):
        order.ask(layers, place, rows, LENGTH)
    order.flush()
    order.flush()
    assert torch.equal(block, due)


def test_another_order_before_the_last_layer(block: Tensor) -> None:
    first, second, order = torch.tensor([1, 0, 3, 3]), torch.tensor([2, 2, 1, 0]), RowOrder()
    due = due_of(due_of(block, range(2), first), range(LAYERS), second)
    layers = layers_of(block, True)
    for rows, count in ((first, 2), (second, LAYERS)):
        for place in range(count):
            order.ask(layers, place, rows, LENGTH)
    assert torch.equal(block, due)


def test_a_layer_out_of_turn(block: Tensor) -> None:
    rows, order = torch.tensor([1, 0, 3, 3]), RowOrder()
    due = due_of(block, range(1, 2), rows)
    order.ask(layers_of(block, True), 1, rows, LENGTH)
    order.flush()
    assert torch.equal(block, due)


def test_a_larger_cache_in_between(block: Tensor) -> None:
    rows, order, larger = torch.tensor([1, 0, 3, 3]), RowOrder(), torch.randn(LAYERS, 2, ROWS, 2, 2 * CAPACITY, 8)
    due, before = due_of(larger, range(LAYERS), rows), block.clone()
    for layers in (layers_of(block, True)[:1], layers_of(larger, True)):
        for place in range(len(layers)):
            order.ask(layers, place, rows, LENGTH)
    assert torch.equal(larger, due)
    assert not torch.equal(block, before)
