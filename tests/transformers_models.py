"""What tests train with Hugging Face's trainer, which is imported here and not at collection."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from shardscope import World, trace
from shardscope.comm.trace import Trace
from small_models import Net
from trained_models import leaving_torch_alone

with leaving_torch_alone():
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

__all__ = [
    "Failing",
    "FailingOptimizer",
    "Meddling",
    "Regression",
    "Surrounding",
    "Trainer",
    "TrainerCallback",
    "TrainingArguments",
    "make_llama",
    "make_regression",
    "make_texts",
    "make_vectors",
]


class Regression(nn.Module):
    """A model as the trainer wants one: a loss from a batch; remembers it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor, **kwargs: Any) -> dict[str, torch.Tensor]:
        loss = self.net(x).pow(2).mean()
        self.losses.append(loss.item())
        return {"loss": loss}


def make_vectors() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(8, generator=generator)} for _ in range(12)]


def make_regression() -> Regression:
    torch.manual_seed(0)
    return Regression(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2)))


def make_llama(world: World | None = None) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    if world is not None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=world.mesh)
        fully_shard(model, mesh=world.mesh)
    return model


def make_texts() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(0, 64, (6,), generator=generator) for _ in range(12)]
    return [{"input_ids": text, "labels": text} for text in texts]


class Refusing(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("no gradient today")


class Failing(nn.Module):
    """Fails in the given batch, forwards or backwards."""

    def __init__(self, *, batch: int, phase: str) -> None:
        super().__init__()
        self.net = Net()
        self._batches_left, self._phase = batch, phase

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.net(x)
        self._batches_left -= 1
        if self._batches_left == 0 and self._phase == "forward":
            raise ZeroDivisionError("no result today")
        return Refusing.apply(x) if self._batches_left == 0 else x


class FailingOptimizer(torch.optim.SGD):
    """Fails in its second step."""

    num_steps = 0

    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        if self.num_steps == 2:
            raise ZeroDivisionError("no step today")
        super().step()


class Surrounding(TrainerCallback):
    """A plain trace of the same step, by somebody who owns the loop's hooks too."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.trace: Trace | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step - 1:
            self.trace = trace(kwargs["model"]).__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step and self.trace is not None:
            self.trace.__exit__(None, None, None)


class Meddling(TrainerCallback):
    """Raises in the middle of the second step, where nobody looks."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            raise ZeroDivisionError("meddled")
