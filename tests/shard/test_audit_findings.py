"""Each finding of an audit: a model that has it, and one that does not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from audited_models import Tied
from shardscope import Recording, World, audit, simulate
from shardscope.errors import AuditError
from shardscope.record import Finding, Severity

FIRST = {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()}
PLAN = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}


class Mlp(nn.Module):
    """Two linear layers."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(8, hidden, bias=False)
        self.down = nn.Linear(hidden, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def found(recording: Recording, rule: str) -> list[Finding]:
    return [finding for finding in recording.findings if finding.rule == rule]


def one(recording: Recording, rule: str) -> Finding:
    (finding,) = found(recording, rule)
    return finding


def stack(world: World, *, hidden: int = 16, has_root: bool = True) -> nn.Sequential:
    """Two MLPs, right in every way: tensor parallel, then FSDP on each, then on all."""
    model = nn.Sequential(Mlp(hidden), Mlp(hidden))
    parallelize_module(model, world.mesh["tp"], PLAN)
    for block in model:
        fully_shard(block, mesh=world.mesh["dp"])
    return fully_shard(model, mesh=world.mesh["dp"]) if has_root else model


def test_a_model_that_is_right_has_no_findings() -> None:
    with simulate({"dp": 2, "tp": 2}) as world:
        model = stack(world)
        recording = audit(model, plan=PLAN, step=lambda: model(torch.ones(4, 8)).sum().backward())
    assert recording.findings == ()
    assert recording.gaps == ()


def test_a_model_that_is_not_sharded_has_no_findings() -> None:
    assert audit(Tied()).findings == ()


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ({"before": 3}, "`before` is int, not a recording"),
        ({"step": 3}, "`step` is int, not a function"),
    ],
)
def test_other_arguments_are_checked_too(argument: dict[str, Any], sentence: str) -> None:
    with pytest.raises(AuditError, match=sentence):
        audit(Mlp(), **argument)


# Ties


def test_a_plan_that_cuts_a_tied_tensor_in_two_ways() -> None:
    plan = {"embed": ColwiseParallel(), "head": ColwiseParallel()}
    finding = one(audit(Tied(), plan=plan), "tied-weights")
    assert (finding.severity, finding.subject) == (Severity.ERROR, "embed.weight, head.weight")
    assert "embed.weight: cut along dim 1; head.weight: cut along dim 0" in finding.fact
    assert "RowwiseParallel for an embedding" in finding.remedy


def test_a_plan_that_cuts_a_tied_tensor_in_one_way() -> None:
    plan = {"embed": RowwiseParallel(), "head": ColwiseParallel()}
    assert found(audit(Tied(), plan=plan), "tied-weights") == []


def test_a_plan_that_leaves_one_of_two_tied_tensors_out() -> None:
    finding = one(audit(Tied(), plan={"head": ColwiseParallel()}), "tied-weights")
    assert "embed.weight: as it is; head.weight: cut along dim 0" in finding.fact


def tear(world: World) -> nn.Module:
    model = Tied()
    return parallelize_module(model, world.mesh, {"head": ColwiseParallel()})


def keep(world: World) -> nn.Module:
    return fully_shard(Tied(), mesh=world.mesh)


@pytest.mark.parametrize(("shard", "num_torn"), [(tear, 1), (keep, 0)])
def test_ties_that_sharding_tore(shard: Callable[[World], nn.Module], num_torn: int) -> None:
    with simulate({"tp": 2}) as world:
        torn = found(audit(shard(world), before=audit(Tied())), "tied-weights")
    assert len(torn) == num_torn
    assert all("have become two: whole and Shard(0)" in finding.fact for finding in torn)


def test_ties_that_fsdp_tore_into_two_groups() -> None:
    with simulate({"dp": 2}) as world:
        model = Tied()
        fully_shard(model.embed, mesh=world.mesh)
        fully_shard(model, mesh=world.mesh)
        finding = one(audit(model, before=audit(Tied())), "tied-weights")
    assert "in FSDP group embed and Shard(0) in FSDP group of the root" in finding.fact


