"""Typical mistakes in sharding a model, each beside a program that is right.

Every mistake must be found with its cause and its module; the programs that are right must pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from parity_models import Column, Copy, Gather, GatherAndReduce, Row, Scatter, Sum, reduce_gradients
from shardscope import Recording, parity
from shardscope.parallel.equivalence import OriginalNames
from shardscope.parallel.parity.probe import OpProbe, ProbePoint, Role
from shardscope.record import Phase, Suspect

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional:FutureWarning"),
]

DIM, NUM_HEADS, VOCABULARY, LENGTH, BATCH = 16, 4, 32, 6, 8


class Attention(nn.Module):
    """With a number of heads that sharding has to divide."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM) for _ in range(4))
        self.num_heads = NUM_HEADS

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.num_heads, -1).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(functional.gelu(self.up(x))))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(DIM), Attention()
        self.norm2, self.mlp = nn.LayerNorm(DIM), FeedForward(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, *, is_tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.emb, self.block = nn.Embedding(VOCABULARY, DIM), Block(dropout)
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.emb(tokens))))


TOKENS = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
LABELS = TOKENS.roll(-1, 1)


def make_model(**options: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(**options)


def cross_entropy(logits: Tensor) -> Tensor:
    """The mean over the samples of this rank, or over all samples on a single device."""
    labels = LABELS
    if len(logits) < BATCH:
        labels = LABELS.chunk(BATCH // len(logits))[dist.get_rank()]
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def check(
    parallelize: Any, mesh: dict[str, int], *, model: Any = None, **options: Any
) -> Recording:
    options.setdefault("loss", cross_entropy if "step" not in options else None)
    return parity(
        make_model() if model is None else model,
        mesh,
        parallelize=parallelize,
        inputs=options.pop("inputs", TOKENS),
        **options,
    )


def tensor_parallel(model: GPT, mesh: Any, *, divide_heads: bool = True) -> None:
    styles = {
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.o": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    parallelize_module(model.block, mesh["tp"], styles)
    if divide_heads:
        model.block.attention.num_heads //= mesh["tp"].size()


def fully_sharded(model: GPT, mesh: Any) -> None:
    fully_shard(model.block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def assert_agrees(recording: Recording) -> None:
    assert [(finding.rule, finding.subject, finding.fact) for finding in recording.findings] == []
    assert recording.parity[0].divergences == ()


def assert_divergence(
    recording: Recording, module: str | None, suspect: Suspect, *facts: str
) -> None:
    """Expect one finding with this cause, in this module or none, and no other suspect."""
    (finding,) = recording.findings
    record = recording.parity[0]
    assert finding.rule == f"parity-{suspect.replace('_', '-')}", finding
    assert [divergence.module for divergence in record.divergences] == (
        [] if module is None else [module]
    )
    assert {verdict.suspect for verdict in record.tensors if verdict.suspect is not None} == {
        suspect
    }
    for fact in facts:
        assert fact in finding.fact
    if module is not None:
        assert (finding.subject, record.divergences[0].suspect) == (module, suspect)


def test_tensor_parallel_and_fully_sharded_models_agree() -> None:
    assert_agrees(check(tensor_parallel, {"tp": 2}))
    assert_agrees(check(fully_sharded, {"dp": 2}, batch_axes="dp"))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_undivided_heads_are_found_in_the_attention_not_in_the_layer_behind_it(
    num_ranks: int,
) -> None:
    def parallelize(model: GPT, mesh: Any) -> None:
        tensor_parallel(model, mesh, divide_heads=False)

    recording = check(parallelize, {"tp": num_ranks})
    assert_divergence(
        recording,
        "block.attention",
        Suspect.WRONG_DIM,
        "The first tensor that differs is the input of `block.attention.o`",
        f"dim 3 is sharded over tp where dim 1 should be, {NUM_HEADS // num_ranks} of {NUM_HEADS}",
    )
    (divergence,) = recording.parity[0].divergences
    assert "scaled_dot_product" in divergence.op
    assert divergence.source is not None
    assert divergence.source.text.startswith("y = functional.scaled_dot_product_attention")
    assert "divide the number of heads by the size of tp" in divergence.remedy


def attend_by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v


def attend_by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhtd,bhsd->bhts", q, k)
    return torch.einsum("bhts,bhsd->bhtd", scores.softmax(-1), v)


@pytest.mark.parametrize("attend", [attend_by_products, attend_by_einsum])
def test_undivided_heads_are_found_where_batch_and_heads_are_flattened(attend: Any) -> None:
    class Products(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
                for layer in (self.q, self.k, self.v)
            )
            return self.o(attend(q, k, v).transpose(1, 2).flatten(2))

    def parallelize(model: GPT, mesh: Any) -> None:
        tensor_parallel(model, mesh, divide_heads=False)

    model = make_model()
    model.block.attention = Products()
    fact = "dim 2 is sharded over tp where dim 0 should be, 2 of 4 on each rank."
    recording = check(parallelize, {"tp": 2}, model=model)
    assert_divergence(recording, "block.attention", Suspect.WRONG_DIM, fact)


def test_a_fused_weight_that_is_sharded_as_a_single_part_is_found() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.o, self.size = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), DIM // 4

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                part.unflatten(-1, (-1, self.size)).transpose(1, 2)
                for part in self.qkv(x).chunk(3, -1)
            )
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.o(y.transpose(1, 2).flatten(2))

    def parallelize(model: GPT, mesh: Any) -> None:
        styles = {"qkv": ColwiseParallel(), "o": RowwiseParallel()}
        parallelize_module(model.block.attention, mesh, styles)

    model = make_model()
    model.block.attention = Fused()
    recording = check(parallelize, {"tp": 2}, model=model)
    fact = "On rank 1 its input 0 is a shard of what its input 1 should be"
    assert_divergence(recording, "block.attention", Suspect.WRONG_SLICE, fact)
    assert recording.findings[0].remedy.startswith("Shard each part of a fused weight")


def test_a_bias_that_every_rank_adds_before_the_reduction_is_found() -> None:
    def parallelize(model: GPT, mesh: Any) -> None:
        parallelize_module(model.block, mesh, {"mlp.up": ColwiseParallel()})
        row = Row(model.block.mlp.down, mesh, reduce=None, bias="before")
        row.register_forward_hook(lambda _, __, y: dist_nn.all_reduce(y, group=mesh.get_group()))
        model.block.mlp.down = row

    recording = check(parallelize, {"tp": 2})
    assert_divergence(
        recording, "block.mlp.down", Suspect.DOUBLE_REDUCTION, "a multiple of the bias"
    )
    assert recording.findings[0].remedy.startswith("Add the bias once")


def test_a_tie_that_sharding_broke_is_found() -> None:
    def parallelize(model: GPT, mesh: Any) -> None:
        emb = RowwiseParallel(input_layouts=Replicate())
        head = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh, {"emb": emb, "head": head})

    recording = check(parallelize, {"tp": 2}, model=make_model(is_tied=True))
    assert_divergence(
        recording, "emb", Suspect.BROKEN_TIE, "emb.weight and head.weight were one tensor"
    )


class Tied(nn.Module):
    """An embedding and a head with one weight, and a residual around the layers between them."""

    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.e, self.h = nn.Embedding(32, 8), nn.Linear(8, 32, bias=False)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        if is_tied:
            self.h.weight = self.e.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.e(tokens)
        return self.h(x + self.down(self.up(x).relu()))


def shard_tied(model: Tied, mesh: Any, *, frozen: str = "", is_tied_again: bool = False) -> None:
    styles = {
        "e": RowwiseParallel(input_layouts=Replicate()),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "h": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, styles)
    if is_tied_again:
        model.h.weight = model.e.weight
    if frozen:
        model.get_submodule(frozen).weight.requires_grad_(False)


def check_tied(parallelize: Any, *, seed: int = 0, axis: str = "tp", **options: Any) -> Recording:
    torch.manual_seed(seed)
    tokens = torch.randint(32, (2, 6))
    return parity(Tied(), {axis: 2}, parallelize=parallelize, inputs=tokens, **options)


@pytest.mark.parametrize("seed", range(8))
def test_a_broken_tie_is_the_only_finding_whatever_the_values(seed: int) -> None:
    recording = check_tied(shard_tied, seed=seed)
    fact = "e.weight and h.weight were one tensor and are 2 now, each with a part of the gradient."
    assert_divergence(recording, "e", Suspect.BROKEN_TIE, "Outputs agree.", fact)


@pytest.mark.parametrize("frozen", ["e", "h"])
def test_a_copy_of_a_tied_weight_that_is_frozen_is_a_broken_tie(frozen: str) -> None:
    recording = check_tied(partial(shard_tied, frozen=frozen))
    fact = f"are 2 now, of which {frozen}.weight requires no gradient."
    assert_divergence(recording, "e", Suspect.BROKEN_TIE, fact)


class VocabularyShard(nn.Module):
    """A row-wise embedding by hand."""

    def __init__(self, layer: nn.Embedding, mesh: Any) -> None:
        super().__init__()
        self.rank, self.group = mesh.get_local_rank(), mesh.get_group()
        own = layer.weight.detach().chunk(mesh.size())[self.rank]
        self.weight = nn.Parameter(own.clone())

    def forward(self, tokens: Tensor) -> Tensor:
        size = len(self.weight)
        own = tokens - self.rank * size
        is_own = (own >= 0) & (own < size)
        rows = functional.embedding(own.clamp(0, size - 1), self.weight)
        return Sum.apply(rows * is_own.unsqueeze(-1), self.group)


class HeadShard(nn.Module):
    """A column-wise head by hand, whose output is gathered."""

    def __init__(self, weight: Tensor, mesh: Any, name: str) -> None:
        super().__init__()
        self.group, self.name = mesh.get_group(), name
        setattr(self, name, weight)

    def forward(self, x: Tensor) -> Tensor:
        shard = functional.linear(Copy.apply(x, self.group), getattr(self, self.name))
        return Gather.apply(shard, self.group, -1)


@pytest.mark.parametrize("name", ["weight", "kernel"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_tie_of_layers_written_by_hand_is_compared_copy_by_copy(
    name: str, *, is_tied: bool
) -> None:
    def parallelize(model: Tied, mesh: Any) -> None:
        model.e = VocabularyShard(model.e, mesh)
        weight = model.e.weight if is_tied else nn.Parameter(model.e.weight.detach().clone())
        model.h = HeadShard(weight, mesh, name)

    recording = check_tied(parallelize)
    if is_tied:
        assert_agrees(recording)
    else:
        assert_divergence(recording, "e", Suspect.BROKEN_TIE, "each with a part of the gradient")


def test_parameters_that_are_tied_again_after_sharding_agree() -> None:
    assert_agrees(check_tied(partial(shard_tied, is_tied_again=True)))
    wrapped = check_tied(
        lambda model, _: DistributedDataParallel(model), axis="dp", batch_axes="dp"
    )
    assert_agrees(wrapped)


def untie(model: Tied, *, is_summed: bool) -> None:
    model.h.weight = nn.Parameter(model.h.weight.detach().clone())
    weights, num_done = (model.e.weight, model.h.weight), []

    def add(weight: Tensor) -> None:
        num_done.append(weight)
        if len(num_done) == len(weights):
            total = weights[0].grad + weights[1].grad
            for tied in weights:
                tied.grad = total.clone()

    for weight in weights if is_summed else ():
        weight.register_post_accumulate_grad_hook(add)


def test_copies_of_a_tied_weight_whose_gradients_are_summed_agree() -> None:
    assert_agrees(check_tied(lambda model, _: untie(model, is_summed=True)))

    def doubled(logits: Tensor) -> Tensor:
        return logits.square().mean() * (2 if dist.is_initialized() else 1)

    recording = check_tied(lambda model, _: untie(model, is_summed=True), loss=doubled)
    fact = "Every gradient is 2 times as large as it should be"
    assert_divergence(recording, None, Suspect.DOUBLE_REDUCTION, fact)


def test_a_broken_tie_explains_weights_that_were_initialized_or_updated_apart() -> None:
    def initialize(model: Tied, _: Any) -> None:
        model.h.weight = nn.Parameter(torch.randn_like(model.h.weight))

    recording = check_tied(initialize)
    fact = "h.weight has other values already before the step"
    assert_divergence(recording, "e", Suspect.BROKEN_TIE, fact)

    def step(model: nn.Module, tokens: Tensor) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(tokens).square().mean().backward()
            optimizer.step()

    recording = check_tied(lambda model, _: untie(model, is_summed=False), step=step)
    assert_divergence(recording, "e", Suspect.BROKEN_TIE, "and their gradients differ")


class TiedStage(nn.Module):
    """A pipeline stage: everything except the head, or the head."""

    def __init__(self, model: Tied, mesh: Any) -> None:
        super().__init__()
        self.is_last, self.group = bool(mesh.get_local_rank()), mesh.get_group()
        if self.is_last:
            self.h = model.h
        else:
            self.e, self.up, self.down = model.e, model.up, model.down

    def forward(self, tokens: Tensor) -> Tensor | None:
        if self.is_last:
            self.x = torch.empty(*tokens.shape, 8, dtype=self.h.weight.dtype)
            dist.recv(self.x, 0, group=self.group)
            return self.h(self.x.requires_grad_())
        x = self.e(tokens)
        self.x = x + self.down(self.up(x).relu())
        dist.send(self.x.detach(), 1, group=self.group)
        return None


@pytest.mark.parametrize("is_summed", [True, False])
def test_a_weight_that_is_tied_over_pipeline_stages_needs_the_sum_of_their_gradients(
    *, is_summed: bool
) -> None:
    def step(model: Any, tokens: Tensor) -> None:
        output = model(tokens)
        if isinstance(model, Tied):
            output.square().mean().backward()
            return
        if model.is_last:
            output.square().mean().backward()
            dist.send(model.x.grad, 0, group=model.group)
        else:
            gradient = torch.empty_like(model.x)
            dist.recv(gradient, 1, group=model.group)
            model.x.backward(gradient)
        if is_summed:
            weight = model.h.weight if model.is_last else model.e.weight
            dist.all_reduce(weight.grad, group=model.group)

    recording = check_tied(TiedStage, axis="pp", step=step)
    if is_summed:
        assert_agrees(recording)
    else:
        fact = "are 2 now, on different ranks, each with a part of the gradient"
        assert_divergence(recording, "e", Suspect.BROKEN_TIE, fact)
        assert recording.findings[0].remedy.startswith("Sum the gradients of the copies")


def test_a_wrong_gradient_is_not_located_in_a_layer_that_reads_a_residual() -> None:
    """On ranks, the input of a column-wise layer is a DTensor: its gradient is of that use only."""

    def parallelize(model: Tied, mesh: Any) -> None:
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        model.h.weight.register_hook(lambda gradient: 3 * gradient)

    recording = check(parallelize, {"tp": 2}, model=Tied(is_tied=False), loss=None)
    assert_divergence(recording, "h", Suspect.SCALED, "It is 3 times what it should be.")


def test_a_frozen_embedding_is_found_there_and_not_behind_it() -> None:
    def parallelize(model: Tied, mesh: Any) -> None:
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        model.e.weight.requires_grad_(False)

    recording = check(parallelize, {"tp": 2}, model=Tied(is_tied=False), loss=None)
    assert_divergence(recording, "e", Suspect.STALE, "the parameter is frozen on the ranks")


def test_seeds_that_differ_where_a_tensor_is_replicated_are_found() -> None:
    def parallelize(model: GPT, mesh: Any) -> None:
        tensor_parallel(model, mesh)
        torch.manual_seed(1234 + mesh.get_local_rank())

    recording = check(parallelize, {"tp": 2}, model=make_model(dropout=0.5))
    assert [finding.rule for finding in recording.findings] == ["parity-randomness"]
    assert recording.parity[0].divergences[0].module == "block.mlp.drop"


def test_a_common_factor_on_all_gradients_is_reported_without_a_module() -> None:
    """The loss is divided by the number of ranks, and FSDP averages over them again."""

    def halved(logits: Tensor) -> Tensor:
        return cross_entropy(logits) / (1 if len(logits) == BATCH else 2)

    recording = check(fully_sharded, {"dp": 2}, loss=halved, batch_axes="dp")
    fact = "Every gradient is 1/2 of what it should be, and 2 is the size of dp."
    assert_divergence(recording, None, Suspect.DOUBLE_REDUCTION, "Outputs agree.", fact)
    assert recording.findings[0].subject == "all gradients"
    ratios = [verdict.ratio for verdict in recording.parity[0].tensors if verdict.suspect]
    assert ratios == pytest.approx([0.5] * len(ratios))


def test_gradients_that_are_summed_instead_of_averaged_name_no_module() -> None:
    recording = check(
        lambda model, mesh: reduce_gradients(model, mesh.get_group(), dist.ReduceOp.SUM),
        {"dp": 2},
        batch_axes="dp",
    )
    assert_divergence(
        recording, None, Suspect.DOUBLE_REDUCTION, "Every gradient is 2 times as large"
    )
    assert recording.findings[0].remedy.startswith("Average gradients over dp instead of summing")


def accumulate(model: nn.Module, tokens: Tensor, *, is_divided: bool) -> None:
    chunks = tokens.chunk(4) if dist.is_initialized() else [tokens]
    for chunk in chunks:
        (model(chunk).square().mean() / (len(chunks) if is_divided else 1)).backward()


def test_losses_that_are_not_divided_by_the_number_of_micro_batches_are_found() -> None:
    step = partial(accumulate, is_divided=False)
    recording = check(fully_sharded, {"dp": 2}, step=step, batch_axes="dp")
    facts = "Every gradient is 4 times", "4 is the number of micro-batches."
    assert_divergence(recording, None, Suspect.SCALED, *facts)
    remedy = "Divide the loss of each micro-batch by their number, once."
    assert recording.findings[0].remedy == remedy


def valid_tokens(labels: Tensor) -> Callable[..., Callable[[Tensor], Tensor]]:
    def make(*, is_global: bool) -> Callable[[Tensor], Tensor]:
        def loss(logits: Tensor) -> Tensor:
            is_single = len(logits) == BATCH
            own = labels if is_single else labels.chunk(2)[dist.get_rank()]
            total = functional.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum")
            count = (own != -100).sum().to(total.dtype)
            if is_global and not is_single:
                dist.all_reduce(count, dist.ReduceOp.AVG)  # FSDP averages
            return total / count

        return loss

    return make


def test_means_over_different_numbers_of_tokens_are_found_in_the_loss() -> None:
    labels = LABELS.clone()
    labels[BATCH // 2 :, 2:] = -100
    make_loss = valid_tokens(labels)
    right = check(fully_sharded, {"dp": 2}, loss=make_loss(is_global=True), batch_axes="dp")
    assert_agrees(right)
    wrong = check(fully_sharded, {"dp": 2}, loss=make_loss(is_global=False), batch_axes="dp")
    fact = "Each rank's shard is off by a different factor: 0.6667 on rank 0, 2 on rank 1."
    assert_divergence(wrong, None, Suspect.SCALED, "the two versions diverge in the loss", fact)
    assert wrong.findings[0].subject == "the loss"


class OnSequenceShard(nn.Module):
    """Runs a module on this rank's part of the sequence."""

    def __init__(self, inner: nn.Module, groups: tuple[Any, Any], *, is_reduced: bool) -> None:
        super().__init__()
        self.inner, self.groups = inner, groups
        if is_reduced:
            reduce_gradients(inner, groups[1], dist.ReduceOp.SUM)

    def forward(self, x: Tensor) -> Tensor:
        shard = self.inner(Scatter.apply(x, self.groups[0], 1))
        return Gather.apply(shard, self.groups[1], 1)


def shard_norm(*axes: str, is_reduced: bool = True) -> Any:
    def parallelize(model: GPT, mesh: Any) -> None:
        scatter, gather = (mesh[axis].get_group() for axis in axes)
        model.norm = OnSequenceShard(model.norm, (scatter, gather), is_reduced=is_reduced)

    return parallelize


def test_gradients_of_a_norm_on_sequence_shards_must_be_summed() -> None:
    assert_agrees(check(shard_norm("tp", "tp"), {"tp": 2}))
    recording = check(shard_norm("tp", "tp", is_reduced=False), {"tp": 2})
    assert_divergence(
        recording,
        "norm",
        Suspect.MISSING_REDUCTION,
        "The gradients of norm.weight, norm.bias differ",
        "summed over tp they match",
    )
    assert recording.findings[0].remedy.startswith("Sum the gradient over tp")


def test_a_remedy_averages_where_the_fact_says_that_averages_match() -> None:
    """The backward of torch's all_gather sums gradients that are the same on all ranks."""

    class Gathered(nn.Module):
        def __init__(self, inner: nn.Module, mesh: Any) -> None:
            super().__init__()
            self.inner, self.mesh = inner, mesh

        def forward(self, x: Tensor) -> Tensor:
            shard = x.chunk(self.mesh.size(), 1)[self.mesh.get_local_rank()]
            shards = dist_nn.all_gather(self.inner(shard).contiguous(), self.mesh.get_group())
            return torch.cat(shards, 1)

    def parallelize(model: GPT, mesh: Any) -> None:
        model.norm = Gathered(model.norm, mesh)

    recording = check(parallelize, {"tp": 2})
    assert_divergence(recording, "norm", Suspect.MISSING_REDUCTION, "averaged over tp they match")
    assert recording.findings[0].remedy.startswith("Average the gradient over tp")


def test_a_loss_over_a_shard_of_the_vocabulary_is_found() -> None:
    def parallelize(model: GPT, mesh: Any) -> None:
        parallelize_module(model, mesh, {"head": ColwiseParallel()})

    labels = TOKENS % (VOCABULARY // 2)
    recording = check(
        parallelize,
        {"tp": 2},
        loss=lambda logits: functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
    )
    fact = "The loss is computed from each rank's own shard of the output only (dim 2 over tp)."
    assert_divergence(recording, None, Suspect.MISSING_REDUCTION, fact)
    assert recording.findings[0].subject == "the loss"


def test_batch_statistics_of_each_ranks_own_samples_are_found() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    recording = check(
        lambda model, mesh: fully_shard(model, mesh=mesh["dp"]),
        {"dp": 2},
        model=model,
        inputs=torch.randn(8, 8),
        loss=lambda y: y.square().mean(),
        batch_axes="dp",
    )
    fact = "Each rank runs it on its own shard of the input only (dim 0 over dp)."
    assert_divergence(recording, "1", Suspect.MISSING_REDUCTION, fact)


def test_parameters_that_fsdp_does_not_manage_are_named_together() -> None:
    recording = check(
        lambda model, mesh: fully_shard(model.block, mesh=mesh["dp"]) and None,
        {"dp": 2},
        batch_axes="dp",
    )
    assert_divergence(
        recording,
        None,
        Suspect.MISSING_REDUCTION,
        "The gradients of emb.weight, norm.weight, norm.bias and 1 more differ",
        "averaged over dp they match",
    )
    assert recording.findings[0].subject == "emb, norm, head"  # they have no module in common


def test_an_axis_over_which_no_gradient_is_reduced_names_no_module() -> None:
    def step(model: nn.Module, tokens: Tensor) -> None:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        cross_entropy(inner(tokens)).backward()

    for parallelize, suspect in (
        (lambda model, mesh: None, Suspect.MISSING_REDUCTION),
        (lambda model, mesh: DistributedDataParallel(model), Suspect.LOST_HOOK),
    ):
        recording = check(parallelize, {"dp": 2}, step=step, batch_axes="dp")
        fact = "No gradient is reduced over dp."
        assert_divergence(recording, None, suspect, "Outputs agree.", fact)


def test_a_replicated_axis_unknown_to_fsdp_names_no_module() -> None:
    def parallelize(model: GPT, mesh: Any) -> None:
        fully_shard(model, mesh=mesh["shard"])

    mesh = {"replicate": 2, "shard": 2}
    recording = check(parallelize, mesh, batch_axes=list(mesh))
    fact = "No gradient is reduced over replicate."
    assert_divergence(recording, None, Suspect.MISSING_REDUCTION, fact)


class GatheredWeight(nn.Module):
    """A layer whose weight is sharded over dp, by hand; its gradient is scattered over `axis`."""

    def __init__(self, layer: nn.Linear, mesh: Any, axis: str) -> None:
        super().__init__()
        self.gather, self.scatter = mesh["dp"].get_group(), mesh[axis].get_group()
        own = layer.weight.detach().chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
        self.weight, self.bias = nn.Parameter(own.clone()), layer.bias

    def forward(self, x: Tensor) -> Tensor:
        weight = GatherAndReduce.apply(self.weight, self.gather, 0, self.scatter)
        return functional.linear(x, weight, self.bias)


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_a_gradient_that_is_scattered_over_the_wrong_group_is_found(axis: str) -> None:
    """All shards exist, but on other ranks than the shards of the weight."""

    def parallelize(model: GPT, mesh: Any) -> None:
        model.block.mlp.up = GatheredWeight(model.block.mlp.up, mesh, axis)

    recording = check(parallelize, {"dp": 2, "tp": 2})
    if axis == "dp":
        assert_agrees(recording)
    else:
        fact = "the chunk of its rank along tp, where it should be that of its rank along dp"
        assert_divergence(recording, "block.mlp.up", Suspect.WRONG_GROUP, fact)
        assert recording.findings[0].remedy == "Pass the process group of dp to the collective."


@pytest.mark.parametrize(
    ("scattered", "gathered", "batch_axes"),
    [("dp", "tp", ()), ("tp", "dp", ()), ("dp", "tp", "dp")],
)
def test_a_scatter_and_a_gather_over_different_groups_are_found(
    scattered: str, gathered: str, batch_axes: str
) -> None:
    recording = check(
        shard_norm(scattered, gathered),
        {"dp": 2, "tp": 2},
        loss=lambda logits: logits.square().mean(),
        batch_axes=batch_axes,
    )
    fact = f"it is sharded over {scattered}, but gathered over {gathered}."
    assert_divergence(recording, "norm", Suspect.WRONG_GROUP, fact)


def test_a_reduction_over_the_wrong_group_is_found() -> None:
    def parallelize(model: GPT, mesh: Any) -> None:
        mlp = model.block.mlp
        mlp.up = Column(mlp.up, mesh["tp"], index=mesh["tp"].get_local_rank(), copies=True)
        mlp.down = Row(mlp.down, mesh["tp"], reduce=Sum, bias="none")
        mlp.down.group = mesh["dp"].get_group()

    model = make_model()
    nn.init.zeros_(model.block.mlp.down.bias)
    recording = check(parallelize, {"dp": 2, "tp": 2}, model=model)
    fact = "It is summed over dp instead of tp"
    assert_divergence(recording, "block.mlp.down", Suspect.WRONG_GROUP, fact)


def test_a_module_that_is_detached_on_the_ranks_is_found() -> None:
    class Detached(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.detach())

    def parallelize(model: GPT, _: Any) -> None:
        model.block.mlp = Detached(model.block.mlp)

    recording = check(parallelize, {"tp": 2})
    assert_divergence(recording, "block.mlp", Suspect.STALE, "No rank has one")


class Grouped(nn.Module):
    """Mixes positions; queries share keys in groups of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM // 2)
        self.mixing = GroupedMixing()

    def forward(self, x: Tensor) -> Tensor:
        q, k = (layer(x).unflatten(-1, (-1, 4)) for layer in (self.q, self.k))
        return self.mixing(q, k).flatten(2)


class GroupedMixing(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), k)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("mesh", [{"cp": 2}, {"dp": 2, "cp": 2}])
def test_keys_that_are_gathered_along_the_heads_are_found(dim: int, mesh: dict[str, int]) -> None:
    def parallelize(model: Grouped, mesh: Any) -> Grouped:
        group = mesh.get_group("cp")

        def gather(_: nn.Module, inputs: Any) -> Any:
            q, k = inputs
            return q, Gather.apply(k.contiguous(), group, dim)

        model.mixing.register_forward_pre_hook(gather)
        return model

    def forward(model: Grouped, x: Tensor) -> Tensor:
        if dist.is_initialized():
            x = x.chunk(2, 1)[dist.get_rank() % 2]
        return model(x)

    torch.manual_seed(0)
    recording = check(
        parallelize,
        mesh,
        model=Grouped(),
        inputs=torch.randn(4, LENGTH, DIM),
        step=forward,
        batch_axes="dp" if "dp" in mesh else (),
    )
    if dim == 1:
        assert_agrees(recording)
        return
    fact = "Its input [1] has the shape [{}, 3, 4, 4] instead of [4, 6, 2, 4]: it is sharded over "
    fact = fact.format(2 if "dp" in mesh else 4)
    fact += "cp along dim 1, but gathered along dim 2."
    assert_divergence(recording, "mixing", Suspect.WRONG_DIM, fact)


def test_an_argument_that_is_computed_from_a_shard_is_named() -> None:
    class Scaled(Attention):
        def forward(self, x: Tensor) -> Tensor:
            batch, length, _ = x.shape
            q, k, v = (
                layer(x).view(batch, length, self.num_heads, -1).transpose(1, 2)
                for layer in (self.q, self.k, self.v)
            )
            scale = self.num_heads**-0.5
            y = functional.scaled_dot_product_attention(q, k, v, scale=scale)
            return self.o(y.transpose(1, 2).reshape(batch, length, -1))

    model = make_model()
    model.block.attention = Scaled()
    recording = check(tensor_parallel, {"tp": 2}, model=model)
    fact = "Its argument scale is 0.707107 on the ranks and 0.5 on the single device."
    assert_divergence(recording, "block.attention", Suspect.SCALED, fact)


def test_a_fused_kernel_without_the_scale_of_the_ops_it_replaces_is_named() -> None:
    class Mixing(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (q @ k.transpose(-1, -2) * 0.3).softmax(-1) @ v

    class Fused(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(q, k, v)

    class Scaled(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.mixing: nn.Module = Mixing()

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                layer(x).unflatten(-1, (-1, DIM // NUM_HEADS)).transpose(1, 2)
                for layer in (self.q, self.k, self.v)
            )
            return self.o(self.mixing(q, k, v).transpose(1, 2).flatten(2))

    def parallelize(model: GPT, mesh: Any) -> None:
        model.block.attention.mixing = Fused()
        tensor_parallel(model, mesh)

    model = make_model()
    model.block.attention = Scaled()
    recording = check(parallelize, {"tp": 2}, model=model)
    fact = "Its argument scale is not given on the ranks and 0.3 on the single device."
    assert_divergence(recording, "block.attention.mixing", Suspect.SCALED, fact)


def test_scores_that_are_not_normalised_have_rows_with_different_factors() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.is_normalised = nn.Linear(DIM, 8), True

        def forward(self, x: Tensor) -> Tensor:
            scores = self.gate(x).softmax(-1).topk(2).values
            return scores / scores.sum(-1, keepdim=True) if self.is_normalised else scores

    def parallelize(model: nn.Sequential, mesh: Any) -> nn.Module:
        model[0].is_normalised = False
        return DistributedDataParallel(model)

    torch.manual_seed(0)
    model, inputs = nn.Sequential(Scores(), nn.Linear(2, DIM)), torch.randn(64, DIM)
    recording = check(
        parallelize, {"dp": 2}, model=model, inputs=inputs, loss=Tensor.sum, batch_axes="dp"
    )
    assert [(f.rule, f.subject) for f in recording.findings] == [("parity-scaled", "0")]
    assert "rows that are multiplied by different factors" in recording.findings[0].fact


class Mixture(nn.Module):
    """Each token goes to one expert; ranks have a part of the experts, or also of the tokens."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, num_experts)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(num_experts))
        self.out = nn.Linear(DIM, DIM)
        self.first, self.group = 0, None

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        inputs = x if self.group is None else Copy.apply(x, self.group)
        shares = weights if self.group is None else Copy.apply(weights, self.group)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            (rows,) = (chosen == index + self.first).nonzero(as_tuple=True)
            y = y.index_put((rows,), expert(inputs[rows]) * shares[rows].unsqueeze(-1))
        return self.out(y if self.group is None else Sum.apply(y, self.group))


def expert_parallel(model: Mixture, mesh: Any, copy: Any = lambda expert: expert) -> None:
    per_rank = len(model.experts) // mesh.size()
    model.first, model.group = mesh.get_local_rank() * per_rank, mesh.get_group()
    own = model.experts[model.first : model.first + per_rank]
    model.experts = nn.ModuleList(copy(expert) for expert in own)


def test_a_factor_on_the_gradients_of_the_experts_is_found_there() -> None:
    def parallelize(model: Mixture, mesh: Any) -> None:
        expert_parallel(model, mesh)
        for parameter in model.experts.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)

    torch.manual_seed(0)
    recording = check(
        parallelize, {"ep": 2}, model=Mixture(), inputs=torch.randn(12, DIM), loss=None
    )
    assert_divergence(recording, "experts", Suspect.DOUBLE_REDUCTION, "2 is the size of ep")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_gradients_of_different_experts_that_are_reduced_together_are_found(
    num_ranks: int,
) -> None:
    def parallelize(model: Mixture, mesh: Any) -> None:
        expert_parallel(model, mesh)
        reduce_gradients(model.experts, mesh.get_group(), dist.ReduceOp.AVG)

    torch.manual_seed(0)
    recording = check(
        parallelize, {"ep": num_ranks}, model=Mixture(), inputs=torch.randn(12, DIM), loss=None
    )
    fact = "the sum of the gradients of several parameters (experts.0.weight, experts."
    assert_divergence(recording, "experts", Suspect.WRONG_GROUP, fact, "it is reduced over ep")


def test_tokens_that_are_dropped_are_not_called_a_missing_reduction() -> None:
    """A different number of tokens cannot be compared, but their results are."""

    class Dropping(Mixture):
        def forward(self, x: Tensor) -> Tensor:
            chosen = self.router(x).argmax(-1)
            y = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = (chosen == index).nonzero()[:, 0][: self.first or None]
                y = y.index_add(0, rows, expert(x[rows]))
            return self.out(y)

    def parallelize(model: Mixture, mesh: Any) -> None:
        model.first = 1  # the number of tokens that an expert takes

    torch.manual_seed(0)
    recording = check(
        parallelize,
        {"dp": 2},
        model=Dropping(),
        inputs=torch.randn(12, DIM),
        loss=None,
        batch_axes="dp",
    )
    assert recording.findings[0].rule == "parity-stale"
    assert "of 12 rows" in recording.findings[0].fact
    assert "on its own shard" not in recording.findings[0].fact


def test_a_gradient_of_the_router_that_is_not_summed_is_found_at_its_output() -> None:
    def parallelize(model: Mixture, mesh: Any) -> None:
        expert_parallel(model, mesh)
        model.router.register_forward_hook(lambda _, __, y: Undo.apply(y, model.group))

    class Undo(torch.autograd.Function):
        """Undoes the sum over ranks in the gradient, except for this rank's part."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
            ctx.rank = dist.get_rank(group)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            is_own = torch.arange(len(gradient)) % 2 == ctx.rank
            return gradient * is_own.unsqueeze(-1), None

    torch.manual_seed(0)
    recording = check(
        parallelize, {"ep": 2}, model=Mixture(), inputs=torch.randn(12, DIM), loss=None
    )
    assert_divergence(recording, "router", Suspect.MISSING_REDUCTION, "summed over ep they match")
    assert recording.parity[0].divergences[0].phase is Phase.BACKWARD


def test_a_gradient_that_a_hook_of_its_module_sums_is_not_blamed() -> None:
    """The gate's gradient is partial too, and nothing sums it."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.gate = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, 1)
            self.down = nn.Linear(DIM, DIM, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            share = self.gate(x).sigmoid()
            return self.down(self.up(x.roll(1, 0)).relu()) * share

    def parallelize(model: nn.Sequential, mesh: Any) -> None:
        group, gated = mesh.get_group(), model[1]
        for layer, dim in ((gated.up, 0), (gated.down, 1)):
            weight = layer.weight.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()]
            layer.weight = nn.Parameter(weight.clone())
        gated.up.register_forward_pre_hook(lambda _, inputs: (Copy.apply(inputs[0], group),))
        gated.register_forward_hook(lambda _, __, y: Sum.apply(y, group))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), Gated())
    inputs = torch.randn(12, DIM)
    recording = check(parallelize, {"tp": 2}, model=model, inputs=inputs, loss=None)
    fact = "that of the output of `1.gate`"
    assert_divergence(recording, "1", Suspect.MISSING_REDUCTION, fact, "summed over tp they match")


def test_an_expert_that_a_single_rank_has_is_compared_with_the_originals() -> None:
    def parallelize(model: Mixture, mesh: Any) -> None:
        expert_parallel(model, mesh, copy.deepcopy)
        if mesh.get_local_rank() == 1:
            model.experts[1].register_forward_hook(lambda _, __, y: y * 3)

    torch.manual_seed(0)
    recording = check(
        parallelize, {"ep": 2}, model=Mixture(), inputs=torch.randn(12, DIM), loss=None
    )
    assert_divergence(recording, "experts.3", Suspect.SCALED, "It is 3 times what it should be.")


def test_a_bias_that_was_not_loaded_is_missing() -> None:
    def parallelize(model: GPT, _: Any) -> None:
        layer = model.block.mlp.up
        model.block.mlp.up = nn.Linear(DIM, 2 * DIM)
        model.block.mlp.up.weight = layer.weight
        nn.init.zeros_(model.block.mlp.up.bias)

    recording = check(parallelize, {"tp": 2})
    assert_divergence(recording, "block.mlp.up", Suspect.STALE)


def test_an_uninitialized_output_buffer_is_not_an_input() -> None:
    """Uninitialized memory has random values that could explain a difference by chance."""

    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.empty_like(x).bernoulli_(0.5)
            return mask.mul_(x)

    probe, model = OpProbe(""), Noisy()
    with probe.attached(model, OriginalNames(model)):
        model(torch.ones(3))
    points = [ProbePoint.decode(name) for name in probe.snapshots]
    inputs = [(point.module, point.path) for point in points if point.role is Role.INPUT]
    assert inputs == [("aten.mul_.Tensor", "[0]"), ("aten.mul_.Tensor", "[1]")]
