"""`compat.tensor_parallel_transformation`: torch's results, and right ones where torch's fails."""

from __future__ import annotations

import inspect
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.experimental._tp_transform import (
    tensor_parallel_transformation as torchs_transformation,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.export import ExportedProgram

import transformed_models
from rank_processes import run_ranks
from shardscope import simulate
from shardscope.compat import tensor_parallel_transformation
from shardscope.errors import ParallelError, PlanError
from transformed_models import CASES, MLPs, count_collectives, export, mlp_plan

# Torch copies what it says is outdated when it takes programs apart.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default


@cache
def export_pairs(num_pairs: int) -> ExportedProgram:
    program = torch.export.export(MLPs(num_pairs), (torch.randn(10, 12),))
    return program.run_decompositions()


def shapes(program: ExportedProgram) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in program.state_dict.items()}


def group_names(program: ExportedProgram) -> set[Any]:
    return {node.args[-1] for node in program.graph.nodes if node.target is ALL_REDUCE}


def test_signature_is_torchs() -> None:
    ours, torchs = map(inspect.signature, (tensor_parallel_transformation, torchs_transformation))
    assert [
        (parameter.name, parameter.kind, parameter.default)
        for parameter in ours.parameters.values()
    ] == [
        (parameter.name, parameter.kind, parameter.default)
        for parameter in torchs.parameters.values()
    ]


@pytest.mark.parametrize("num_pairs", [1, 2, 3, 4])
def test_each_pair_costs_one_all_reduce(num_pairs: int) -> None:
    program = export_pairs(num_pairs)
    for rank in range(4):
        mine = tensor_parallel_transformation(program, rank, 4, "cpu", mlp_plan(num_pairs))
        assert count_collectives(mine) == {"all_reduce": num_pairs, "wait_tensor": num_pairs}


@pytest.mark.parametrize(("world_size", "is_decomposed"), [(2, True), (4, True), (2, False)])
def test_an_op_that_no_layer_covers_costs_one_all_gather(
    world_size: int, is_decomposed: bool
) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    program = torch.export.export(model, (torch.randn(7, 3),))
    program = program.run_decompositions() if is_decomposed else program
    for rank in range(world_size):
        mine = tensor_parallel_transformation(
            program, rank, world_size, "cpu", {"0": ColwiseParallel}
        )
        assert count_collectives(mine) == {"all_gather_into_tensor": 1, "wait_tensor": 1}


def test_a_single_rank_needs_no_collectives() -> None:
    program = export_pairs(1)
    mine = tensor_parallel_transformation(program, 0, 1, "cpu", mlp_plan(1))
    assert count_collectives(mine) == {}
    x = torch.randn(10, 12)
    torch.testing.assert_close(mine.module()(x), program.module()(x))


def test_every_rank_holds_its_shards_of_weights_and_biases() -> None:
    program = export_pairs(1)
    ranks = [
        tensor_parallel_transformation(program, rank, 3, "cpu", mlp_plan(1)) for rank in range(3)
    ]
    for name, dim in (("pairs.0.0.weight", 0), ("pairs.0.0.bias", 0), ("pairs.0.2.weight", 1)):
        shards = [rank.state_dict[name] for rank in ranks]
        assert all(isinstance(shard, nn.Parameter) for shard in shards)
        assert torch.equal(torch.cat(shards, dim), program.state_dict[name])
        assert {shard.shape[dim] for shard in shards} == {6}
    for rank in ranks:
        assert torch.equal(rank.state_dict["pairs.0.2.bias"], program.state_dict["pairs.0.2.bias"])


def test_the_graph_has_the_shapes_of_each_rank() -> None:
    mine = tensor_parallel_transformation(export_pairs(1), 1, 3, "cpu", mlp_plan(1))
    mine.graph.lint()
    values = {
        str(node.target): node.meta["val"] for node in mine.graph.nodes if node.op != "output"
    }
    assert values["p_pairs_0_0_weight"].shape == (6, 6)
    assert values["aten.relu.default"].shape == (10, 6)
    assert values["_c10d_functional.all_reduce.default"].shape == (10, 6)
    (output,) = list(mine.graph.nodes)[-1].args[0]
    assert list(mine.graph_signature.user_outputs) == [output.name]


def test_the_given_program_is_not_changed() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    program = torch.export.export(model, (torch.randn(7, 3),))
    plan = {"0": ColwiseParallel}
    graph, signature = str(program.graph), str(program.graph_signature)
    state = {name: (tensor, tensor.clone()) for name, tensor in program.state_dict.items()}
    mine = [tensor_parallel_transformation(program, rank, 2, "cpu", plan) for rank in (0, 1)]
    assert (str(program.graph), str(program.graph_signature)) == (graph, signature)
    assert plan == {"0": ColwiseParallel}
    # What batch norm counts is each rank's own, and not the model's.
    counts = [rank.state_dict["1.num_batches_tracked"] for rank in mine]
    counts[0].add_(1)
    for name, (tensor, before) in state.items():
        assert program.state_dict[name] is tensor
        assert torch.equal(tensor, before)
    assert counts[1] == 0


