"""`audit` and `parallelize` select the same modules for the same plan."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from shardscope import audit, simulate
from shardscope.errors import PlanError
from shardscope.parallel import Colwise, Plan, Rowwise, Shard
from shardscope.parallel.plan.program_index import index_model
from shardscope.parallel.plan.resolve import resolve


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(8, 8)
        self.mlp = nn.Linear(8, 8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(17)))
        self.wq = nn.Linear(8, 8)


def audited(model: nn.Module, plan: dict[str, object]) -> dict[str, str]:
    """By module, the entry of the plan that the audit shows at its weight."""
    recording = audit(model, plan=plan)
    return {
        module.name: parameter.rule
        for module in recording.modules
        for parameter in module.parameters
        if parameter.name == "weight" and parameter.rule is not None
    }


def parallelized(model: nn.Module, plan: dict[str, object]) -> dict[str, str]:
    """By module, the entry of the plan that decided its weight's placement."""
    patterns = resolve(plan, index_model(model), {"tp": 2}).patterns
    return {
        name.removesuffix(".weight"): matching[0]
        for name, matching in patterns.items()
        if name.endswith(".weight")
    }


PLANS: list[dict[str, object]] = [
    {"layers.*.mlp": "colwise"},
    {"layers.[8-15].mlp": "colwise"},
    {"layers.1?.wq": "rowwise"},
    {"**.wq": "colwise"},
    {"layers.**": "colwise"},
    {"**": "colwise"},
    {"layers.3.mlp": "colwise"},
    {"wq": "rowwise"},
    {"layers.*.mlp.weight": "colwise"},
    {"layers.3.mlp": "rowwise", "layers.[2-4].*": "colwise", "**.weight": "rowwise"},
    {"layers.*.wq": "colwise", "layers.5.wq.weight": "rowwise"},
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: " ".join(plan))
def test_a_plan_selects_the_same_modules_everywhere(plan: dict[str, object]) -> None:
    selected = audited(Model(), plan)
    assert selected != {}
    assert parallelized(Model(), plan) == selected


@pytest.mark.parametrize("pattern", ["layers.*", "layers", "*.mlp", "layers.[17-20].mlp"])
def test_patterns_that_no_layer_matches_select_none_anywhere(pattern: str) -> None:
    plan: dict[str, object] = {pattern: "colwise"}
    assert audited(Model(), plan) == {}
    with pytest.raises(PlanError):
        parallelized(Model(), plan)


class PatchEmbedding(nn.Linear):
    """A linear layer, in spite of its name."""


def test_a_subclass_of_a_torch_layer_is_sharded_as_that_layer() -> None:
    model, plan = nn.Sequential(PatchEmbedding(8, 8, bias=False)), {"0": "colwise"}
    assert resolve(plan, index_model(model), {"tp": 2}).tensors == {"0.weight": (Shard(0),)}
    with simulate({"tp": 2}) as world:
        parallelize_module(model, world.mesh, {"0": ColwiseParallel()})
        assert audit(model, plan=plan).findings == ()


@pytest.mark.parametrize(
    ("plan", "is_applied"),
    [
        ({"0": {"tp": Colwise()}}, True),
        ({"0": {"tp": "rowwise"}}, False),
        ({"0.weight": "shard(0)"}, True),
        ({"0.weight": "shard(1)"}, False),
        (Plan({"0": Colwise()}), True),
        (Plan({"0": {"tp": Rowwise()}}), False),
    ],
    ids=repr,
)
def test_an_audit_takes_the_plans_that_parallelize_takes(plan: Any, is_applied: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    with simulate({"tp": 2}) as world:
        parallelize_module(model, world.mesh, {"0": ColwiseParallel()})
        rules = [finding.rule for finding in audit(model, plan=plan).findings]
    assert rules == ([] if is_applied else ["plan-not-applied"])
