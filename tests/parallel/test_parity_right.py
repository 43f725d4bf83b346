"""Parallel models that are right are called so, whatever they are made of."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from parity_models import (
    MLP,
    Copy,
    LanguageModel,
    Sum,
    by_hand,
    data_parallel,
    make_tokens,
    sequence_parallel,
    tensor_and_data_parallel,
    tensor_parallel,
)
from shardscope import Recording, parity
from shardscope.record import FINE, Agreement, Severity, Suspect, TensorKind

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


def verdicts(recording: Recording) -> dict[str, Agreement]:
    (found,) = recording.parity
    return {one.name: one.agreement for one in found.tensors}


def assert_fine(recording: Recording) -> None:
    (found,) = recording.parity
    assert [one for one in found.tensors if one.agreement not in FINE] == []
    assert recording.findings == ()
    assert recording.gaps == ()
    assert found.divergences == ()


def make_model(dtype: torch.dtype = torch.float32) -> LanguageModel:
    torch.manual_seed(1)
    return LanguageModel(num_layers=1).to(dtype)


@pytest.mark.parametrize(
    ("axes", "parallelize", "dtype"),
    [
        ({"tp": 2}, tensor_parallel, torch.float32),
        ({"tp": 2}, tensor_parallel, torch.bfloat16),
        ({"tp": 4}, tensor_parallel, torch.float32),
        ({"tp": 2}, sequence_parallel, torch.float32),
        ({"tp": 4}, sequence_parallel, torch.float32),
        ({"tp": 2}, by_hand(), torch.float32),
        ({"tp": 2}, by_hand(), torch.float16),
        ({"dp": 2}, data_parallel, torch.float32),
        ({"dp": 4}, data_parallel, torch.bfloat16),
        ({"dp": 2, "tp": 2}, tensor_and_data_parallel, torch.float32),
        ({"dp": 2, "tp": 2}, tensor_and_data_parallel, torch.bfloat16),
    ],
)
def test_torchs_own_parallelisms_and_layers_by_hand_agree(axes, parallelize, dtype):
    recording = parity(make_model(dtype), axes, parallelize=parallelize, inputs=make_tokens())
    assert_fine(recording)
    (found,) = recording.parity
    kinds = [one.kind for one in found.tensors]
    assert kinds.count(TensorKind.OUTPUT) == 1
    # The tied weight is compared once.
    assert kinds.count(TensorKind.GRADIENT) == len(list(make_model().parameters()))
    assert "['logits']" in verdicts(recording)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 4}])
def test_each_rank_may_have_its_share_of_the_batch(axes):
    recording = parity(
        make_model(), axes, parallelize=data_parallel, inputs=make_tokens(), batch_axes="dp"
    )
    assert_fine(recording)


def test_the_batch_may_be_cut_along_one_axis_of_two():
    recording = parity(
        make_model(),
        {"dp": 2, "tp": 2},
        parallelize=tensor_and_data_parallel,
        inputs=make_tokens(),
        batch_axes=["dp"],
        loss=lambda output: output["logits"].float().logsumexp(-1).mean(),
    )
    assert_fine(recording)


def wrap(model: nn.Module, _: Any) -> nn.Module:
    return DistributedDataParallel(model)


def test_names_are_those_of_the_model_not_of_its_wrapper():
    recording = parity(MLP(), {"dp": 2}, parallelize=wrap, inputs=torch.randn(4, 8))
    assert_fine(recording)
    assert list(verdicts(recording)) == ["", "up.weight", "up.bias", "down.weight", "down.bias"]


@pytest.mark.parametrize(
    ("axes", "parallelize"),
    [
        ({"dp": 2}, wrap),
        ({"replicate": 2, "shard": 2}, lambda model, mesh: fully_shard(model, mesh=mesh)),
    ],
)
def test_other_data_parallelisms_average_over_shares_of_the_batch(axes, parallelize):
    recording = parity(
        MLP(), axes, parallelize=parallelize, inputs=torch.randn(8, 8), batch_axes=list(axes)
    )
    assert_fine(recording)


def test_a_loss_on_pieces_of_the_vocabulary_agrees():
    """Its context changes what DTensor does, for the whole process and so for all ranks."""

    def step(model, tokens):
        logits = model(tokens)["logits"].flatten(0, 1)
        with loss_parallel() if isinstance(logits, DTensor) else nullcontext():
            nn.functional.cross_entropy(logits, tokens.flatten()).backward()

    def parallelize(model, mesh):
        plan = {
            "tok": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(use_local_output=False),
        }
        parallelize_module(model, mesh, plan)
        model.head.weight = model.tok.weight

    recording = parity(
        make_model(), {"tp": 2}, parallelize=parallelize, inputs=make_tokens(), step=step
    )
    assert_fine(recording)


def columns(model: Any, mesh: Any) -> Any:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_uneven_weights_are_put_together(num_ranks):
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(6, 7)

        def forward(self, x):
            return self.only(x)

    def shard(model, mesh):
        return fully_shard(model, mesh=mesh)

    assert_fine(parity(Uneven(), {"dp": num_ranks}, parallelize=shard, inputs=torch.randn(4, 6)))


def test_outputs_that_ranks_have_pieces_of_are_put_together():
    def only_up(model, mesh):
        return parallelize_module(model, mesh, {"0": ColwiseParallel()})

    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh())
    assert_fine(parity(model, {"tp": 4}, parallelize=only_up, inputs=torch.randn(3, 8)))


def test_outputs_that_are_dtensors_are_put_together():
    def only_up(model, mesh):
        return parallelize_module(model, mesh, {"0": ColwiseParallel(use_local_output=False)})

    model = nn.Sequential(nn.Linear(8, 12))
    assert_fine(parity(model, {"tp": 2}, parallelize=only_up, inputs=torch.randn(3, 8)))


class Odd(nn.Module):
    """Unused parameters, an unused layer, several outputs, whole numbers, keywords, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("table", torch.randn(8), persistent=False)

    def forward(self, x, *, scale=1.0, mask=None):
        self.num_calls += 1
        y = self.mlp(x) * scale * self.frozen + self.table
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        return y, [y.argmax(-1), {"none": None, "mean": y.mean()}]


