"""Training steps on ranks against a single device: what is compared, what is wrong, and why."""

import linecache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from parity_models import Row, Sum
from shardscope import parity
from shardscope.errors import ParityError
from shardscope.record import TOLERABLE, TensorKind

WIDTH = 8
X, Y = torch.randn(7, WIDTH), torch.randn(7, WIDTH)  # an odd number of samples: shards are uneven


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def shard(model, mesh):
    return fully_shard(model, mesh=mesh["dp"])


def train(model, batch, optimizer, mesh=None, *, limit=0.1, total=None, loss_count=None):
    """A right step on uneven shards: the loss is divided by the number of elements of all ranks."""
    x, y = batch
    optimizer.zero_grad()
    count = torch.tensor(float(y.numel()))
    if mesh is not None:
        dist.all_reduce(count)
        count /= mesh.size()  # gradients are averaged
    loss = (model(x) - y).square().sum() / (count if loss_count is None else loss_count(y))
    loss.backward()
    norm = nn.utils.clip_grad_norm_(list(model.parameters()), limit)
    if total is not None:
        total(norm)
    optimizer.step()
    logged = loss.detach().clone()
    if mesh is not None:
        dist.all_reduce(logged, op=dist.ReduceOp.AVG)
    return {"loss": logged.item(), "norm": norm}


def compare(parallel_step=train, *, parallelize=shard, single_step=train, **options):
    options = {"optimizer": make_optimizer, "batch_axes": "dp", "inputs": (X, Y)} | options
    return parity(
        build(),
        {"dp": 2},
        parallelize=parallelize,
        train_step=single_step,
        parallel_train_step=parallel_step,
        **options,
    )


def read_line(finding):
    return linecache.getline(__file__, finding.source.line).strip()


def only_finding(recording):
    [finding] = recording.findings
    return finding


def test_all_that_a_right_step_computes_is_compared_in_every_step():
    recording = compare()
    tensors = recording.parity[0].tensors
    assert not recording.findings
    assert {tensor.step for tensor in tensors} == {1, 2}
    assert {tensor.kind for tensor in tensors} == {
        TensorKind.OUTPUT,
        TensorKind.LOSS,
        TensorKind.GRADIENT,
        TensorKind.NORM,
        TensorKind.CLIPPED,
        TensorKind.SETTING,
        TensorKind.STATE,
        TensorKind.UPDATED,
        TensorKind.REPORTED,
    }
    names = {tensor.name for tensor in tensors}
    assert {"lr", "0.weight exp_avg", "returned['loss']", "gradient norm"} <= names


def test_a_loss_divided_by_the_own_number_of_samples_is_blamed_with_its_line():
    def step(model, batch, optimizer, mesh=None):
        return train(model, batch, optimizer, mesh, loss_count=torch.numel)

    finding = only_finding(compare(step))
    assert finding.rule == "parity-scaled"
    assert read_line(finding).startswith("loss = (model(x) - y)")


def test_ranks_that_clip_with_another_limit_are_named_as_such():
    def step(model, batch, optimizer, mesh=None):
        return train(model, batch, optimizer, mesh, limit=0.05)

    finding = only_finding(compare(step))
    assert finding.rule == "parity-clipping"
    assert "Gradients and their norm agree before clipping" in finding.fact


def clip_by_own_norm(model, batch, optimizer, mesh=None):
    x, y = batch
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    local = [
        p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()
    ]
    norm = torch.stack([gradient.square().sum() for gradient in local]).sum().sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
    optimizer.step()


def test_a_norm_of_the_own_shards_is_a_wrong_norm():
    even = {"inputs": (X[:6], Y[:6])}
    finding = only_finding(compare(clip_by_own_norm, single_step=clip_by_own_norm, **even))
    assert finding.rule == "parity-norm"
    assert "from its own shards only" in finding.fact
    assert "clip_grads_with_norm_" in read_line(finding)


def scale_by_own_norm(model, batch, optimizer, mesh=None):
    x, y = batch
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    local = [
        p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()
    ]
    norm = torch.stack([gradient.square().sum() for gradient in local]).sum().sqrt()
    torch._foreach_mul_(local, 0.1 / norm)
    optimizer.step()


def test_a_norm_of_own_shards_is_recognized_where_gradients_are_scaled_by_hand():
    even = {"inputs": (X[:6], Y[:6])}
    finding = only_finding(compare(scale_by_own_norm, single_step=scale_by_own_norm, **even))
    assert finding.rule == "parity-norm"
    assert "computes it from its own shards only" in finding.fact


