"""Types that are inferred from the values of all ranks, and findings where they contradict use."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from parity_models import (
    MLP,
    Copy,
    LanguageModel,
    Sum,
    make_tokens,
    sequence_parallel,
    tensor_and_data_parallel,
)
from shardscope import Recording, infer_types, load, save
from shardscope.errors import ParityError
from shardscope.record import TensorRole

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


def read(recording: Recording) -> dict[str, str]:
    """`up.weight parameter` with the types along each axis: `dp S(0) / S(0), tp R / R`."""
    (types,) = recording.types
    return {
        f"{tensor.describe()} {tensor.role}": ", ".join(
            f"{axis.axis} {axis.describe()}" for axis in tensor.axes
        )
        for tensor in types.tensors
    }


def test_tensor_parallel_layers_under_fsdp_have_types_along_both_axes(tmp_path: Any) -> None:
    recording = infer_types(
        LanguageModel(1),
        {"dp": 2, "tp": 2},
        parallelize=tensor_and_data_parallel,
        inputs=make_tokens(),
        batch_axes="dp",
    )
    types = read(recording)
    assert recording.findings == ()
    assert types["tok[0] input"] == "dp S(0), tp R"
    assert types["layers.0.attn.wq[0] input"] == "dp S(0) / S(0), tp R / P"
    assert types["layers.0.attn.wq output"] == "dp S(0) / S(0), tp S(2) / S(2)"
    assert types["layers.0.attn.wo output"] == "dp S(0) / S(0), tp R / R"
    assert types["layers.0.attn.wq.weight parameter"] == "dp S(0) / S(0), tp S(0) / S(0)"
    assert types["layers.0.mlp.down.bias parameter"] == "dp S(0) / S(0), tp R / R"
    assert types["·['logits'] output"] == "dp S(0) / S(0), tp R / R"
    assert not [name for name in types if name.startswith("head.")]  # tied with tok
    save(recording, tmp_path / "types.json")
    assert load(tmp_path / "types.json") == recording


def test_sequence_parallel_activations_are_sharded_along_the_sequence() -> None:
    recording = infer_types(
        LanguageModel(1), {"tp": 2}, parallelize=sequence_parallel, inputs=make_tokens()
    )
    types = read(recording)
    assert recording.findings == ()
    assert types["layers.0.norm1 output"] == "tp S(1) / S(1)"
    assert types["layers.0.attn[0] input"] == "tp R / R"
    assert types["layers.0.mlp output"] == "tp S(1) / S(1)"


class ByHand(nn.Module):
    """A row-wise layer of plain tensors that leaves partial sums, and what sums them."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, 16), nn.Linear(16, size, bias=False)
        self.reduce = nn.Identity()
        self.register_buffer("steps", torch.tensor([3, 4]))
        self.register_buffer("zeros", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.down(self.up(x).relu()))


def shard_by_hand(model: Any, mesh: DeviceMesh, *, is_summed: bool = True) -> Any:
    tp, group = mesh["tp"], mesh["tp"].get_group()
    for layer, name, dim in (
        (model.up, "weight", 0),
        (model.up, "bias", 0),
        (model.down, "weight", 1),
    ):
        full = getattr(layer, name).detach()
        shard = full.chunk(tp.size(), dim)[tp.get_local_rank()].clone()
        setattr(layer, name, nn.Parameter(shard))
    model.up.register_forward_pre_hook(lambda _, args: (Copy.apply(args[0], group),))
    if is_summed:
        model.reduce.register_forward_hook(lambda _, __, y: Sum.apply(y, group))
    return model


def test_plain_tensors_need_no_placements_and_zeros_are_a_gap() -> None:
    recording = infer_types(
        ByHand(), {"one": 1, "tp": 2}, parallelize=shard_by_hand, inputs=torch.randn(4, 8)
    )
    types = read(recording)
    assert recording.findings == ()
    assert types["down output"] == "one ? / ?, tp P / R"
    assert types["reduce output"] == "one ? / ?, tp R / R"
    assert types["down.weight parameter"] == "one ? / ?, tp S(1) / S(1)"
    assert types["steps buffer"] == "one ?, tp R"
    assert types["zeros buffer"] == "one ?, tp ?"
    assert {gap.place: gap.fact for gap in recording.gaps} == {
        "one": "no types: the axis has a single rank",
        "tp": "the values do not decide the types of 1 tensors or gradients, such as zeros: "
        "zeros buffer",
    }


