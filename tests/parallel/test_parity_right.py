"""Parallel models that are right agree, whatever they are made of."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.parametrize import register_parametrization

from parity_models import (
    MLP,
    Copy,
    LanguageModel,
    Sum,
    by_hand,
    data_parallel,
    make_tokens,
    reduce_gradients,
    sequence_parallel,
    tensor_and_data_parallel,
    tensor_parallel,
)
from shardscope import Recording, parity
from shardscope.record import FINE, Agreement, Severity, Suspect, TensorKind

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


def verdicts(recording: Recording) -> dict[str, Agreement]:
    (record,) = recording.parity
    return {verdict.name: verdict.agreement for verdict in record.tensors}


def assert_fine(recording: Recording) -> None:
    (record,) = recording.parity
    assert [verdict for verdict in record.tensors if verdict.agreement not in FINE] == []
    assert recording.findings == ()
    assert recording.gaps == ()
    assert record.divergences == ()


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
    (record,) = recording.parity
    kinds = [verdict.kind for verdict in record.tensors]
    assert kinds.count(TensorKind.OUTPUT) == 1
    # The tied weight is compared once.
    assert kinds.count(TensorKind.GRADIENT) == len(list(make_model().parameters()))
    assert "['logits']" in verdicts(recording)


@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 4}])
def test_each_rank_may_have_its_shard_of_the_batch(axes):
    recording = parity(
        make_model(), axes, parallelize=data_parallel, inputs=make_tokens(), batch_axes="dp"
    )
    assert_fine(recording)


def test_the_batch_may_be_sharded_along_the_first_of_two_axes():
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
def test_further_data_parallelisms_average_over_shards_of_the_batch(axes, parallelize):
    recording = parity(
        MLP(), axes, parallelize=parallelize, inputs=torch.randn(8, 8), batch_axes=list(axes)
    )
    assert_fine(recording)


def test_a_loss_on_shards_of_the_vocabulary_agrees():
    """Its context changes DTensor for the entire process, and so for all ranks."""

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


def test_sharded_outputs_are_joined():
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
    """Unused parameters, an unused layer, several outputs, integers, keywords, a buffer."""

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


def test_dropout_on_shards_differs_by_chance_and_is_reported_as_harmless():
    class Dropping(MLP):
        def forward(self, x):
            return self.down(nn.functional.dropout(self.up(x), 0.5, self.training))

    recording = parity(Dropping(), {"tp": 2}, parallelize=columns, inputs=torch.randn(16, 8))
    agreements = set(verdicts(recording).values())
    assert Agreement.RANDOM in agreements
    assert agreements <= {*FINE, Agreement.RANDOM}
    assert [finding.severity for finding in recording.findings] == [Severity.INFO]


def test_dropout_with_the_same_random_numbers_on_all_ranks_agrees():
    model = nn.Sequential(nn.Dropout(0.5), MLP())
    recording = parity(
        model,
        {"tp": 2},
        parallelize=lambda model, mesh: columns(model[1], mesh) and None,
        inputs=torch.randn(16, 8),
    )
    assert_fine(recording)


def test_lower_precision_is_distinguished_from_an_error_and_may_be_allowed():
    def shard(model, mesh):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    model, x = MLP(16, 64), torch.randn(32, 16)
    recording = parity(model, {"dp": 2}, parallelize=shard, inputs=x)
    assert set(verdicts(recording).values()) == {Agreement.ROUNDED}
    assert {verdict.suspect for verdict in recording.parity[0].tensors} == {Suspect.ROUNDING}
    assert [finding.severity for finding in recording.findings] == [Severity.INFO]
    allowed = parity(model, {"dp": 2}, parallelize=shard, inputs=x, precision=torch.bfloat16)
    assert_fine(allowed)


@pytest.mark.parametrize("has_exact", [True, False])
def test_an_output_in_the_dtype_of_mixed_precision_agrees_by_rounding(has_exact):
    class Stubborn(MLP):
        def forward(self, x):
            if x.dtype is torch.float64 and not has_exact:
                raise TypeError("this kernel knows no double precision")
            return super().forward(x)

    def shard(model, mesh):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return fully_shard(model, mesh=mesh["dp"], mp_policy=policy)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Stubborn(16, 64), torch.randn(32, 16)
    recording = parity(model, {"dp": 2}, parallelize=shard, inputs=x, step=run_forward)
    assert verdicts(recording)[""] is Agreement.ROUNDED
    dtype, rounded = recording.findings
    assert (dtype.rule, dtype.severity) == ("parity-dtype", Severity.INFO)
    assert dtype.fact == "The dtype of the output is bfloat16 instead of float32."
    assert "output_dtype=torch.float32" in dtype.remedy
    assert rounded.rule == "parity-rounded"
    assert ("in double precision they agree" in rounded.fact) is has_exact
    # Reductions are in float32 already: advice to change that would be wrong.
    assert "where the ranks compute or reduce in less than float32" in rounded.remedy


def run_forward(model, inputs):
    model(inputs)


def test_it_runs_where_an_fp64_reference_cannot_be_had():
    class Stubborn(MLP):
        def forward(self, x):
            if x.dtype is torch.float64:
                raise TypeError("this kernel knows no double precision")
            return super().forward(x)

    recording = parity(Stubborn(), {"tp": 2}, parallelize=columns, inputs=torch.randn(4, 8))
    (record,) = recording.parity
    assert all(verdict.agreement in FINE for verdict in record.tensors)
    assert not record.has_exact
    assert "this kernel knows no double precision" in recording.gaps[0].fact


def test_the_callers_model_and_state_are_unchanged():
    model, tokens = make_model(), make_tokens()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    for _ in range(2):
        parity(model, {"tp": 2}, parallelize=tensor_parallel, inputs=tokens)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(tokens, make_tokens())
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert all(
        type(parameter) is nn.Parameter and parameter.grad is None
        for parameter in model.parameters()
    )
    assert not dist.is_initialized()
    assert torch.get_default_dtype() is torch.float32


def test_an_exported_program_is_compared_like_a_model():
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
    """Queries, keys and values in one weight; a rank's shard has its heads of each."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8, bias=False)
        nn.init.zeros_(self.qkv.bias)
        self.reduce = None

    def forward(self, x):
        q, k, v = (
            projection.unflatten(-1, (-1, 2)).transpose(1, 2)
            for projection in self.qkv(x).chunk(3, -1)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        y = self.out(y)
        return y if self.reduce is None else self.reduce(y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_of_a_fused_weight_are_joined_part_by_part(dtype):
    def parallelize(model, mesh):
        rank, size = mesh.get_local_rank(), mesh.size()
        for tensor in (model.qkv.weight, model.qkv.bias):
            parts = [part.chunk(size)[rank] for part in tensor.data.chunk(3)]
            tensor.data = torch.cat(parts).clone()
        model.out.weight.data = model.out.weight.data.chunk(size, 1)[rank].clone()
        model.qkv.register_forward_pre_hook(lambda _, x: (Copy.apply(x[0], mesh.get_group()),))
        model.reduce = lambda y: Sum.apply(y, mesh.get_group())

    x = torch.randn(3, 5, 8, dtype=dtype, requires_grad=True)
    assert_fine(parity(Fused().to(dtype), {"tp": 2}, parallelize=parallelize, inputs=x))


def test_a_loss_that_the_model_returns_is_averaged_where_the_batch_is_sharded():
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
    assert all(agreement in FINE for agreement in verdicts(recording).values())


def test_a_model_that_draws_with_numpy_and_python_is_given_the_same_numbers():
    class Drawing(MLP):
        def forward(self, x):
            return super().forward(x) * random.random() * float(numpy.random.rand())

    random.seed(3)
    state = random.getstate()
    assert_fine(parity(Drawing(), {"tp": 2}, parallelize=columns, inputs=torch.randn(4, 8)))
    assert random.getstate() == state


def test_a_step_without_results_is_reported_as_nothing_compared():
    recording = parity(
        MLP(), {"tp": 2}, parallelize=columns, inputs=torch.randn(4, 8), step=lambda *_: None
    )
    assert [finding.rule for finding in recording.findings] == ["parity-nothing"]


class Experts(nn.Module):
    """Each token goes to the expert of its number."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({str(index): nn.Linear(8, 8) for index in range(4)})
        self.reduce = None

    def forward(self, x, which):
        y = torch.zeros_like(x)
        for name, expert in self.experts.items():
            y = y + expert(x) * (which == int(name)).unsqueeze(-1)
        return y if self.reduce is None else self.reduce(y)


def test_experts_are_compared_on_the_ranks_that_have_them():
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


class Tied(nn.Module):
    """An embedding and a head with one weight, outside the layers that a plan shards."""

    def __init__(self, padding: int | None = None, *, is_tied_twice: bool = False) -> None:
        super().__init__()
        self.tok, self.mlp = nn.Embedding(32, 8, padding_idx=padding), MLP()
        self.head, self.again = nn.Linear(8, 32, bias=False), nn.Embedding(32, 8)
        self.head.weight = self.tok.weight
        if is_tied_twice:
            self.again.weight = self.tok.weight

    def forward(self, tokens):
        x = self.tok(tokens)
        return self.head(x + self.mlp(x) + self.again(tokens.flip(1)))


@pytest.mark.parametrize("padding", [None, 0])
@pytest.mark.parametrize("is_tied_twice", [False, True])
@pytest.mark.parametrize(
    "plan",
    [
        {"mlp.up": "colwise", "mlp.down": "rowwise"},
        {"tok": "rowwise", "mlp.up": "colwise", "mlp.down": "rowwise", "head": "colwise"},
    ],
)
def test_tied_weights_agree_under_a_plan(padding, is_tied_twice, plan):
    model = Tied(padding, is_tied_twice=is_tied_twice)
    recording = parity(model, {"tp": 2}, plan, inputs=(make_tokens(),))
    assert_fine(recording)
    gradients = [
        verdict.name for verdict in recording.parity[0].tensors if verdict.kind == "gradient"
    ]
    assert "tok.weight" in gradients
    assert "head.weight" not in gradients  # it is the same tensor


def test_a_tied_weight_may_have_a_single_name_on_the_ranks():
    class Head(nn.Module):
        def __init__(self, tok: nn.Module) -> None:
            super().__init__()
            self.get_weight = lambda: tok.weight

        def forward(self, x):
            return x @ self.get_weight().T

    def parallelize(model, mesh):
        columns(model.mlp, mesh)
        model.head = Head(model.tok)

    assert_fine(parity(Tied(), {"tp": 2}, parallelize=parallelize, inputs=make_tokens()))


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Twice(nn.Module):
    def forward(self, weight):
        return weight * 1


def wrap_in_place(model, _):
    model.up, model.down = Wrapper(Wrapper(model.up)), nn.Sequential(nn.Identity(), model.down)


def wrap_copies(model, _):
    model.up, model.down = Wrapper(copy.deepcopy(model.up)), Wrapper(copy.deepcopy(model.down))


def wrap_all(model, _):
    return Wrapper(Wrapper(model))


def wrap_by_torch(model, _):
    model.up = checkpoint_wrapper(torch.compile(model.up, backend="eager"))
    model.down = DistributedDataParallel(model.down)
    average_gradients(model.up)


def parametrize_weights(model, _):
    register_parametrization(model.up, "weight", Twice())


def move_to_another_class(model, _):
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleDict({"first": model.up, "last": model.down})

        def forward(self, x):
            return self.stages["last"](nn.functional.gelu(self.stages["first"](x)))

    return Other()


def average_gradients(module: nn.Module) -> None:
    reduce_gradients(module, None, dist.ReduceOp.AVG)


class Renamed(nn.Module):
    """Both layers, sharded by hand: the weights in one flat parameter, or transposed."""

    def __init__(self, mlp: MLP, mesh: Any, *, is_flat: bool) -> None:
        super().__init__()
        rank, size, self.group, self.is_flat = mesh.get_local_rank(), mesh.size(), None, is_flat
        self.group = mesh.get_group()
        self.offsets = nn.Parameter(mlp.up.bias.detach().chunk(size)[rank].clone())
        self.offset = nn.Parameter(mlp.down.bias.detach().clone())
        up = mlp.up.weight.detach().chunk(size, 0)[rank]
        down = mlp.down.weight.detach().chunk(size, 1)[rank].T
        self.kernels = nn.Parameter(
            torch.cat([up, down]) if is_flat else torch.stack([up.T, down.T])
        )

    def forward(self, x):
        up, down = self.kernels.chunk(2) if self.is_flat else (kernel.T for kernel in self.kernels)
        y = nn.functional.gelu(Copy.apply(x, self.group) @ up.T + self.offsets)
        return Sum.apply(y @ down, self.group) + self.offset


@pytest.mark.parametrize(
    "parallelize",
    [
        wrap_in_place,
        wrap_copies,
        wrap_all,
        wrap_by_torch,
        parametrize_weights,
        move_to_another_class,
        lambda model, mesh: Renamed(model, mesh, is_flat=True),
        lambda model, mesh: Renamed(model, mesh, is_flat=False),
    ],
)
def test_parameters_are_known_by_what_they_are_not_by_their_names(parallelize):
    recording = parity(MLP(), {"tp": 2}, parallelize=parallelize, inputs=torch.randn(4, 8))
    assert_fine(recording)
    assert list(verdicts(recording)) == ["", "up.weight", "up.bias", "down.weight", "down.bias"]


def test_parameters_that_only_the_parallel_model_has_are_a_gap_not_an_error():
    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.a = nn.Parameter(torch.randn(2, base.in_features))
            self.b = nn.Parameter(torch.zeros(base.out_features, 2))

        def forward(self, x):
            return self.base(x) + x @ self.a.T @ self.b.T

    def parallelize(model, _):
        model.up = Adapted(model.up)

    recording = parity(MLP(), {"tp": 2}, parallelize=parallelize, inputs=torch.randn(4, 8))
    assert recording.findings == ()
    (gap,) = recording.gaps
    assert gap.fact == "only in the parallel model, and not compared: up.a, up.b"


def test_a_parameter_that_becomes_computed_is_a_gap():
    def parallelize(model, _):
        weight_norm(model.up)

    recording = parity(MLP(), {"tp": 2}, parallelize=parallelize, inputs=torch.randn(4, 8))
    assert recording.findings == ()
    assert any("not compared: up.weight" in gap.fact for gap in recording.gaps)


def accumulate(
    num_chunks: int | None = None, *, size: int = 2, is_synced_last: bool = False
) -> Any:
    """A step of several micro-batches, of a given number or size."""

    def step(model, batch):
        chunks = [
            tensor.chunk(num_chunks) if num_chunks else tensor.split(size) for tensor in batch
        ]
        for index, (x, y) in enumerate(zip(*chunks, strict=True)):
            is_last = index == len(chunks[0]) - 1
            if is_synced_last and hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(is_last)
            loss = nn.functional.mse_loss(model(x), y)
            (loss / len(chunks[0])).backward()

    return step


def full_batch_on_a_single_device(model, batch):
    accumulate(2 if dist.is_initialized() else 1)(model, batch)


@pytest.mark.parametrize(
    "step",
    [
        accumulate(2),
        accumulate(4),
        accumulate(size=2),
        accumulate(2, is_synced_last=True),
        full_batch_on_a_single_device,
    ],
)
def test_every_micro_batch_is_compared_however_the_batch_is_divided(step):
    def shard(model, mesh):
        fully_shard(model, mesh=mesh)

    batch = (torch.randn(8, 8), torch.randn(8, 8))
    recording = parity(
        MLP(), {"dp": 2}, parallelize=shard, inputs=batch, step=step, batch_axes="dp"
    )
    assert_fine(recording)
    assert recording.parity[0].tensors[0].shape == (8, 8)  # of all calls


def test_losses_of_micro_batches_and_counts_of_calls_are_no_difference():
    class Counting(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("num_calls", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.num_calls += 1
            y = super().forward(x)
            return {"loss": y.square().mean(), "num_positive": (y > 0).sum(0)}

    def step(model, x):
        for part in x.split(2):
            (model(part)["loss"] * 2 / len(x)).backward()

    def shard(model, mesh):
        fully_shard(model, mesh=mesh)

    recording = parity(
        Counting(),
        {"dp": 2},
        parallelize=shard,
        inputs=torch.randn(8, 8),
        step=step,
        batch_axes="dp",
    )
    assert recording.findings == ()
    (gap,) = recording.gaps
    assert gap.fact.endswith("changed by every call, and not compared: num_calls")


def test_calls_with_different_shapes_are_compared_separately():
    class Lengths(MLP):
        def forward(self, x):
            return super().forward(x).mean(0, keepdim=True) if len(x) > 4 else super().forward(x).T

    def step(model, x):
        for part in (x[:3], x[:4], x):
            model(part).square().mean().backward()

    recording = parity(
        Lengths(), {"tp": 2}, parallelize=columns, inputs=torch.randn(6, 8), step=step
    )
    assert_fine(recording)
    assert {"of call 1", "of call 2", "of call 3"} <= set(verdicts(recording))


class Routed(nn.Module):
    """Each token goes to two experts of four, of which a rank may have the first or the last."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(MLP() for _ in range(4))
        self.first, self.group = 0, None

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        tokens, experts = torch.arange(len(x)).repeat_interleave(2), chosen.flatten()
        order = experts.argsort(stable=True)
        inputs, experts = x[tokens[order]], experts[order]
        if self.group is None:
            y = self._run(inputs, experts)
        else:
            per_rank = 4 // dist.get_world_size(self.group)
            sent = torch.bincount(experts // per_rank, minlength=dist.get_world_size(self.group))
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=self.group)
            sizes = sent.tolist(), received.tolist()
            there = AllToAll.apply(inputs, *sizes, self.group)
            which = AllToAll.apply(experts, *sizes, self.group)
            sort = which.argsort(stable=True)
            y = self._run(there[sort], which[sort])[sort.argsort()]
            y = AllToAll.apply(y, *reversed(sizes), self.group)
        shares = weights.flatten()[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, tokens[order], y * shares)

    def _run(self, x, experts):
        own = enumerate(self.experts, self.first)
        return torch.cat([expert(x[experts == index]) for index, expert in own])


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received, group):
        ctx.sizes, ctx.group = (sent, received), group
        y = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(y, x.contiguous(), received, sent, group=group)
        return y

    @staticmethod
    def backward(ctx, gradient):
        sent, received = ctx.sizes
        x = gradient.new_empty(sum(sent), *gradient.shape[1:])
        dist.all_to_all_single(x, gradient.contiguous(), sent, received, group=ctx.group)
        return x, None, None, None


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("own", [lambda expert: expert, copy.deepcopy])
def test_experts_that_every_rank_counts_from_zero_are_distinguished(num_ranks, own):
    def parallelize(model, mesh):
        per_rank = 4 // num_ranks
        model.first, model.group = mesh.get_local_rank() * per_rank, mesh.get_group()
        experts = model.experts[model.first : model.first + per_rank]
        model.experts = nn.ModuleList(own(expert) for expert in experts)
        average_gradients(model.gate)
        for parameter in model.experts.parameters():
            parameter.register_hook(lambda gradient: gradient / num_ranks)

    recording = parity(
        Routed(),
        {"ep": num_ranks},
        parallelize=parallelize,
        inputs=torch.randn(16, 8),
        loss=lambda y: y.square().mean(),
        batch_axes="ep",
    )
    assert_fine(recording)
    assert sum(name.startswith("experts") for name in verdicts(recording)) == 16


class Causal(nn.Module):
    """Attention with positions; ranks may have a part of the sequence in any order."""

    def __init__(self, *, has_loss: bool = False) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(32, 8), nn.Embedding(16, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 32)
        self.choose, self.gather, self.has_loss = lambda x, dim: x, lambda x, dim: x, has_loss

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1])
        tokens, positions = self.choose(tokens, 1), self.choose(positions, 0)
        q, k, v = self.qkv(self.tok(tokens) + self.pos(positions)).chunk(3, -1)
        k, v, all_positions = self.gather(k, 1), self.gather(v, 1), self.gather(positions, 0)
        mask = all_positions[None, :] <= positions[:, None]
        logits = self.out(nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        return {"logits": logits, "loss": loss} if self.has_loss else logits


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        shards = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shards, x.contiguous(), group=group)
        return torch.cat(shards, dim)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        shards = gradient.chunk(dist.get_world_size(ctx.group), ctx.dim)
        return shards[dist.get_rank(ctx.group)].contiguous(), None, None


