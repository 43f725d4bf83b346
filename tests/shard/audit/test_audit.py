"""What an audit writes down of every module, parameter and buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from audited_models import SHARDED, Tied, Unit
from shardscope import Recording, audit, load, save, simulate
from shardscope.compat import get_sharded_module_tree_with_module_name_to_fqns
from shardscope.errors import AuditError
from shardscope.record import Mark, MarkKind, Module, Parameter


def modules_of(recording: Recording) -> dict[str, Module]:
    return {module.name: module for module in recording.modules}


def tensors_of(recording: Recording) -> dict[str, Parameter]:
    return {
        f"{module.name}.{parameter.name}".lstrip("."): parameter
        for module in recording.modules
        for parameter in module.parameters
    }


def sharded(name: str, *, mesh: dict[str, int] | None = None, rank: int = 0) -> Recording:
    with simulate(mesh or {"world": 4}, rank=rank):
        return audit(SHARDED[name]())


def test_every_parameter_and_buffer_of_a_plain_model_is_there_once() -> None:
    model = Tied()
    found = tensors_of(audit(model))
    everything = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    assert set(found) == set(everything)
    assert {name: entry.shape for name, entry in found.items()} == {
        name: tuple(tensor.shape) for name, tensor in everything.items()
    }
    assert all(entry.global_bytes == entry.local_bytes for entry in found.values())
    assert found["units.0.norm.num_batches_tracked"].is_buffer
    assert not found["units.0.up.weight"].is_buffer


def test_names_are_clean_live_and_of_the_checkpoint() -> None:
    found = tensors_of(sharded("shard_by_fsdp_and_tp"))
    weight = found["units.0.up.weight"]
    assert weight.live_name == "units.0._orig_mod._checkpoint_wrapped_module.up.weight"
    assert weight.checkpoint_key == "units.0.up.weight"
    assert found["units.0.mask"].checkpoint_key is None
    assert found["units.1.up.weight"].live_name == "units.1.up.weight"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["shard_by_fsdp_and_tp", "shard_by_hsdp", "replicate_by_ddp"])
def test_checkpoint_keys_are_those_that_torch_saves_under(name: str) -> None:
    with simulate({"world": 4}):
        model = SHARDED[name]()
        keys = {entry.checkpoint_key for entry in tensors_of(audit(model)).values()}
        assert keys - {None} == set(get_model_state_dict(model))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["shard_by_fsdp1", "shard_by_hiding_fsdp1"])
def test_fsdp1_is_read_in_the_users_own_names(name: str) -> None:
    recording = sharded(name)
    found = tensors_of(recording)
    plain = tensors_of(audit(Tied()))
    assert {key: entry.shape for key, entry in found.items()} == {
        key: entry.shape for key, entry in plain.items()
    }
    weight = found["units.0.up.weight"]
    assert weight.fsdp_group == "units.0"
    assert found["embed.weight"].alias_group == "embed.weight" == found["head.weight"].alias_group
    (mark,) = modules_of(recording)["units.0"].marks
    assert (mark.kind, mark.detail, mark.num_parameters) == (MarkKind.FSDP1, "full_shard", 6)
    is_hidden = name == "shard_by_hiding_fsdp1"
    live = "units.0._fsdp_wrapped_module." + ("_flat_param" if is_hidden else "up.weight")
    assert weight.live_name == f"_fsdp_wrapped_module.{live}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHARDED)
def test_modules_carry_the_users_own_classes(name: str) -> None:
    types = {module.name: module.type for module in sharded(name).modules}
    assert types[""] == "Tied"
    assert types["units.0"] == types["units.1"] == "Unit"
    assert types["units.0.up"] == "Linear"


def test_shapes_bytes_and_placements_are_of_this_rank() -> None:
    found = tensors_of(sharded("shard_by_fsdp_and_tp", rank=3))
    up = found["units.1.up.weight"]
    assert (up.shape, up.axes) == ((10, 6), ("dp", "tp"))
    assert up.placements == ("StridedShard(0)", "Shard(0)")
    assert up.local_shape == (2, 6)  # of 10 rows tp leaves 5, of which dp gives this rank 2
    assert (up.global_bytes, up.local_bytes) == (240, 48)
    assert found["units.1.down.bias"].placements == ("Shard(0)", "Replicate")
    assert found["units.1.norm.weight"].axes == ("dp",)


def test_marks_say_what_was_done() -> None:
    modules = modules_of(sharded("shard_by_fsdp_and_tp"))
    assert modules[""].marks == (
        Mark(
            kind=MarkKind.FULLY_SHARD,
            detail="stays gathered after forward",
            axes=("dp",),
            num_parameters=1,
        ),
    )
    kinds = [mark.kind for mark in modules["units.0"].marks]
    assert kinds == [MarkKind.FULLY_SHARD, MarkKind.COMPILED, MarkKind.CHECKPOINTED]
    assert modules["units.0"].marks[0].detail == "reshards after forward"
    assert modules["units.0.down"].marks == (
        Mark(kind=MarkKind.TENSOR_PARALLEL, detail="RowwiseParallel", axes=("tp",)),
    )
    assert modules["units.0.norm"].marks == ()


def test_hybrid_sharding_names_both_axes() -> None:
    recording = sharded("shard_by_hsdp")
    (mark,) = modules_of(recording)[""].marks
    assert mark.axes == ("replicas", "shards")
    assert tensors_of(recording)["embed.weight"].placements == ("Replicate", "Shard(0)")


def test_ddp_is_marked_with_what_it_reduces() -> None:
    (mark,) = modules_of(sharded("replicate_by_ddp"))[""].marks
    assert (mark.kind, mark.num_parameters) == (MarkKind.DDP, 13)


def test_every_style_is_known_by_name() -> None:
    styles = {
        "0": ColwiseParallel(),
        "1": RowwiseParallel(),
        "2": SequenceParallel(),
        "3": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
    }
    with simulate({"tp": 2}) as world:
        layers = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU()
        model = parallelize_module(nn.Sequential(*layers), world.mesh, styles)
        modules = modules_of(audit(model))
    for name, style in styles.items():
        (mark,) = modules[name].marks
        assert (mark.detail, mark.axes) == (type(style).__name__, ("tp",))


def test_compiling_and_checkpointing_in_place_are_marked() -> None:
    from torch.distributed._composable import checkpoint

    model = nn.Sequential(Unit(), Unit())
    model[0].compile(backend="eager")
    checkpoint(model[1])
    modules = modules_of(audit(model))
    assert [mark.kind for mark in modules["0"].marks] == [MarkKind.COMPILED]
    assert [mark.kind for mark in modules["1"].marks] == [MarkKind.CHECKPOINTED]


def test_tied_tensors_share_a_group_and_others_have_none() -> None:
    found = tensors_of(audit(Tied()))
    tied = {name: entry.alias_group for name, entry in found.items() if entry.alias_group}
    assert tied == {"embed.weight": "embed.weight", "head.weight": "embed.weight"}


def test_a_shared_module_is_there_once_with_all_its_names() -> None:
    unit = Unit()
    recording = audit(nn.Sequential(unit, nn.ReLU(), unit))
    modules = modules_of(recording)
    assert modules["0"].aliases == ("2",)
    assert "2" not in modules
    assert "0.up.weight" in tensors_of(recording)


def test_a_root_without_parameters_of_its_own_is_sharded_all_the_same() -> None:
    with simulate({"dp": 2}) as world:
        model = nn.Sequential(fully_shard(Unit(), mesh=world.mesh))
        fully_shard(model, mesh=world.mesh)
        tree, names = get_sharded_module_tree_with_module_name_to_fqns(model)
    assert tree.startswith("[Sequential] FULLY SHARDED\n    0[Unit] FULLY SHARDED\n")
    assert names["[Sequential]"] == []


def test_modules_that_are_sharded_together_are_both_marked() -> None:
    with simulate({"dp": 2}) as world:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        fully_shard([model[0], model[2]], mesh=world.mesh)
        _, names = get_sharded_module_tree_with_module_name_to_fqns(model)
        modules = modules_of(audit(model))
    assert [len(modules[name].marks) for name in ("0", "1", "2")] == [1, 0, 1]
    assert names == {
        "0[Linear]": ["0.weight", "0.bias"],
        "2[Linear]": ["2.weight", "2.bias"],
    }


@pytest.mark.filterwarnings("ignore")
def test_frozen_and_trainable_parameters_are_distinguished() -> None:
    with simulate({"dp": 2}):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].requires_grad_(False)
        wrapped = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), use_orig_params=True
        )
        found = tensors_of(audit(wrapped))
    assert {name for name, entry in found.items() if entry.is_trainable} == {"1.weight", "1.bias"}


def test_replicate_is_marked_and_leaves_the_users_class() -> None:
    from torch.distributed._composable import replicate

    with simulate({"dp": 2}) as world:
        recording = audit(replicate(Unit(), device_mesh=world.mesh))
    root = modules_of(recording)[""]
    assert (root.type, [mark.kind for mark in root.marks]) == ("Unit", [MarkKind.DDP])


def test_parametrized_modules_keep_their_class() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    assert audit(model).modules[0].type == "Linear"


def test_tensors_that_cannot_be_read_are_gaps() -> None:
    model = nn.Linear(2, 2)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    model.register_buffer("ragged", nested)
    recording = audit(model)
    assert [gap.place for gap in recording.gaps] == ["ragged"]
    assert set(tensors_of(recording)) == {"weight", "bias"}


def test_bytes_of_sparse_tensors_are_those_of_indices_and_values() -> None:
    model = nn.ReLU()
    model.register_buffer("eye", torch.eye(100).to_sparse())
    assert tensors_of(audit(model))["eye"].local_bytes == 100 * (4 + 2 * 8)


def test_tied_tensors_are_reported_as_shards_also_during_forward() -> None:
    with simulate({"dp": 2}) as world:
        model = fully_shard(Tied(), mesh=world.mesh)
        before = audit(model)
        model.unshard()
        assert audit(model).modules == before.modules


def test_gathered_fsdp_parameters_are_reported_as_shards() -> None:
    with simulate({"dp": 4}) as world:
        model = fully_shard(Unit(), mesh=world.mesh)
        before = audit(model)
        model.unshard()
        assert tuple(model.up.weight.shape) == (10, 6)
        assert not hasattr(model.up.weight, "placements")
        assert audit(model).modules == before.modules


def test_an_audit_leaves_the_model_as_it_was() -> None:
    model = Tied()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    audit(model, step=lambda: model(torch.zeros(3, dtype=torch.long)).sum().backward())
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    changed = [name for name, old in state.items() if not model.state_dict()[name].equal(old)]
    assert {name.rpartition(".")[2] for name in changed} <= {  # as the step itself would
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }


def test_an_audit_can_be_saved_and_loaded(tmp_path: Any) -> None:
    recording = sharded("shard_by_fsdp_and_tp")
    assert load(save(recording, tmp_path / "audit.json.gz")) == recording


def test_lazy_parameters_are_gaps() -> None:
    recording = audit(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4)))
    assert {gap.place for gap in recording.gaps} == {"0.weight", "0.bias"}
    assert "1.weight" in tensors_of(recording)


def test_a_model_on_meta_and_one_without_parameters_are_fine() -> None:
    with torch.device("meta"):
        assert tensors_of(audit(Tied()))["embed.weight"].global_bytes == 264
    assert audit(nn.ReLU()).modules == (
        Module(name="", type="ReLU", ranks=audit(nn.ReLU()).run.ranks),
    )


def test_something_else_than_a_model_is_refused() -> None:
    with pytest.raises(AuditError, match=r"audit\(\) got dict, not a torch.nn.Module"):
        audit({})  # type: ignore[arg-type]


def test_a_tensor_of_a_single_parameter_keeps_its_placements() -> None:
    with simulate({"tp": 2}) as world:
        model = nn.Linear(4, 4, bias=False)
        model.weight = nn.Parameter(distribute_tensor(model.weight, world.mesh, [Shard(1)]))
        (parameter,) = tensors_of(audit(model)).values()
    assert (parameter.placements, parameter.local_shape) == (("Shard(1)",), (4, 2))


TREE = """\
[Tied] FULLY SHARDED
    embed[Embedding]
    units[ModuleList]
        units.0[Unit] FULLY SHARDED
            units.0.up[Linear]
            units.0.norm[BatchNorm1d]
            units.0.down[Linear]
        units.1[Unit] FULLY SHARDED
            units.1.up[Linear]
            units.1.norm[BatchNorm1d]
            units.1.down[Linear]
    head[Linear]
