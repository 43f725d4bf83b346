"""Verdicts: found by dispatching and computing, at placements that were asked for or at all.

That they agree with real ranks, for every op of five models, is shown in tests/integration.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from older_torch import TORCH
from shardscope import coverage, simulate
from shardscope.record import Coverage, OpCoverage, OpVerdict
from small_models import DIM, MLP, batch, split_mlp

FINE = {OpVerdict.LOCAL, OpVerdict.SHARDED, OpVerdict.DECOMPOSED}


class Calls(nn.Module):
    """A model of one call."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def forward(self, *args: Tensor) -> Any:
        return self.call(*args)


def cover(model: Any, *args: Any, **kwargs: Any) -> dict[str, OpCoverage]:
    model = model if isinstance(model, nn.Module) else Calls(model)
    (found,) = coverage(model, *args, levels=["exported"], **kwargs).coverage
    return {op.op.removeprefix("aten."): op for op in found.ops}


def shardings(op: OpCoverage) -> dict[str, OpVerdict]:
    return {" ".join(sharding.inputs): sharding.verdict for sharding in op.shardings}


def test_each_dim_of_each_input_is_sharded_in_turn() -> None:
    found = cover(torch.mm, torch.ones(4, 8), torch.ones(8, 6))["mm.default"]
    assert shardings(found) == {
        "self: Shard(0)": OpVerdict.SHARDED,
        "self: Shard(1)": OpVerdict.SHARDED,
        "mat2: Shard(0)": OpVerdict.SHARDED,
        "mat2: Shard(1)": OpVerdict.SHARDED,
    }
    assert [sharding.outputs for sharding in found.shardings] == [
        ("Shard(0)",),
        ("Partial(sum)",),
        ("Partial(sum)",),
        ("Shard(1)",),
    ]


def test_a_dim_that_the_op_needs_replicated_is_gathered_with_bytes() -> None:
    found = cover(lambda x: torch.softmax(x, -1), torch.ones(4, 8))["softmax.int"]
    assert found.verdict is OpVerdict.DECOMPOSED  # there is a dim on which it costs nothing
    assert shardings(found)["self: Shard(1)"] is OpVerdict.REDISTRIBUTED
    priced = next(
        sharding for sharding in found.shardings if sharding.inputs == ("self: Shard(1)",)
    )
    assert priced.num_bytes == 4 * 8 * 4 // 2  # what this rank of two sends of the full tensor


def test_an_op_whose_only_dim_cannot_be_sharded_is_replicated() -> None:
    found = cover(lambda x: torch.cumsum(x, 0), torch.ones(8))["cumsum.default"]
    assert found.verdict is OpVerdict.REPLICATED
    (move,) = found.moves
    assert (move.argument, move.before, move.after) == ("self", ("Shard(0)",), ("Replicate",))
    assert move.num_bytes == 16


MESHES = ({"tp": 3}, {"dp": 3, "tp": 4}, {"a": 2, "b": 2, "c": 2})


@pytest.mark.parametrize("mesh", MESHES)
def test_numbers_are_compared_on_meshes_of_any_shape(mesh: dict[str, int]) -> None:
    recording = coverage(Calls(torch.mm), torch.ones(12, 12), torch.ones(12, 12), mesh=mesh)
    assert recording.gaps == ()
    assert {op.verdict for op in recording.coverage[0].ops} == {OpVerdict.SHARDED}


@pytest.mark.parametrize("op", [torch.cumsum, torch.cumprod, torch.logcumsumexp])
def test_a_scan_along_a_negative_dim_is_wrong_until_torch_2_14(op: Any) -> None:
    (found,) = cover(lambda x: op(x, dim=-1), torch.ones(4, 8)).values()
    (right,) = cover(lambda x: op(x, dim=1), torch.ones(4, 8)).values()
    if op is not torch.cumsum and TORCH < (2, 13):
        assert found.verdict is OpVerdict.MISSING  # it has no rule yet that could be wrong
        return
    assert right.verdict is OpVerdict.SHARDED
    if TORCH >= (2, 14):
        assert found.verdict is OpVerdict.SHARDED
        assert shardings(found) == shardings(right)
        return
    assert found.verdict is OpVerdict.WRONG
    assert shardings(found) == {
        "self: Shard(0)": OpVerdict.SHARDED,
        "self: Shard(1)": OpVerdict.WRONG,
    }
    assert "Do not shard self as Shard(1)" in found.remedy


def test_a_convolution_with_a_sharded_weight_is_found_to_be_wrong() -> None:
    model = nn.Conv2d(4, 8, 3, padding=1, bias=False)
    found = cover(model, torch.randn(2, 4, 8, 8))["conv2d.default"]
    assert found.verdict is OpVerdict.WRONG
    assert shardings(found)["weight: Shard(0)"] is OpVerdict.WRONG
    assert shardings(found)["input: Shard(0)"] is OpVerdict.DECOMPOSED