def test_shards_in_plain_tensors_that_a_norm_does_not_sum_are_named():
    """The norms of DTensors are complete, and both groups are clipped with the common norm."""

    def shard_by_hand(model, mesh):
        parallelize_module(model[0], mesh["dp"], ColwiseParallel())
        model[2] = Row(model[2], mesh["dp"], reduce=Sum, bias="after")

    def step(model, batch, optimizer, mesh=None):
        x, y = batch
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        groups = [list(model[0].parameters()), list(model[2].parameters())]
        norms = [nn.utils.get_total_norm([p.grad for p in group]) for group in groups]
        norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        total = torch.stack(norms).square().sum().sqrt()
        for group in groups:
            nn.utils.clip_grads_with_norm_(group, 0.1, total)
        optimizer.step()

    recording = compare(step, parallelize=shard_by_hand, single_step=step, batch_axes=())
    finding = only_finding(recording)
    assert (finding.rule, finding.subject) == ("parity-norm", "the gradient norm")
    assert "its own shards of 2.weight only, which are not summed over dp" in finding.fact


def test_gradients_that_clipping_changes_on_one_rank_only_agree():
    def step(model, batch, optimizer, mesh=None):
        optimizer.zero_grad()
        (model(batch[0]) - batch[1]).square().mean().backward()
        largest = torch.stack([p.grad.abs().max() for p in model.parameters()]).max()
        if mesh is not None:
            largest = largest.full_tensor()
        nn.utils.clip_grad_value_(model.parameters(), 0.9 * float(largest))
        optimizer.step()

    assert not compare(step, single_step=step, inputs=(X[:6], Y[:6])).findings


@pytest.mark.parametrize("is_of_all", [True, False])
def test_a_quotient_by_a_count_that_is_not_summed_is_a_missing_reduction(is_of_all):
    def report(model, batch, optimizer, mesh=None):
        train(model, batch, optimizer, mesh)
        x, y = batch
        total, count = (model(x) - y).detach().abs().sum(), torch.tensor(float(len(x)))
        if mesh is not None:
            dist.all_reduce(total)
            if is_of_all:
                dist.all_reduce(count)
        return total / count

    recording = compare(report, single_step=report)
    if is_of_all:
        assert not recording.findings
        return
    finding = only_finding(recording)
    assert (finding.rule, finding.subject) == ("parity-missing-reduction", "returned")
    assert "each rank divides by is not summed over dp" in finding.fact


def test_a_norm_that_only_the_factor_of_clipping_shows_is_explained():
    """A program that scales gradients by itself calls nothing that tells its norm."""

    def clip_by_hand(model, batch, optimizer, mesh=None):
        x, y = batch
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        squares = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum()
        if mesh is not None:
            dist.all_reduce(squares)  # DistributedDataParallel's gradients are copies
        factor = min(1.0, 0.1 / (squares.sqrt().item() + 1e-6))
        for parameter in model.parameters():
            parameter.grad.mul_(factor)
        optimizer.step()

    finding = only_finding(
        compare(
            clip_by_hand,
            single_step=clip_by_hand,
            parallelize=lambda model, mesh: DistributedDataParallel(model),
            inputs=(X[:6], Y[:6]),
        )
    )
    assert finding.rule == "parity-norm"
    assert "their norm" not in finding.fact
    assert "are counted 2 times, which is the size of dp" in finding.fact


@pytest.mark.parametrize(
    ("num_rows", "fact"),
    [
        (0, "Rank 1 leaves it as it was, and the single device updates it."),
        (6, "32 of 128 elements are left as they were before the step"),
    ],
)
def test_parameters_that_some_ranks_leave_as_they_were_are_stale(num_rows, fact):
    def average(model, batch, optimizer, mesh=None):
        inner = model if mesh is None else model.module
        optimizer.zero_grad()
        (model(batch[0]) - batch[1]).square().mean().backward()
        optimizer.step()
        rows = slice(num_rows if mesh is not None and mesh.get_rank() else None)
        with torch.no_grad():
            inner[3].weight[rows].lerp_(inner[2].weight[rows], 0.5)

    def build_average():
        model = build()
        model.append(nn.Linear(16, WIDTH).requires_grad_(requires_grad=False))
        model[3].forward = lambda x: x
        return model

    finding = only_finding(
        parity(
            build_average(),
            {"dp": 2},
            parallelize=lambda model, mesh: DistributedDataParallel(model),
            train_step=average,
            optimizer=make_optimizer,
            inputs=(X[:6], Y[:6]),
            batch_axes="dp",
        )
    )
    assert (finding.rule, finding.subject) == ("parity-stale", "3.weight")
    assert fact in finding.fact


