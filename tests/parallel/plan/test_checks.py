"""What is wrong with a plan is said before anything is traced: fact, place, remedy."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from plan_models import Decoder
from shardscope.errors import PlanError
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
from shardscope.parallel.plan.resolve import resolve

DECODER = index_model(Decoder())
TP = {"tp": 4}


def refusal(plan: Any, axes: dict[str, int] | None = None, index: ProgramIndex = DECODER) -> str:
    with pytest.raises(PlanError) as caught:
        resolve(plan, index, TP if axes is None else axes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "layers.7.wo",
            "The plan names 'layers.7.wo', but the program has no such module or tensor (it has "
            "layers.0 … layers.2). Check the layer count, or use the pattern 'layers.*.wo'.",
        ),
        (
            "layers.[3-5].wo",
            "The plan names 'layers.[3-5].wo', but the program has no module or tensor that it "
            "matches (it has layers.0 … layers.2). Check the layer count, or use the pattern "
            "'layers.*.wo'.",
        ),
        (
            "layer.*.wo",
            "The plan names 'layer.*.wo', but the program has no module or tensor that it matches. "
            "Did you mean 'layers.*.wo'?",
        ),
        (
            "layers.0.w0",
            "The plan names 'layers.0.w0', but the program has no such module or tensor. Did you "
            "mean 'layers.0.wo'?",
        ),
        (
            "model.layers.*.wo",
            "The plan names 'model.layers.*.wo', but the program has no module or tensor that it "
            "matches (it has 'layers.*.wo', without 'model'). Write 'layers.*.wo'.",
        ),
        (
            "wo",
            "The plan names 'wo', but the program has no such module or tensor (it has "
            "'layers.0.wo'). Write 'layers.*.wo'.",
        ),
        (
            "zzz",
            "The plan names 'zzz', but the program has no such module or tensor (it has head, "
            "layers, scale, tok). Fix the name or remove the entry.",
        ),
    ],
)
def test_an_entry_that_matches_nothing_gets_a_suggestion(name: str, message: str) -> None:
    assert refusal({name: Colwise()}) == message


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"layers.0": Colwise()},
            "The plan's entry 'layers.0': Colwise() has no effect: 'layers.0' has no "
            "parameters or buffers itself. Name the layers in it, such as 'layers.0.norm'.",
        ),
        (
            {"layers.*": Shard(0)},
            "The plan's entry 'layers.*': Shard(0) has no effect: 'layers.0' has no parameters "
            "or buffers itself. Name the layers in it, or remove the entry.",
        ),
        (
            {"tok": Replicated(), "layers.*.wo": Rowwise()},
            "The plan's entry 'tok': Replicated() has no effect: what it names stays "
            "replicated anyway. Remove it, or give it a sharded placement.",
        ),
        (
            {"layers.0.wo.bias": Rowwise()},
            "The plan's entry 'layers.0.wo.bias': Rowwise() has no effect: what it names stays "
            "replicated anyway. Remove it, or give it a sharded placement.",
        ),
        (
            {"layers.*.wo": Rowwise(), "**.wo": Colwise()},
            "The plan's entry '**.wo': Colwise() is never used: all that it names is decided by "
            "'layers.*.wo'. Remove it, or put it first; an exact name wins over any pattern.",
        ),
        (
            {"layers.*.norm": Sequence(), "**.norm": ModuleInput(Replicate())},
            "The plan's entry '**.norm': ModuleInput(Replicate()) is never used: all that it names "
            "is decided by 'layers.*.norm'. Remove it, or put it first; an exact name wins over "
            "any pattern.",
        ),
    ],
)
def test_an_entry_without_effect_is_an_error(plan: Any, message: str) -> None:
    assert refusal(plan) == message


@pytest.mark.parametrize(
    "plan", [{}, None, Plan({}, inputs={"x": Replicate()}), Plan({}, outputs={0: Shard(0)})]
)
def test_a_plan_that_does_nothing_is_refused(plan: Any) -> None:
    assert refusal(plan).startswith(
        "The plan does nothing: it shards no tensor and no input, so every rank would compute "
        "everything. Name what to shard, such as"
    )


def test_a_tied_tensor_sharded_in_two_ways_is_refused() -> None:
    assert refusal({"tok": Colwise(), "head": Colwise()}) == (
        "'tok.weight' and 'head.weight' are one tensor, but along tp the plan wants it sharded "
        "along dim 1 and sharded along dim 0 ('tok': Colwise(); 'head': Colwise()). Give it "
        "one layout: Rowwise() shards an embedding as Colwise() shards a linear layer."
    )
    message = refusal({"tok": Rowwise(), "head": Replicated()})
    assert (
        "the plan wants it sharded along dim 0 and replicated ('tok': Rowwise(); 'head'" in message
    )
    message = refusal({"tok": Rowwise(), "head": Colwise(fused=2)})
    assert "the plan wants it as Shard(0) and as Shard(0, outer=2)" in message


@pytest.mark.parametrize(
    ("style", "axes", "message"),
    [
        (
            Colwise(heads=12),
            {"tp": 8},
            "12 heads do not divide over tp=8 (layers.0.qkv.weight). Choose an axis size that "
            "divides 12, or keep the tensor replicated with Replicated().",
        ),
        (
            {"dp": Shard(0), "tp": Colwise(heads=12)},
            {"dp": 4, "tp": 4},
            "12 heads do not divide over dp=4 × tp=4 (layers.0.qkv.weight). Choose an axis "
            "size that divides 12, or keep the tensor replicated with Replicated().",
        ),
        (
            Colwise(heads=(8, 2, 2)),
            {"tp": 4},
            "2 heads do not divide over tp=4 (layers.0.qkv.weight). Choose an axis size that "
            "divides 2, or keep the tensor replicated with Replicated().",
        ),
        (
            Colwise(heads=5),
            {"tp": 5},
            "layers.0.qkv.weight has no 5 heads: 24 does not divide by 5. Give its number of "
            "heads.",
        ),
        (
            Colwise(heads=(4, 3)),
            {"tp": 2},
            "heads=(4, 3) makes 7 heads of one size, but dim 0 of layers.0.qkv.weight (24) does "
            "not divide by that. Give the heads that it has, or the sizes of its parts with "
            "fused=.",
        ),
        (
            Colwise(fused=3, heads=(4, 2)),
            {"tp": 2},
            "heads=(4, 2) is for 2 parts, but layers.0.qkv.weight has 3. Give one number for each "
            "part, or one for all.",
        ),
        (
            Colwise(fused=(16, 4, 2)),
            {"tp": 2},
            "Colwise(fused=(16, 4, 2)) names parts of 16 + 4 + 2 = 22, but dim 0 of "
            "layers.0.qkv.weight (24) is not that long. Give the sizes of its parts.",
        ),
        (
            Colwise(fused=5),
            {"tp": 2},
            "Colwise(fused=5) has 5 equal parts, but dim 0 of layers.0.qkv.weight (24) does not "
            "divide by that. Give the number of its parts, or their sizes.",
        ),
        (
            Colwise(fused=3),
            {"tp": 3},
            "The part of 8 in dim 0 of layers.0.qkv.weight (24) does not divide over tp=3. "
            "Choose an axis size that divides it, or keep the tensor replicated with "
            "Replicated().",
        ),
        (
            {"tp": Colwise(fused=3), "dp": Shard(0)},
            {"dp": 2, "tp": 2},
            "The plan's entry 'layers.0.qkv': {'tp': Colwise(fused=3), 'dp': Shard(0)} shards "
            "dim 0 of 'layers.0.qkv.weight' in parts, but dp and tp both shard that dim. Shard "
            "another dim along the other axis.",
        ),
    ],
)
def test_parts_and_heads_that_do_not_divide_are_reported(
    style: Any, axes: dict[str, int], message: str
) -> None:
    assert refusal({"layers.0.qkv": style}, axes) == message


@pytest.mark.parametrize(
    ("plan", "axes", "message"),
    [
        (
            {"tok": {"tpp": Rowwise()}},
            {"dp": 2, "tp": 2},
            "The plan's entry 'tok' is for the axis 'tpp', but the mesh has dp=2 and tp=2. Did "
            "you mean 'tp'?",
        ),
        (
            {"tok": {"pipeline": Rowwise()}},
            {"tp": 2},
            "The plan's entry 'tok' is for the axis 'pipeline', but the mesh has tp=2. Name one of "
            "them.",
        ),
        (
            {"tok": Rowwise()},
            {"dp": 2, "ep": 2},
            "The plan's entry 'tok' does not name an axis, and the mesh has dp=2 and ep=2. "
            "Write {'ep': …} around it.",
        ),
        (
            {"tok": [Shard(0)]},
            {"dp": 2, "tp": 2},
            "The plan's entry 'tok' gives 1 placement, but the mesh has 2 axes: dp=2 and tp=2. "
            "Give one for each, or name the axis: {'tp': …}.",
        ),
        ({"tok": Rowwise()}, {}, "The mesh has no axes. Give one, such as {'tp': 4}."),
        (
            {"tok": Rowwise()},
            {"tp": 0},
            ("The mesh's axis 'tp' has size 0. Give it at least one rank."),
        ),
    ],
)
def test_axes_that_the_mesh_does_not_have_are_refused(
    plan: Any, axes: dict[str, int], message: str
) -> None:
    assert refusal(plan, axes) == message


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            {"tok.weight": Shard(2)},
            "The plan's entry 'tok.weight': Shard(2) shards dim 2, but 'tok.weight' has 2 dims. "
            "Give a dim that it has.",
        ),
        (
            {"layers.*.wo": Shard(1)},
            "The plan's entry 'layers.*.wo': Shard(1) shards dim 1, but 'layers.0.wo.bias' has 1 "
            "dim. Name the tensors that have that dim.",
        ),
        (
            {"tok.weight": Sequence()},
            "The plan's entry 'tok.weight': Sequence() is for modules, but 'tok.weight' is a "
            "tensor. Name its module, or give the tensor a placement, such as Shard(0).",
        ),
        (
            {"tok.weight": Rowwise(output=Shard(1))},
            "The plan's entry 'tok.weight': Rowwise(output=Shard(1)) places inputs or outputs, but "
            "'tok.weight' is a tensor, not a module. Name its module, or leave input and output "
            "out.",
        ),
        (
            {"tok.weight": ModuleOutput(Shard(1))},
            "The plan's entry 'tok.weight': ModuleOutput(Shard(1)) is for modules, but "
            "'tok.weight' is a tensor. Name its module, or give the tensor a placement, such as "
            "Shard(0).",
        ),
    ],
)
def test_what_does_not_fit_a_tensor_is_refused(plan: Any, message: str) -> None:
    assert refusal(plan) == message


VALUES = ProgramIndex(
    DECODER.modules,
    DECODER.tensors,
    inputs={"ids": ValueInfo((8, 4), "ids"), "flag": ValueInfo(None, "flag")},
    outputs={"0": ValueInfo((8, 4, 16), "add")},
)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"idx": Shard(0)},
            ("The plan's input 'idx' does not exist in the program. Did you mean 'ids'?"),
        ),
        (
            {"zzz": Shard(0)},
            ("The plan's input 'zzz' does not exist in the program. It has ids, flag."),
        ),
        ({2: Shard(0)}, "The plan's input '2' does not exist in the program. It has ids, flag."),
        (
            {"ids": Shard(2)},
            "The plan's input 'ids' is Shard(2), but 'ids' has 2 dims. Give a dim that it has.",
        ),
        (
            {"flag": Shard(0)},
            "The plan's input 'flag' is not a tensor, so every rank gets all of it. Remove it.",
        ),
        (
            {"ids": {"xx": Shard(0)}},
            "The plan's input 'ids' is for the axis 'xx', but the mesh has tp=4. Name one of them.",
        ),
    ],
)
def test_inputs_that_the_program_does_not_have_are_refused(values: Any, message: str) -> None:
    assert refusal(Plan({}, inputs=values), index=VALUES) == message


def test_a_style_for_the_root_module_needs_tensors_at_the_root() -> None:
    assert refusal(Colwise(), index=index_model(nn.Sequential(nn.Linear(4, 4)))) == (
        "The plan's entry '': Colwise() has no effect: '' has no parameters or buffers itself. "
        "Name the layers in it, such as '0'."
    )
    linear = index_model(nn.Linear(4, 4))
    assert resolve(Colwise(), linear, TP).tensors == {"weight": (Shard(0),), "bias": (Shard(0),)}
