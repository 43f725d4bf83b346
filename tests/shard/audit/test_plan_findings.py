"""Findings of an audit about ties and plans: a model that has each, and one that does not."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from audited_models import FIRST, PLAN, Mlp, Tied, found, only_finding, stack
from older_torch import IS_OLDER
from shardscope import World, audit, simulate
from shardscope.errors import AuditError
from shardscope.record import Severity

# Ties


def test_a_plan_that_shards_a_tied_tensor_in_two_ways() -> None:
    plan = {"embed": ColwiseParallel(), "head": ColwiseParallel()}
    finding = only_finding(audit(Tied(), plan=plan), "tied-weights")
    assert (finding.severity, finding.subject) == (Severity.ERROR, "embed.weight, head.weight")
    assert "embed.weight: sharded along dim 1; head.weight: sharded along dim 0" in finding.fact
    assert "RowwiseParallel for an embedding" in finding.remedy


def test_a_plan_that_shards_both_tied_tensors_the_same_way() -> None:
    plan = {"embed": RowwiseParallel(), "head": ColwiseParallel()}
    assert found(audit(Tied(), plan=plan), "tied-weights") == []


def test_a_plan_that_leaves_one_of_two_tied_tensors_out() -> None:
    finding = only_finding(audit(Tied(), plan={"head": ColwiseParallel()}), "tied-weights")
    assert "embed.weight: unchanged; head.weight: sharded along dim 0" in finding.fact


def tear(world: World) -> nn.Module:
    model = Tied()
    return parallelize_module(model, world.mesh, {"head": ColwiseParallel()})


def keep(world: World) -> nn.Module:
    return fully_shard(Tied(), mesh=world.mesh)


@pytest.mark.parametrize(("shard", "num_torn"), [(tear, 1), (keep, 0)])
def test_ties_that_sharding_broke(shard: Callable[[World], nn.Module], num_torn: int) -> None:
    with simulate({"tp": 2}) as world:
        torn = found(audit(shard(world), before=audit(Tied())), "tied-weights")
    assert len(torn) == num_torn
    assert all("are now two tensors: replicated and Shard(0)" in finding.fact for finding in torn)


@pytest.mark.skipif(not IS_OLDER, reason="newer torch refuses such ties, see the next test")
def test_ties_that_fsdp_broke_into_two_groups() -> None:
    with simulate({"dp": 2}) as world:
        model = Tied()
        fully_shard(model.embed, mesh=world.mesh)
        fully_shard(model, mesh=world.mesh)
        finding = only_finding(audit(model, before=audit(Tied())), "tied-weights")
    assert "in FSDP group embed and Shard(0) in FSDP group of the root" in finding.fact


@pytest.mark.skipif(IS_OLDER, reason="torch before 2.13 breaks the tie and trains both")
@pytest.mark.parametrize("has_before", [True, False])
def test_parameter_in_two_fsdp_groups_is_an_error_before_torch_refuses_it(has_before: bool) -> None:
    with simulate({"dp": 2}) as world:
        model = Tied()
        before = audit(model) if has_before else None
        fully_shard(model.embed, mesh=world.mesh)
        fully_shard(model, mesh=world.mesh)
        finding = only_finding(audit(model, before=before), "tied-weights")
        with pytest.raises(ValueError, match="already managed by another FSDP group"):
            model(torch.zeros(2, dtype=torch.long))
    assert (finding.subject, finding.severity) == ("embed.weight, head.weight", Severity.ERROR)
    assert "are now in 2 FSDP groups, which torch refuses" in finding.fact
    assert finding.remedy.startswith("Call fully_shard([embed, head]) once")


def test_parameter_shared_by_modules_of_one_fsdp_group_is_no_finding() -> None:
    with simulate({"dp": 2}) as world:
        model = Tied()
        fully_shard([model.embed, model.head], mesh=world.mesh)
        fully_shard(model, mesh=world.mesh)
        assert found(audit(model, before=audit(Tied())), "tied-weights") == []


def test_ties_that_the_model_declares() -> None:
    model: Any = Tied()
    model._tied_weights_keys = {"head.weight": "embed.weight"}
    model.config = SimpleNamespace(tie_word_embeddings=True)
    assert found(audit(model), "tied-weights") == []
    model.head.weight = nn.Parameter(model.head.weight.clone())
    assert only_finding(audit(model), "tied-weights").subject == "embed.weight, head.weight"
    model.config.tie_word_embeddings = False  # it could tie them, and was not told to
    assert found(audit(model), "tied-weights") == []


def test_a_shared_module_whose_tie_was_broken() -> None:
    shared = nn.Linear(2, 2, bias=False)
    before = audit(nn.Sequential(shared, shared))
    after = audit(nn.Sequential(shared, nn.Linear(2, 2, bias=False)), before=before)
    assert only_finding(after, "tied-weights").subject == "0.weight, 1.weight"


def test_a_plan_that_says_the_same_in_several_ways() -> None:
    plan = {"embed.weight": [Shard(-2)], "head": "colwise"}
    assert found(audit(Tied(), plan=plan), "tied-weights") == []


# The plan


def test_a_rule_that_matches_nothing() -> None:
    plan = {"*.up": ColwiseParallel(), "*.gate": ColwiseParallel()}
    finding = only_finding(audit(nn.Sequential(Mlp()), plan=plan), "plan-unused")
    assert finding.subject == "*.gate"
    assert "the plan gives ColwiseParallel to '*.gate'" in finding.fact


def test_a_rule_for_a_layer_at_another_depth_says_where_it_is() -> None:
    finding = only_finding(
        audit(nn.Sequential(Mlp()), plan={"up": ColwiseParallel()}), "plan-unused"
    )
    assert "Did you mean '0.up'?" in finding.remedy


def test_rules_that_all_match() -> None:
    assert found(audit(nn.Sequential(Mlp()), plan=PLAN), "plan-unused") == []


def test_parameters_name_the_rule_that_matched_them() -> None:
    recording = audit(nn.Sequential(Mlp(), nn.Linear(8, 8)), plan=PLAN | {"1.weight": [Shard(0)]})
    rules = {module.name: [p.rule for p in module.parameters] for module in recording.modules}
    assert rules["0.up"] == ["*.up"]
    assert rules["1"] == ["1.weight", None]


def test_a_parameter_that_the_plan_did_not_reach() -> None:
    with simulate({"tp": 2}) as world:
        model = nn.Sequential(checkpoint_wrapper(Mlp()), Mlp())
        with pytest.warns(UserWarning, match="could not be resolved"):
            parallelize_module(model, world.mesh, PLAN)
        recording = audit(model, plan=PLAN)
    missed = found(recording, "plan-not-applied")
    assert [finding.subject for finding in missed] == ["0.up.weight", "0.down.weight"]
    assert "by ColwiseParallel (rule '*.up'), but it is a plain tensor" in missed[0].fact
    assert "Apply tensor parallelism first" in missed[0].remedy


def test_a_placement_that_is_not_the_plans() -> None:
    with simulate({"tp": 2}) as world:
        model = nn.Linear(4, 4, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight, world.mesh, [Replicate()]))
        finding = only_finding(audit(model, plan={"weight": Shard(0)}), "plan-not-applied")
        assert found(audit(model, plan={"weight": [Replicate()]}), "plan-not-applied") == []
    assert "the plan shards it by Shard(0) (rule 'weight'), but it is Replicate" in finding.fact


def test_parameters_that_only_fsdp_shards_did_not_get_the_plan() -> None:
    with simulate({"dp": 2, "tp": 2}) as world:
        model = nn.Sequential(Mlp(), Mlp())
        fully_shard(model, mesh=world.mesh["dp"])
        missed = found(audit(model, plan=PLAN), "plan-not-applied")
    assert [finding.subject for finding in missed] == ["*.up.weight (×2)", "*.down.weight (×2)"]
    assert "but it is sharded by FSDP only" in missed[0].fact


def test_a_plan_of_which_nothing_was_applied() -> None:
    model = nn.Sequential(Mlp())
    assert found(audit(model, plan=PLAN), "plan-not-applied") == []  # not yet, perhaps
    missed = found(audit(model, plan=PLAN, before=audit(model)), "plan-not-applied")
    assert len(missed) == 2


def test_a_plan_that_was_applied_the_other_way_round() -> None:
    wrong = {"*.up": RowwiseParallel(), "*.down": ColwiseParallel()}
    with simulate({"tp": 2}) as world:
        model = parallelize_module(nn.Sequential(Mlp()), world.mesh, PLAN)
        missed = found(audit(model, plan=wrong), "plan-not-applied")
    assert len(missed) == 2
    assert "by RowwiseParallel (rule '*.up'), but it is Shard(0)" in missed[0].fact


@pytest.mark.parametrize("placement", [Shard(0), Shard(-2)])
def test_placements_of_a_plan_are_compared_without_fsdps(placement: Shard) -> None:
    with simulate({"dp": 2, "tp": 2}) as world:
        plan = {"*.up.weight": [placement]}
        assert found(audit(stack(world), plan=plan), "plan-not-applied") == []


def test_a_style_that_shards_nothing_and_was_not_applied() -> None:
    plan = FIRST | {"1": SequenceParallel()}
    with simulate({"tp": 2}) as world:
        model = nn.Sequential(Mlp(), nn.LayerNorm(8))
        parallelize_module(model, world.mesh, FIRST)
        finding = only_finding(audit(model, plan=plan), "plan-not-applied")
        parallelize_module(model, world.mesh, {"1": SequenceParallel()})
        assert found(audit(model, plan=plan), "plan-not-applied") == []
    assert finding.subject == "1"
    assert "SequenceParallel" in finding.fact


def test_rules_may_use_the_further_names_of_a_module() -> None:
    shared = nn.Linear(4, 4)
    recording = audit(nn.Sequential(shared, shared), plan={"1": ColwiseParallel()})
    assert recording.modules[1].parameters[0].rule == "1"
    wrapped = nn.Sequential(checkpoint_wrapper(nn.Linear(4, 4)))
    plan = {"0._checkpoint_wrapped_module": ColwiseParallel()}
    assert found(audit(wrapped, plan=plan), "plan-unused") == []


def test_tensors_of_other_shapes_are_findings_of_their_own() -> None:
    with simulate({"dp": 2}) as world:
        model = nn.Sequential(Mlp(), *(nn.Linear(8, 4 + 4 * (i % 2)) for i in range(4)))
        fully_shard(model[0], mesh=world.mesh)
        outside = found(audit(model), "outside-groups")
    assert [f.subject for f in outside if "weight" in f.subject] == ["*.weight (×2)"] * 2


@pytest.mark.parametrize("style", [ColwiseParallel, "colwise", "local_colwise", ColwiseParallel()])
def test_a_plan_may_name_styles_in_every_way(style: Any) -> None:
    finding = only_finding(audit(Tied(), plan={"head": style}), "tied-weights")
    assert "head.weight: sharded along dim 0" in finding.fact


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ([1], "The plan is list, not a mapping"),
        ({"up": 3}, "entry 'up' gives int, which is neither a style nor a placement"),
        ({"up": [Partial()]}, r"entry 'up' gives Partial\(\), but a parameter cannot be partial"),
    ],
)
def test_a_plan_that_is_none_is_refused(plan: Any, sentence: str) -> None:
    with pytest.raises(AuditError, match=sentence):
        audit(Mlp(), plan=plan)
