"""After coverage() everything is as before: the model, torch, the process, and the next call."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _get_python_sharding_prop_cache_info

from shardscope import Recording, coverage, simulate
from shardscope.errors import CoverageError
from small_models import MLP, batch


class Remembering(nn.Module):
    """Leaves something behind wherever a module can."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.seen: list[Tensor] = []
        self.last: Tensor | None = None
        self.constant = torch.ones(4)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.last = x
        self.seen.append(x)
        self.late = x
        return self.dropout(self.norm(self.linear(x))) * self.constant


def state(model: nn.Module) -> dict[str, Any]:
    return {
        "tensors": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "identities": [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
        "grads": [parameter.grad for parameter in model.parameters()],
        "training": [module.training for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [
            len(module._forward_hooks) + len(module._backward_hooks) for module in model.modules()
        ],
    }


def is_same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    tensors, second_tensors = first.pop("tensors"), second.pop("tensors")
    return first == second and all(
        torch.equal(tensors[key], second_tensors[key]) for key in tensors
    )


@pytest.mark.parametrize("looks_at_values", [False, True])
def test_the_model_and_its_statistics_are_as_before(looks_at_values: bool) -> None:
    model = Remembering()
    if looks_at_values:
        model.linear.register_forward_hook(lambda *_: torch.ones(2).sum().item() and None)
        model.linear.register_forward_hook(lambda m, args, out: out * float(out.sum().item() > -99))
    before = state(model)
    coverage(model, torch.randn(8, 4), levels=["exported"])
    assert (model.seen, model.last, model.num_calls) == ([], None, 0)
    assert is_same(before, state(model))


def test_the_process_is_as_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    call, propagator = nn.Module.__call__, DTensor._op_dispatcher.sharding_propagator
    attributes, known = dict(vars(propagator)), dict(propagator.op_to_schema_info)
    handlers = dict(DTensor._op_dispatcher._custom_op_handlers)
    coverage(model, torch.ones(2, 4))
    assert torch.equal(torch.rand(4), expected)
    assert nn.Module.__call__ is call
    assert not dist.is_initialized()
    assert vars(propagator) == attributes
    assert propagator.op_to_schema_info == known
    assert DTensor._op_dispatcher._custom_op_handlers == handlers
    assert not DTensor._op_dispatcher._allow_implicit_replication
    assert _get_python_sharding_prop_cache_info().currsize == 0


def test_a_world_has_no_more_groups_than_before() -> None:
    with simulate({"dp": 4, "tp": 4}) as world:
        before = dist.distributed_c10d._world.pg_names.copy()
        coverage(MLP(), batch(), levels=["exported"])
        assert dist.distributed_c10d._world.pg_names == before
        assert world.mesh["tp"].size() == 4


def test_an_exception_midway_puts_everything_back() -> None:
    class Failing(Remembering):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise ValueError("not today")

    model = Failing()
    before = state(model)
    with pytest.raises(CoverageError, match="forward raised ValueError: not today"):
        coverage(model, torch.randn(8, 4))
    assert is_same(before, state(model))
    assert model.seen == []
    assert not dist.is_initialized()
    assert coverage(MLP(), batch(), levels=["exported"]).coverage


def test_a_second_call_and_another_model_in_between_change_nothing() -> None:
    model = MLP()
    first = coverage(model, batch())
    coverage(nn.Linear(4, 4), torch.ones(2, 4))
    assert coverage(model, batch()) == first


def test_threads_take_turns_and_find_the_same() -> None:
    model, other = MLP(), nn.Linear(8, 8)
    expected = [coverage(model, batch(), levels=["exported"]).coverage]
    expected += [coverage(other, batch(), levels=["exported"]).coverage]
    found: list[tuple[int, Recording]] = []

    def run(index: int) -> None:
        covered = coverage((model, other)[index], batch(), levels=["exported"])
        found.append((index, covered))

    threads = [threading.Thread(target=run, args=(number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(verdicts(result.coverage) == verdicts(expected[index]) for index, result in found)


def verdicts(levels: Any) -> list[tuple[str, str, int, int]]:
    return [
        (op.op, op.verdict, op.num_forward, op.num_backward) for level in levels for op in level.ops
    ]