def zigzag(x: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    chunks = x.chunk(2 * size, dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim)


def striped(x: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    return x.index_select(dim, torch.arange(rank, x.shape[dim], size))


def contiguous(x: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    return x.chunk(size, dim)[rank]


def context_parallel(order: Any, op: Any = dist.ReduceOp.SUM) -> Any:
    def parallelize(model, mesh):
        axis = mesh["cp"]
        group, rank_and_size = axis.get_group(), (axis.get_local_rank(), axis.size())
        model.choose = lambda x, dim: order(x, dim, *rank_and_size)
        model.gather = lambda x, dim: GatherSequence.apply(x, dim, group)
        reduce_gradients(model, group, op)
        if "dp" in mesh.mesh_dim_names:
            reduce_gradients(model, mesh["dp"].get_group(), dist.ReduceOp.AVG)

    return parallelize


@pytest.mark.parametrize(
    ("order", "axes"),
    [
        (contiguous, {"cp": 2}),
        (zigzag, {"cp": 2}),
        (zigzag, {"cp": 4}),
        (zigzag, {"dp": 2, "cp": 2}),
        (striped, {"cp": 4}),
    ],
)
def test_a_sequence_may_be_sharded_in_the_orders_of_context_parallelism(order, axes):
    tokens = torch.randint(0, 32, (2, 16))
    batch_axes = [axis for axis in axes if axis == "dp"]
    parallelize = context_parallel(order)
    recording = parity(
        Causal(), axes, parallelize=parallelize, inputs=tokens, batch_axes=batch_axes
    )
    assert_fine(recording)


def test_each_rank_may_return_the_loss_of_its_part_of_the_sequence():
    recording = parity(
        Causal(has_loss=True),
        {"cp": 2},
        parallelize=context_parallel(zigzag, dist.ReduceOp.AVG),
        inputs=torch.randint(0, 32, (2, 16)),
        loss=lambda output: output["loss"],
    )
    assert_fine(recording)
    loss = next(verdict for verdict in recording.parity[0].tensors if verdict.name == "['loss']")
    assert loss.detail == "each rank's own; averaged over cp they agree"


def test_ranks_may_take_samples_in_any_order():
    order = torch.tensor([5, 0, 7, 2, 1, 6, 3, 4])

    def step(model, x):
        samples = x[order].chunk(2)[dist.get_rank()] if dist.is_initialized() else x
        model(samples).square().mean().backward()

    recording = parity(MLP(), {"dp": 2}, parallelize=wrap, inputs=torch.randn(8, 8), step=step)
    assert_fine(recording)
    assert recording.parity[0].tensors[0].detail == "agrees, with its samples in another order"


def test_gradients_of_inputs_are_larger_where_each_rank_has_its_shard_of_the_batch():
    recording = parity(
        MLP(),
        {"dp": 2},
        parallelize=lambda model, mesh: fully_shard(model, mesh=mesh),
        inputs=torch.randn(4, 8, requires_grad=True),
        loss=lambda y: y.square().mean(),
        batch_axes="dp",
    )
    assert_fine(recording)
    assert "inputs" in verdicts(recording)


def test_a_pipeline_stage_may_return_nothing_of_the_output():
    class First(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.up = layer

        def forward(self, x):
            return Send.apply(nn.functional.gelu(self.up(x)))

    class Last(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.down = layer

        def forward(self, x):
            return self.down(Receive.apply(x.new_zeros(len(x), 16).requires_grad_()))

    class Send(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.shape = x.shape
            dist.send(x.contiguous(), 1)
            return x.new_zeros(())

        @staticmethod
        def backward(ctx, gradient):
            gradient = gradient.new_empty(ctx.shape)
            dist.recv(gradient, 1)
            return gradient

    class Receive(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x = torch.empty_like(x)
            dist.recv(x, 0)
            return x

        @staticmethod
        def backward(ctx, gradient):
            dist.send(gradient.contiguous(), 0)
            return gradient

    def parallelize(model, mesh):
        return Last(model.down) if mesh.get_local_rank() else First(model.up)

    recording = parity(
        MLP(),
        {"pp": 2},
        parallelize=parallelize,
        inputs=torch.randn(4, 8),
        step=lambda model, x: model(x).square().sum().backward(),
    )
    assert_fine(recording)
    assert recording.parity[0].tensors[0].detail.endswith("the ranks that have the last modules")


class Stages(nn.Module):
    """Layers; a pipeline stage has a part of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): nn.Linear(8, 8) for index in range(4)})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


def keep_stage(model, mesh):
    for index in range(4):
        if index // 2 != mesh.get_local_rank():
            del model.layers[str(index)]


def run_schedule(model, x, *, scale_grads: bool = True):
    """Micro-batches in torch's schedule, which calls stages once more to infer shapes."""
    if not dist.is_initialized():
        for chunk in x.chunk(4):
            (model(chunk).square().mean() / 4).backward()
        return
    rank = dist.get_rank()
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, lambda y, _: y.square().mean(), scale_grads=scale_grads)
    schedule.step(x) if rank == 0 else schedule.step(target=x)


def check_schedule(parallelize, **options):
    return parity(
        Stages(),
        {"pp": 2},
        parallelize=parallelize,
        inputs=torch.randn(8, 8),
        step=partial(run_schedule, **options),
    )


def test_torchs_pipeline_schedule_agrees():
    recording = check_schedule(keep_stage)
    assert_fine(recording)
    assert len(recording.parity[0].tensors) == 9


def test_a_layer_of_a_pipeline_stage_that_is_wrong_is_found():
    def parallelize(model, mesh):
        keep_stage(model, mesh)
        if mesh.get_local_rank():
            with torch.no_grad():
                model.layers["3"].weight.mul_(3)

    (finding,) = check_schedule(parallelize).findings
    assert (finding.rule, finding.subject) == ("parity-scaled", "layers.3")
    assert "layers.3.weight differs already before the step by a factor of 3." in finding.fact


def test_gradients_of_all_stages_that_are_not_divided_by_the_micro_batches_are_found():
    (finding,) = check_schedule(keep_stage, scale_grads=False).findings
    assert (finding.rule, finding.subject) == ("parity-scaled", "all gradients")
    assert "4 is the number of micro-batches." in finding.fact


def test_micro_batches_of_a_zigzag_sequence_may_return_their_own_losses():
    def step(model, tokens):
        for chunk in tokens.chunk(2):
            (model(chunk)["loss"] / 2).backward()

    recording = parity(
        Causal(has_loss=True),
        {"cp": 2},
        parallelize=context_parallel(zigzag, dist.ReduceOp.AVG),
        inputs=torch.randint(0, 32, (4, 16)),
        step=step,
    )
    assert_fine(recording)


def test_parts_of_a_sequence_in_different_orders_are_found():
    def parallelize(model, mesh):
        context_parallel(zigzag)(model, mesh)
        choose = model.choose
        model.choose = lambda x, dim: choose(x, 1) if dim else contiguous(x, 0, mesh.get_rank(), 2)

    recording = parity(
        Causal(), {"cp": 2}, parallelize=parallelize, inputs=torch.randint(0, 32, (2, 16))
    )
    (finding,) = recording.findings
    assert (finding.rule, finding.subject) == ("parity-permuted", "the model itself")
    assert "Its inputs are sharded in different orders: " in finding.fact