def test_a_mean_over_targets_of_which_ranks_ignore_some_is_wrong_until_torch_2_14() -> None:
    targets = torch.zeros(8, dtype=torch.long)
    for loss in (functional.cross_entropy, functional.nll_loss):
        (found,) = cover(loss, torch.randn(8, 16), targets).values()
        if TORCH >= (2, 14):
            assert shardings(found)["self: Shard(0)"] is OpVerdict.REDISTRIBUTED
        else:
            assert shardings(found)["self: Shard(0)"] is OpVerdict.WRONG
            assert found.detail.endswith("where targets are -100 and ignored")
    (added,) = cover(
        lambda x, t: functional.cross_entropy(x, t, reduction="sum", ignore_index=3),
        torch.randn(8, 16),
        targets,
    ).values()
    assert added.verdict is OpVerdict.DECOMPOSED


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [7, 1001])
def test_a_mean_over_uneven_shards_is_found_to_be_wrong_however_small_the_error(
    num_rows: int, dtype: torch.dtype
) -> None:
    x, y = torch.ones(2, num_rows, 16, dtype=dtype)
    found = cover(functional.mse_loss, x, y)["mse_loss.default"]
    if TORCH >= (2, 13):
        assert shardings(found)["self: Shard(0)"] is OpVerdict.WRONG
        assert shardings(found)["self: Shard(1)"] is OpVerdict.DECOMPOSED


def test_a_sum_over_no_dims_has_an_invalid_placement() -> None:
    found = cover(lambda x: x.sum(dim=[]), torch.ones(4, 8))["sum.dim_IntList"]
    assert found.verdict is OpVerdict.WRONG
    assert "0 dims but its spec is" in found.detail


def test_batch_statistics_that_are_written_to_a_copy_are_found_to_be_wrong() -> None:
    found = cover(nn.BatchNorm1d(4), torch.randn(8, 4))
    batch_norm = found.get("batch_norm.default")
    assert batch_norm is not None
    if TORCH >= (2, 13):  # before, it has no rule at all
        assert shardings(batch_norm)["input: Shard(1)"] is OpVerdict.WRONG
    assert batch_norm.verdict in (OpVerdict.WRONG, OpVerdict.MISSING)


def test_an_op_that_shardings_of_some_calls_break_has_the_worst_of_all_its_calls() -> None:
    def losses(even: Tensor, uneven: Tensor) -> Tensor:
        of_even = functional.mse_loss(even, even)
        return of_even + functional.mse_loss(uneven, uneven)

    found = cover(losses, torch.ones(8, 16), torch.ones(7, 16))["mse_loss.default"]
    assert found.num_forward == 2
    assert found.verdict is OpVerdict.WRONG
    alone = cover(functional.mse_loss, torch.ones(8, 16), torch.ones(8, 16))["mse_loss.default"]
    assert alone.verdict is not OpVerdict.WRONG


def test_random_ops_are_compared_by_shape_only() -> None:
    recording = coverage(nn.Dropout(0.5), torch.ones(4, 8, requires_grad=True))
    assert recording.gaps == ()
    verdicts = {op.op: op.verdict for op in recording.coverage[0].ops}
    assert verdicts["aten.dropout.default"] is OpVerdict.DECOMPOSED


def test_ops_with_nothing_to_shard_say_so() -> None:
    found = cover(lambda x: torch.arange(3).sum() + x, torch.ones(()))
    assert found["arange.default"].detail == "takes no tensors"
    assert found["add.Tensor"].detail == "no input has a dim to shard"
    assert found["add.Tensor"].verdict is found["arange.default"].verdict is OpVerdict.LOCAL


@pytest.fixture(scope="module")
def double() -> Any:
    """A custom op that DTensor does not know."""

    @torch.library.custom_op("coverage_tests::double", mutates_args=())
    def double(x: Tensor, times: int = 2) -> Tensor:
        return x * times

    double.register_fake(lambda x, times=2: torch.empty_like(x))
    return torch.ops.coverage_tests.double.default


@pytest.fixture
def _unregistered(double: Any) -> Iterator[None]:
    yield
    propagator = DTensor._op_dispatcher.sharding_propagator
    propagator.op_strategy_funcs.pop(double, None)
    propagator.op_to_schema_info.pop(double, None)


@pytest.mark.usefixtures("_unregistered")
def test_a_custom_op_is_missing_and_the_remedys_three_lines_register_it(double: Any) -> None:
    found = cover(double, torch.ones(4, 8))["coverage_tests.double.default"]
    assert found.verdict is OpVerdict.MISSING
    _, *lines = found.remedy.splitlines()
    assert lines == [
        "@register_sharding(torch.ops.coverage_tests.double.default)",
        "def shard_coverage_tests_double(x, times=None):",
        "    return [([Replicate()], [Replicate(), None])]",
    ]
    names = {"torch": torch, "register_sharding": register_sharding, "Replicate": Replicate}
    exec("\n".join(lines), names)
    covered = cover(double, torch.ones(4, 8))["coverage_tests.double.default"]
    assert covered.verdict is OpVerdict.REPLICATED


