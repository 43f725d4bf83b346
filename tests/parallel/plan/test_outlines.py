"""Outlines: what a model, or a program exported from it, tells a plan."""

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
from shardscope.parallel.plan.outline import ModuleOutline, TensorOutline, ValueOutline
from shardscope.parallel.plan.outlines import outline_of, outline_of_program
from shardscope.parallel.plan.resolve import resolve

PLAN = {"tok": Rowwise(), "layers.*.qkv": Colwise(fused=3), "layers.*.wo": Rowwise()}
BOTH_MODES = pytest.mark.parametrize("strict", [False, True], ids=["nonstrict", "strict"])


def test_a_model_tells_its_modules_and_tensors() -> None:
    outline = outline_of(Decoder(num_layers=1))
    assert outline.modules["layers.0.wo"] == ModuleOutline(
        "torch.nn.modules.linear.Linear", ("weight", "bias")
    )
    assert outline.modules[""] == ModuleOutline("plan_models.Decoder", (), ("scale",))
    assert outline.tensors["tok.weight"] == TensorOutline((16, 8), True, ("head.weight",))
    assert outline.tensors["scale"] == TensorOutline((8,), False)
    assert "head.weight" not in outline.tensors
    assert outline.tensor("head.weight") is outline.tensors["tok.weight"]
    assert outline.inputs is None


@BOTH_MODES
def test_a_program_tells_what_its_model_does(strict: bool) -> None:
    model, program = outline_of(Decoder()), outline_of_program(decoder_program(strict=strict))
    assert program.tensors == model.tensors
    assert program.modules.keys() == model.modules.keys()
    assert program.modules["layers.1.qkv"] == model.modules["layers.1.qkv"]
    assert program.modules["head"] == model.modules["head"]  # though strict export drops its name
    assert resolve(PLAN, program, {"tp": 2}).tensors == resolve(PLAN, model, {"tp": 2}).tensors


@BOTH_MODES
def test_a_program_tells_its_inputs_and_outputs_by_path(strict: bool) -> None:
    outline = outline_of_program(decoder_program(strict=strict))
    assert outline.inputs is not None
    assert outline.outputs is not None
    assert outline.inputs["batch.ids"] == ValueOutline((2, 4), "batch_ids")
    assert list(outline.outputs) == ["logits", "rest.0", "rest.1"]
    assert outline.outputs["logits"].shape == (2, 4, 16)
    assert outline.outputs["rest.1"].shape is None


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # torch 2.11
def test_a_program_that_was_saved_tells_the_same(tmp_path: Path) -> None:
    program = decoder_program()
    torch.export.save(program, tmp_path / "decoder.pt2")
    loaded = torch.export.load(tmp_path / "decoder.pt2")
    assert outline_of_program(loaded).modules == outline_of_program(program).modules
    assert outline_of_program(loaded).tensors == outline_of_program(program).tensors


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch warns of itself
def test_a_program_that_was_decomposed_tells_the_same() -> None:
    program = decoder_program()
    decomposed = outline_of_program(program.run_decompositions())
    assert decomposed.modules == outline_of_program(program).modules
    assert decomposed.tensors == outline_of_program(program).tensors


def test_a_program_of_meta_tensors_knows_which_are_tied() -> None:
    with torch.device("meta"):
        program = decoder_program()
    tensors = outline_of_program(program).tensors
    assert tensors["tok.weight"].aliases == ("head.weight",)
    assert sum(len(one.aliases) for one in tensors.values()) == 1


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
    outline = outline_of_program(program)
    assert set(outline.modules) == {"", "first", "second", "second.0", "second.1", "idle"}
    assert outline.tensors["first.weight"].aliases == ("second.0.weight",)
    resolved = resolve({"first": Colwise()}, outline, {"tp": 2})
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
    wrapped = outline_of_program(torch.export.export(Wrapped(Decoder()), (ids,)))
    assert "model.layers.0.wo" in wrapped.modules
    outline = wrapped.without_prefix("model")
    plain = outline_of_program(decoder_program())
    assert outline.modules == plain.modules
    assert outline.tensors == {**plain.tensors, "temperature": TensorOutline(())}
    assert resolve(PLAN, outline, {"tp": 2}).tensors == resolve(PLAN, plain, {"tp": 2}).tensors


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
    one = torch.ones(4, 2)
    program = torch.export.export(
        Varied(),
        (Pair(one, one), 2.0, torch.ones(4, 2)),
        {"mask": None, "extra": torch.ones(3)},
        strict=strict,
    )
    outline = outline_of_program(program)
    assert outline.inputs is not None
    shapes = {path: value.shape for path, value in outline.inputs.items()}
    assert list(shapes) == ["pair.left", "pair.right", "flag", "rest_0", "mask", "extra"]
    assert [path for path, shape in shapes.items() if shape is None] == ["flag", "mask"]
    assert shapes["pair.left"] == (4, 2)
    assert list(outline.outputs or ()) == ["0", "1.0", "1.1", "2"]
    plan = Plan({}, inputs={"pair": {"dp": Shard(0)}}, outputs={1: {"dp": Shard(0)}})
    resolved = resolve(plan, outline, {"dp": 2})
    assert list(resolved.inputs) == ["pair.left", "pair.right"]
    assert list(resolved.outputs) == ["1.0"]


def test_sizes_that_a_program_leaves_open_are_expressions() -> None:
    shapes = {"input": {0: torch.export.Dim("batch", min=2)}}
    program = torch.export.export(nn.Linear(4, 8), (torch.ones(2, 4),), dynamic_shapes=shapes)
    outline = outline_of_program(program)
    assert outline.inputs is not None
    assert outline.outputs is not None
    (given,), (put_out,) = outline.inputs.values(), outline.outputs.values()
    assert given.shape is not None
    assert isinstance(given.shape[0], sympy.Expr)
    assert (given.shape[1], put_out.shape) == (4, (given.shape[0], 8))


def test_a_single_output_is_at_position_zero() -> None:
    program = torch.export.export(nn.Linear(4, 4), (torch.ones(2, 4),))
    assert list(outline_of_program(program).outputs or ()) == ["0"]


def test_a_lazy_model_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'weight' has no shape yet: its module is lazy\. Call"):
        outline_of(nn.LazyLinear(4))


def test_tensors_that_share_memory_but_are_not_one_are_not_tied() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    whole = torch.ones(8, 4)
    model["a"].weight = nn.Parameter(whole[:4])
    model["b"].weight = nn.Parameter(whole[4:])
    assert all(not tensor.aliases for tensor in outline_of(model).tensors.values())
    model["b"].weight = nn.Parameter(model["a"].weight.data)
    assert outline_of(model).tensors["a.weight"].aliases == ("b.weight",)


def test_a_class_that_cannot_be_looked_up_is_known_by_the_op_that_it_calls() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16, 8))

        def forward(self, ids: Tensor) -> Tensor:
            return nn.functional.embedding(ids, self.weight)

    ids = torch.zeros(2, 4, dtype=torch.long)
    program = torch.export.export(nn.Sequential(Tokens(), nn.Linear(8, 8)), (ids,))
    resolved = resolve({"0": Colwise()}, outline_of_program(program), {"tp": 2})
    assert resolved.tensors == {"0.weight": (Shard(1),)}
