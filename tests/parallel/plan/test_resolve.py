"""Resolved plans: which entry decides, along which axis, for which names."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed.tensor as dtensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from plan_models import Decoder, Zoo
from shardscope.parallel import (
    Colwise,
    ModuleInput,
    ModuleOutput,
    Plan,
    Replicate,
    Replicated,
    Rowwise,
    Sequence,
    Shard,
)
from shardscope.parallel.plan.program_index import ProgramIndex, ValueInfo, index_model
from shardscope.parallel.plan.resolve import InputConstraints, resolve

DECODER = index_model(Decoder())
LOOSE = index_model(Decoder(is_tied=False))
R, S0, S1 = Replicate(), Shard(0), Shard(1)
TP = {"tp": 2}
BOTH = {"dp": 2, "tp": 2}


def test_a_sequence_parallel_plan_in_torchs_words_comes_to_what_torch_would_do() -> None:
    layout = {
        "tok": RowwiseParallel(input_layouts=dtensor.Replicate(), output_layouts=dtensor.Shard(1)),
        "layers.*": PrepareModuleInput(
            input_layouts=(dtensor.Shard(1),), desired_input_layouts=(dtensor.Replicate(),)
        ),
        "layers.*.norm": SequenceParallel(),
        "layers.*.wo": RowwiseParallel(output_layouts=dtensor.Shard(1)),
        "head": ColwiseParallel(input_layouts=dtensor.Shard(1), output_layouts=dtensor.Replicate()),
    }
    resolved = resolve(layout, LOOSE, TP)
    assert resolved.tensors == {
        "tok.weight": (S0,),
        "head.weight": (S0,),
        **{f"layers.{i}.wo.weight": (S1,) for i in range(3)},
    }
    assert resolved.module_inputs["layers.0"] == InputConstraints(((R,),))
    assert resolved.module_inputs["layers.1.norm"] == InputConstraints(((S1,),))
    assert resolved.module_outputs["layers.1.norm"] == ((S1,),)
    assert resolved.module_outputs["tok"] == ((S1,),)
    assert resolved.module_outputs["layers.2.wo"] == ((S1,),)
    assert resolved.module_inputs["head"] == InputConstraints(((R,),))
    assert resolved.module_outputs["head"] == ((R,),)
    assert resolved.patterns["layers.0.wo.weight"] == ("layers.*.wo",)
    assert resolved.patterns["layers.0"] == ("layers.*",)


def test_an_exact_name_wins_over_patterns_and_the_earlier_pattern_over_the_later() -> None:
    plan = {
        "layers.[0-1].wo": Rowwise(),
        "layers.*.wo": Colwise(),
        "layers.0.wo": Replicated(),
        "layers.2.wo.bias": Replicate(),
    }
    resolved = resolve(plan, DECODER, TP)
    assert resolved.tensors == {"layers.1.wo.weight": (S1,), "layers.2.wo.weight": (S0,)}
    assert resolved.patterns["layers.0.wo.weight"] == ("layers.0.wo",)
    assert resolved.patterns["layers.1.wo.bias"] == ("layers.[0-1].wo",)
    assert resolved.patterns["layers.2.wo.bias"] == ("layers.2.wo.bias",)
    assert "layers.0.wo" not in resolved.module_inputs
    assert resolved.module_inputs["layers.2.wo"] == InputConstraints(((R,),))


def test_each_axis_is_decided_by_the_first_entry_that_names_it() -> None:
    plan = {
        "layers.*.wo": Rowwise(),
        "**": {"dp": Shard(0)},
        "layers.0.wo.bias": {"dp": Replicate()},
    }
    resolved = resolve(plan, DECODER, BOTH)
    assert resolved.tensors["layers.0.wo.weight"] == (S0, S1)
    assert "layers.0.wo.bias" not in resolved.tensors
    assert resolved.tensors["layers.1.wo.bias"] == (S0, R)
    assert resolved.tensors["head.weight"] == (S0, R)
    assert "scale" not in resolved.tensors  # a buffer is cut by its name alone
    assert resolved.patterns["layers.0.wo.weight"] == ("**", "layers.*.wo")


def test_two_axes_may_shard_one_dim() -> None:
    plan = {"head": {"tp": Colwise(heads=4), "dp": Shard(0)}}
    assert resolve(plan, LOOSE, BOTH).tensors == {"head.weight": (S0, S0)}


def test_placements_may_be_given_in_the_meshs_order_or_by_axis() -> None:
    by_axis = resolve({"head": {"tp": Shard(-1), "dp": Replicate()}}, LOOSE, BOTH)
    in_order = resolve({"head": [Replicate(), Shard(1)]}, LOOSE, BOTH)
    assert by_axis.tensors == in_order.tensors == {"head.weight": (R, S1)}


def test_a_bare_style_is_for_the_axis_tp_or_the_only_one() -> None:
    assert resolve({"head": Colwise()}, LOOSE, BOTH).tensors == {"head.weight": (R, S0)}
    assert resolve({"head": Colwise()}, LOOSE, {"x": 2}).tensors == {"head.weight": (S0,)}


def test_entries_that_only_constrain_values_leave_the_rest_to_later_ones() -> None:
    plan = {
        "layers.0.wo": ModuleInput(Replicate(), mask=Replicate()),
        "layers.1.wo": [Replicated(), ModuleOutput(Shard(1))],
        "layers.*.wo": Rowwise(),
    }
    resolved = resolve(plan, DECODER, TP)
    assert resolved.tensors == {"layers.0.wo.weight": (S1,), "layers.2.wo.weight": (S1,)}
    assert resolved.module_inputs["layers.0.wo"] == InputConstraints(((R,),), {"mask": (R,)})
    assert resolved.module_outputs["layers.0.wo"] == ((R,),)
    assert resolved.module_outputs["layers.1.wo"] == ((S1,),)
    assert "layers.1.wo" not in resolved.module_inputs


def test_constraints_are_none_for_axes_and_positions_that_no_entry_names() -> None:
    plan = {"layers.0": {"tp": ModuleInput(None, Shard(1)), "dp": ModuleOutput(None, Shard(0))}}
    resolved = resolve(plan, DECODER, BOTH)
    assert resolved.module_inputs == {"layers.0": InputConstraints((None, (None, S1)))}
    assert resolved.module_outputs == {"layers.0": (None, (S0, None))}


def test_one_entry_lays_out_a_tied_tensor_under_all_its_names() -> None:
    resolved = resolve({"head": Colwise()}, DECODER, TP)
    assert resolved.tensors == {"tok.weight": (S0,), "head.weight": (S0,)}


def test_entries_that_shard_a_tied_tensor_in_one_way_agree() -> None:
    resolved = resolve({"head": Colwise(), "tok": Rowwise()}, DECODER, TP)
    assert resolved.tensors == {"tok.weight": (S0,), "head.weight": (S0,)}
    assert resolved.patterns["tok.weight"] == ("tok",)
    assert resolved.patterns["head.weight"] == ("head",)


@pytest.mark.parametrize(
    ("style", "cut"),
    [
        (Colwise(fused=3), {"outer": 3}),
        (Colwise(fused=(8, 8, 8)), {"outer": 3}),
        (Colwise(fused=(16, 4, 4)), {"segments": (16, 4, 4)}),
        (Colwise(fused=3, heads=2), {"outer": 3}),
        (Colwise(heads=(8, 2, 2)), {"segments": (16, 4, 4)}),
        (Colwise(fused=(16, 4, 4), heads=(8, 2, 2)), {"segments": (16, 4, 4)}),
        (Colwise(heads=4), {}),
        (Colwise(fused=1), {}),
    ],
    ids=repr,
)
def test_a_fused_weight_and_its_output_are_sharded_part_by_part(
    style: Colwise, cut: dict[str, Any]
) -> None:
    resolved = resolve({"layers.0.qkv": style}, DECODER, TP)
    assert resolved.tensors == {
        "layers.0.qkv.weight": (Shard(0, **cut),),
        "layers.0.qkv.bias": (Shard(0, **cut),),
    }
    assert resolved.module_outputs == {"layers.0.qkv": ((Shard(-1, **cut),),)}


def test_the_input_of_a_fused_weight_is_sharded_part_by_part() -> None:
    resolved = resolve({"layers.0.wo": Rowwise(fused=2)}, DECODER, TP)
    assert resolved.tensors == {"layers.0.wo.weight": (Shard(1, outer=2),)}
    assert resolved.module_inputs["layers.0.wo"].positional == ((Shard(-1, outer=2),),)
    assert resolved.module_outputs["layers.0.wo"] == ((R,),)


def test_a_placement_in_parts_is_checked_and_unchanged() -> None:
    resolved = resolve({"layers.0.qkv.weight": Shard(0, segments=(16, 4, 4))}, DECODER, TP)
    assert resolved.tensors == {"layers.0.qkv.weight": (Shard(0, segments=(16, 4, 4)),)}


def test_dims_that_do_not_divide_are_sharded_unevenly() -> None:
    index = index_model(Decoder(dim=10))
    resolved = resolve({"layers.0.wo": Rowwise()}, index, {"tp": 4})
    assert resolved.tensors == {"layers.0.wo.weight": (S1,)}


def test_a_trailing_wildcard_skips_modules_that_cannot_be_sharded() -> None:
    resolved = resolve({"**": Shard(0)}, index_model(Zoo()), TP)
    assert "temperature" not in resolved.tensors
    assert "batch_norm.running_mean" not in resolved.tensors
    assert resolved.tensors["lstm.weight_ih_l0"] == (S0,)
    resolved = resolve({"layers.0.*": Colwise()}, DECODER, TP)
    assert set(resolved.tensors) == {
        f"layers.0.{name}" for name in ("norm.weight", "norm.bias", "qkv.weight", "qkv.bias")
    } | {"layers.0.wo.weight", "layers.0.wo.bias"}


def test_a_buffer_is_sharded_by_its_name() -> None:
    assert resolve({"scale": Shard(0)}, DECODER, TP).tensors == {"scale": (S0,)}


VALUES = ProgramIndex(
    DECODER.modules,
    DECODER.tensors,
    inputs={
        "batch.ids": ValueInfo((8, 4), "batch_ids"),
        "batch.mask": ValueInfo((8, 4), "batch_mask"),
        "bias": ValueInfo(None, "bias"),
    },
    outputs={"logits": ValueInfo((8, 4, 16)), "rest.0": ValueInfo((8, 4, 8))},
)


@pytest.mark.parametrize(
    ("inputs", "meant"),
    [
        ({"batch.ids": Shard(0)}, {"batch.ids": (S0, R)}),
        ({"batch_ids": Shard(-1)}, {"batch.ids": (S1, R)}),
        ({1: Shard(0)}, {"batch.mask": (S0, R)}),
        ({"batch": Shard(0)}, {"batch.ids": (S0, R), "batch.mask": (S0, R)}),
        ({"**": Shard(0)}, {"batch.ids": (S0, R), "batch.mask": (S0, R)}),
        (
            {"batch.*": Shard(0), "batch": Shard(1), "batch.mask": Replicate()},
            {"batch.ids": (S1, R), "batch.mask": (R, R)},
        ),
    ],
)
def test_an_input_is_named_by_path_name_or_position_or_with_all_beside_it(
    inputs: dict[Any, Any], meant: dict[str, Any]
) -> None:
    plan = Plan({}, inputs={key: {"dp": value} for key, value in inputs.items()})
    assert resolve(plan, VALUES, BOTH).inputs == meant


def test_outputs_are_unconstrained_along_axes_that_are_not_named() -> None:
    plan = Plan({}, inputs={"batch": {"dp": Shard(0)}}, outputs={0: {"dp": Shard(0)}})
    assert resolve(plan, VALUES, BOTH).outputs == {"logits": (S0, None)}


def test_inputs_alone_make_a_plan_of_data_parallelism() -> None:
    resolved = resolve(Plan({}, inputs={"x": Shard(0)}), DECODER, {"dp": 2})
    assert resolved.inputs == {"x": (S0,)}
    assert resolved.tensors == resolved.module_inputs == {}


def test_sequence_parallelism_alone_is_a_plan() -> None:
    resolved = resolve({"layers.*.norm": Sequence()}, DECODER, TP)
    assert resolved.tensors == {}
    assert set(resolved.module_inputs) == {f"layers.{i}.norm" for i in range(3)}
