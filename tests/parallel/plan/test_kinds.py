"""How styles shard each kind of module: dims of tensors, and placements of inputs and outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from plan_models import Zoo
from shardscope.errors import PlanError
from shardscope.parallel import Colwise, Replicate, Rowwise, Sequence, Shard
from shardscope.parallel.plan.program_index import ModuleInfo, ProgramIndex, TensorInfo, index_model
from shardscope.parallel.plan.resolve import ResolvedPlan, resolve

ZOO = index_model(Zoo())
R = Replicate()


def sharded_dims(resolved: ResolvedPlan) -> dict[str, int]:
    """By tensor, the dim that is sharded, without blocks, along the only axis."""
    for (placement,) in resolved.tensors.values():
        assert isinstance(placement, Shard)
        assert placement.is_plain
    return {name: placed[0].dim for name, placed in resolved.tensors.items()}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "style", "dims", "input_placement", "output_placement"),
    [
        ("linear", Colwise(), {"weight": 0, "bias": 0}, R, Shard(-1)),
        ("linear", Rowwise(), {"weight": 1}, Shard(-1), R),
        ("embedding", Colwise(), {"weight": 1}, R, Shard(-1)),
        ("embedding", Rowwise(), {"weight": 0}, R, R),
        ("bag", Rowwise(), {"weight": 0}, R, R),
        ("bilinear", Colwise(), {"weight": 0, "bias": 0}, R, Shard(-1)),
        ("conv", Colwise(), {"weight": 0, "bias": 0}, R, Shard(-3)),
        ("conv", Rowwise(), {"weight": 1}, Shard(-3), R),
        ("deconv", Colwise(), {"weight": 1, "bias": 0}, R, Shard(-2)),
        ("deconv", Rowwise(), {"weight": 0}, Shard(-2), R),
        ("layer_norm", Colwise(), {"weight": 0, "bias": 0}, None, None),
        ("rms_norm", Colwise(), {"weight": 0}, None, None),
        ("group_norm", Colwise(), {"weight": 0, "bias": 0}, None, None),
        (
            "batch_norm",
            Colwise(),
            {"weight": 0, "bias": 0, "running_mean": 0, "running_var": 0},
            None,
            None,
        ),
        ("layer_norm", Sequence(), {}, Shard(1), Shard(1)),
        ("attention.out_proj", Rowwise(), {"weight": 1}, Shard(-1), R),
        ("linear", Colwise(input=Shard(1), output=R), {"weight": 0, "bias": 0}, Shard(1), R),
        ("layer_norm", Colwise(input=Shard(-1)), {"weight": 0, "bias": 0}, Shard(-1), None),
    ],
)
def test_a_style_shards_a_module_of_this_kind(
    name: str, style: Any, dims: dict[str, int], input_placement: Any, output_placement: Any
) -> None:
    resolved = resolve({name: style}, ZOO, {"tp": 2})
    assert sharded_dims(resolved) == {f"{name}.{own}": dim for own, dim in dims.items()}
    module_constraints = resolved.module_inputs.get(name)
    assert (None if module_constraints is None else module_constraints.positional) == (
        None if input_placement is None else ((input_placement,),)
    )
    assert resolved.module_outputs.get(name) == (
        None if output_placement is None else ((output_placement,),)
    )


@pytest.mark.parametrize(
    ("name", "style", "sentence"),
    [
        (
            "layer_norm",
            Rowwise(),
            r"Rowwise\(\) has no meaning for 'layer_norm', LayerNorm with we",
        ),
        ("image_norm", Colwise(), "has no meaning for 'image_norm', LayerNorm with weight, bias"),
        ("bilinear", Rowwise(), "has no meaning for 'bilinear', Bilinear"),
        ("attention", Colwise(), "MultiheadAttention with in_proj_weight, in_proj_bias. Name the"),
        ("lstm", Colwise(), "no meaning for 'lstm', LSTM with weight_ih_l0"),
        ("normed", Colwise(), "no meaning for 'normed', ParametrizedLinear with bias. Name the te"),
    ],
)
def test_a_style_without_a_meaning_for_a_module_is_refused(
    name: str, style: Any, sentence: str
) -> None:
    with pytest.raises(PlanError, match=sentence):
        resolve({name: style}, ZOO, {"tp": 2})


def test_a_style_for_a_tensor_shards_it_as_its_module_or_by_its_rank() -> None:
    plan = {
        "embedding.weight": "colwise",
        "linear.weight": "rowwise",
        "deconv.weight": "colwise",
        "attention.in_proj_weight": "colwise",
        "attention.in_proj_bias": "colwise",
        "normed.parametrizations.weight.original1": "rowwise",
    }
    assert sharded_dims(resolve(plan, ZOO, {"tp": 2})) == {
        "embedding.weight": 1,
        "linear.weight": 1,
        "deconv.weight": 1,
        "attention.in_proj_weight": 0,
        "attention.in_proj_bias": 0,
        "normed.parametrizations.weight.original1": 1,
    }


def test_stacked_expert_weights_are_sharded_after_the_stacked_dim() -> None:
    experts = ProgramIndex(
        {"": ModuleInfo(), "experts": ModuleInfo("moe.Experts", ("gate_up", "down"))},
        {"experts.gate_up": TensorInfo((4, 16, 8)), "experts.down": TensorInfo((4, 8, 8))},
    )
    plan = {"experts.gate_up": "packed_colwise", "experts.down": "local_rowwise"}
    assert resolve(plan, experts, {"tp": 2}).tensors == {
        "experts.gate_up": (Shard(1, outer=2),),
        "experts.down": (Shard(2),),
    }


class Tokens(nn.Embedding):
    """Recognized by its base class, not by its name."""


class Mixer(nn.Module):
    """Of no known class; the weight is (out, in) unless the bias has the other size."""

    def __init__(self, bias: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))
        self.bias = None if bias is None else nn.Parameter(torch.ones(bias))


class Gains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))


@pytest.mark.parametrize(
    ("module", "dims"),
    [
        (Tokens(8, 4), {"weight": 1}),
        (Mixer(None), {"weight": 0}),
        (Mixer(4), {"weight": 0, "bias": 0}),
        (Mixer(8), {"weight": 1, "bias": 0}),
        (Gains(), {"gain": 0}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_custom_class_is_recognized_by_its_bases_or_tensors(
    module: nn.Module, dims: dict[str, int]
) -> None:
    resolved = resolve({"own": Colwise()}, index_model(nn.ModuleDict({"own": module})), {"tp": 2})
    assert sharded_dims(resolved) == {f"own.{name}": dim for name, dim in dims.items()}


def test_a_matrix_with_a_bias_of_no_side_is_refused() -> None:
    index = index_model(nn.ModuleDict({"own": Mixer(5)}))
    with pytest.raises(PlanError, match="has no meaning for 'own', Mixer with weight, bias"):
        resolve({"own": Colwise()}, index, {"tp": 2})


def test_the_transposed_linear_layer_of_gpt2_is_recognized() -> None:
    index = ProgramIndex(
        {
            "": ModuleInfo(),
            "fc": ModuleInfo("transformers.pytorch_utils.Conv1D", ("weight",)),
        },
        {"fc.weight": TensorInfo((8, 16))},
    )
    assert sharded_dims(resolve({"fc": Colwise()}, index, {"tp": 2})) == {"fc.weight": 1}
    assert sharded_dims(resolve({"fc": Rowwise()}, index, {"tp": 2})) == {"fc.weight": 0}
