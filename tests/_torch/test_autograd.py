"""The autograd engine's sequence numbers, graph tasks and current node."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import torch

from shardscope._torch.autograd import (
    NO_GRAPH_TASK,
    current_graph_task,
    current_node,
    is_in_backward,
    next_sequence_number,
    node_origin,
)


def test_a_node_gets_the_next_sequence_number() -> None:
    x = torch.ones(1, requires_grad=True)
    numbers = []
    for _ in range(3):
        expected = next_sequence_number()
        x = x * 2
        numbers.append((expected, node_origin(x.grad_fn)))
    assert all(expected == number for expected, number in numbers)
    assert [number for number, _ in numbers] == sorted({number for number, _ in numbers})


def test_ops_without_gradient_do_not_advance_the_sequence_number() -> None:
    before = next_sequence_number()
    torch.ones(3).mul(2).add(1)
    with torch.no_grad():
        torch.ones(1, requires_grad=True) * 2
    assert next_sequence_number() == before


def test_sequence_numbers_are_per_thread() -> None:
    def make_nodes() -> None:
        x = torch.ones(1, requires_grad=True)
        for _ in range(10):
            x = x * 2

    before = next_sequence_number()
    worker = threading.Thread(target=make_nodes)
    worker.start()
    worker.join()
    assert next_sequence_number() == before


def test_outside_backward_there_is_no_graph_task_or_node() -> None:
    assert current_graph_task() == NO_GRAPH_TASK
    assert current_node() is None
    assert not is_in_backward()


class EngineProbe(torch.autograd.Function):
    """Records the engine's state while its own backward runs."""

    states: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        EngineProbe.states.append(
            (current_graph_task(), node_origin(current_node()), is_in_backward())
        )
        return gradient


def test_in_backward_the_current_node_has_its_sequence_number() -> None:
    EngineProbe.states.clear()
    x = torch.ones(1, requires_grad=True)
    number = next_sequence_number()
    EngineProbe.apply(x).sum().backward()
    ((task, node_sequence_number, in_backward),) = EngineProbe.states
    assert task != NO_GRAPH_TASK
    assert node_sequence_number == number
    assert in_backward


def test_a_leaf_is_the_origin_of_the_node_that_accumulates_its_gradient() -> None:
    leaf = torch.ones(1, requires_grad=True)
    origins = []
    leaf.register_post_accumulate_grad_hook(lambda _: origins.append(node_origin(current_node())))
    (leaf * 2).sum().backward()
    assert len(origins) == 1
    assert origins[0] is leaf