"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["shard_by_fsdp_and_tp", "shard_by_fsdp1", "shard_by_hiding_fsdp1"]
)
def test_sharded_module_tree_is_in_the_format_that_pytorch_documents(name: str) -> None:
    with simulate({"world": 4}):
        tree, names = get_sharded_module_tree_with_module_name_to_fqns(SHARDED[name]())
    assert tree == TREE
    assert list(names) == ["[Tied]", "units.0[Unit]", "units.1[Unit]"]
    assert names["[Tied]"] == ["embed.weight"]
    assert names["units.1[Unit]"] == [
        f"units.1.{layer}.{kind}" for layer in ("up", "norm", "down") for kind in ("weight", "bias")
    ]


def test_sharded_module_tree_of_a_model_that_is_not_sharded() -> None:
    tree, names = get_sharded_module_tree_with_module_name_to_fqns(nn.Sequential(nn.ReLU()))
    assert tree == "[Sequential]\n    0[ReLU]\n"
    assert names == {}


def test_wrappers_add_no_level() -> None:
    model = checkpoint_wrapper(nn.Sequential(torch.compile(nn.ReLU(), backend="eager")))
    assert [module.name for module in audit(model).modules] == ["", "0"]
    with simulate({"dp": 2}):
        wrapped = DistributedDataParallel(nn.Linear(2, 2))
        assert set(tensors_of(audit(wrapped))) == {"weight", "bias"}