def test_ties_that_the_model_declares() -> None:
    model: Any = Tied()
    model._tied_weights_keys = {"head.weight": "embed.weight"}
    model.config = SimpleNamespace(tie_word_embeddings=True)
    assert found(audit(model), "tied-weights") == []
    model.head.weight = nn.Parameter(model.head.weight.clone())
    assert one(audit(model), "tied-weights").subject == "embed.weight, head.weight"
    model.config.tie_word_embeddings = False  # it could tie them, and was not told to
    assert found(audit(model), "tied-weights") == []


def test_a_shared_module_that_was_torn() -> None:
    shared = nn.Linear(2, 2, bias=False)
    before = audit(nn.Sequential(shared, shared))
    after = audit(nn.Sequential(shared, nn.Linear(2, 2, bias=False)), before=before)
    assert one(after, "tied-weights").subject == "0.weight, 1.weight"


def test_a_plan_that_says_the_same_in_several_ways() -> None:
    plan = {"embed.weight": [Shard(-2)], "head": "colwise"}
    assert found(audit(Tied(), plan=plan), "tied-weights") == []


# The plan


def test_a_rule_that_matches_nothing() -> None:
    plan = {"*.up": ColwiseParallel(), "*.gate": ColwiseParallel()}
    finding = one(audit(nn.Sequential(Mlp()), plan=plan), "plan-unused")
    assert finding.subject == "*.gate"
    assert "the plan gives ColwiseParallel to '*.gate'" in finding.fact


def test_a_rule_for_a_layer_at_another_depth_says_where_it_is() -> None:
    finding = one(audit(nn.Sequential(Mlp()), plan={"up": ColwiseParallel()}), "plan-unused")
    assert "There is 0.up." in finding.remedy


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
        finding = one(audit(model, plan={"weight": Shard(0)}), "plan-not-applied")
        assert found(audit(model, plan={"weight": [Replicate()]}), "plan-not-applied") == []
    assert "to lay it out by Shard(0) (rule 'weight'), but it is Replicate" in finding.fact


def test_a_plan_that_only_fsdp_cut_was_not_applied() -> None:
    with simulate({"dp": 2, "tp": 2}) as world:
        model = nn.Sequential(Mlp(), Mlp())
        fully_shard(model, mesh=world.mesh["dp"])
        missed = found(audit(model, plan=PLAN), "plan-not-applied")
    assert [finding.subject for finding in missed] == ["*.up.weight (×2)", "*.down.weight (×2)"]
    assert "but it is cut by FSDP alone" in missed[0].fact


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


def test_a_style_without_cuts_that_was_not_applied() -> None:
    plan = FIRST | {"1": SequenceParallel()}
    with simulate({"tp": 2}) as world:
        model = nn.Sequential(Mlp(), nn.LayerNorm(8))
        parallelize_module(model, world.mesh, FIRST)
        finding = one(audit(model, plan=plan), "plan-not-applied")
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
    finding = one(audit(Tied(), plan={"head": style}), "tied-weights")
    assert "head.weight: cut along dim 0" in finding.fact


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ([1], "The plan is list, not a mapping"),
        ({"up": 3}, "rule 'up' gives int, which is neither a parallel style nor placements"),
    ],
)
def test_a_plan_that_is_none_is_refused(plan: Any, sentence: str) -> None:
    with pytest.raises(AuditError, match=sentence):
        audit(Mlp(), plan=plan)


# Where tensors lie


def test_a_large_parameter_that_only_one_axis_leaves_whole() -> None:
    with simulate({"dp": 2, "tp": 4}) as world, torch.device("meta"):
        model = nn.Sequential(Mlp(), nn.Linear(4096, 4096, bias=False))
        parallelize_module(model, world.mesh["tp"], FIRST)
        fully_shard(model, mesh=world.mesh["dp"])
        finding = one(audit(model), "replicated")
    assert finding.subject == "1.weight"
    assert "32.0 MiB are the same on 4 ranks of tp, which cuts other" in finding.fact
    assert "would hold 8.0 MiB instead of 32.0 MiB" in finding.remedy


