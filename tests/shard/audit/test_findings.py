"""Each finding of an audit: a model that has it, and one that does not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from audited_models import FIRST, PLAN, Mlp, Tied, found, only_finding, stack
from shardscope import World, audit, simulate
from shardscope.errors import AuditError
from shardscope.record import Severity


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


# Placements


def test_a_large_parameter_replicated_along_an_axis_that_shards_others() -> None:
    with simulate({"dp": 2, "tp": 4}) as world, torch.device("meta"):
        model = nn.Sequential(Mlp(), nn.Linear(4096, 4096, bias=False))
        parallelize_module(model, world.mesh["tp"], FIRST)
        fully_shard(model, mesh=world.mesh["dp"])
        finding = only_finding(audit(model), "replicated")
    assert finding.subject == "1.weight"
    assert "32.0 MiB are the same on 4 ranks of tp, which shards other" in finding.fact
    assert "would hold 8.00 MiB instead of 32.0 MiB" in finding.remedy


def test_large_parameters_that_data_parallelism_alone_replicates() -> None:
    with simulate({"replicas": 2, "shards": 2}) as world, torch.device("meta"):
        model = fully_shard(nn.Linear(8192, 8192), mesh=world.mesh)
        assert found(audit(model), "replicated") == []


def test_a_flattened_mesh_that_shards_as_much_as_two_axes() -> None:
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
        finding = only_finding(audit(model), "replicated")
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
        finding = only_finding(audit(model), "mixed-meshes")
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
        finding = only_finding(audit(stack(world, has_root=False)), "root-not-sharded")
    assert finding.subject == "Sequential"
    assert "2 of its modules are under FSDP (0, …) and the model itself is not" in finding.fact


def test_a_root_that_is_sharded_without_parameters_of_its_own() -> None:
    with simulate({"dp": 2, "tp": 2}) as world:
        assert found(audit(stack(world)), "root-not-sharded") == []


def test_parameters_outside_every_group() -> None:
    with simulate({"dp": 2}) as world:
        model = nn.Sequential(Mlp(), nn.Linear(8, 8, bias=False))
        fully_shard(model[0], mesh=world.mesh)
        finding = only_finding(audit(model), "outside-groups")
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
        (checkpoint_around_fsdp, ["checkpointing wraps FSDP"]),
        (checkpoint_around_compile, ["checkpointing wraps torch.compile"]),
        (compile_around_fsdp, ["torch.compile wraps an FSDP module"]),
        (compile_in_place_around_fsdp, ["torch.compile wraps an FSDP module"]),
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


def test_plain_tensors_mixed_with_dtensors_are_findings_with_line_and_origin() -> None:
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


def test_repeated_layers_in_the_wrong_order_are_one_finding() -> None:
    model = nn.Sequential(
        *(checkpoint_wrapper(torch.compile(Mlp(), backend="eager")) for _ in range(4))
    )
    assert only_finding(audit(model), "wrong-order").subject == "* (×4)"


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_tensors_of_one_element_may_be_mixed_with_dtensors(shape: tuple[int, ...]) -> None:
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


def test_plain_targets_of_a_loss_on_sharded_logits_are_not_reported() -> None:
    targets = torch.zeros(4, dtype=torch.long)
    with simulate({"tp": 2}) as world:
        logits = distribute_tensor(torch.ones(4, 8), world.mesh, [Shard(1)]).requires_grad_()

        def step() -> None:
            with loss_parallel():
                nn.functional.cross_entropy(logits, targets).backward()

        recording = audit(nn.ReLU(), step=step)
        refused = audit(nn.ReLU(), step=lambda: nn.functional.cross_entropy(logits, targets))
    assert (recording.findings, recording.gaps) == ((), ())
    assert "a plain tensor of 4" in only_finding(refused, "mixed-tensors").fact


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


def test_identical_layers_that_mix_tensors_are_one_finding() -> None:
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
    assert gap.fact.endswith("later ops were not checked (ValueError: no data)")
    assert recording.modules