def test_an_optimizer_made_before_sharding_holds_stale_parameters():
    def parallelize(model, mesh):
        optimizer = make_optimizer(model)
        for module in model:
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(module.weight.detach().clone())
        return model, optimizer

    def step(model, batch, optimizer, mesh=None):
        x, y = batch
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()

    finding = only_finding(compare(step, parallelize=parallelize, single_step=step, batch_axes=()))
    assert finding.rule == "parity-stale"
    assert "The optimizer of the ranks does not hold 0.weight, 2.weight" in finding.fact


def test_a_learning_rate_of_the_ranks_that_is_scaled_is_named():
    def parallelize(model, mesh):
        model = shard(model, mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2 * mesh.size())

    finding = only_finding(compare(parallelize=parallelize))
    assert "lr is 0.02 on the ranks and 0.01 on the single device" in finding.fact
    assert "a factor of the size of dp" in finding.fact


def test_a_number_that_only_the_log_shows_wrong_is_blamed_by_itself():
    def step(model, batch, optimizer, mesh=None):
        result = train(model, batch, optimizer, mesh)
        total = torch.tensor(7.0)  # of all ranks
        if mesh is not None:
            dist.all_reduce(total)
        return result | {"samples": total.item()}

    finding = only_finding(compare(step, single_step=step))
    assert "The model is trained as on the single device" in finding.fact
    assert finding.subject == "returned['samples']"
    assert read_line(finding) == "dist.all_reduce(total)"  # which computes it


def test_a_step_that_is_parallel_by_itself_needs_no_sharding_function():
    def step(model, batch, optimizer, mesh):
        x, y = batch
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        for parameter in model.parameters() if mesh is not None else ():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=mesh.get_group("dp"))
        optimizer.step()

    recording = compare(step, single_step=step, parallelize=None, inputs=(X[:6], Y[:6]))
    assert all(tensor.agreement in TOLERABLE for tensor in recording.parity[0].tensors)


def test_a_comparison_of_no_step_is_refused():
    with pytest.raises(ParityError, match=r"steps is 0\. Compare at least one"):
        compare(steps=0)
    with pytest.raises(ParityError, match="computes its own loss"):
        compare(loss=torch.sum)


def test_settings_and_weights_that_one_rank_alone_changes_are_out_of_sync():
    def step(model, batch, optimizer, mesh=None):
        result = train(model, batch, optimizer, mesh)
        if mesh is None or mesh.get_rank() == 0:
            optimizer.param_groups[0]["lr"] *= 0.5
        return result

    finding = only_finding(compare(step, single_step=step))
    assert finding.rule == "parity-out-of-sync"
    assert "lr is 0.005 on rank 0, 0.01 on rank 1 and 0.005 on the single device" in finding.fact

    def follow(model, batch, optimizer, mesh=None):
        with torch.no_grad():
            is_right = mesh is None or mesh.get_rank() == 0
            model[2].bias += torch.arange(WIDTH) if is_right else torch.arange(WIDTH).square()

    finding = only_finding(
        compare(follow, single_step=follow, parallelize=None, optimizer=None, batch_axes=())
    )
    assert (finding.rule, finding.subject) == ("parity-out-of-sync", "2.bias")
    assert "matches on rank 0 only" in finding.fact


def test_a_step_that_one_rank_skips_is_stale_and_not_a_matter_of_clipping():
    def step(model, batch, optimizer, mesh=None):
        x, y = batch
        optimizer.zero_grad()
        (model(x) - y).square().mean().mul(2).backward()
        if mesh is None or mesh.get_rank() == 0:
            for parameter in model.parameters():
                parameter.grad /= 2
            optimizer.step()

    even = {"inputs": (X[:6], Y[:6]), "parallelize": None, "batch_axes": ()}
    finding = only_finding(compare(step, single_step=step, **even))
    assert finding.rule == "parity-stale"
    assert "optimizer steps is 1 on rank 0, 0 on rank 1 and 1 on the single device" in finding.fact