def test_an_empty_plan_replicates_everything() -> None:
    program = export_pairs(1)
    mine = tensor_parallel_transformation(program, 1, 2, "cpu", {})
    assert count_collectives(mine) == {}
    assert shapes(mine) == shapes(program)
    x = torch.randn(10, 12)
    torch.testing.assert_close(mine.module()(x), program.module()(x))


def test_without_a_process_group_collectives_name_the_one_to_come() -> None:
    assert not dist.is_initialized()
    program = export_pairs(1)
    for rank in (0, 1):
        mine = tensor_parallel_transformation(program, rank, 2, "cpu", mlp_plan(1))
        assert group_names(mine) == {"0"}


def test_within_a_process_group_every_ranks_program_names_it() -> None:
    program = export_pairs(1)
    with simulate(mesh={"tp": 2}):
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        for rank in (0, 1):
            mine = tensor_parallel_transformation(program, rank, 2, "cpu", mlp_plan(1))
            assert group_names(mine) == {name}


def test_a_program_for_the_first_ranks_of_many_names_a_group_of_those() -> None:
    program = export_pairs(1)
    with simulate(mesh={"tp": 4}):
        mine = tensor_parallel_transformation(program, 0, 2, "cpu", mlp_plan(1))
        (name,) = group_names(mine)
        assert name != dist.group.WORLD.group_name  # type: ignore[union-attr]


def test_more_ranks_than_there_are_is_an_error() -> None:
    program = export_pairs(1)
    with (
        simulate(mesh={"tp": 2}),
        pytest.raises(ParallelError, match="world_size is 4, but the process group has 2 ranks"),
    ):
        tensor_parallel_transformation(program, 0, 4, "cpu", mlp_plan(1))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_an_error(rank: int) -> None:
    with pytest.raises(ParallelError, match=f"rank is {rank}, but world_size is 2"):
        tensor_parallel_transformation(export_pairs(1), rank, 2, "cpu", mlp_plan(1))


def test_a_name_that_the_program_does_not_have_is_an_error_that_helps() -> None:
    plan = {"pairs.7.0": ColwiseParallel, "pairs.0.2": RowwiseParallel}
    with pytest.raises(PlanError, match=r"'pairs\.7\.0'.* pairs\.0 … pairs\.0.*'pairs\.\*\.0'"):
        tensor_parallel_transformation(export_pairs(1), 0, 2, "cpu", plan)


def test_a_model_that_was_not_exported_is_an_error_that_helps() -> None:
    with pytest.raises(ParallelError, match=r"MLPs is not an exported program.*torch\.export"):
        tensor_parallel_transformation(MLPs(1), 0, 2, "cpu", {})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def ran() -> list[dict[str, Any]]:
    """The results of every case on each of two real ranks."""
    results = []
    for code, printed in run_ranks(2, Path(transformed_models.__file__)):
        assert code == 0, printed
        results.append(json.loads(printed.splitlines()[-1]))
    return results


@pytest.mark.parametrize("name", CASES)
def test_real_ranks_compute_what_the_single_device_does(
    ran: list[dict[str, Any]], name: str
) -> None:
    for results in ran:
        assert results[name]["error"] < 1e-5


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.does_torchs_work])
def test_real_ranks_have_the_shards_and_collectives_of_torchs(
    ran: list[dict[str, Any]], name: str
) -> None:
    for results in ran:
        assert results[f"{name}, torch's"]["error"] < 1e-5
        assert results[name]["collectives"] == results[f"{name}, torch's"]["collectives"]
        assert results[name]["shapes"] == results[f"{name}, torch's"]["shapes"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("style objects", {"all_reduce": 1}),
        ("patterns", {"all_reduce": 2}),
        ("fused attention", {"all_reduce": 1}),
        ("attention by hand", {"all_reduce": 1}),
        ("itself twice", {"all_reduce": 1}),
        ("sum of what is cut", {"all_reduce": 1}),
        # Tokens looked up in pieces of the vocabulary, attention, logits put together.
        ("tied", {"all_reduce": 2, "all_gather_into_tensor": 1}),
    ],
)
def test_no_more_collectives_than_needed(
    ran: list[dict[str, Any]], name: str, expected: dict[str, int]
) -> None:
    for results in ran:
        collectives = {**results[name]["collectives"]}
        assert collectives.pop("wait_tensor") == sum(expected.values())
        assert collectives == expected


def test_tied_weights_stay_tied() -> None:
    program, _ = export(CASES["tied"])
    state = tensor_parallel_transformation(program, 1, 2, "cpu", CASES["tied"].plan).state_dict
    assert state["head.weight"] is state["embed.weight"]
    assert state["head.weight"].shape == (6, 16)
