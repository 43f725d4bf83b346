"""What is the user's is as before when `memory` has ended, and counted as it is."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from memory_models import DIM, WEIGHT, backward, chain, rows
from shardscope import Memory, ShardscopeError, memory, simulate
from shardscope._torch.cuda.kernel_choices import cuda_choices
from shardscope._torch.fake_models import is_fake
from shardscope.record import MemoryKind

K = MemoryKind


def most(told: Memory, kind: MemoryKind) -> int:
    index = list(MemoryKind).index(kind)
    return max(sample.num_bytes[index] for sample in told.profile.samples)


def places(told: Memory) -> list[str]:
    return [gap.place for gap in told.recording.gaps]


class TestOptimizers:
    @pytest.mark.parametrize("name", ["Adam", "AdamW", "RAdam", "NAdam", "Adagrad"])
    def test_an_optimizer_that_has_stepped_continues_from_its_count(self, name: str) -> None:
        model = chain(1)
        optimizer = getattr(torch.optim, name)(model.parameters())
        backward(model)()
        optimizer.step()
        count = optimizer.state[model[0].weight]["step"].clone()
        told = memory(model, backward(model), optimizer)
        assert "values" not in places(told)
        assert optimizer.state[model[0].weight]["step"] == count

    def test_hyperparameters_and_schedulers_are_as_before(self) -> None:
        model = chain(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

        def step() -> None:
            model(rows()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

        memory(model, step, optimizer)
        assert optimizer.param_groups[0]["lr"] == 1.0
        assert scheduler.last_epoch == 0

    @pytest.mark.parametrize("is_met_late", [True, False])
    def test_gradients_are_not_held_beyond_the_step(self, is_met_late: bool) -> None:
        model = chain(3)
        given = torch.optim.AdamW(model.parameters())
        hidden = {"optimizer": given}

        def step() -> None:
            model(rows()).sum().backward()
            if is_met_late:
                hidden["optimizer"].step()
                hidden["optimizer"].zero_grad()

        optimizer = None if is_met_late else (lambda m: torch.optim.AdamW(m.parameters()))
        told = memory(model, step, optimizer)
        assert most(told, K.GRADIENTS) == 3 * WEIGHT
        assert dict(given.state) == {}

    def test_an_optimizer_of_a_model_that_was_not_passed_keeps_no_fake_state(self) -> None:
        model = chain(1)
        optimizer = torch.optim.AdamW(model.parameters())
        told = memory(None, backward(model), optimizer)
        assert dict(optimizer.state) == {}
        assert model[0].weight.grad is None
        assert most(told, K.OPTIMIZER_STATE) == 2 * WEIGHT


class TestRMSNorm:
    def test_tensors_with_data_are_left_alone(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8))
        x = torch.randn(2, 8)
        expected = model(x)
        with cuda_choices(device_type="cpu"):
            found = model(x)
            found.sum().backward()
        assert torch.equal(expected, found)
        assert model[0].weight.grad is not None

    def test_a_world_with_data_can_be_profiled(self) -> None:
        with simulate({"dp": 2}):
            model = nn.Sequential(nn.Linear(DIM, DIM), nn.RMSNorm(DIM))
            assert memory(model, backward(model)).profile.peak_bytes > WEIGHT


class TestTensorsWithData:
    def test_views_of_a_batch_with_data_share_what_they_view(self) -> None:
        model, x = nn.Linear(64, 64, bias=False), torch.randn(16, 1024, 64)
        captured = memory(model, lambda: model(x).sum().backward())
        made = memory(model, lambda: model(torch.randn(16, 1024, 64)).sum().backward())
        assert captured.profile.peak_bytes == made.profile.peak_bytes

    def test_a_model_with_data_that_is_materialized_is_counted_once(self) -> None:
        held = []
        for device in ("cpu", "meta"):
            with simulate({"dp": 2}) as world:
                with torch.device(device):
                    model = chain(2)
                world.materialize(model)
                held.append(most(memory(model, backward(model)), K.ACTIVATIONS))
        assert held[0] == held[1]

    def test_a_value_that_is_there_is_read(self) -> None:
        model, scale, read = chain(1), torch.tensor(7.0), []

        def step() -> None:
            read.append(scale.item())
            model(rows()).sum().backward()

        assert places(memory(model, step)) == []
        assert read == [7.0, 7.0]


class TestParameters:
    def test_hooks_with_optimizers_of_their_own_are_run(self) -> None:
        model = chain(2)
        optimizers = {parameter: torch.optim.AdamW([parameter]) for parameter in model.parameters()}

        def update(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        told = memory(model, backward(model))
        assert most(told, K.OPTIMIZER_STATE) == 4 * WEIGHT
        assert most(told, K.GRADIENTS) == WEIGHT  # one after the other
        assert all(not optimizer.state for optimizer in optimizers.values())

    def test_hooks_on_gradients_are_run(self) -> None:
        model, seen = chain(1), []
        model[0].weight.register_hook(lambda grad: seen.append(tuple(grad.shape)))
        memory(model, backward(model))
        assert seen == [(DIM, DIM)] * 2

    def test_copies_have_the_attributes_of_parameters(self) -> None:
        model, seen = chain(1), []
        model[0].weight.group = "decayed"

        def step() -> None:
            seen.append(model[0].weight.group)
            model(rows()).sum().backward()

        memory(model, step)
        assert seen == ["decayed"] * 2

    def test_parameters_of_another_class_are_a_gap(self) -> None:
        class Marked(nn.Parameter):
            pass

        model = chain(1)
        model[0].weight = Marked(torch.randn(DIM, DIM))
        (gap,) = memory(model, backward(model)).recording.gaps
        assert "class Marked were treated as plain tensors" in gap.fact

    def test_parameters_captured_before_are_a_gap(self) -> None:
        model = chain(1)
        captured = list(model.parameters())

        def step() -> None:
            (model(rows()).sum() + captured[0].pow(2).sum()).backward()

        told = memory(model, step)
        assert places(told) == ["captured parameters"]
        assert most(told, K.PARAMETERS) == WEIGHT
        assert captured[0].grad is None


class TestLeftovers:
    def test_caches_and_buffers_that_a_forward_makes_are_gone(self) -> None:
        class Caching(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(DIM, DIM)
                self.cache: torch.Tensor | None = None
                self.by_size: dict[int, torch.Tensor] = {}

            def forward(self, x: torch.Tensor) -> Any:
                if self.cache is None:
                    self.cache = torch.ones(DIM)
                    self.by_size[len(x)] = self.cache
                    self.register_buffer("mask", torch.ones(DIM), persistent=False)
                return self.linear(x) * self.cache * self.mask

        model = Caching()
        memory(model, backward(model))
        assert model.cache is None
        assert model.by_size == {}
        assert list(model.buffers()) == []
        assert model.state_dict().keys() == {"linear.weight", "linear.bias"}

    def test_what_is_left_elsewhere_is_a_gap_that_names_it(self) -> None:
        model, losses, numbers = chain(1), [], []

        def step() -> None:
            loss = model(rows()).sum()
            loss.backward()
            losses.append(loss.detach())
            numbers.append(1)

        (gap,) = memory(model, step).recording.gaps
        assert (gap.place, gap.fact.split()[0]) == ("leftovers", "losses")

    def test_a_step_may_be_a_partial_or_name_what_is_not_there_yet(self) -> None:
        model = chain(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def step(used: torch.optim.Optimizer) -> None:
            model(rows()).sum().backward()
            used.param_groups[0]["lr"] = 2.0
            if used is None:
                later()

        memory(model, partial(step, optimizer))
        assert optimizer.param_groups[0]["lr"] == 1.0

        def later() -> None: ...

    def test_a_scaler_is_as_before(self) -> None:
        model, scaler = chain(1), torch.amp.GradScaler("cpu")
        optimizer = torch.optim.SGD(model.parameters())

        def step() -> None:
            scaler.scale(model(rows()).sum()).backward()
            scaler.step(optimizer)
            scaler.update()

        memory(model, step, optimizer)
        scale = scaler.scale(torch.ones(()))
        assert not is_fake(scale)
        assert scale == 65536.0

    def test_a_trainer_with_an_optimizer_and_a_scaler_of_its_own_is_as_before(self) -> None:
        class Trainer:
            def __init__(self) -> None:
                self.model = chain(1)
                self.optimizer = torch.optim.AdamW(self.model.parameters())
                self.scaler = torch.amp.GradScaler("cpu")

            def step(self) -> None:
                self.scaler.scale(self.model(rows()).sum()).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()

        trainer = Trainer()
        told = memory(trainer.model, trainer.step)
        assert most(told, K.OPTIMIZER_STATE) == 2 * WEIGHT
        assert dict(trainer.optimizer.state) == {}
        assert trainer.scaler.scale(torch.ones(())) == 65536.0


class TestOneAtATime:
    def test_a_second_call_on_another_thread_is_refused(self) -> None:
        model, other, raised = chain(1), chain(1), []

        def call() -> None:
            try:
                memory(other, backward(other))
            except ShardscopeError as error:
                raised.append(str(error))

        def step() -> None:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            model(rows()).sum().backward()

        memory(model, step)
        assert len(raised) == 2
        assert "while another call was running" in raised[0]
        assert memory(other, backward(other)).profile.peak_bytes


def test_offloading_with_pinned_memory_is_a_gap_as_well() -> None:
    with simulate({"dp": 2}) as world:
        with torch.device("meta"):
            model = chain(1)
        fully_shard(model, mesh=world.mesh, offload_policy=CPUOffloadPolicy())
        world.materialize(model)
        told = memory(model, backward(model))
    assert places(told) == ["FSDP"]
