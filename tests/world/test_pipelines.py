"""Pipeline schedules in a simulated world: each stage sends and receives what it would for real."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from older_torch import TORCH
from shardscope import Recording, simulate, trace
from shardscope.errors import WorldError

NUM_STAGES = 4
NUM_MICROBATCHES = 4
WIDTH = 16
ACTIVATION_BYTES = 4 * 2 * WIDTH


def example() -> torch.Tensor:
    return torch.empty(2, WIDTH, device="meta", requires_grad=True)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def run_step(schedule: Any, *, is_first: bool, is_last: bool) -> None:
    batch = torch.ones(2 * NUM_MICROBATCHES, WIDTH)
    inputs = (batch,) if is_first else ()
    options = {"target": batch} if is_last else {}
    schedule.step(*inputs, **options)


def train(
    schedule_class: type[Any], *, rank: int, fake: bool = False, has_shapes: bool = True
) -> Recording:
    with simulate(mesh={"pp": NUM_STAGES}, rank=rank) as world:
        model = nn.Linear(WIDTH, WIDTH, device="meta" if fake else "cpu")
        shapes = {"input_args": example(), "output_args": example()} if has_shapes else {}
        stage = PipelineStage(
            model, rank, NUM_STAGES, torch.device("cpu"), group=world.mesh.get_group(), **shapes
        )
        schedule = schedule_class(stage, NUM_MICROBATCHES, loss_fn=loss)
        if fake:
            world.materialize(model)
        with trace(model) as t:
            run_step(schedule, is_first=rank == 0, is_last=rank == NUM_STAGES - 1)
        assert model.weight.grad is not None
    return t.recording


def activations(recording: Recording) -> list[tuple[str, int | None]]:
    """Sends and receives of activations and their gradients: not the vote before the first step."""
    return [
        (str(c.kind), c.peer)
        for c in recording.collectives
        if max(c.input_bytes, c.output_bytes) == ACTIVATION_BYTES
    ]


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("rank", range(NUM_STAGES))
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_a_stage_exchanges_one_activation_and_gradient_per_microbatch(
    schedule: type[Any], rank: int, fake: bool
) -> None:
    recording = train(schedule, rank=rank, fake=fake)
    expected: Counter[tuple[str, int]] = Counter()
    for neighbour in (rank - 1, rank + 1):
        if 0 <= neighbour < NUM_STAGES:
            expected[("send", neighbour)] = expected[("recv", neighbour)] = NUM_MICROBATCHES
    assert Counter(activations(recording)) == expected
    assert {c.axis for c in recording.collectives} == {"pp"}
    assert recording.gaps == ()


def test_gpipe_does_all_forwards_first() -> None:
    assert activations(train(ScheduleGPipe, rank=3)) == [("recv", 2)] * 4 + [("send", 2)] * 4


def test_1f1b_alternates_on_the_last_stage() -> None:
    assert activations(train(Schedule1F1B, rank=3)) == [("recv", 2), ("send", 2)] * 4


def test_a_rank_may_hold_several_stages() -> None:
    with simulate(mesh={"pp": 2}, rank=1) as world:
        models = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        stages = [
            PipelineStage(
                model,
                1 + 2 * index,
                4,
                torch.device("cpu"),
                input_args=example(),
                output_args=example(),
                group=world.mesh.get_group(),
            )
            for index, model in enumerate(models)
        ]
        schedule = ScheduleInterleaved1F1B(stages, NUM_MICROBATCHES, loss_fn=loss)
        with trace(models) as t:
            run_step(schedule, is_first=False, is_last=True)
        assert all(model.weight.grad is not None for model in models)
    assert Counter(activations(t.recording)) == {("recv", 0): 12, ("send", 0): 12}


@pytest.mark.parametrize(("rank", "asked", "wanted"), [(0, 1, "gradients"), (2, 1, "inputs")])
def test_a_stage_without_shapes_says_what_to_give_it(rank: int, asked: int, wanted: str) -> None:
    sentence = (
        f"Pipeline stage {rank} infers the shapes of its {wanted} from stage {asked}, which does "
        "not run in a simulated world. Pass input_args and output_args to PipelineStage"
    )
    if wanted == "gradients" and TORCH < (2, 13):
        pytest.skip(f"torch {torch.__version__} asks no stage for the shapes of gradients")
    with pytest.raises(WorldError, match=sentence):
        train(ScheduleGPipe, rank=rank, has_shapes=False)


@pytest.mark.skipif(TORCH < (2, 15), reason=f"torch {torch.__version__} has no group per edge")
def test_groups_for_single_edges_are_refused() -> None:
    with (
        dist.config.patch(pipeline_per_edge_p2p=True),
        pytest.raises(WorldError, match="stage 1 needs one process group per neighbour, which"),
    ):
        train(ScheduleGPipe, rank=1)


@pytest.mark.parametrize("fake", [False, True])
def test_what_stages_exchange_before_the_first_step_is_recorded(fake: bool) -> None:
    recording = train(ScheduleGPipe, rank=1, fake=fake)
    before_activations = [
        (str(c.kind), c.peer) for c in recording.collectives if c.input_bytes + c.output_bytes <= 8
    ]
    # A vote, then stages 0 and 1 and stages 2 and 3 connect, then stages 1 and 2.
    connect = [("recv", 0), ("all_reduce", None), ("send", 2), ("all_reduce", None)]
    votes_along_the_stages = [("recv", 0), ("send", 2), ("recv", 2), ("send", 0)]
    expected = {
        (2, 15): [("all_reduce", None), *connect],
        (2, 13): votes_along_the_stages,
        (2, 11): [("recv", 0), ("send", 2), ("send", 0), ("recv", 2)],
    }
    assert before_activations == next(e for since, e in expected.items() if since <= TORCH)
