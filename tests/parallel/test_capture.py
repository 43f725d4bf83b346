"""From a model to its program: what it may return and do, and what is refused in which words."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from parallel_cases.layers import PAIR, Mlp
from shardscope.errors import ParallelError
from shardscope.parallel import Colwise, Plan, Replicate, Rowwise, parallelize
from shardscope.parallel.program import ParallelProgram
from shardscope.record import TensorKind


def x() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def square(output: Any) -> Tensor:
    value: Tensor = output.square().mean()
    return value


def forward_kinds(program: ParallelProgram) -> Counter[str]:
    return Counter(
        str(collective.kind) for collective in program.collectives if collective.phase == "forward"
    )


# What a model may return.


class KeyCache:
    """Holds tensors in layers, as the caches of transformers do."""

    def __init__(self, keys: Tensor) -> None:
        self.layers = [SimpleNamespace(keys=keys, is_initialized=True)]
        self.owner = self  # objects may refer to each other


@dataclass
class Answer:
    hidden: Tensor
    scale: float = 2.0


class Returning(Mlp):
    """An MLP that also returns its hidden values, inside of something."""

    def __init__(self, container: Any) -> None:
        super().__init__()
        self.container = container

    def forward(self, x: Tensor) -> Any:
        hidden = self.act(self.up(x))
        return {"y": self.down(hidden), "inside": self.container(hidden)}


def test_a_cache_that_is_returned_stays_sharded() -> None:
    """As hand-written tensor parallelism keeps keys and values: each rank has those it computes."""
    program = parallelize(Returning(KeyCache), "tp=2", PAIR, args=(x(),))
    assert forward_kinds(program) == {"all_reduce": 1}
    specs = {role.name: value.spec for value, role in program.graph.outputs}
    assert str(specs["inside.layers.0.keys"].placements[0]) == "S(1)"
    module = program.exported(0).module()
    assert module  # it can be written, though export knows no KeyCache
    compared = {
        verdict.name for verdict in program.verdicts or () if verdict.kind is TensorKind.OUTPUT
    }
    assert compared == {"[y]", "[inside.layers.0.keys]"}


def test_a_cache_is_replicated_if_the_plan_constrains_it() -> None:
    outputs = {"inside": Replicate()}
    program = parallelize(Returning(KeyCache), "tp=2", Plan(PAIR), args=(x(),), outputs=outputs)
    assert forward_kinds(program) == {"all_gather": 1, "all_reduce": 1}


def test_other_objects_are_replicated_like_any_output() -> None:
    program = parallelize(Returning(Answer), "tp=2", PAIR, args=(x(),))
    assert forward_kinds(program) == {"all_gather": 1, "all_reduce": 1}
    assert "inside.hidden" in {role.name for _, role in program.graph.outputs}


def test_a_loss_may_ignore_what_cannot_be_returned() -> None:
    program = parallelize(
        Returning(KeyCache), "tp=2", PAIR, args=(x(),), loss=lambda output: square(output["y"])
    )
    assert program.verdicts


def test_an_object_among_the_inputs_is_refused_by_name() -> None:
    sentence = "argument 0 is or holds a KeyCache, which torch.export does not take as an input"
    with pytest.raises(ParallelError, match=sentence):
        parallelize(Mlp(), "tp=2", PAIR, args=(KeyCache(x()),))


# What a model may do.


class Empty(Mlp):
    """Appends to an empty constant, as a cache does that was never used."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.cat([torch.tensor([]), self.act(self.up(x))], -1))


class Biased(nn.Module):
    """Attention whose kernel, and so its result's strides, depends on whether its mask is trained.

    The write makes torch take reshape for a view when the program is made functional.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.randn(1, 2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        qkv += 1
        q, k, v = (part.view(1, 4, 2, 4).transpose(1, 2) for part in qkv.chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias + 1)
        return self.out(mixed.transpose(1, 2).reshape(1, 4, -1))


class Dropping(Mlp):
    """Writes in place, so that torch decomposes dropout when the program is made functional."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        hidden += 1
        return self.down(F.dropout(hidden, 0.5, training=True))