def test_odd_models_agree():
    inputs = {"x": torch.randn(4, 8), "scale": 0.5, "mask": torch.rand(4, 8) < 0.2}

    def parallelize(model, mesh):
        columns(model.mlp, mesh)

    recording = parity(Odd(), {"tp": 2}, parallelize=parallelize, inputs=inputs)
    assert_fine(recording)
    assert verdicts(recording)["num_calls"] is Agreement.EQUAL
    assert verdicts(recording)["[1][0]"] is Agreement.EQUAL
    assert not any(name.startswith(("unused", "frozen", "table")) for name in verdicts(recording))


def test_gradients_of_inputs_that_ask_for_them_are_compared():
    x = torch.randn(4, 8, requires_grad=True)
    recording = parity(MLP(), {"tp": 2}, parallelize=columns, inputs=(x,))
    assert_fine(recording)
    assert "inputs[0]" in verdicts(recording)
    assert x.grad is None


def test_a_model_without_gradients_is_compared_by_its_outputs():
    model = MLP().requires_grad_(False)
    recording = parity(model, {"tp": 2}, parallelize=columns, inputs=torch.randn(4, 8))
    assert_fine(recording)
    assert list(verdicts(recording)) == [""]
    assert not recording.parity[0].has_backward
    with torch.no_grad():
        assert_fine(parity(MLP(), {"tp": 2}, parallelize=columns, inputs=torch.randn(4, 8)))


def test_a_step_of_the_users_own_is_run():
    def step(model, batch):
        x, y = batch
        nn.functional.mse_loss(model(x), y).backward()

    batch = (torch.randn(4, 8), torch.randn(4, 8))
    recording = parity(MLP(), {"tp": 2}, parallelize=columns, inputs=batch, step=step)
    assert_fine(recording)
    assert list(verdicts(recording)) == ["", "up.weight", "up.bias", "down.weight", "down.bias"]


def test_a_shared_module_and_batch_norm_agree():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.BatchNorm1d(8), MLP()
            self.again = self.mlp

        def forward(self, x):
            return self.again(self.norm(self.mlp(x)))

    recording = parity(
        Shared(),
        {"tp": 2},
        parallelize=lambda model, mesh: columns(model.mlp, mesh) and None,
        inputs=torch.randn(6, 8),
    )
    assert_fine(recording)
    assert {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"} <= set(
        verdicts(recording)
    )


