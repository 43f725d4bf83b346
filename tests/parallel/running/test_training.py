"""A rank's module that trains: gradients as any module has them, each of them once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from parallel_cases.alone import mesh_of_one
from shardscope.errors import ParallelError
from shardscope.parallel import Shard
from shardscope.parallel.program import ParallelProgram
from shardscope.parallel.transform import parallelize


class Net(nn.Module):
    """Two biases that have one gradient, and a buffer that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.other = nn.Parameter(torch.zeros(4))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        out: Tensor = self.down(torch.relu(self.up(x))) * self.frozen + self.other
        return out + 0 * self.unused.sum()


def made(model: nn.Module) -> Any:
    """On a mesh of one rank."""
    return cut(model).module()


def cut(model: nn.Module) -> ParallelProgram:
    return parallelize(
        copy.deepcopy(model),
        mesh_of_one("dp"),
        {},
        args=(torch.ones(2, 4),),
        loss=functional.mse_loss,
        targets=(torch.ones(2, 4),),
        inputs={"x": {"dp": Shard(0)}, "target": {"dp": Shard(0)}},
        verify=False,
    )


@pytest.fixture
def given() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 4), torch.randn(2, 4)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad for name, one in module.named_parameters() if one.grad is not None}


def check_same(found: nn.Module, wanted: nn.Module, *, factor: float = 1.0) -> None:
    mine, others = gradients(found), gradients(wanted)
    assert set(mine) == set(others)
    for name, gradient in others.items():
        torch.testing.assert_close(mine[name], factor * gradient)


@pytest.mark.parametrize("is_step", [True, False])
def test_loss_and_gradients_are_the_models(given: Any, is_step: bool) -> None:
    model = Net()
    module = made(model)
    wanted = functional.mse_loss(model(given[0]), given[1])
    wanted.backward()
    loss = module.step(*given) if is_step else module(*given)
    if not is_step:
        loss.backward()
    torch.testing.assert_close(loss.detach(), wanted.detach())
    check_same(module, model)
    assert float(module.calls) == 1.0


@pytest.mark.parametrize("is_step", [True, False])
def test_gradients_add_up(given: Any, is_step: bool) -> None:
    model = Net()
    module = made(model)
    functional.mse_loss(model(given[0]), given[1]).backward()
    for _ in range(3):
        module.step(*given) if is_step else module(*given).backward()
    check_same(module, model, factor=3.0)


def test_a_loss_that_is_scaled_has_gradients_that_are(given: Any) -> None:
    model = Net()
    module = made(model)
    functional.mse_loss(model(given[0]), given[1]).backward()
    (module(*given) / 4).backward()
    check_same(module, model, factor=0.25)


@pytest.mark.parametrize("is_step", [True, False])
def test_no_two_parameters_share_a_gradient(given: Any, is_step: bool) -> None:
    module = made(Net())
    module.step(*given) if is_step else module(*given).backward()
    addresses = [one.data_ptr() for one in gradients(module).values()]
    assert len(set(addresses)) == len(addresses)
    before = {name: one.clone() for name, one in gradients(module).items()}
    nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
    factors = {
        name: float((one.norm() / before[name].norm()).nan_to_num())
        for name, one in gradients(module).items()
    }
    factors.pop("unused")
    assert max(factors.values()) == pytest.approx(min(factors.values()))


def test_gradients_are_handed_over_and_not_copied(given: Any) -> None:
    module = made(Net())
    program = module._program
    made_here: list[int] = []
    run = program.run

    def watch(args: Any, kwargs: Any) -> Any:
        loss, found = run(args, kwargs)
        made_here.extend(one.data_ptr() for one in found)
        return loss, found

    program.run = watch
    module(*given).backward()
    assert sorted(one.data_ptr() for one in gradients(module).values()) == sorted(made_here)


def test_a_loss_is_differentiated_once(given: Any) -> None:
    loss = made(Net())(*given)
    loss.backward(retain_graph=True)
    with pytest.raises(ParallelError, match="backward was already run"):
        loss.backward()


def test_inputs_may_lie_otherwise_in_memory(given: Any) -> None:
    module = made(Net())
    wanted = module.step(*given)
    turned = [one.t().contiguous().t() for one in given]
    assert not turned[0].is_contiguous()
    assert torch.equal(module.step(*turned), wanted)


def test_it_trains_as_the_model_does(given: Any) -> None:
    model = Net()
    module = made(model)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.1) for one in (model, module)]
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        functional.mse_loss(model(given[0]), given[1]).backward()
        module.step(*given)
        for optimizer in optimizers:
            optimizer.step()
    for name, one in model.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], one)


def test_it_goes_on_with_what_is_loaded(given: Any) -> None:
    model, module = Net(), made(Net())
    module.load_state_dict(model.state_dict(), assign=True)
    functional.mse_loss(model(given[0]), given[1]).backward()
    module.step(*given)
    check_same(module, model)


def test_other_inputs_are_refused(given: Any) -> None:
    module = made(Net())
    with pytest.raises(ParallelError, match="its inputs come first and then the targets"):
        module(given[0])
    with pytest.raises(ParallelError, match=r"target is \[3, 4\] and"):
        module.step(given[0], torch.ones(3, 4))


def test_modules_of_one_program_train_apart(given: Any) -> None:
    program = cut(Net())
    one, other = program.module(), program.module()
    one.step(*given)  # type: ignore[operator]
    assert gradients(other) == {}
    torch.optim.SGD(one.parameters(), lr=1.0).step()
    wanted = program.source.state_dict
    assert all(torch.equal(value, wanted[name]) for name, value in other.state_dict().items())
