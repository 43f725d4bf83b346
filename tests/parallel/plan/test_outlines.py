"""ProgramIndex: modules, tensors, inputs and outputs of a model or an exported program."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sympy
import torch
from torch import Tensor, nn

from plan_models import Decoder, decoder_program
from shardscope.errors import PlanError
from shardscope.parallel import Colwise, Plan, Rowwise, Shard
from shardscope.parallel.plan.program_index import (
    ModuleInfo,
    TensorInfo,
    ValueInfo,
    index_model,
    index_program,
)
from shardscope.parallel.plan.resolve import resolve

PLAN = {"tok": Rowwise(), "layers.*.qkv": Colwise(fused=3), "layers.*.wo": Rowwise()}
BOTH_MODES = pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])


def test_a_models_modules_and_tensors_are_indexed() -> None:
    index = index_model(Decoder(num_layers=1))
    assert index.modules["layers.0.wo"] == ModuleInfo(
        "torch.nn.modules.linear.Linear", ("weight", "bias")
    )
    assert index.modules[""] == ModuleInfo("plan_models.Decoder", (), ("scale",))
    assert index.tensors["tok.weight"] == TensorInfo((16, 8), True, ("head.weight",))
    assert index.tensors["scale"] == TensorInfo((8,), False)
    assert "head.weight" not in index.tensors
    assert index.tensor("head.weight") is index.tensors["tok.weight"]
    assert index.inputs is None


@BOTH_MODES
def test_a_program_has_the_index_of_its_model(strict: bool) -> None:
    model, program = index_model(Decoder()), index_program(decoder_program(strict=strict))
    assert program.tensors == model.tensors
    assert program.modules.keys() == model.modules.keys()
    assert program.modules["layers.1.qkv"] == model.modules["layers.1.qkv"]
    assert program.modules["head"] == model.modules["head"]  # though strict export drops its name
    assert resolve(PLAN, program, {"tp": 2}).tensors == resolve(PLAN, model, {"tp": 2}).tensors


@BOTH_MODES
def test_a_programs_inputs_and_outputs_are_indexed_by_path(strict: bool) -> None:
    index = index_program(decoder_program(strict=strict))
    assert index.inputs is not None
    assert index.outputs is not None
    assert index.inputs["batch.ids"] == ValueInfo((2, 4), "batch_ids")
    assert list(index.outputs) == ["logits", "rest.0", "rest.1"]
    assert index.outputs["logits"].shape == (2, 4, 16)
    assert index.outputs["rest.1"].shape is None


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11
def test_a_saved_program_has_the_same_index(tmp_path: Path) -> None:
    program = decoder_program()
    torch.export.save(program, tmp_path / "decoder.pt2")
    loaded = torch.export.load(tmp_path / "decoder.pt2")
    assert index_program(loaded).modules == index_program(program).modules
    assert index_program(loaded).tensors == index_program(program).tensors


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch warns of itself
def test_a_decomposed_program_has_the_same_index() -> None:
    program = decoder_program()
    decomposed = index_program(program.run_decompositions())
    assert decomposed.modules == index_program(program).modules
    assert decomposed.tensors == index_program(program).tensors


def test_a_program_of_meta_tensors_knows_which_are_tied() -> None:
    with torch.device("meta"):
        program = decoder_program()
    tensors = index_program(program).tensors
    assert tensors["tok.weight"].aliases == ("head.weight",)
    assert sum(len(tensor.aliases) for tensor in tensors.values()) == 1


class Twice(nn.Module):
    """Calls one module twice, holds another under two names, and a third for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(self.first, nn.Identity())
        self.idle = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.first(x)))


@BOTH_MODES
def test_modules_that_are_shared_or_called_again_have_plain_names(strict: bool) -> None:
    program = torch.export.export(Twice(), (torch.ones(2, 4),), strict=strict)
    index = index_program(program)
    assert set(index.modules) == {"", "first", "second", "second.0", "second.1", "idle"}
    assert index.tensors["first.weight"].aliases == ("second.0.weight",)
    resolved = resolve({"first": Colwise()}, index, {"tp": 2})
    assert resolved.tensors["second.0.bias"] == (Shard(0),)


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor) -> Any:
        return self.model({"ids": ids})["logits"] * self.temperature