def test_dropout_on_pieces_differs_by_chance_and_is_called_harmless():
    class Dropping(MLP):
        def forward(self, x):
            return self.down(nn.functional.dropout(self.up(x), 0.5, self.training))

    recording = parity(Dropping(), {"tp": 2}, parallelize=columns, inputs=torch.randn(16, 8))
    found = set(verdicts(recording).values())
    assert Agreement.RANDOM in found
    assert found <= {*FINE, Agreement.RANDOM}
    assert [one.severity for one in recording.findings] == [Severity.INFO]


def test_dropout_that_all_ranks_draw_alike_agrees():
    model = nn.Sequential(nn.Dropout(0.5), MLP())
    recording = parity(
        model,
        {"tp": 2},
        parallelize=lambda model, mesh: columns(model[1], mesh) and None,
        inputs=torch.randn(16, 8),
    )
    assert_fine(recording)


def test_lower_precision_is_told_from_an_error_and_may_be_allowed():
    def shard(model, mesh):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    model, x = MLP(16, 64), torch.randn(32, 16)
    recording = parity(model, {"dp": 2}, parallelize=shard, inputs=x)
    assert set(verdicts(recording).values()) == {Agreement.ROUNDED}
    assert {one.suspect for one in recording.parity[0].tensors} == {Suspect.ROUNDING}
    assert [one.severity for one in recording.findings] == [Severity.INFO]
    allowed = parity(model, {"dp": 2}, parallelize=shard, inputs=x, precision=torch.bfloat16)
    assert_fine(allowed)


def test_it_runs_where_an_fp64_reference_cannot_be_had():
    class Stubborn(MLP):
        def forward(self, x):
            if x.dtype is torch.float64:
                raise TypeError("this kernel knows no double precision")
            return super().forward(x)

    recording = parity(Stubborn(), {"tp": 2}, parallelize=columns, inputs=torch.randn(4, 8))
    (found,) = recording.parity
    assert all(one.agreement in FINE for one in found.tensors)
    assert not found.has_exact
    assert "this kernel knows no double precision" in recording.gaps[0].fact


def test_nothing_of_the_callers_is_changed():
    model, tokens = make_model(), make_tokens()
    state = {name: one.clone() for name, one in model.state_dict().items()}
    random = torch.get_rng_state()
    for _ in range(2):
        parity(model, {"tp": 2}, parallelize=tensor_parallel, inputs=tokens)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(tokens, make_tokens())
    assert all(torch.equal(state[name], one) for name, one in model.state_dict().items())
    assert all(type(one) is nn.Parameter and one.grad is None for one in model.parameters())
    assert not dist.is_initialized()
    assert torch.get_default_dtype() is torch.float32


def test_an_exported_program_is_a_model_like_any_other():
    x = torch.randn(4, 8)
    program = torch.export.export(MLP(), (x,))

    def average(model, _):
        for parameter in model.parameters():
            parameter.register_hook(_averaged)

    assert_fine(parity(program, {"dp": 2}, parallelize=average, inputs=(x,)))