def test_integers_and_flags_have_types_too() -> None:
    class Mask(nn.Module):
        def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x * 2, tokens > 1, tokens

    recording = infer_types(
        Mask(),
        {"dp": 2},
        parallelize=lambda model, _: model,
        inputs=(torch.randn(4), torch.tensor([0, 1, 2, 3])),
        batch_axes="dp",
    )
    types = read(recording)
    assert types["·[1] output"] == types["·[2] output"] == "dp S(0)"


def test_types_must_hold_for_other_weights_than_the_models_own() -> None:
    """A scale of ones is the same on every rank by coincidence."""
    model = nn.LayerNorm(8)

    def shard(model: Any, mesh: DeviceMesh) -> Any:
        index = mesh.get_local_rank()
        model.weight = nn.Parameter(model.weight.detach().roll(index))
        return model

    once, thrice = (
        infer_types(model, {"tp": 2}, parallelize=shard, inputs=torch.randn(4, 8), num_runs=number)
        for number in (1, 3)
    )
    assert read(once)["weight parameter"].startswith("tp R")
    assert read(thrice)["weight parameter"].startswith("tp V")
    assert [finding.rule for finding in thrice.findings] == ["types-varying-as-replicated"] * 2


@pytest.mark.parametrize("is_declared", [False, True])
def test_a_partial_value_that_is_used_as_complete_is_found(is_declared: bool) -> None:
    class Model(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).tanh()

    def shard(model: Any, mesh: DeviceMesh) -> Any:
        row = RowwiseParallel(output_layouts=Partial(), use_local_output=not is_declared)
        model.down.bias = None
        return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": row})

    model = Model()
    model.down.bias = None
    recording = infer_types(model, {"tp": 2}, parallelize=shard, inputs=torch.randn(4, 8))
    rules = [(finding.rule, finding.subject) for finding in recording.findings]
    # DTensor sums a declared partial value before it computes the tanh.
    assert rules == ([] if is_declared else [("types-partial-as-complete", "down")])


def test_a_partial_sum_that_the_model_returns_is_found() -> None:
    def shard(model: Any, mesh: DeviceMesh) -> Any:
        return shard_by_hand(model, mesh, is_summed=False)

    recording = infer_types(ByHand(), {"tp": 2}, parallelize=shard, inputs=torch.randn(4, 8))
    assert {finding.rule for finding in recording.findings} == {"types-partial-as-complete"}
    assert "the model" in {finding.subject for finding in recording.findings}


def test_gradients_that_nothing_reduces_are_found_and_reduced_ones_are_not() -> None:
    def reduce(model: nn.Module, inputs: Tensor) -> None:
        model(inputs).square().mean().backward()
        if dist.is_initialized():
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def run(step: Any) -> Recording:
        return infer_types(
            MLP(),
            {"dp": 2},
            parallelize=lambda model, _: model,
            inputs=torch.randn(4, 8),
            batch_axes="dp",
            step=step,
        )

    (finding,) = run(None).findings
    assert finding.rule == "types-unreduced-gradient"
    assert finding.subject == "up.weight, up.bias, down.weight (×4)"
    assert "replicated over dp, and their gradients are partial" in finding.fact
    assert run(reduce).findings == ()


def test_a_training_step_has_types_and_missing_arguments_are_named() -> None:
    def train_step(model: nn.Module, batch: Tensor, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    recording = infer_types(
        ByHand(),
        {"tp": 2},
        parallelize=shard_by_hand,
        inputs=torch.randn(4, 8),
        train_step=train_step,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )
    assert read(recording)["down.weight parameter"] == "tp S(1) / S(1)"
    roles = {tensor.role for tensor in recording.types[0].tensors}
    assert roles == set(TensorRole)
    with pytest.raises(ParityError, match=r"infer_types\(\) got no function that shards the model"):
        infer_types(MLP(), {"tp": 2}, inputs=torch.randn(4, 8))
