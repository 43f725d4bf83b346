"""Parallel models that are wrong are reported, with the module, the op and the cause."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from parity_models import MLP, LanguageModel, SumBoth, by_hand, make_tokens
from shardscope import Recording, parity
from shardscope.errors import CollectiveError, ParityError, RankError
from shardscope.record import (
    Agreement,
    Divergence,
    Phase,
    RankSpan,
    Suspect,
    TensorKind,
    TensorVerdict,
)


def check(parallelize: Any, model: nn.Module | None = None, *, num_ranks: int = 2, **more: Any):
    torch.manual_seed(1)
    if model is None:
        model, more = LanguageModel(), {"inputs": make_tokens(), **more}
    more.setdefault("inputs", torch.randn(6, 8))
    return parity(model, {"tp": num_ranks}, parallelize=parallelize, **more)


def only_divergence(recording: Recording) -> Divergence:
    assert {finding.severity.value for finding in recording.findings} == {"error"}
    (divergence,) = recording.parity[0].divergences
    assert recording.findings[0].subject == divergence.module
    return divergence


def named(recording: Recording, name: str) -> TensorVerdict:
    return next(verdict for verdict in recording.parity[0].tensors if verdict.name == name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forgotten_reduction_is_found_in_its_module_with_its_op_and_line(dtype):
    torch.manual_seed(1)
    recording = check(
        by_hand(reduce=None), LanguageModel(num_layers=2).to(dtype), inputs=make_tokens()
    )
    divergence = only_divergence(recording)
    assert (divergence.module, divergence.type) == ("layers.1.mlp.down", "Linear")
    assert (divergence.phase, divergence.suspect) == (Phase.FORWARD, Suspect.MISSING_REDUCTION)
    assert "summed over tp they match" in divergence.detail
    assert divergence.op == "aten.mm.default"
    assert divergence.source is not None
    assert divergence.source.file.endswith("parity_models.py")
    assert divergence.source.text.startswith("y = nn.functional.linear(")


def test_a_forgotten_reduction_without_a_bias_is_found_too():
    model = nn.Sequential(nn.Linear(8, 8, bias=False))

    def parallelize(model, mesh):
        weight = model[0].weight.detach().chunk(2, 1)[mesh.get_local_rank()]

        class Part(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(weight.clone())
                self.rank = mesh.get_local_rank()

            def forward(self, x):
                return x.chunk(2, -1)[self.rank] @ self.weight.T

        model[0] = Part()

    divergence = only_divergence(check(parallelize, model))
    assert (divergence.module, divergence.suspect) == ("0", Suspect.MISSING_REDUCTION)
    assert divergence.detail.endswith("summed over tp they match.")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_gradient_that_is_summed_once_too_often_is_as_many_times_too_large(num_ranks):
    recording = check(by_hand(reduce=SumBoth), num_ranks=num_ranks)
    divergence = only_divergence(recording)
    assert (divergence.module, divergence.phase) == ("layers.1.mlp.down", Phase.BACKWARD)
    assert divergence.suspect is Suspect.DOUBLE_REDUCTION
    assert f"It is {num_ranks} times as large as it should be" in divergence.detail
    assert f"{num_ranks} is the size of tp" in divergence.detail
    verdict = named(recording, "layers.1.mlp.down.weight")
    assert verdict.suspect is Suspect.DOUBLE_REDUCTION
    assert verdict.ratio == pytest.approx(num_ranks)
    assert named(recording, "['logits']").agreement is Agreement.CLOSE


def test_a_missing_reduction_in_backward_is_found_in_the_module_that_returns_the_gradient():
    divergence = only_divergence(check(by_hand(copies=False)))
    assert (divergence.module, divergence.phase) == ("layers.1.mlp.up", Phase.BACKWARD)
    assert divergence.suspect is Suspect.MISSING_REDUCTION
    assert "that of the input of `layers.1.mlp.up`" in divergence.detail


def test_a_to_local_that_drops_a_reduction_in_backward_is_found():
    class Scaled(nn.Module):
        """A replicated weight that multiplies each rank's own rows."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8))

        def forward(self, x):
            weight = self.weight
            if isinstance(weight, DTensor):
                weight = weight.to_local()  # grad_placements=[Partial()] is missing
            return x * weight

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.scaled = nn.Linear(8, 8), Scaled()

        def forward(self, x):
            return self.scaled(self.before(x))

    def parallelize(model, mesh):
        weight = distribute_tensor(model.scaled.weight.detach(), mesh, [Replicate()])
        model.scaled.weight = nn.Parameter(weight)
        for parameter in model.before.parameters():
            parameter.register_hook(lambda gradient: _sum(gradient))

    recording = check(parallelize, Model(), batch_axes="tp", loss=lambda y: y.square().sum() / 2)
    # Each rank's loss is over its own rows, without averaging: sums are done by hand.
    assert named(recording, "before.weight").agreement is Agreement.CLOSE
    verdict = named(recording, "scaled.weight")
    assert verdict.agreement is Agreement.RANKS_DISAGREE
    assert verdict.suspect is Suspect.MISSING_REDUCTION