@pytest.mark.usefixtures("_unregistered")
def test_a_custom_op_with_a_rule_is_covered_and_a_wrong_rule_is_found(double: Any) -> None:
    @register_sharding(double)
    def rows(x: Any, times: int = 2) -> Any:
        return [([Replicate()], [Replicate(), None]), ([Shard(0)], [Shard(0), None])]

    found = cover(double, torch.ones(4, 8))["coverage_tests.double.default"]
    assert found.verdict is OpVerdict.SHARDED

    @register_sharding(double)
    def lies(x: Any, times: int = 2) -> Any:
        return [([Replicate()], [Replicate(), None]), ([Shard(1)], [Shard(0), None])]

    found = cover(double, torch.ones(4, 8))["coverage_tests.double.default"]
    assert shardings(found)["x: Shard(0)"] is OpVerdict.WRONG


# A Megatron layout: the first weight by columns, the second by rows.
MEGATRON = {"up.weight": Shard(0), "down.weight": Shard(1)}


def test_ops_are_tested_at_the_placements_of_a_plan() -> None:
    (found,) = coverage(MLP(), batch(), plan=MEGATRON, levels=["exported"]).coverage
    assert found.has_plan
    by_name = {op.op: op for op in found.ops}
    assert by_name["aten.relu.default"].verdict is OpVerdict.SHARDED
    assert {" ".join(sharding.inputs) for sharding in by_name["aten.linear.default"].shardings} == {
        "weight: Shard(0)",
        "input: Shard(2) weight: Shard(1)"
        if batch().dim() == 3
        else "input: Shard(1) weight: Shard(1)",
    }


def test_a_plan_that_leaves_partial_sums_redistributes_at_the_next_op() -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.ReLU())
    found = cover(model, batch(4), plan={"0.weight": Shard(1)})["relu.default"]
    assert found.verdict is OpVerdict.REPLICATED
    (move,) = found.moves
    assert (move.before, move.after) == (("Partial(sum)",), ("Replicate",))
    assert move.num_bytes == 4 * DIM * 4  # 2(n-1)/n of the output, on two ranks
    assert found.modules == ("1",)


def test_patterns_of_a_plan_name_tied_weights_by_either_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    model["b"].weight = model["a"].weight
    model.forward = lambda x: model["a"](x) + model["b"](x)  # type: ignore[method-assign]
    found = cover(model, torch.ones(2, 4), plan={"b.*": [Shard(0)]})["linear.default"]
    assert [sharding.inputs for sharding in found.shardings] == [("weight: Shard(0)",)]


def shard_by_styles(model: nn.Module, mesh: Any) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def test_a_function_shards_a_copy_and_the_model_stays_plain() -> None:
    model = MLP()
    (found,) = coverage(model, batch(), plan=shard_by_styles, levels=["exported"]).coverage
    assert found.has_plan
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert not model.up._forward_pre_hooks
    assert {op.verdict for op in found.ops} <= FINE


def test_a_model_that_is_sharded_already_is_tested_in_its_world() -> None:
    with simulate({"dp": 2, "tp": 4}, rank=3) as world:
        with torch.device("meta"):
            model = split_mlp(MLP(), world.mesh["tp"])
        found = coverage(model, batch(), levels=["exported"])
        assert model.up.weight.is_meta
    (level,) = found.coverage
    assert isinstance(level, Coverage)
    assert level.has_plan
    assert (level.rank, [axis.name for axis in level.axes]) == (3, ["tp"])
    assert {op.verdict for op in level.ops} <= FINE


def test_ops_on_plain_or_replicated_tensors_are_local_and_not_sharded() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.split = MLP()
            self.plain = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.plain(self.split(x)))

    def shard(model: nn.Module, mesh: Any) -> nn.Module:
        shard_by_styles(model.split, mesh)
        return model

    (found,) = coverage(Partly(), batch(), plan=shard, levels=["core_aten"]).coverage
    verdicts = {op.op: op.verdict for op in found.ops}
    assert verdicts["aten.tanh.default"] is OpVerdict.LOCAL
    # ColwiseParallel turns its output into a local tensor, on which the activation runs.
    assert verdicts["aten.relu.default"] is OpVerdict.LOCAL
    # Of an op that is called on both, the calls on DTensors count.
    assert verdicts["aten.mm.default"] is OpVerdict.SHARDED
    replicated = coverage(nn.Tanh(), batch(), plan={}, mesh={"tp": 2}, levels=["core_aten"])
    (op,) = [op for op in replicated.coverage[0].ops if op.op == "aten.tanh.default"]
    assert (op.verdict, op.flops) == (OpVerdict.LOCAL, None)


def test_a_plain_tensor_that_meets_a_dtensor_is_missing_with_its_line_and_a_remedy() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.weight

    with simulate({"tp": 2}) as world:
        model = Mixed()
        model.weight = nn.Parameter(
            DTensor.from_local(torch.ones(2, 4), world.mesh, [Shard(0)], run_check=False)
        )
        found = cover(model, torch.ones(4, 4))["add.Tensor"]
    assert found.verdict is OpVerdict.MISSING
    assert "mixed torch.Tensor and DTensor" in found.detail
    assert "distribute_tensor()" in found.remedy
    assert [source.text for source in found.sources] == ["return x + self.weight"]