def _averaged(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    dist.all_reduce(gradient, dist.ReduceOp.AVG)
    return gradient


class Fused(nn.Module):
    """Queries, keys and values of one weight; a rank's piece has its heads of each."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8, bias=False)
        nn.init.zeros_(self.qkv.bias)
        self.reduce = None

    def forward(self, x):
        q, k, v = (one.unflatten(-1, (-1, 2)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = self.out(y)
        return y if self.reduce is None else self.reduce(y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_in_an_order_of_their_own_are_put_together_as_the_weights_are(dtype):
    def parallelize(model, mesh):
        rank, size = mesh.get_local_rank(), mesh.size()
        for tensor in (model.qkv.weight, model.qkv.bias):
            parts = [one.chunk(size)[rank] for one in tensor.data.chunk(3)]
            tensor.data = torch.cat(parts).clone()
        model.out.weight.data = model.out.weight.data.chunk(size, 1)[rank].clone()
        model.qkv.register_forward_pre_hook(lambda _, x: (Copy.apply(x[0], mesh.get_group()),))
        model.reduce = lambda y: Sum.apply(y, mesh.get_group())

    x = torch.randn(3, 5, 8, dtype=dtype, requires_grad=True)
    assert_fine(parity(Fused().to(dtype), {"tp": 2}, parallelize=parallelize, inputs=x))


def test_a_loss_that_the_model_returns_is_averaged_where_the_batch_is_cut():
    class WithLoss(MLP):
        def forward(self, x):
            y = super().forward(x)
            return {"y": y, "loss": y.square().mean()}

    recording = parity(
        WithLoss(),
        {"dp": 2},
        parallelize=lambda model, mesh: fully_shard(model, mesh=mesh),
        inputs={"x": torch.randn(4, 8)},
        loss=lambda output: output["loss"],
        batch_axes="dp",
    )
    assert_fine(recording)


@pytest.mark.filterwarnings("ignore:.*random.*mesh")
def test_dropout_on_dtensors_differs_by_chance():
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8)

        def forward(self, x):
            return self.down(self.drop(self.up(x)))

    def parallelize(model, mesh):
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        return parallelize_module(model, mesh, plan)

    recording = parity(Dropping(), {"tp": 2}, parallelize=parallelize, inputs=torch.randn(16, 8))
    assert set(verdicts(recording).values()) <= {*FINE, Agreement.RANDOM}
    assert Agreement.RANDOM in verdicts(recording).values()


def test_activation_checkpointing_of_the_parallel_version_changes_nothing():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def parallelize(model, mesh):
        tensor_parallel(model, mesh)
        model.layers[0] = checkpoint_wrapper(model.layers[0])

    assert_fine(parity(make_model(), {"tp": 2}, parallelize=parallelize, inputs=make_tokens()))


def test_compiled_models_are_compared_as_they_were_written():
    model = torch.compile(MLP(), backend="eager")
    recording = parity(
        model,
        {"tp": 2},
        parallelize=lambda model, mesh: (
            columns(dict(model.named_children())["_orig_mod"], mesh) and None
        ),
        inputs=torch.randn(4, 8),
    )
    assert all(one in FINE for one in verdicts(recording).values())


def test_a_model_that_draws_with_numpy_and_python_is_given_the_same_numbers():
    class Drawing(MLP):
        def forward(self, x):
            return super().forward(x) * random.random() * float(numpy.random.rand())

    random.seed(3)
    state = random.getstate()
    assert_fine(parity(Drawing(), {"tp": 2}, parallelize=columns, inputs=torch.randn(4, 8)))
    assert random.getstate() == state


def test_a_step_that_gives_nothing_is_said_to_have_proved_nothing():
    recording = parity(
        MLP(), {"tp": 2}, parallelize=columns, inputs=torch.randn(4, 8), step=lambda *_: None
    )
    assert [one.rule for one in recording.findings] == ["parity-nothing"]


class Experts(nn.Module):
    """Each token goes to the expert that its number says."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({str(index): nn.Linear(8, 8) for index in range(4)})
        self.reduce = None

    def forward(self, x, which):
        y = torch.zeros_like(x)
        for name, expert in self.experts.items():
            y = y + expert(x) * (which == int(name)).unsqueeze(-1)
        return y if self.reduce is None else self.reduce(y)


def test_experts_that_only_some_ranks_have_are_compared_there():
    def parallelize(model, mesh):
        for index in range(4):
            if index % 2 != mesh.get_local_rank():
                del model.experts[str(index)]
        model.reduce = lambda y: Sum.apply(y, mesh.get_group())

    recording = parity(
        Experts(),
        {"ep": 2},
        parallelize=parallelize,
        inputs=(torch.randn(6, 8), torch.randint(0, 4, (6,))),
    )
    assert_fine(recording)
    assert sum(name.startswith("experts") for name in verdicts(recording)) == 8


def test_a_parameter_that_no_rank_has_is_missing():
    def parallelize(model, _):
        del model.experts["3"]

    recording = parity(
        Experts(),
        {"ep": 2},
        parallelize=parallelize,
        inputs=(torch.randn(6, 8), torch.zeros(6, dtype=torch.long)),
    )
    assert_fine(recording)  # its gradient is zero: no token went there
    recording = parity(
        Experts(),
        {"ep": 2},
        parallelize=parallelize,
        inputs=(torch.randn(6, 8), torch.full((6,), 3)),
    )
    assert verdicts(recording)["experts.3.weight"] is Agreement.MISSING