def _sum(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient


@pytest.mark.parametrize(
    ("index", "fact"),
    [
        (
            lambda mesh: 1 - mesh.get_local_rank(),
            "layers.1.mlp.up.weight differs already before the step: of 2 chunks along dim 0, "
            "chunk 1 is where chunk 0 should be",
        ),
        (lambda mesh: 0, "No rank holds layers.1.mlp.up.weight[8:16, :]."),
    ],
)
def test_another_ranks_slice_is_found(index, fact):
    recording = check(by_hand(index=index))
    divergence = only_divergence(recording)
    assert (divergence.module, divergence.suspect) == ("layers.1.mlp.up", Suspect.WRONG_SLICE)
    assert fact in divergence.detail
    weights = [
        verdict for verdict in recording.parity[0].tensors if verdict.kind is TensorKind.PARAMETER
    ]
    assert [verdict.name for verdict in weights] == [
        "layers.1.mlp.up.weight",
        "layers.1.mlp.up.bias",
    ]


def test_a_bias_that_each_rank_adds_before_the_sum_is_found():
    divergence = only_divergence(check(by_hand(bias="before")))
    assert (divergence.module, divergence.suspect) == (
        "layers.1.mlp.down",
        Suspect.DOUBLE_REDUCTION,
    )
    assert "a multiple of the bias, which every rank adds before the reduction" in divergence.detail


def test_shards_gathered_along_another_dim_are_permuted():
    class Transposed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x).T.contiguous()

    def parallelize(model, _):
        model.down = Transposed(model.down)

    model = MLP()
    recording = check(parallelize, model, inputs=torch.randn(8, 8))
    (divergence, *_) = recording.parity[0].divergences
    assert (divergence.module, divergence.suspect) == ("down", Suspect.PERMUTED)
    assert "Its dims are in the order 1, 0." in divergence.detail


def test_different_dropout_seeds_on_a_replicated_value_are_found():
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.drop, self.mlp = nn.Linear(8, 8), nn.Dropout(0.5), MLP()

        def forward(self, x):
            return self.mlp(self.drop(self.before(x)))

    def parallelize(model, mesh):
        plan = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
        torch.manual_seed(100 + mesh.get_local_rank())

    recording = check(parallelize, Dropping(), inputs=torch.randn(32, 8))
    divergence = only_divergence(recording)
    assert (divergence.module, divergence.suspect) == ("drop", Suspect.RANDOMNESS)
    assert "The ranks drew different random numbers" in divergence.detail
    assert divergence.op.startswith("aten.bernoulli_")


def test_an_error_beside_dropout_is_distinguished_from_randomness():
    class Dropping(MLP):
        def forward(self, x):
            return self.down(nn.functional.dropout(self.up(x), 0.5))

    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) * 2

    def parallelize(model, mesh):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
        model.down = Doubled(model.down)

    recording = check(parallelize, Dropping(), inputs=torch.randn(32, 8))
    (divergence, *_) = recording.parity[0].divergences
    assert (divergence.module, divergence.suspect) == ("down", Suspect.DOUBLE_REDUCTION)
    assert named(recording, "").agreement is Agreement.DIFFERS


def test_statistics_of_each_ranks_own_rows_make_buffers_disagree():
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))
    recording = check(lambda model, mesh: fully_shard(model, mesh=mesh), model, batch_axes="tp")
    for name in ("0.running_mean", "0.running_var"):
        verdict = named(recording, name)
        assert (verdict.kind, verdict.agreement) == (TensorKind.BUFFER, Agreement.RANKS_DISAGREE)
    assert named(recording, "0.num_batches_tracked").agreement is Agreement.EQUAL
    assert recording.parity[0].divergences[0].module == "0"


def test_nans_are_found_where_they_begin():
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = 0.0

        def forward(self, x):
            return (x.abs() - self.shift).sqrt()

    model = nn.Sequential(nn.Linear(8, 8), Root(), nn.Linear(8, 8))

    def parallelize(model, _):
        model[1].shift = 0.1

    recording = check(parallelize, model)
    assert named(recording, "").agreement is Agreement.NONFINITE
    divergence = only_divergence(recording)
    assert divergence.module == "1"
    assert "NaN" in divergence.detail


