"""What trainers do around a step: inner losses, buffers of gradients, wrappers, samplers."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from parity_models import MLP, Column, Row, Sum
from shardscope import parity
from shardscope.record import TOLERABLE, Severity, TensorKind

WIDTH, NUM_MICRO = 8, 2
X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


class Attached(torch.autograd.Function):
    """Returns a tensor, and in backward starts that of a loss."""

    scale = 1.0

    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.full((), Attached.scale, dtype=gradient.dtype)


class Gated(nn.Module):
    """A layer with a gate, which a loss inside keeps small."""

    def __init__(self):
        super().__init__()
        self.gate, self.layer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        gate = self.gate(x).sigmoid()
        return self.layer(x) * Attached.apply(gate, gate.square().mean())


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Gated())


def make_optimizer(model):
    parameters = [getattr(p, "main_param", p) for p in model.parameters()]
    return torch.optim.AdamW(parameters, lr=1e-2)


def train(model, batch, optimizer):
    Attached.scale = 1.0
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    model.zero_grad()


def compare(parallelize, rank_step=train, batch_axes="dp"):
    return parity(
        make_model(),
        {"dp": 2},
        parallelize=parallelize,
        inputs=X,
        train_step=train,
        parallel_train_step=rank_step,
        optimizer=make_optimizer,
        batch_axes=batch_axes,
    )


@pytest.mark.parametrize("scale", [1 / NUM_MICRO, 1.0])
def test_a_loss_inside_a_module_has_to_be_divided_by_the_number_of_micro_batches(scale):
    def step(model, batch, optimizer):
        Attached.scale = scale
        for micro in batch.chunk(NUM_MICRO):
            (model(micro).square().mean() / NUM_MICRO).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        model.zero_grad()

    findings = compare(lambda model, mesh: model, step).findings
    if scale == 1 / NUM_MICRO:
        assert findings == ()
        return
    assert (findings[0].subject, findings[0].rule) == ("2", "parity-scaled")
    fact = "a loss that starts inside `2`, such as one that balances experts, is 2 times what it "
    assert fact + "should be, and 2 is the size of dp and the number of micro-batches" in (
        findings[0].fact
    )


@pytest.mark.parametrize("is_right", [True, False])
def test_gradients_that_hooks_move_into_shards_are_explained_by_micro_batch(is_right):
    """As ZeRO does: the optimizer holds shards that share memory with the parameters."""

    def parallelize(model, mesh):
        def reduce(parameter):
            scaled = parameter.grad if is_right else parameter.main_grad
            scaled.mul_(1 / mesh.size())
            dist.all_reduce(parameter.grad)
            parts = parameter.grad.flatten().chunk(mesh.size())
            parameter.main_grad += parts[mesh.get_local_rank()]
            parameter.grad = None

        for parameter in model.parameters():
            shard = parameter.detach().flatten().chunk(mesh.size())[mesh.get_local_rank()]
            parameter.main_param = nn.Parameter(shard)
            parameter.main_grad = torch.zeros_like(shard)
            parameter.register_post_accumulate_grad_hook(reduce)

    def step(model, batch, optimizer):
        for micro in batch.chunk(NUM_MICRO):
            Attached.scale = 1 / NUM_MICRO
            (model(micro).square().mean() / NUM_MICRO).backward()
        for parameter in model.parameters():
            parameter.main_param.grad = parameter.main_grad
        optimizer.step()
        for parameter in model.parameters():
            parameter.main_grad.zero_()
            parts = [torch.empty_like(parameter.main_param) for _ in range(2)]
            dist.all_gather(parts, parameter.main_param.detach())
            parameter.data.copy_(torch.cat(parts).view_as(parameter))

    recording = compare(parallelize, step)
    gap = "not compared where the optimizers of the ranks hold other tensors"
    assert any(gap in str(entry.fact) for entry in recording.gaps)
    assert not any(t.kind is TensorKind.STATE for t in recording.parity[0].tensors)
    if is_right:
        assert recording.findings == ()
        return
    [finding] = recording.findings
    assert (finding.subject, finding.rule) == ("all gradients", "parity-scaled")
    assert "micro-batches are multiplied by different factors: 1, 2" in finding.fact


def test_parameters_that_replace_those_that_ddp_has_hooked_are_named():
    def parallelize(model, mesh):
        wrapped = DistributedDataParallel(model)
        model.load_state_dict({n: p.clone() for n, p in model.state_dict().items()}, assign=True)
        return wrapped

    [finding] = compare(parallelize).findings
    assert (finding.subject, finding.rule) == ("all gradients", "parity-lost-hook")
    assert "these parameters have replaced others since the model was wrapped" in finding.fact


def test_an_optimizer_of_old_parameters_is_found_though_gradients_are_cleared_at_the_end():
    def parallelize(model, mesh):
        optimizer = make_optimizer(model)
        return fully_shard(model, mesh=mesh["dp"]), optimizer

    [finding] = compare(parallelize).findings
    assert finding.rule == "parity-stale"
    assert "it was given other tensors, such as those from before the model was sharded" in (
        finding.fact
    )


@pytest.mark.parametrize("is_right", [True, False])
def test_samples_that_ranks_shuffle_differently_are_found(is_right):
    def step(model, batch, optimizer, mesh):
        rank = mesh.get_local_rank()
        generator = torch.Generator().manual_seed(3 if is_right else 3 + rank)
        mine = torch.randperm(len(batch), generator=generator)[rank :: mesh.size()]
        train(model, batch[mine], optimizer)

    recording = compare(lambda model, mesh: DistributedDataParallel(model), step, batch_axes=())
    assert recording.gaps == ()  # it runs in double precision, with the same order
    if is_right:
        assert recording.findings == ()
        return
    [finding] = recording.findings
    assert (finding.subject, finding.rule) == ("the inputs of the model", "parity-wrong-slice")
    assert "are on no rank" in finding.fact


@pytest.mark.parametrize("is_right", [True, False])
def test_gradients_that_a_rank_counts_in_no_norm_and_does_not_clip_are_named(is_right):
    def make_step(clips):
        def step(model, batch, optimizer):
            Attached.scale = 1.0
            model(batch).square().mean().backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            for index, parameter in enumerate(model.parameters()):
                parameter.grad.mul_(0.1 / norm if clips(index) else 1.0)
            optimizer.step()
            model.zero_grad()

        return step

    recording = parity(
        make_model(),
        {"tp": 2},
        parallelize=lambda model, mesh: model,
        inputs=X,
        train_step=make_step(lambda index: True),
        parallel_train_step=make_step(lambda index: is_right or dist.get_rank() == 0 or index > 0),
        optimizer=make_optimizer,
    )
    if is_right:
        assert recording.findings == ()
        return
    [finding] = recording.findings
    assert (finding.subject, finding.rule) == ("gradient clipping", "parity-clipping")
    assert "Rank 1 does not clip 0.weight." in finding.fact


class Centered(nn.Module):
    """Has a bias without effect: its gradient is only noise."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.layer(x)
        return y - y.mean(0)