def test_large_parameters_that_data_parallelism_alone_replicates() -> None:
    with simulate({"replicas": 2, "shards": 2}) as world, torch.device("meta"):
        model = fully_shard(nn.Linear(8192, 8192), mesh=world.mesh)
        assert found(audit(model), "replicated") == []


def test_a_flattened_mesh_that_cuts_as_much_as_others() -> None:
    with simulate({"dp": 2, "ep": 4}) as world, torch.device("meta"):
        everyone = world.mesh._flatten("everyone")
        model = nn.Sequential(nn.Linear(8192, 8192), nn.Linear(8192, 8192))
        experts = distribute_tensor(model[1].weight, world.mesh["ep"], [Shard(0)])
        model[1].weight = nn.Parameter(experts)
        fully_shard(model[1], mesh=world.mesh["dp"])
        fully_shard(model, mesh=everyone)
        assert found(audit(model), "replicated") == []


def test_repeated_layers_are_one_finding() -> None:
    with simulate({"tp": 2}) as world, torch.device("meta"):
        model = nn.Sequential(Mlp(), *(nn.Linear(4096, 4096, bias=False) for _ in range(4)))
        parallelize_module(model, world.mesh, FIRST)
        finding = one(audit(model), "replicated")
    assert finding.subject == "*.weight (×4)"


@pytest.mark.parametrize(
    ("hidden", "sizes", "severity"),
    [(10, "3, 3, 3, 1", Severity.INFO), (6, "2, 2, 2, 0", Severity.WARNING)],
)
def test_dims_that_do_not_divide(hidden: int, sizes: str, severity: Severity) -> None:
    with simulate({"tp": 4}) as world:
        model = parallelize_module(nn.Sequential(Mlp(hidden)), world.mesh, PLAN)
        uneven = found(audit(model), "uneven-shards")
    assert [finding.subject for finding in uneven] == ["0.up.weight", "0.down.weight"]
    assert {finding.severity for finding in uneven} == {severity}
    assert f"dim 0 of {hidden} does not divide by tp of 4: its ranks hold {sizes}" in uneven[0].fact
    assert "dim 1" in uneven[1].fact


def test_uneven_sizes_are_those_that_ranks_really_hold() -> None:
    sizes = []
    for rank in range(6):
        with simulate({"dp": 2, "tp": 3}, rank=rank) as world:
            model = nn.Sequential(Mlp(10))
            parallelize_module(model, world.mesh["tp"], PLAN)
            fully_shard(model, mesh=world.mesh["dp"])
            recording = audit(model)
            parameters = [p for m in recording.modules for p in m.parameters if m.name == "0.up"]
            sizes.append(parameters[0].local_shape[0])
    (finding,) = [f for f in found(recording, "uneven-shards") if f.subject == "0.up.weight"]
    assert f"dp and tp of 2×3: its ranks hold {', '.join(map(str, sizes))}" in finding.fact


def test_dims_that_divide() -> None:
    with simulate({"tp": 4}) as world:
        model = parallelize_module(nn.Sequential(Mlp()), world.mesh, PLAN)
        assert found(audit(model), "uneven-shards") == []


def mixed(world: World) -> nn.Module:
    model = nn.Sequential(Mlp(), nn.LayerNorm(8))
    parallelize_module(model, world.mesh["tp"], FIRST)
    return fully_shard(model, mesh=world.mesh["dp"])


def unmixed(world: World) -> nn.Module:
    model = nn.Sequential(Mlp(), nn.LayerNorm(8))
    parallelize_module(model, world.mesh["tp"], FIRST | {"1": SequenceParallel()})
    return fully_shard(model, mesh=world.mesh["dp"])