def test_the_prefix_of_a_wrapper_comes_off() -> None:
    ids = torch.zeros(2, 4, dtype=torch.long)
    wrapped = index_program(torch.export.export(Wrapped(Decoder()), (ids,)))
    assert "model.layers.0.wo" in wrapped.modules
    index = wrapped.without_prefix("model")
    plain = index_program(decoder_program())
    assert index.modules == plain.modules
    assert index.tensors == {**plain.tensors, "temperature": TensorInfo(())}
    assert resolve(PLAN, index, {"tp": 2}).tensors == resolve(PLAN, plain, {"tp": 2}).tensors


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Varied(nn.Module):
    def forward(
        self, pair: Pair, flag: float, *rest: Tensor, mask: Tensor | None = None, **more: Tensor
    ) -> list[Any]:
        return [pair.left * flag, (pair.right + rest[0], mask), more["extra"] + 1]


@BOTH_MODES
def test_inputs_of_every_shape_have_paths(strict: bool) -> None:
    ones = torch.ones(4, 2)
    program = torch.export.export(
        Varied(),
        (Pair(ones, ones), 2.0, torch.ones(4, 2)),
        {"mask": None, "extra": torch.ones(3)},
        strict=strict,
    )
    index = index_program(program)
    assert index.inputs is not None
    shapes = {path: value.shape for path, value in index.inputs.items()}
    assert list(shapes) == ["pair.left", "pair.right", "flag", "rest_0", "mask", "extra"]
    assert [path for path, shape in shapes.items() if shape is None] == ["flag", "mask"]
    assert shapes["pair.left"] == (4, 2)
    assert list(index.outputs or ()) == ["0", "1.0", "1.1", "2"]
    plan = Plan({}, inputs={"pair": {"dp": Shard(0)}}, outputs={1: {"dp": Shard(0)}})
    resolved = resolve(plan, index, {"dp": 2})
    assert list(resolved.inputs) == ["pair.left", "pair.right"]
    assert list(resolved.outputs) == ["1.0"]


def test_dynamic_sizes_are_expressions() -> None:
    shapes = {"input": {0: torch.export.Dim("batch", min=2)}}
    program = torch.export.export(nn.Linear(4, 8), (torch.ones(2, 4),), dynamic_shapes=shapes)
    index = index_program(program)
    assert index.inputs is not None
    assert index.outputs is not None
    (source,), (output,) = index.inputs.values(), index.outputs.values()
    assert source.shape is not None
    assert isinstance(source.shape[0], sympy.Expr)
    assert (source.shape[1], output.shape) == (4, (source.shape[0], 8))


def test_a_single_output_is_at_position_zero() -> None:
    program = torch.export.export(nn.Linear(4, 4), (torch.ones(2, 4),))
    assert list(index_program(program).outputs or ()) == ["0"]


def test_a_lazy_model_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'weight' has no shape yet: its module is lazy\. Call"):
        index_model(nn.LazyLinear(4))


def test_different_views_of_one_storage_are_not_tied() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    whole = torch.ones(8, 4)
    model["a"].weight = nn.Parameter(whole[:4])
    model["b"].weight = nn.Parameter(whole[4:])
    assert all(not tensor.aliases for tensor in index_model(model).tensors.values())
    model["b"].weight = nn.Parameter(model["a"].weight.data)
    assert index_model(model).tensors["a.weight"].aliases == ("b.weight",)


def test_a_class_that_cannot_be_looked_up_is_known_by_the_op_that_it_calls() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16, 8))

        def forward(self, ids: Tensor) -> Tensor:
            return nn.functional.embedding(ids, self.weight)

    ids = torch.zeros(2, 4, dtype=torch.long)
    program = torch.export.export(nn.Sequential(Tokens(), nn.Linear(8, 8)), (ids,))
    resolved = resolve({"0": Colwise()}, index_program(program), {"tp": 2})
    assert resolved.tensors == {"0.weight": (Shard(1),)}
