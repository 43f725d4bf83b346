"""Steps that repeat are streamed in short lines, and are recorded as they are without a stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from shardscope import Recording, World, load, simulate, trace
from shardscope.record import Collective, Phase
from small_models import DIM, MLP, Net, Own, Reduce, batch, everyone, shard_net, split_mlp

pytestmark = pytest.mark.usefixtures("host_clock_only")
NUM_STEPS = 4


@pytest.fixture
def world() -> Iterator[World]:
    with simulate({"dp": 2, "tp": 2}) as world:
        yield world


def run_both(
    model: nn.Module | None, step: Callable[[int], object], path: Path
) -> tuple[Recording, Recording]:
    """What is recorded without a stream, and what the stream of the same steps has."""
    with trace(model) as plain, trace(model, stream=path) as streamed:
        for number in range(NUM_STEPS):
            step(number)
    assert load(path).collectives == streamed.recording.collectives
    return plain.recording, load(path)


def count_short_lines(path: Path) -> int:
    return path.read_text().count('{"repeat":')


def without_times(recording: Recording) -> list[Collective]:
    calls = recording.collectives
    return [replace(call, start_ns=None, returned_ns=None) for call in calls]


class Checkpointed(nn.Module):
    """Two blocks, one of which is computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Own(), Own()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, x, use_reentrant=False))


class Changing(nn.Module):
    """Issues more, larger and other collectives in some calls."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.num_calls = Own(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        x = self.own(x)
        for size in range(self.num_calls):
            dist.all_reduce(torch.ones(1 + size))
        if self.num_calls % 2:
            dist.broadcast(torch.ones(3, dtype=torch.float64), src=self.num_calls % 4)
        else:
            dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX)
        return x


class Functional(nn.Module):
    """One functional all-reduce between two layers, which can be compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(funcol.all_reduce(self.first(x), "sum", everyone()))


def compile_layers(model: nn.Sequential) -> nn.Module:
    for layer in model:
        layer.compile(backend="aot_eager")
    return model


