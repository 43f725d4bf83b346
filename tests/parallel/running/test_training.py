"""A rank's TrainingModule: gradients as of any module, each computed once."""

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
from shardscope.parallel.api import parallelize
from shardscope.parallel.program import ParallelProgram


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


def build_module(model: nn.Module) -> Any:
    """On a mesh of one rank."""
    return partition(model).module()


def partition(model: nn.Module) -> ParallelProgram:
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
def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 4), torch.randn(2, 4)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def check_same(actual: nn.Module, expected: nn.Module, *, factor: float = 1.0) -> None:
    actual_gradients, expected_gradients = gradients(actual), gradients(expected)
    assert set(actual_gradients) == set(expected_gradients)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(actual_gradients[name], factor * gradient)


@pytest.mark.parametrize("is_step", [True, False])
def test_loss_and_gradients_are_the_models(inputs: Any, is_step: bool) -> None:
    model = Net()
    module = build_module(model)
    wanted = functional.mse_loss(model(inputs[0]), inputs[1])
    wanted.backward()
    loss = module.step(*inputs) if is_step else module(*inputs)
    if not is_step:
        loss.backward()
    torch.testing.assert_close(loss.detach(), wanted.detach())
    check_same(module, model)
    assert float(module.calls) == 1.0


@pytest.mark.parametrize("is_step", [True, False])
def test_gradients_add_up(inputs: Any, is_step: bool) -> None:
    model = Net()
    module = build_module(model)
    functional.mse_loss(model(inputs[0]), inputs[1]).backward()
    for _ in range(3):
        module.step(*inputs) if is_step else module(*inputs).backward()
    check_same(module, model, factor=3.0)


def test_a_loss_that_is_scaled_has_gradients_that_are(inputs: Any) -> None:
    model = Net()
    module = build_module(model)
    functional.mse_loss(model(inputs[0]), inputs[1]).backward()
    (module(*inputs) / 4).backward()
    check_same(module, model, factor=0.25)


@pytest.mark.parametrize("is_step", [True, False])
def test_no_two_parameters_share_a_gradient(inputs: Any, is_step: bool) -> None:
    module = build_module(Net())
    module.step(*inputs) if is_step else module(*inputs).backward()
    addresses = [gradient.data_ptr() for gradient in gradients(module).values()]
    assert len(set(addresses)) == len(addresses)
    before = {name: gradient.clone() for name, gradient in gradients(module).items()}
    nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
    factors = {
        name: float((gradient.norm() / before[name].norm()).nan_to_num())
        for name, gradient in gradients(module).items()
    }
    factors.pop("unused")
    assert max(factors.values()) == pytest.approx(min(factors.values()))


def test_gradients_are_not_copied(inputs: Any) -> None:
    module = build_module(Net())
    program = module._program
    addresses_in_run: list[int] = []
    run = program.run

    def watch(args: Any, kwargs: Any) -> Any:
        loss, computed = run(args, kwargs)
        addresses_in_run.extend(gradient.data_ptr() for gradient in computed)
        return loss, computed

    program.run = watch
    module(*inputs).backward()
    assert sorted(gradient.data_ptr() for gradient in gradients(module).values()) == sorted(
        addresses_in_run
    )


def test_a_loss_is_differentiated_once(inputs: Any) -> None:
    loss = build_module(Net())(*inputs)
    loss.backward(retain_graph=True)
    with pytest.raises(ParallelError, match="backward was already run"):
        loss.backward()


def test_inputs_may_have_other_strides(inputs: Any) -> None:
    module = build_module(Net())
    wanted = module.step(*inputs)
    turned = [tensor.t().contiguous().t() for tensor in inputs]
    assert not turned[0].is_contiguous()
    assert torch.equal(module.step(*turned), wanted)


def test_it_trains_as_the_model_does(inputs: Any) -> None:
    model = Net()
    module = build_module(model)
    optimizers = [torch.optim.AdamW(trained.parameters(), lr=0.1) for trained in (model, module)]
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        functional.mse_loss(model(inputs[0]), inputs[1]).backward()
        module.step(*inputs)
        for optimizer in optimizers:
            optimizer.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor)


def test_it_trains_on_from_a_loaded_state(inputs: Any) -> None:
    model, module = Net(), build_module(Net())
    module.load_state_dict(model.state_dict(), assign=True)
    functional.mse_loss(model(inputs[0]), inputs[1]).backward()
    module.step(*inputs)
    check_same(module, model)


def test_other_inputs_are_refused(inputs: Any) -> None:
    module = build_module(Net())
    with pytest.raises(ParallelError, match="its inputs come first and then the targets"):
        module(inputs[0])
    with pytest.raises(ParallelError, match=r"target is \[3, 4\] and"):
        module.step(inputs[0], torch.ones(3, 4))


def test_modules_of_one_program_train_independently(inputs: Any) -> None:
    program = partition(Net())
    first, second = program.module(), program.module()
    first.step(*inputs)  # type: ignore[operator]
    assert gradients(second) == {}
    torch.optim.SGD(first.parameters(), lr=1.0).step()
    wanted = program.source.state_dict
    assert all(torch.equal(value, wanted[name]) for name, value in second.state_dict().items())