def test_a_gradient_that_is_only_noise_may_be_larger_in_half_precision():
    def parallelize(model, mesh):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        return fully_shard(model, mesh=mesh["dp"], mp_policy=policy)

    def step(model, batch, optimizer):
        model(batch).float().pow(4).mean().backward()
        optimizer.step()

    torch.manual_seed(0)
    recording = parity(
        Centered(),
        {"dp": 2},
        parallelize=parallelize,
        inputs=X,
        train_step=step,
        optimizer=make_optimizer,
        precision=torch.bfloat16,
    )
    [bias] = [t for t in recording.parity[0].tensors if (t.name, t.step) == ("layer.bias", 1)][:1]
    assert bias.noise > 1.0  # relative to a gradient that is zero but for rounding
    assert bias.error > 1.0
    assert bias.agreement in TOLERABLE
    assert {finding.severity for finding in recording.findings} <= {Severity.INFO}


class Following(torch.optim.Optimizer):
    """Moves a parameter along a direction that depends on all elements of its gradient."""

    def __init__(self, parameters, direction):
        super().__init__(parameters, {"lr": 0.1})
        self.direction = direction

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(self.direction(parameter.grad), alpha=0.1)


def shard_mlp(model, mesh):
    model.up = Column(model.up, mesh["tp"], index=mesh.get_local_rank(), copies=True)
    model.down = Row(model.down, mesh["tp"], reduce=Sum, bias="after")