def test_a_tie_that_sharding_breaks_is_found():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
            self.head.weight = self.tok.weight

        def forward(self, tokens):
            return self.head(self.tok(tokens))

    def parallelize(model, _):
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())

    recording = check(parallelize, Tied(), inputs=torch.randint(0, 16, (4, 4)))
    for name in ("tok.weight", "head.weight"):
        assert named(recording, name).suspect is Suspect.BROKEN_TIE
    assert "tok.weight and head.weight were one tensor" in named(recording, "tok.weight").detail
    assert recording.parity[0].divergences[0].suspect is Suspect.BROKEN_TIE


def test_a_gradient_that_no_rank_has_is_missing():
    def parallelize(model, _):
        model.up.weight.requires_grad_(False)

    verdict = named(check(parallelize, MLP()), "up.weight")
    assert (verdict.agreement, verdict.detail) == (
        Agreement.MISSING,
        "no rank has one; the single device does",
    )


def test_a_gradient_that_a_single_rank_lacks_is_missing_there():
    def parallelize(model, mesh):
        if mesh.get_local_rank() == 1:
            model.up.weight.requires_grad_(False)

    verdict = named(check(parallelize, MLP()), "up.weight")
    assert (verdict.agreement, verdict.detail) == (
        Agreement.MISSING,
        "some ranks have none; the single device does",
    )
    assert [tuple(span) for span in verdict.ranks] == [(1,)]


def test_a_dtensor_gradient_that_a_single_rank_lacks_does_not_hang_the_ranks():
    def parallelize(model, mesh):
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if mesh.get_local_rank() == 1:
            model.down.bias.requires_grad_(False)

    assert named(check(parallelize, MLP()), "down.bias").agreement is Agreement.MISSING


def test_a_small_error_that_half_precision_hides_is_found_in_double_precision():
    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) * 1.01

    def parallelize(model, _):
        model.down = Scaled(model.down)

    recording = check(parallelize, MLP().bfloat16(), inputs=torch.randn(6, 8, dtype=torch.bfloat16))
    verdict = named(recording, "")
    assert verdict.agreement is Agreement.DIFFERS
    assert "within the noise of bfloat16, but differs in double precision" in verdict.detail
    (divergence, *_) = recording.parity[0].divergences
    assert (divergence.module, divergence.suspect) == ("down", Suspect.SCALED)