class Shared(nn.Module):
    """Calls the same module twice, from different lines."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Own()
        self.layers = nn.ModuleList([self.own, Own()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.own(x)
        for layer in self.layers:
            x = layer(x)
        return x


def make_tensor_parallel(world: World) -> nn.Module:
    return split_mlp(nn.Sequential(MLP(), MLP()), world.mesh["tp"])


def make_hybrid(world: World) -> nn.Module:
    model = split_mlp(nn.Sequential(MLP(), MLP()), world.mesh["tp"])
    for mlp in model.children():
        fully_shard(mlp, mesh=world.mesh["dp"])
    return model


MODELS: dict[str, Callable[[World], nn.Module]] = {
    "blocks": lambda world: Net(),
    "checkpointed": lambda world: Checkpointed(),
    "changing": lambda world: Changing(),
    "shared": lambda world: Shared(),
    "TP": make_tensor_parallel,
    "FSDP2": lambda world: shard_net(Net(), world.mesh["dp"]),
    "FSDP2 and TP": make_hybrid,
    "FSDP1": lambda world: FullyShardedDataParallel(MLP(), device_id=torch.device("cpu")),
    "DDP": lambda world: DistributedDataParallel(MLP()),
    "compiled": lambda world: torch.compile(Functional(), backend="aot_eager"),
    "layers compiled": lambda world: compile_layers(nn.Sequential(Functional(), Functional())),
}


# Torch warns of a module that returns a view, as a tensor-parallel one does, and of FSDP1.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", MODELS)
def test_stream_of_steps_that_repeat_has_what_is_recorded_without_one(
    world: World, tmp_path: Path, name: str
) -> None:
    model = MODELS[name](world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(batch(1 + number % 2)).sum().backward()
        optimizer.step()

    plain, streamed = run_both(model, step, tmp_path / "run.jsonl")
    assert len(plain.collectives) > NUM_STEPS
    assert without_times(streamed) == without_times(plain)
    assert streamed.gaps == plain.gaps
    assert count_short_lines(tmp_path / "run.jsonl") >= len(plain.collectives) // 2 - 1


def test_collectives_of_two_lines_are_not_taken_for_each_other(
    world: World, tmp_path: Path
) -> None:
    x = torch.ones(4)

    def step(number: int) -> None:
        dist.all_reduce(x)
        dist.all_reduce(x)
        if number % 2:
            dist.all_reduce(x)
        dist.all_reduce(x, group=world.mesh["tp"].get_group())

    plain, streamed = run_both(None, step, tmp_path / "run.jsonl")
    lines = [(call.source and call.source.line, call.group) for call in streamed.collectives]
    assert lines == [(call.source and call.source.line, call.group) for call in plain.collectives]
    assert len(set(lines)) == 4


def test_threads_that_repeat_do_not_share_what_they_repeat(world: World, tmp_path: Path) -> None:
    model = nn.Sequential(Own(), Own())

    def work(layer: nn.Module) -> None:
        for _ in range(NUM_STEPS):
            layer(batch()).sum().backward()

    def step(number: int) -> None:
        threads = [
            threading.Thread(target=work, args=[layer], name=f"worker {index}")
            for index, layer in enumerate(model)
        ]
        for thread in threads:
            thread.start()
            thread.join()

    _, streamed = run_both(model, step, tmp_path / "run.jsonl")
    forwards = [call for call in streamed.collectives if call.phase is Phase.FORWARD]
    assert len(forwards) == len(streamed.collectives) // 2 == 2 * NUM_STEPS**2
    assert {(call.thread, call.owner) for call in forwards} == {
        ("worker 0", "0"),
        ("worker 1", "1"),
    }
    # Which module a backward belongs to is a gap where two threads may have run its forward.
    for call in streamed.collectives:
        assert call.owner in (call.thread.removeprefix("worker "), None)


def test_group_that_is_created_anew_in_each_step_is_that_of_the_step(
    world: World, tmp_path: Path
) -> None:
    def step(number: int) -> None:
        group = dist.new_group([0, 1 + number % 3])
        dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)

    plain, streamed = run_both(None, step, tmp_path / "run.jsonl")
    assert without_times(streamed) == without_times(plain)
    assert len({call.group for call in streamed.collectives}) == NUM_STEPS


def test_module_called_by_another_in_the_next_step_is_not_taken_for_the_first(
    world: World, tmp_path: Path
) -> None:
    model = nn.ModuleDict({"a": Own(), "b": Own()})

    def step(number: int) -> None:
        for name in ("a", "b") if number % 2 else ("b", "a"):
            model[name](batch()).sum().backward()

    plain, streamed = run_both(model, step, tmp_path / "run.jsonl")
    assert without_times(streamed) == without_times(plain)
    assert [call.owner for call in streamed.collectives[:8]] == [*"bbaaaabb"]


def test_functional_collectives_that_repeat_keep_their_backward(
    world: World, tmp_path: Path
) -> None:
    def step(number: int) -> None:
        x = torch.ones(2, requires_grad=True)
        Reduce.apply(x).sum().backward()

    plain, streamed = run_both(None, step, tmp_path / "run.jsonl")
    assert without_times(streamed) == without_times(plain)
    assert len({call.phase for call in streamed.collectives}) == 2
    assert everyone().size() == 4


def test_program_that_never_repeats_itself_keeps_few_templates(
    world: World, tmp_path: Path
) -> None:
    namespace: dict[str, Any] = {"dist": dist, "x": torch.ones(1)}
    with trace(stream=tmp_path / "run.jsonl", stream_bytes=64 * 1024) as t:
        for number in range(5000):
            exec(compile("dist.all_reduce(x)", f"/tmp/made_{number}.py", "exec"), namespace)
        assert t._session is not None
        assert len(t._session.recorder._repeats._templates) < 4200
    assert t.recording.collectives[-1].order == 4999


def test_mesh_is_named_in_each_step(tmp_path: Path) -> None:
    with simulate({"dp": 4}):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))

        def step(number: int) -> None:
            dist.all_reduce(torch.ones(1), group=mesh.get_group("ab"[number % 2]))

        plain, streamed = run_both(None, step, tmp_path / "run.jsonl")
    assert [call.axis for call in streamed.collectives] == [*"abab"]
    assert without_times(streamed) == without_times(plain)