def test_meshes_that_gradient_clipping_refuses() -> None:
    with simulate({"dp": 2, "tp": 2}) as world:
        model = mixed(world)
        finding = one(audit(model), "mixed-meshes")
        model(torch.ones(4, 8)).sum().backward()
        with pytest.raises((RuntimeError, ValueError), match=r"(?i)mesh"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert "(dp, tp): 2, such as 0.up.weight; (dp): 2, such as 1.weight" in finding.fact


def test_meshes_that_gradient_clipping_takes() -> None:
    with simulate({"dp": 2, "tp": 2}) as world:
        model = unmixed(world)
        assert found(audit(model), "mixed-meshes") == []
        model(torch.ones(4, 2, 8)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


# How the model was put together


def test_a_root_that_is_not_sharded() -> None:
    with simulate({"dp": 2, "tp": 2}) as world:
        finding = one(audit(stack(world, has_root=False)), "root-not-sharded")
    assert finding.subject == "Sequential"
    assert "2 of its modules are under FSDP (0, …) and the model itself is not" in finding.fact


def test_a_root_that_is_sharded_without_parameters_of_its_own() -> None:
    with simulate({"dp": 2, "tp": 2}) as world:
        assert found(audit(stack(world)), "root-not-sharded") == []


def test_parameters_outside_every_group() -> None:
    with simulate({"dp": 2}) as world:
        model = nn.Sequential(Mlp(), nn.Linear(8, 8, bias=False))
        fully_shard(model[0], mesh=world.mesh)
        finding = one(audit(model), "outside-groups")
        fully_shard(model, mesh=world.mesh)
        assert found(audit(model), "outside-groups") == []
    assert finding.subject == "1.weight"
    assert "no FSDP group manages it" in finding.fact


def test_parameters_that_are_not_trained_may_stay_outside() -> None:
    with simulate({"dp": 2}) as world:
        model = nn.Sequential(Mlp(), nn.Linear(8, 8).requires_grad_(False))
        fully_shard(model[0], mesh=world.mesh)
        assert found(audit(model), "outside-groups") == []


def checkpoint_around_fsdp(world: World) -> nn.Module:
    return fully_shard(
        nn.Sequential(checkpoint_wrapper(fully_shard(Mlp(), mesh=world.mesh))), mesh=world.mesh
    )


def checkpoint_around_compile(world: World) -> nn.Module:
    return nn.Sequential(checkpoint_wrapper(torch.compile(Mlp(), backend="eager")))


def compile_around_fsdp(world: World) -> nn.Module:
    return torch.compile(fully_shard(Mlp(), mesh=world.mesh), backend="eager")  # type: ignore[return-value]


def right_order(world: World) -> nn.Module:
    block = torch.compile(checkpoint_wrapper(Mlp()), backend="eager")
    assert isinstance(block, nn.Module)
    return fully_shard(nn.Sequential(fully_shard(block, mesh=world.mesh)), mesh=world.mesh)


def compile_in_place_around_fsdp(world: World) -> nn.Module:
    model = fully_shard(nn.Sequential(fully_shard(Mlp(), mesh=world.mesh)), mesh=world.mesh)
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("build", "facts"),
    [
        (checkpoint_around_fsdp, ["checkpointing was put around FSDP"]),
        (checkpoint_around_compile, ["checkpointing was put around torch.compile"]),
        (compile_around_fsdp, ["torch.compile was put around an FSDP module"]),
        (compile_in_place_around_fsdp, ["torch.compile was put around an FSDP module"]),
        (right_order, []),
    ],
)
def test_order_of_wrappers(build: Callable[[World], nn.Module], facts: list[str]) -> None:
    with simulate({"dp": 2}) as world:
        wrong = found(audit(build(world)), "wrong-order")
    assert len(wrong) == len(facts)
    for finding, fact in zip(wrong, facts, strict=True):
        assert fact in finding.fact
        assert "tensor parallelism first, then checkpointing, then torch.compile" in finding.remedy


# Plain tensors that meet DTensors


class Masked(nn.Module):
    """Multiplies a tensor-parallel activation by a buffer, and adds what it made itself."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.register_buffer("mask", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x) * self.mask
        shift = torch.ones(16)
        return self.down(hidden + shift)


def masked(world: World, *, num_layers: int = 1, is_local: bool = False) -> nn.Module:
    model = nn.Sequential(*(Masked() for _ in range(num_layers)))
    plan = {"*.up": ColwiseParallel(use_local_output=is_local), "*.down": RowwiseParallel()}
    if is_local:
        for layer in model:
            layer.mask = torch.ones(8)
            layer.forward = lambda x, layer=layer: layer.down(layer.up(x) * layer.mask)
    return parallelize_module(model, world.mesh, plan)


def test_plain_tensors_that_meet_dtensors_are_all_found_with_line_and_origin() -> None:
    with simulate({"tp": 2}) as world:
        model = masked(world)
        recording = audit(model, step=lambda: model(torch.ones(4, 8)).sum().backward())
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            model(torch.ones(4, 8))
    first, second = found(recording, "mixed-tensors")
    assert "aten.mul.Tensor gets the plain buffer 0.mask together with a DTensor" in first.fact
    assert first.subject == "0"
    assert first.source is not None
    assert first.source.text == "hidden = self.up(x) * self.mask"
    assert "aten.add.Tensor gets a plain tensor of 16, made at" in second.fact
    assert second.source is not None
    assert second.source.text == "return self.down(hidden + shift)"
    made = int(second.fact.partition("made at ")[2].split()[0].rpartition(":")[2])
    assert made == second.source.line - 1
    assert "distribute_tensor(…, mesh, [Replicate()])" in second.remedy


def test_layers_in_the_wrong_order_are_told_once() -> None:
    model = nn.Sequential(
        *(checkpoint_wrapper(torch.compile(Mlp(), backend="eager")) for _ in range(4))
    )
    assert one(audit(model), "wrong-order").subject == "* (×4)"


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_tensors_of_one_element_meet_dtensors_freely(shape: tuple[int, ...]) -> None:
    with simulate({"tp": 2}) as world, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weight = distribute_tensor(torch.ones(4, 4), world.mesh, [Shard(0)])
        recording = audit(nn.ReLU(), step=lambda: weight * torch.ones(shape))
        assert (weight * torch.ones(shape)).shape == (4, 4)
    assert (recording.findings, recording.gaps) == ((), ())


def test_the_users_own_implicit_replication_is_left_alone() -> None:
    with simulate({"tp": 2}) as world:
        weight = distribute_tensor(torch.ones(4, 4), world.mesh, [Shard(0)])
        with implicit_replication():
            recording = audit(nn.ReLU(), step=lambda: weight * torch.ones(4))
            assert (weight * torch.ones(4)).shape == (4, 4)
    assert (recording.findings, recording.gaps) == ((), ())


def test_torch_compile_works_after_an_audit_as_before() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    model = torch.compile(nn.Sequential(Mlp()), backend=backend, fullgraph=True)
    audit(model, step=lambda: model(torch.ones(2, 8)))
    assert graphs == []
    model(torch.ones(2, 8))
    assert len(graphs) == 1


def test_layers_that_are_alike_are_told_once() -> None:
    with simulate({"tp": 2}) as world:
        model = masked(world, num_layers=3)
        recording = audit(model, step=lambda: model(torch.ones(4, 8)).sum().backward())
    assert len(found(recording, "mixed-tensors")) == 2


def test_plain_tensors_that_meet_none() -> None:
    with simulate({"tp": 2}) as world:
        model = masked(world, is_local=True)
        recording = audit(model, step=lambda: model(torch.ones(4, 8)).sum().backward())
    assert found(recording, "mixed-tensors") == []
    assert recording.gaps == ()


def test_a_step_that_fails_is_a_gap_and_the_rest_is_there() -> None:
    def step() -> None:
        raise ValueError("no data\nat all")

    with simulate({"dp": 2, "tp": 2}) as world:
        recording = audit(stack(world), step=step)
    (gap,) = recording.gaps
    assert gap.place == "step"
    assert gap.fact.endswith("is not known (ValueError: no data)")
    assert recording.modules
