"""Styles: how they are written, printed, compared, and refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch.distributed.tensor as dtensor

from shardscope.errors import PlanError
from shardscope.parallel import (
    Colwise,
    ModuleInput,
    ModuleOutput,
    Partial,
    Replicate,
    Replicated,
    Rowwise,
    Sequence,
    Shard,
)

PRINTED = {
    "Colwise()": Colwise(),
    "Colwise(output=Replicate())": Colwise(output=Replicate()),
    "Colwise(fused=3, heads=12)": Colwise(fused=3, heads=12),
    "Rowwise(input=Shard(-1, outer=3), fused=(4, 2, 2))": Rowwise(
        input=Shard(-1, outer=3), fused=(4, 2, 2)
    ),
    "Rowwise(output=Partial())": Rowwise(output=Partial()),
    "Rowwise(output=Partial('max'))": Rowwise(output=Partial("max")),
    "Sequence()": Sequence(),
    "Sequence(dim=0)": Sequence(0),
    "Replicated()": Replicated(),
    "ModuleInput(Replicate(), None, mask=Shard(0))": ModuleInput(Replicate(), None, mask=Shard(0)),
    "ModuleOutput(None, Shard(0, segments=[4, 2]))": ModuleOutput(None, Shard(0, segments=(4, 2))),
}


@pytest.mark.parametrize("text", PRINTED)
def test_a_style_prints_as_the_code_that_makes_it(text: str) -> None:
    assert repr(PRINTED[text]) == text


@pytest.mark.parametrize("style", PRINTED.values(), ids=repr)
def test_a_style_is_frozen_hashable_and_survives_copies(style: object) -> None:
    assert pickle.loads(pickle.dumps(style)) == style == copy.deepcopy(style)
    assert hash(copy.deepcopy(style)) == hash(style)
    with pytest.raises(AttributeError):
        style.output = Replicate()  # type: ignore[attr-defined]


def test_placements_may_be_torchs_or_text() -> None:
    ours = Colwise(input=Replicate(), output=Shard(1))
    assert Colwise(input=dtensor.Replicate(), output=dtensor.Shard(1)) == ours  # type: ignore[arg-type]
    assert Colwise(input="replicate", output="Shard( 1 )") == ours  # type: ignore[arg-type]
    assert ModuleInput(None, dtensor.Partial("max")) == ModuleInput(None, Partial("max"))


def test_parts_may_be_a_list_and_one_part_is_a_number() -> None:
    assert Colwise(fused=[4, 2, 2]) == Colwise(fused=(4, 2, 2))  # type: ignore[arg-type]
    assert Colwise(heads=[4]) == Colwise(heads=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: Colwise(output="shard(x)"),
            r"Colwise's output is 'shard\(x\)', which is not a plac",
        ),
        (lambda: Colwise(output=3), "Colwise's output is 3, which is not a placement. Give Shard"),
        (lambda: Colwise(output=Shard), "Colwise's output is the class Shard, which is not a plac"),
        (lambda: Rowwise(input=Shard(0, outer=0)), r"Shard\(0, outer=0\), which has no blocks"),
        (lambda: Rowwise(input=Shard(0, 2, (2, 2))), "which has no blocks"),
        (lambda: Rowwise(input=Shard("0")), "shards dim '0', which is not a number"),
        (lambda: Colwise(fused=0), "Colwise's fused is 0. Give numbers above zero"),
        (lambda: Colwise(fused=()), r"Colwise's fused is \(\). Give a number"),
        (lambda: Colwise(fused="3"), "Colwise's fused is '3'. Give a number"),
        (lambda: Colwise(heads=True), "Colwise's heads is True. Give a number"),
        (lambda: Sequence("1"), "Sequence's dim is '1', which is not a number"),
        (lambda: ModuleInput(), r"ModuleInput\(\) has no placements"),
        (lambda: ModuleInput(None, mask=None), "has no placements"),
        (lambda: ModuleOutput(None), r"ModuleOutput\(\) has no placements"),
        (lambda: ModuleInput(mask=1), "ModuleInput's mask is 1, which is not a placement"),
        (lambda: ModuleOutput(dtensor.Partial("avg")), "which a plan does not support"),
    ],
)
def test_a_style_that_means_nothing_is_refused(make: object, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        make()  # type: ignore[operator]


def test_placements_that_only_dtensor_can_mean_are_refused() -> None:
    strided = dtensor.placement_types._StridedShard(0, split_factor=2)
    with pytest.raises(PlanError, match="which a plan does not support"):
        Colwise(output=strided)  # type: ignore[arg-type]