class Chaos(nn.Module):
    """Doubles the error of its input forty times."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.full((8,), 3.9))

    def forward(self, x):
        x = x.sigmoid()
        for _ in range(40):
            x = self.rate * x * (1 - x)
        return x


def test_an_error_that_chaos_hides_is_found_in_double_precision():
    def parallelize(model, _):
        with torch.no_grad():
            model.rate.mul_(1.0001)

    recording = check(parallelize, Chaos())
    assert named(recording, "").agreement is Agreement.DIFFERS
    assert check(lambda *_: None, Chaos()).findings == ()


def test_noise_that_would_let_anything_pass_is_a_finding():
    class Stubborn(Chaos):
        def forward(self, x):
            if x.dtype is torch.float64:
                raise TypeError("no double precision")
            return super().forward(x)

    def parallelize(model, _):
        with torch.no_grad():
            model.rate.mul_(1 + 1e-7)

    (finding,) = check(parallelize, Stubborn()).findings
    assert finding.rule == "parity-noisy"
    assert finding.severity == "warning"


@pytest.mark.parametrize("factor", [1.001, 2.0])
def test_a_wrong_value_in_another_dtype_is_found(factor):
    """In bfloat16 rounding hides a factor of 1.001; double precision reveals it."""

    def parallelize(model, mesh):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(model, mesh=mesh["tp"], mp_policy=policy)
        model.down.register_forward_hook(lambda _, __, y: y * factor)

    recording = check(parallelize, MLP())
    assert named(recording, "").agreement is Agreement.DIFFERS
    severities = {finding.rule: finding.severity for finding in recording.findings}
    assert severities["parity-dtype"] == "info"
    assert "error" in severities.values()
    assert recording.parity[0].divergences[0].module == "down"


def test_an_integer_output_instead_of_floats_is_an_error():
    def parallelize(model, _):
        model.register_forward_hook(lambda _, __, y: y.long())

    def step(model, inputs):
        model(inputs)

    recording = check(parallelize, MLP(), step=step)
    assert named(recording, "").agreement is Agreement.DIFFERS
    assert "error" in {finding.severity for finding in recording.findings}


def test_only_the_rank_whose_shard_of_a_parameter_was_changed_is_named():
    def parallelize(model, mesh):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        if mesh.get_rank() == 1:
            with torch.no_grad():
                local = model.up.weight.to_local()
                local.copy_(local.roll(1, 0))

    recording = check(parallelize, MLP())
    (changed,) = (v for v in recording.parity[0].tensors if v.kind is TensorKind.PARAMETER)
    assert (changed.name, changed.ranks) == ("up.weight", (RankSpan(1, 1),))


def test_outputs_of_another_shape_are_reported():
    class Cut(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)[:, :3]

    def parallelize(model, _):
        model.down = Cut(model.down)

    verdict = named(check(parallelize, MLP()), "")
    assert verdict.agreement is Agreement.RESHAPED
    assert "[6, 3]" in verdict.detail


def test_a_layer_whose_parent_sums_its_partial_sums_is_not_reported():
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.after = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
            self.group = None

        def forward(self, x):
            return self.after(self._sum(self.inner(x)))

        def _sum(self, y):
            return y if self.group is None else SumOnce.apply(y, self.group)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = Parent(), nn.Linear(8, 8)

        def forward(self, x):
            return self.last(self.first(x))

    def parallelize(model, mesh):
        rank = mesh.get_local_rank()
        full = model.first.inner.weight.detach().clone()
        model.first.inner.weight.data = torch.zeros_like(full)
        model.first.inner.weight.data[:, rank * 4 : rank * 4 + 4] = full[:, rank * 4 : rank * 4 + 4]
        model.first.group = mesh.get_group()
        with torch.no_grad():
            model.last.weight.mul_(3)

    recording = check(parallelize, Outer())
    assert only_divergence(recording).module == "last"


class SumOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_weights_may_have_any_form_if_their_results_are_right():
    def parallelize(model, mesh):
        with torch.no_grad():
            model.down.bias.div_(2)
        model.down.register_forward_hook(lambda module, _, output: output + module.bias.detach())

    recording = check(parallelize, MLP())
    assert recording.findings == ()
    assert TensorKind.PARAMETER not in {verdict.kind for verdict in recording.parity[0].tensors}


def test_a_rank_that_raises_is_reported_in_a_sentence_and_all_end():
    def parallelize(model, mesh):
        if mesh.get_local_rank() == 1:
            raise ValueError("no weights for this rank")
        dist.barrier()

    with pytest.raises(RankError, match=r"^rank 1 failed: ValueError: no weights for this rank$"):
        check(parallelize, MLP())
    assert not dist.is_initialized()


def test_ranks_that_deadlock_are_reported_in_one_sentence():
    def parallelize(model, mesh):
        if mesh.get_local_rank() == 1:
            model.register_forward_hook(lambda *_: dist.barrier())

    sentence = "rank 0 waits in the end of its step with .*; rank 1 waits in barrier with"
    with pytest.raises(CollectiveError, match=sentence):
        check(parallelize, MLP())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": 3}, "parity() got int, not a module"),
        ({"model": nn.Linear(2, 2, device="meta")}, "whose weight is on the meta device"),
        ({"model": nn.LazyLinear(2)}, "whose weight has no shape yet"),
        ({"inputs": (torch.ones(2, 2, device="meta"),)}, "inputs[0] on the meta device"),
        ({"mesh": {}}, "which has no axis"),
        ({"mesh": 4}, "which has no axis"),
        ({"batch_axes": "dp"}, "the mesh has the axes tp"),
        ({"parallelize": None}, "neither a plan nor a function"),
        ({"loss": lambda y: y}, "loss returned a tensor of shape [2, 2]"),
        ({"loss": lambda y: 3}, "loss returned 3"),
        ({"inputs": torch.ones(2, 3)}, "fails on a single device (RuntimeError: "),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(change, sentence):
    arguments = {
        "model": nn.Linear(2, 2),
        "mesh": {"tp": 2},
        "inputs": torch.ones(2, 2),
        "parallelize": lambda model, mesh: None,
        **change,
    }
    with pytest.raises(ParityError) as raised:
        parity(arguments.pop("model"), arguments.pop("mesh"), **arguments)
    assert sentence in str(raised.value)
    assert str(raised.value).count(". ") >= 1 or str(raised.value).endswith(".")


@pytest.mark.filterwarnings("ignore")
def test_fsdp1_is_refused():
    def parallelize(model, _):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))

    with pytest.raises(ParityError, match=r"FullyShardedDataParallel \(FSDP1\)"):
        check(parallelize, MLP())


def test_a_model_that_is_sharded_already_is_refused():
    from shardscope import simulate

    with simulate({"tp": 2}) as world:
        model = MLP()
        model.up.weight = nn.Parameter(
            distribute_tensor(model.up.weight.detach(), world.mesh, [Shard(0)])
        )
        with pytest.raises(ParityError, match=r"up\.weight is a DTensor"):
            check(lambda *_: None, model)