@pytest.mark.parametrize(
    ("direction", "rule", "fact"),
    [
        (lambda g: g / g.norm(), "scaled", "Each rank multiplies the update of its shard by"),
        (lambda g: g.flatten().cumsum(0).view_as(g), "missing-reduction", "are sharded over tp"),
    ],
    ids=["norm", "sum"],
)
def test_an_update_that_needs_the_entire_parameter_is_no_factor(direction, rule, fact):
    def step(model, batch, optimizer):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    torch.manual_seed(0)
    [finding] = parity(
        MLP(),
        {"tp": 2},
        parallelize=shard_mlp,
        inputs=X,
        train_step=step,
        optimizer=lambda model: Following(model.parameters(), direction),
    ).findings
    assert finding.rule == f"parity-{rule}"
    assert "up.weight" in finding.subject
    assert fact in finding.fact


@pytest.mark.parametrize("is_clipped", [True, False])
def test_what_changes_gradients_after_backward_is_named(is_clipped):
    """Maxima that are added where gradients are clipped, and gradients that are reduced twice."""

    def step(model, batch, optimizer, mesh=None):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        if is_clipped:
            largest = max(p.grad.abs().max() for p in model.parameters())
            if mesh is not None:
                dist.all_reduce(largest)
            for parameter in model.parameters():
                parameter.grad *= 1e-3 / largest
        elif mesh is not None:
            dist.all_reduce(model.down.bias.grad)
        optimizer.step()

    torch.manual_seed(0)
    [finding] = parity(
        MLP(),
        {"tp": 2},
        parallelize=shard_mlp,
        inputs=X,
        train_step=step,
        parallel_train_step=step,
        optimizer=make_optimizer,
    ).findings
    if is_clipped:
        assert (finding.rule, finding.subject) == ("parity-norm", "gradient clipping")
        assert "it is the sum of what each rank has as its largest element" in finding.fact
    else:
        assert (finding.rule, finding.subject) == ("parity-double-reduction", "down")
        assert "when the optimizer takes them, down.bias differs. Each is 2 times" in finding.fact


def test_a_norm_that_takes_shards_for_copies_names_them():
    def step(model, batch, optimizer, mesh=None):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        counted = list(model.parameters())
        if mesh is not None and mesh.get_local_rank():
            counted = [model.up.weight, model.down.weight]  # and not the shard of up.bias
        square = torch.stack([p.grad.square().sum() for p in counted]).sum()
        if mesh is not None:
            dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(model.parameters(), 1e-3, square.sqrt())
        optimizer.step()

    torch.manual_seed(0)
    [finding] = parity(
        MLP(),
        {"tp": 2},
        parallelize=shard_mlp,
        inputs=X,
        train_step=step,
        parallel_train_step=step,
        optimizer=make_optimizer,
    ).findings
    assert (finding.rule, finding.subject) == ("parity-norm", "the gradient norm")
    assert "The norm lacks gradients of up.bias: only rank 0 counts its own" in finding.fact


def test_a_state_that_is_restored_to_another_parameter_is_named():
    def step(model, batch, optimizer, mesh=None):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        if mesh is not None and optimizer.state:
            saved = optimizer.state_dict()
            state = saved["state"]
            saved["state"] = state | {0: state[2], 2: state[0]}  # two weights of one shape
            optimizer.load_state_dict(saved)
        optimizer.step()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    options = {"train_step": step, "parallel_train_step": step, "optimizer": make_optimizer}
    [finding] = parity(model, {"dp": 2}, inputs=X, parallelize=lambda *_: None, **options).findings
    assert finding.rule == "parity-permuted"
    assert "state exp_avg of 0.weight is that of 1.weight" in finding.fact