class OnDevice(Mlp):
    """Makes a tensor where its input is."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.arange(8, device=x.device))


class Rescued(Mlp):
    """Computes a factor under no_grad(), as rotary embeddings do."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        with torch.no_grad():
            factor = hidden.abs().mean() + 1
        return self.down(hidden * factor)


@pytest.mark.parametrize("loss", [None, square])
@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (Empty, PAIR),
        (Biased, {"qkv": Colwise(fused=3), "out": Rowwise(), "bias": "shard(1)"}),
        (Rescued, PAIR),
        (Dropping, PAIR),
    ],
)
def test_what_real_models_do_is_right(make: Any, plan: Any, loss: Any) -> None:
    torch.manual_seed(0)
    program = parallelize(make(), "tp=2", plan, args=(x()[None],), loss=loss)
    assert program.verdicts
    assert not program.not_verified


@pytest.mark.parametrize("loss", [None, square])
def test_a_model_on_meta_is_verified_on_generated_data(loss: Any) -> None:
    with torch.device("meta"):
        model = OnDevice()
    program = parallelize(model, "tp=2", PAIR, args=(x().to("meta"),), loss=loss)
    assert program.verdicts


def test_a_compiled_model_goes_by_the_names_of_its_modules() -> None:
    program = parallelize(torch.compile(Mlp(), backend="eager"), "tp=2", PAIR, args=(x(),))
    assert forward_kinds(program) == {"all_reduce": 1}


def test_ranks_with_the_same_program_are_traced_once() -> None:
    program = parallelize(Mlp(), "tp=4", PAIR, args=(x(),), loss=square)
    assert len({id(program.joint(rank)) for rank in range(4)}) == 1
    embedding = nn.Sequential(nn.Embedding(8, 8), Mlp())
    ids = (torch.tensor([[1, 7]]),)
    program = parallelize(embedding, "tp=4", {"0": Rowwise()}, args=ids, loss=square)
    assert len({id(program.joint(rank)) for rank in range(4)}) == 4  # each has its own rows


# What is refused.


class Branching(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand([]) < 0.5:
            return x
        return super().forward(x)


class TinyExperts(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        for row in (x.sum(-1) > 0).nonzero():
            x = x + row
        return x


@pytest.mark.parametrize(
    ("model", "where", "remedy"),
    [
        (nn.Sequential(Branching()), "0 decides by the value of", "call model.eval(), or set"),
        (nn.Sequential(TinyExperts()), "0 decides", "set_experts_implementation('grouped_mm')"),
        (nn.Sequential(Mlp(), TinyExperts()).eval(), "1 decides", "'grouped_mm'"),
    ],
)
@pytest.mark.parametrize("loss", [None, square])
def test_a_branch_on_a_tensor_is_named_with_its_module_line_and_remedy(
    model: nn.Module, where: str, remedy: str, loss: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ParallelError) as refused:
        parallelize(model, "tp=2", {"**.up": Colwise()}, args=(x(),), loss=loss)
    assert where in str(refused.value)
    assert "test_capture.py:" in str(refused.value)
    assert remedy in str(refused.value)
    assert "def forward" not in capfd.readouterr().err  # torch.export prints its graph


class WritesTwice(Mlp):
    """Cannot be differentiated: a value that autograd saved is overwritten."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).exp()
        squared = hidden * hidden
        hidden.mul_(2)
        return self.down(squared + hidden)


def test_a_model_that_fails_in_eager_mode_is_distinguished_from_our_errors() -> None:
    with pytest.raises(ParallelError, match="WritesTwice itself fails in eager mode on these"):
        parallelize(WritesTwice(), "tp=2", PAIR, args=(x(),), loss=square)


def test_a_torch_error_is_never_raised_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("expected scalar type Long")

    monkeypatch.setattr("shardscope.parallel.partition.make_functional", fail)
    sentence = r"Mlp cannot be parallelized \(RuntimeError: expected scalar type Long\)\. Please"
    with pytest.raises(ParallelError, match=sentence):
        parallelize(Mlp(), "tp=2", PAIR, args=(x(),))