def test_a_loss_of_own_samples_is_no_difference_in_steps_before_the_first_wrong_one():
    def step(model, batch, optimizer, mesh=None):
        epoch = int(len(optimizer.state) > 0)
        if mesh is not None:  # takes the first half again in the second step
            batch = [tensor.chunk(2)[mesh.get_rank()] for tensor in batch]
            epoch = 0
        x, y = (tensor.roll(epoch, 0) for tensor in batch)
        optimizer.zero_grad()
        (model(x) * (epoch + 1) - y).square().mean().backward()
        optimizer.step()

    recording = compare(step, single_step=step, batch_axes=(), inputs=(X[:6], Y[:6]))
    wrong = [t for t in recording.parity[0].tensors if t.agreement not in TOLERABLE]
    assert {tensor.step for tensor in wrong} == {2}


def train_on(samples):
    """A step on the samples that a function of the batch, the mesh and the step takes."""

    def step(model, batch, optimizer, mesh=None):
        x, y = samples(batch, mesh, len(optimizer.state))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize(
    ("rank_of", "epoch_of", "rule", "fact"),
    [
        (lambda _: 0, lambda epoch: epoch, "wrong-slice", "Of 4 samples 2 are on no rank"),
        (lambda rank: rank, lambda _: 0, "stale", "get the samples of the step before again"),
        (lambda rank: rank, lambda epoch: 2 * epoch, "unknown", "differs already"),
    ],
)
def test_samples_that_are_not_those_of_the_single_device_are_inputs_that_differ(
    rank_of, epoch_of, rule, fact
):
    def samples(batch, mesh, has_stepped):
        epoch = int(has_stepped > 0)
        if mesh is None:
            return [tensor[:12].split(4)[epoch] for tensor in batch]
        part = slice(rank_of(mesh.get_rank()), None, 2)
        return [tensor[:12].split(4)[epoch_of(epoch)][part] for tensor in batch]

    x = torch.randn(16, WIDTH)
    samples_of = train_on(samples)
    finding = only_finding(
        compare(samples_of, single_step=samples_of, batch_axes=(), inputs=(x, x.roll(1)))
    )
    assert finding.rule == f"parity-{rule}"
    assert finding.subject == "the inputs of the model"
    assert fact in finding.fact
    assert "model(x)" in read_line(finding)


class Shifted(nn.Module):
    """Adds positions, which a caller may pass."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Embedding(8, WIDTH)

    def forward(self, x, positions=None):
        positions = torch.arange(x.shape[1]) if positions is None else positions
        return self.first(x) + self.second(positions)


def test_positions_that_a_rank_passes_and_the_model_would_compute_are_inputs():
    def step(model, x, optimizer, mesh=None):
        optimizer.zero_grad()
        output = model(x) if mesh is None else model(x, torch.arange(x.shape[1]))
        output.square().mean().backward()
        optimizer.step()

    recording = parity(
        Shifted(),
        {"cp": 2},
        parallelize=lambda model, mesh: fully_shard(model, mesh=mesh["cp"]),
        inputs=torch.randn(3, 8, WIDTH),
        train_step=step,
        optimizer=make_optimizer,
        batch_axes="cp",
        batch_dim=1,
    )
    finding = only_finding(recording)
    assert (finding.rule, finding.subject) == ("parity-wrong-slice", "the inputs of the model")
    assert "model(x, torch.arange" in read_line(finding)


def test_rows_that_the_loss_of_ranks_leaves_out_are_counted():
    def step(model, batch, optimizer, mesh=None):
        x, y = batch
        optimizer.zero_grad()
        losses = (model(x) - y).square().mean(-1)
        (losses if mesh is None else losses[:-1]).mean().backward()
        optimizer.step()

    finding = only_finding(compare(step, single_step=step, inputs=(X[:6], Y[:6])))
    assert (finding.rule, finding.subject) == ("parity-stale", "the loss")
    assert "zero in 2 of 6 rows" in finding.fact


def test_an_op_that_only_allocates_is_not_called_the_first_to_differ():
    def step(model, batch, optimizer, mesh=None):
        x, y = batch
        optimizer.zero_grad()
        start = torch.arange(1.0)[0] if mesh is None else torch.zeros(())
        output = model(x)
        output.register_hook(lambda gradient: gradient * (1 if mesh is None else 3))
        (start + (output - y).square().mean()).backward()
        optimizer.step()

    finding = only_finding(compare(step, single_step=step, inputs=(X[:6], Y[:6])))
    assert finding.rule == "parity-scaled"
    assert "zeros" not in finding.fact
