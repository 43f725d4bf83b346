"""Causes that need more evidence than the values of one tensor, beside programs that are right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from parity_models import MLP, Column, Gather, GatherAndReduce, Row, Sum, reduce_gradients
from shardscope import Recording, parity
from shardscope.record import Finding

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")

DIM, NUM_HEADS = 8, 2


class Attention(nn.Module):
    """Attends to all keys and values, which `gather` may fetch from other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.gather: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = functional.scaled_dot_product_attention(q, self.gather(k), self.gather(v))
        return self.o(y.transpose(1, 2).flatten(2))


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(DIM, DIM), Attention()
        self.mlp, self.last = MLP(DIM, 2 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.attention(x)
        return self.last(x + self.mlp(x))


def check(parallelize: Any, mesh: dict[str, int], **options: Any) -> Recording:
    torch.manual_seed(0)
    model = options.pop("model", None) or Model()
    if "step" not in options:
        options.setdefault("loss", lambda y: y.square().mean())
    return parity(model, mesh, parallelize=parallelize, inputs=torch.randn(4, 4, DIM), **options)


def only_finding(recording: Recording) -> Finding:
    (finding,) = recording.findings
    suspects = {tensor.suspect for tensor in recording.parity[0].tensors if tensor.suspect}
    assert {f"parity-{suspect.replace('_', '-')}" for suspect in suspects} == {finding.rule}
    return finding


class GatherSequence(torch.autograd.Function):
    """Gathers shards; backward takes this rank's shard of the gradient, or of its sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, is_summed: bool) -> Tensor:
        ctx.group, ctx.is_summed = group, is_summed
        return Gather.forward(ctx, x, group, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.clone()
        if ctx.is_summed:
            dist.all_reduce(gradient, group=ctx.group)
        return *Gather.backward(ctx, gradient)[:1], None, None


def shard_sequence(model: Model, mesh: Any, *, is_summed: bool) -> None:
    axis = mesh["cp"]
    rank, size, group = axis.get_local_rank(), axis.size(), axis.get_group()
    model.first.register_forward_pre_hook(lambda _, args: (args[0].chunk(size, 1)[rank],))
    model.attention.gather = lambda x: GatherSequence.apply(x, group, is_summed)
    reduce_gradients(model, None, dist.ReduceOp.AVG)


@pytest.mark.parametrize("mesh", [{"cp": 2}, {"dp": 2, "cp": 2}])
def test_gradients_of_keys_and_values_that_context_parallelism_does_not_sum_are_found(
    mesh: dict[str, int],
) -> None:
    batch_axes = [axis for axis in mesh if axis == "dp"]
    right = check(partial(shard_sequence, is_summed=True), mesh, batch_axes=batch_axes)
    assert right.findings == ()
    wrong = check(partial(shard_sequence, is_summed=False), mesh, batch_axes=batch_axes)
    finding = only_finding(wrong)
    assert (finding.rule, finding.subject) == ("parity-missing-reduction", "attention")
    fact = "only the part of it that comes from its own shard of the output of `attention` (dim 1 "
    assert f"{fact}over cp)" in finding.fact
    assert finding.remedy.startswith("Sum it over cp in backward")


@pytest.mark.parametrize("name", ["mlp", "attention"])
def test_a_residual_that_a_wrapper_adds_once_more_is_found(name: str) -> None:
    def parallelize(model: Model, _: Any) -> None:
        setattr(model, name, Residual(getattr(model, name)))

    finding = only_finding(check(parallelize, {"tp": 2}))
    assert (finding.rule, finding.subject) == ("parity-double-reduction", name)
    assert "It is too large by its input, which is added once too often." in finding.fact
    assert finding.remedy.startswith("Add the residual once")


def test_a_residual_that_the_wrapper_drops_is_found() -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), Residual(MLP(DIM, DIM)), nn.Linear(DIM, DIM))

    def parallelize(model: nn.Sequential, _: Any) -> None:
        model[1].forward = model[1].inner.forward

    finding = only_finding(check(parallelize, {"tp": 2}, model=model))
    assert (finding.rule, finding.subject) == ("parity-stale", "1")
    assert "Its input is not added to its output" in finding.fact


class RowBlock(nn.Module):
    """A residual around an MLP whose partial sums are reduced by `reduce`."""

    def __init__(self, block: Residual, mesh: Any, *, num_residuals: int) -> None:
        super().__init__()
        mlp = block.inner
        up = Column(mlp.up, mesh, index=mesh.get_local_rank(), copies=True)
        down = Row(mlp.down, mesh, reduce=None, bias="none")
        self.inner = MLP()
        self.inner.up, self.inner.down = up, down
        self.group, self.num_residuals = mesh.get_group(), num_residuals

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.num_residuals == 1:
            return x + Sum.apply(y, self.group) + self.inner.down.bias
        return Sum.apply(x + y, self.group) + self.inner.down.bias


@pytest.mark.parametrize("num_residuals", [1, 3])
def test_a_residual_that_every_rank_adds_before_the_sum_is_found_in_the_caller(
    num_residuals: int,
) -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), Residual(MLP(DIM, 12)), nn.Linear(DIM, DIM))

    def parallelize(model: nn.Sequential, mesh: Any) -> None:
        model[1] = RowBlock(model[1], mesh, num_residuals=num_residuals)

    recording = check(parallelize, {"tp": 3}, model=model)
    if num_residuals == 1:
        assert recording.findings == ()
        return
    finding = only_finding(recording)
    assert (finding.rule, finding.subject) == ("parity-double-reduction", "1")
    assert "added 2 times too often, as if each rank of tp added it before a sum" in finding.fact


def accumulate(
    model: nn.Module, x: Tensor, *, num_clears: int, is_late: bool, is_set_to_none: bool = True
) -> None:
    chunks = x.chunk(2) if dist.is_initialized() else [x]
    for index, chunk in enumerate(chunks):
        if index < num_clears and not is_late:
            model.zero_grad(set_to_none=is_set_to_none)
        y = model(chunk)
        if index < num_clears and is_late:  # after forward
            model.zero_grad(set_to_none=is_set_to_none)
        (y.square().mean() / len(chunks)).backward()


@pytest.mark.parametrize(
    ("parallelize", "is_late"),
    [
        (lambda model, mesh: None, False),
        (lambda model, mesh: None, True),
        (fully_shard, False),  # after forward, its parameters are not those with gradients
    ],
)
def test_gradients_that_are_cleared_between_micro_batches_are_found(
    parallelize: Any, is_late: bool
) -> None:
    def shard(model: nn.Module, mesh: Any) -> None:
        parallelize(model, mesh=mesh)

    def step(num_clears: int, *, is_set_to_none: bool = True) -> Any:
        return partial(
            accumulate, num_clears=num_clears, is_late=is_late, is_set_to_none=is_set_to_none
        )

    assert check(shard, {"dp": 2}, step=step(1)).findings == ()
    finding = only_finding(check(shard, {"dp": 2}, step=step(2, is_set_to_none=is_late)))
    assert (finding.rule, finding.subject) == ("parity-stale", "all gradients")
    fact = "Gradients are cleared between two backward passes of the step once on the ranks and "
    assert f"Outputs agree. {fact}never on the single device" in finding.fact
    assert finding.remedy.startswith("Call zero_grad() once before the first micro-batch")


def test_a_step_of_several_updates_may_clear_gradients_between_them() -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    recording = check(lambda model, _: None, {"tp": 2}, step=step)
    assert (recording.findings, recording.gaps) == ((), ())

    def parallelize(model: Model, _: Any) -> None:
        model.last.weight.register_hook(lambda gradient: 2 * gradient)

    def update_once(model: nn.Module, x: Tensor) -> None:
        model(x).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    finding = only_finding(check(parallelize, {"tp": 2}, step=update_once))
    assert (finding.rule, finding.subject) == ("parity-double-reduction", "last")


@pytest.mark.parametrize("is_set_to_none", [True, False])
def test_a_step_that_clears_its_gradients_at_the_end_leaves_a_gap(*, is_set_to_none: bool) -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        model(x).square().mean().backward()
        model.zero_grad(set_to_none=is_set_to_none)

    recording = check(lambda model, _: None, {"tp": 2}, step=step)
    (gap,) = recording.gaps
    assert gap.place == "gradients"
    assert gap.fact.startswith("not compared: the step runs backward, but no gradient is left")
    assert "zero_grad()" in gap.fact
    forward_only = check(lambda model, _: None, {"tp": 2}, step=lambda model, x: model(x))
    assert forward_only.gaps == ()


class GatheredWeight(nn.Module):
    """A layer whose weight is sharded over dp, and its gradient over `axis`."""

    def __init__(self, layer: nn.Linear, mesh: Any, axis: str) -> None:
        super().__init__()
        self.groups = mesh["dp"].get_group(), mesh[axis].get_group()
        own = layer.weight.detach().chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
        self.weight, self.bias = nn.Parameter(own.clone()), layer.bias

    def forward(self, x: Tensor) -> Tensor:
        weight = GatherAndReduce.apply(self.weight, self.groups[0], 0, self.groups[1])
        return functional.linear(x, weight, self.bias)


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_a_reduce_scatter_of_a_gradient_over_the_wrong_group_is_found(axis: str) -> None:
    """Each rank of dp has its shard of the batch, so that ranks have different gradients."""

    def parallelize(model: Model, mesh: Any) -> None:
        weight = model.mlp.up.weight
        model.mlp.up = GatheredWeight(model.mlp.up, mesh, axis)
        own = model.mlp.up.weight
        assert weight.shape != own.shape
        for parameter in model.parameters():
            if parameter is not own:
                reduce_gradients(nn.ParameterList([parameter]), mesh["dp"].get_group(), _AVG)

    recording = check(parallelize, {"dp": 2, "tp": 2}, batch_axes="dp")
    if axis == "dp":
        assert recording.findings == ()
        return
    finding = only_finding(recording)
    assert (finding.rule, finding.subject) == ("parity-wrong-group", "mlp.up")
    assert "It is reduced and scattered over tp instead of dp" in finding.fact
    assert finding.remedy == "Pass the process group of dp to the collective."


_AVG = dist.ReduceOp.AVG


class ReduceScatter(torch.autograd.Function):
    """Sums a value and takes this rank's shard of the sequence; gathers the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = Sum.forward(ctx, x, group)
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        return total.chunk(size, 1)[rank].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        shards = [torch.empty_like(gradient) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(shards, gradient.contiguous(), group=ctx.group)
        return torch.cat(shards, 1), None


class ScatteredMLP(nn.Module):
    """Reduce-scatters partial sums along the sequence over one axis, and gathers over another."""

    def __init__(self, mlp: MLP, mesh: Any, axes: tuple[str, str]) -> None:
        super().__init__()
        axis = mesh["tp"]
        self.up = Column(mlp.up, axis, index=axis.get_local_rank(), copies=True)
        self.down = Row(mlp.down, axis, reduce=None, bias="none")
        self.groups = tuple(mesh[name].get_group() for name in axes)

    def forward(self, x: Tensor) -> Tensor:
        shard = ReduceScatter.apply(self.down(functional.gelu(self.up(x))), self.groups[0])
        return Gather.apply(shard, self.groups[1], 1) + self.down.bias


@pytest.mark.parametrize(
    ("axes", "fact"),
    [
        (("tp", "tp"), ""),
        (("dp", "tp"), "The output of `mlp` is reduced and scattered over dp instead of tp"),
        (("dp", "dp"), "The output of `mlp` is summed over dp instead of tp"),
    ],
)
def test_partial_sums_that_the_caller_reduces_over_the_wrong_group_are_found_there(
    axes: tuple[str, str], fact: str
) -> None:
    def parallelize(model: Model, mesh: Any) -> None:
        model.mlp = ScatteredMLP(model.mlp, mesh, axes)

    recording = check(parallelize, {"dp": 2, "tp": 2})
    if not fact:
        assert recording.findings == ()
        return
    finding = only_finding(recording)
    assert (finding.rule, finding.subject) == ("parity-wrong-group", "mlp")
    assert fact in finding.fact
    assert finding.remedy == "Pass the process group of tp to the collective."


def shard_mlp(model: Model, mesh: Any) -> None:
    axis = mesh["tp"]
    model.mlp.up = Column(model.mlp.up, axis, index=axis.get_local_rank(), copies=True)
    model.mlp.down = Row(model.mlp.down, axis, reduce=Sum, bias="after")


@pytest.mark.parametrize(
    ("op", "verb"), [(dist.ReduceOp.AVG, "averaged"), (dist.ReduceOp.SUM, "summed")]
)
def test_gradients_of_shards_that_are_reduced_over_the_axis_that_shards_them_are_found(
    op: Any, verb: str
) -> None:
    """DDP over all ranks does so with layers that are sharded by hand."""

    def parallelize(model: Model, mesh: Any) -> None:
        shard_mlp(model, mesh)
        reduce_gradients(model, mesh["dp"].get_group(), _AVG)
        sharded = nn.ParameterList([*model.mlp.up.parameters(), model.mlp.down.weight])
        reduce_gradients(sharded, mesh["tp"].get_group(), op)

    finding = only_finding(check(parallelize, {"dp": 2, "tp": 2}, batch_axes="dp"))
    assert (finding.rule, finding.subject) == ("parity-wrong-group", "mlp")
    assert f"Each is {verb} over tp, although each rank of tp has another shard" in finding.fact
    assert "not over tp: give DDP or the all-reduce another process group" in finding.remedy


@pytest.mark.parametrize(
    ("axis", "fact"),
    [
        ("tp", ""),
        ("dp", "Its partial sums are summed over dp instead of tp."),
        (None, "Its partial sums are summed over dp and tp instead of tp."),
    ],
)
def test_partial_sums_that_are_reduced_over_other_samples_are_found(
    axis: str | None, fact: str
) -> None:
    def parallelize(model: Model, mesh: Any) -> None:
        shard_mlp(model, mesh)
        model.mlp.down.group = None if axis is None else mesh[axis].get_group()
        reduce_gradients(model, mesh["dp"].get_group(), _AVG)

    recording = check(parallelize, {"dp": 2, "tp": 2}, batch_axes="dp")
    if not fact:
        assert recording.findings == ()
        return
    finding = only_finding(recording)
    assert (finding.rule, finding.subject) == ("parity-wrong-group", "mlp.down")
    assert fact in finding.fact
    assert finding.remedy == "Pass the process group of tp to the collective."


def test_a_mean_over_each_ranks_own_features_is_to_be_averaged_and_not_its_consumer() -> None:
    class LocalNorm(nn.Module):
        def __init__(self, norm: nn.RMSNorm, mesh: Any) -> None:
            super().__init__()
            self.weight, self.group = norm.weight, mesh.get_group()
            self.rank, self.size = mesh.get_local_rank(), mesh.size()

        def forward(self, x: Tensor) -> Tensor:
            own, weight = (tensor.chunk(self.size, -1)[self.rank] for tensor in (x, self.weight))
            return Gather.apply(functional.rms_norm(own, own.shape[-1:], weight), self.group, -1)

    def parallelize(model: nn.Sequential, mesh: Any) -> None:
        model[1] = LocalNorm(model[1], mesh)

    model = nn.Sequential(nn.Linear(DIM, DIM), nn.RMSNorm(DIM))
    finding = only_finding(check(parallelize, {"tp": 2}, model=model))
    assert (finding.rule, finding.subject) == ("parity-missing-reduction", "1")
    assert finding.remedy == (
        "Average the result of aten.mean.dim over tp with an all-reduce before it is used."
    )


def test_gradients_that_fsdp_never_synchronises_have_a_remedy_that_says_so() -> None:
    def step(model: nn.Module, x: Tensor) -> None:
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(False)
        model(x).square().mean().backward()

    finding = only_finding(
        check(lambda model, mesh: fully_shard(model, mesh=mesh), {"dp": 2}, step=step)
    )
    assert (finding.rule, finding.subject) == ("parity-stale", "all gradients")
    assert "before set_requires_gradient_sync(True)" in finding.remedy


@pytest.mark.parametrize(
    ("num_layers", "subject"), [(2, "layers.0.up, layers.1.up"), (4, "layers.*.up")]
)
def test_modules_of_wrong_layers_are_named_and_not_the_module_list(
    num_layers: int, subject: str
) -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(MLP() for _ in range(num_layers))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    def parallelize(model: Stack, mesh: Any) -> None:
        for layer in model.layers:
            reduce_gradients(layer.down, mesh.get_group(), _AVG)

    finding = only_finding(check(parallelize, {"dp": 2}, model=Stack(), batch_axes="dp"))
    assert (finding.rule, finding.subject) == ("parity-missing-reduction", subject)


def test_gradients_that_are_summed_over_another_axis_than_the_batch_are_found() -> None:
    recording = check(
        lambda model, mesh: reduce_gradients(model, mesh["tp"].get_group(), dist.ReduceOp.SUM),
        {"dp": 2, "tp": 2},
        batch_axes="dp",
    )
    finding = only_finding(recording)
    assert (finding.rule, finding.subject) == ("parity-wrong-group", "all gradients")
    assert "Every gradient is summed over tp and not reduced over dp" in finding.fact


def test_a_gradient_that_is_only_noise_is_reported_with_the_wrong_gradients() -> None:
    """A softmax does not depend on the bias of keys: its gradients sum to zero over the ranks."""

    def parallelize(model: Model, mesh: Any) -> None:
        shard_sequence(model, mesh, is_summed=True)
        for layer in (model.attention.k, model.attention.v):
            for parameter in layer.parameters():
                parameter._backward_hooks.clear()

    finding = only_finding(check(parallelize, {"cp": 2}))
    assert (finding.rule, finding.subject) == ("parity-missing-reduction", "attention")
    assert "and 1 more differ" in finding.fact
