"""Plans in every form that users may write, parsed to one form."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.tensor as dtensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from shardscope.errors import PlanError
from shardscope.parallel import (
    Colwise,
    ModuleInput,
    ModuleOutput,
    Partial,
    Plan,
    Replicate,
    Replicated,
    Rowwise,
    Sequence,
    Shard,
)

R, S = dtensor.Replicate(), dtensor.Shard


class Float8Colwise(ColwiseParallel):
    """A subclass as libraries derive it: the same sharding, other numerics."""


class WantsSharded(ColwiseParallel):
    def __init__(self) -> None:
        super().__init__()
        self.desired_input_layouts = (S(1),)


class Needy(RowwiseParallel):
    def __init__(self, group: object) -> None:
        super().__init__()


class Custom(ParallelStyle):
    def _apply(self, module: Any, device_mesh: Any) -> Any:
        return module


SAME = [
    (Colwise, Colwise()),
    ("colwise", Colwise()),
    (ColwiseParallel, Colwise()),
    (ColwiseParallel(), Colwise()),
    (ColwiseParallel(input_layouts=S(1), output_layouts=R), Colwise(output=Replicate())),
    (ColwiseParallel(output_layouts=S(1), use_local_output=False), Colwise(output=Shard(1))),
    (Float8Colwise(), Colwise()),
    (WantsSharded(), Colwise(input=Shard(1))),
    (RowwiseParallel, Rowwise()),
    (RowwiseParallel(input_layouts=R, output_layouts=S(1)), Rowwise(output=Shard(1))),
    (SequenceParallel, Sequence()),
    (SequenceParallel(sequence_dim=0), Sequence(0)),
    (
        PrepareModuleInput(
            input_layouts=(S(1), None),
            desired_input_layouts=(R, R),
            input_kwarg_layouts={"mask": R, "cache": None},  # type: ignore[dict-item]
            desired_input_kwarg_layouts={"mask": S(0), "cache": R},
        ),
        ModuleInput(Replicate(), None, mask=Shard(0)),
    ),
    (
        PrepareModuleInput(input_kwarg_layouts={"x": S(1)}, desired_input_kwarg_layouts={"x": R}),
        ModuleInput(x=Replicate()),
    ),
    (
        PrepareModuleOutput(output_layouts=S(0), desired_output_layouts=R),
        ModuleOutput(Replicate()),
    ),
    (
        PrepareModuleInputOutput(
            input_layouts=(S(0),),
            desired_input_layouts=(R,),
            output_layouts=(R, None),
            desired_output_layouts=(S(0), None),
        ),
        [ModuleInput(Replicate()), ModuleOutput(Shard(0), None)],
    ),
    (S(0), Shard(0)),
    ("shard(0)", Shard(0)),
    ("Shard(dim=-1, outer=3)", Shard(-1, outer=3)),
    ("shard(0, segments=(8, 4, 4))", Shard(0, segments=(8, 4, 4))),
    (R, Replicated()),
    (dtensor.Replicate, Replicated()),
    ("replicate", Replicated()),
    ([S(0), R], [Shard(0), Replicate()]),
    (("shard(0)", "replicate"), [Shard(0), Replicate()]),
    ({"tp": ColwiseParallel, "dp": S(0)}, {"tp": Colwise(), "dp": Shard(0)}),
    ({"style": "colwise", "heads": 4}, Colwise(heads=4)),
    ({"tp": {"style": "packed_colwise", "heads": 4}}, {"tp": Colwise(fused=2, heads=4)}),
    ({"style": "input", "positional": ["none", "replicate"]}, ModuleInput(None, Replicate())),
]


@pytest.mark.parametrize(("written", "meant"), SAME, ids=lambda value: repr(value)[:60])
def test_every_form_is_parsed_to_one(written: Any, meant: Any) -> None:
    assert Plan({"layer": written}) == Plan({"layer": meant})


@pytest.mark.parametrize(
    ("name", "meant"),
    {
        "colwise_rep": Colwise(output=Replicate()),
        "colwise_gather_output": Colwise(output=Replicate()),
        "rowwise_rep": Rowwise(),
        "rowwise_split_input": Rowwise(),
        "embedding_rowwise": Rowwise(),
        "sequence_parallel": Sequence(),
        "gather": ModuleOutput(Replicate()),
        "local_rowwise": Rowwise(output=Partial()),
        "packed_colwise": Colwise(fused=2),
        "local_packed_rowwise": Rowwise(fused=2, output=Partial()),
    }.items(),
)
def test_the_names_that_transformers_has_for_styles_are_known(name: str, meant: Any) -> None:
    assert Plan({"layer": name}) == Plan({"layer": meant})


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"a": "colwize"}, "entry 'a' gives 'colwize', which is not a style. Did you mean 'colw"),
        ({"a": "tensor"}, "which is not a style. Give 'colwise', 'rowwise', 'sequence'"),
        ({"a": "local"}, "keeps the weights replicated: here it has no effect. Remove it"),
        ({"a": "ep_router"}, "routes tokens to experts. Give the placement"),
        ({"a": 3}, "entry 'a' gives int, which is neither a style nor a placement"),
        ({"a": None}, "entry 'a' gives NoneType, which is neither"),
        ({"a": []}, "entry 'a' has no style. Give one"),
        ({"a": {}}, "entry 'a' is empty. Give placements"),
        ({"a": {"tp": {"x": "colwise"}}}, "gives a table for the axis 'tp'.*in quotes"),
        ({"a": {0: Colwise()}}, "names the axis 0, which is int. Axes of a mesh have names"),
        ({0: Colwise()}, "has the key 0, which is int. Keys are names or patterns"),
        ({"a": Partial()}, r"gives Partial\(\), but a parameter cannot be partial"),
        ({"a": [Shard(0), Partial()]}, r"gives Partial\(\), but a parameter cannot be partial"),
        ({"a": [Colwise(), Rowwise()]}, "gives 2 layouts of the parameters for one axis"),
        ({"a": [Colwise(), Shard(0)]}, "gives 2 layouts of the parameters for one axis"),
        ({"a": [ModuleOutput(R), ModuleOutput(R)]}, "gives 2 placements for the outputs"),
        ({"a": PrepareModuleInput}, "entry 'a' has no style. Give one"),
        ({"a": Needy}, "class Needy, which cannot be created without arguments.*Give an object"),
        ({"a": Custom()}, "gives Custom, which shardscope cannot interpret"),
        ({"a": {"style": 3}}, "gives style = 3. Give its name"),
        ({"a": {"style": "colwise", "head": 3}}, "gives 'head' to the style 'colwise', which tak"),
        ({"a": {"style": "replicate", "dim": 3}}, "gives 'dim' to the style 'replicate', which ta"),
        ({"a": {"style": "input", "keyword": "x"}}, "gives keyword = 'x'. Give a table"),
        ({"a": {"style": "output", "outputs": 3}}, "gives 3 instead of a list of placements"),
        ({"a": {"style": "output"}}, "has no placements"),
        (["a"], "The plan is list, not a mapping"),
    ],
)
def test_invalid_entries_are_refused_with_a_remedy(entry: Any, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        Plan(entry)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"x": Partial()}, r"input 'x' is Partial\(\), but an input cannot be partial"),
        ({"x": "colwise"}, "input 'x''s placement is 'colwise', which is not a placement"),
        ({"x": {}}, "input 'x' is empty"),
        ({True: Shard(0)}, "inputs have the key True. Give a path"),
        ({"": Shard(0)}, "inputs have the key ''. Give a path"),
        ([Shard(0)], "plan's inputs is list, not a mapping"),
    ],
)
def test_invalid_inputs_are_refused(values: Any, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        Plan({}, inputs=values)


def test_plan_of_takes_plans_mappings_and_paths(tmp_path: Path) -> None:
    plan = Plan({"a": Colwise()})
    plan.write(tmp_path / "plan.toml")
    assert Plan.of(plan) is plan
    sources = ({"a": Colwise()}, tmp_path / "plan.toml", str(tmp_path / "plan.toml"))
    assert all(Plan.of(source) == plan for source in sources)
    assert Plan.of(ColwiseParallel()) == Plan.of(Colwise) == Plan({"": Colwise()})
    with pytest.raises(PlanError, match=r"The plan is int\. Give a mapping"):
        Plan.of(3)


def test_the_repr_of_a_plan_is_its_entries() -> None:
    plan = Plan(
        {"a": {"tp": Colwise(), "dp": Shard(0)}, "b": [Shard(0), Replicate()]},
        inputs={"x": {"dp": Shard(0)}, 1: Shard(1)},
        outputs={0: [Shard(0), Replicate()]},
    )
    assert repr(plan) == (
        "Plan({'a': {'tp': Colwise(), 'dp': Shard(0)}, 'b': [Shard(0), Replicate()]}, "
        "inputs={'x': {'dp': Shard(0)}, '1': Shard(1)}, outputs={'0': [Shard(0), Replicate()]})"
    )
    assert pickle.loads(pickle.dumps(plan)) == plan == copy.deepcopy(plan)
    assert hash(copy.deepcopy(plan)) == hash(plan)


def test_plans_in_another_order_are_other_plans() -> None:
    assert Plan({"a.*": Colwise(), "*.b": Rowwise()}) != Plan({"*.b": Rowwise(), "a.*": Colwise()})
