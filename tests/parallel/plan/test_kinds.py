"""What styles mean for each kind of module: which dims they cut, and how values then lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from plan_models import Zoo
from shardscope.errors import PlanError
from shardscope.parallel import Colwise, Replicate, Rowwise, Sequence, Shard
from shardscope.parallel.plan.outline import ModuleOutline, Outline, TensorOutline
from shardscope.parallel.plan.outlines import outline_of
from shardscope.parallel.plan.resolve import resolve
from shardscope.parallel.plan.resolved import Resolved

ZOO = outline_of(Zoo())
R = Replicate()


def cut_dims(resolved: Resolved) -> dict[str, int]:
    """By tensor, the dim that is cut, plainly, along the only axis."""
    for (placement,) in resolved.tensors.values():
        assert isinstance(placement, Shard)
        assert placement.is_plain
    return {name: placed[0].dim for name, placed in resolved.tensors.items()}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "style", "dims", "given", "put_out"),
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
def test_a_style_cuts_a_module_of_this_kind_like_this(
    name: str, style: Any, dims: dict[str, int], given: Any, put_out: Any
) -> None:
    resolved = resolve({name: style}, ZOO, {"tp": 2})
    assert cut_dims(resolved) == {f"{name}.{own}": dim for own, dim in dims.items()}
    pins = resolved.module_inputs.get(name)
    assert (None if pins is None else pins.positional) == (None if given is None else ((given,),))
    assert resolved.module_outputs.get(name) == (None if put_out is None else ((put_out,),))


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


def test_a_style_for_a_tensor_cuts_it_as_its_module_would_be_or_by_its_rank() -> None:
    plan = {
        "embedding.weight": "colwise",
        "linear.weight": "rowwise",
        "deconv.weight": "colwise",
        "attention.in_proj_weight": "colwise",
        "attention.in_proj_bias": "colwise",
        "normed.parametrizations.weight.original1": "rowwise",
    }
    assert cut_dims(resolve(plan, ZOO, {"tp": 2})) == {
        "embedding.weight": 1,
        "linear.weight": 1,
        "deconv.weight": 1,
        "attention.in_proj_weight": 0,
        "attention.in_proj_bias": 0,
        "normed.parametrizations.weight.original1": 1,
    }


def test_stacked_weights_of_experts_are_cut_behind_what_is_stacked() -> None:
    experts = Outline(
        {"": ModuleOutline(), "experts": ModuleOutline("moe.Experts", ("gate_up", "down"))},
        {"experts.gate_up": TensorOutline((4, 16, 8)), "experts.down": TensorOutline((4, 8, 8))},
    )
    plan = {"experts.gate_up": "packed_colwise", "experts.down": "local_rowwise"}
    assert resolve(plan, experts, {"tp": 2}).tensors == {
        "experts.gate_up": (Shard(1, outer=2),),
        "experts.down": (Shard(2),),
    }


class Tokens(nn.Embedding):
    """Known by what it is made of, not by its name."""


class Mixer(nn.Module):
    """Of no known class; (out, in) unless the bias says otherwise."""

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
def test_a_class_of_ones_own_is_known_by_its_bases_or_its_tensors(
    module: nn.Module, dims: dict[str, int]
) -> None:
    resolved = resolve({"own": Colwise()}, outline_of(nn.ModuleDict({"own": module})), {"tp": 2})
    assert cut_dims(resolved) == {f"own.{name}": dim for name, dim in dims.items()}


def test_a_matrix_with_a_bias_of_no_side_is_refused() -> None:
    outline = outline_of(nn.ModuleDict({"own": Mixer(5)}))
    with pytest.raises(PlanError, match="has no meaning for 'own', Mixer with weight, bias"):
        resolve({"own": Colwise()}, outline, {"tp": 2})


def test_the_linear_layer_that_gpt2_has_is_known_to_lie_the_other_way() -> None:
    outline = Outline(
        {
            "": ModuleOutline(),
            "fc": ModuleOutline("transformers.pytorch_utils.Conv1D", ("weight",)),
        },
        {"fc.weight": TensorOutline((8, 16))},
    )
    assert cut_dims(resolve({"fc": Colwise()}, outline, {"tp": 2})) == {"fc.weight": 1}
    assert cut_dims(resolve({"fc": Rowwise()}, outline, {"tp": 2})) == {"fc.weight": 0}
