"""Pipelines of torch's schedules, with data parallelism by hand, by DDP's averages or FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from benchmarks.silent.correct_layouts import Layout
from benchmarks.silent.correct_models import GPT, Batch
from benchmarks.silent.correct_steps import (
    Details,
    LossOfElements,
    Trainer,
    clip_rank,
    data_size,
    sum_over_data,
    update,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "looped": ScheduleLoopedBFS,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
IGNORED = -100


class Stage(nn.Module):
    """Consecutive layers of a language model; the first has the embeddings, the last the head."""

    def __init__(self, model: GPT, keys: list[str], *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.tok, self.pos = (model.tok, model.pos) if is_first else (None, None)
        self.layers = nn.ModuleDict({key: model.layers[key] for key in keys})
        self.norm, self.head = (model.norm, model.head) if is_last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        if self.tok is not None and self.pos is not None:
            x = self.tok(x) + self.pos(positions)
        for layer in self.layers.values():
            x = layer(x, positions)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


class Stages(nn.Module):
    """The stages of a rank, and the schedule that runs them."""

    def __init__(self, parts: list[Stage]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.schedule: Any = None
        self.count: Tensor | None = None  # of the tokens of the step, if the loss is divided by it


class Pipeline(Layout):
    """The layers on the ranks of an axis pp, and replicas or shards along an axis dp."""

    stage_axes = ("pp",)

    def __init__(
        self,
        mesh: Mapping[str, int],
        schedule: str,
        *,
        has_fsdp: bool = False,
        is_tied: bool = False,
    ) -> None:
        super().__init__(mesh)
        self.data_axes = self.batch_axes = tuple(axis for axis in mesh if axis != "pp")
        self.schedule, self.has_fsdp, self.is_tied = schedule, has_fsdp, is_tied
        self.name = f"pp-{schedule}" + ("-fsdp" if has_fsdp else "")

    @property
    def num_parts(self) -> int:
        """How many stages a rank has."""
        return 1 if self.schedule in ("gpipe", "1f1b") else 2

    def stage_indices(self, rank: int) -> list[int]:
        """The stages of a rank, in a loop or in the form of a V."""
        size = self.mesh["pp"]
        if self.schedule == "zbv":
            return [rank, 2 * size - 1 - rank]
        return [rank + size * part for part in range(self.num_parts)]

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        assert isinstance(model, GPT)
        num_stages = self.mesh["pp"] * self.num_parts
        keys = list(model.layers)
        size = len(keys) // num_stages
        indices = self.stage_indices(mesh.get_local_rank("pp"))
        parts = [
            Stage(
                model,
                keys[index * size : (index + 1) * size],
                is_first=index == 0,
                is_last=index == num_stages - 1,
            )
            for index in indices
        ]
        stages = Stages(parts)
        if self.has_fsdp:
            for part in parts:
                for layer in part.layers.values():
                    fully_shard(layer, mesh=mesh["dp"])
                fully_shard(part, mesh=mesh["dp"])
        return stages

    def build_schedule(
        self, stages: Stages, mesh: DeviceMesh, details: Details, loss: Callable[..., Tensor]
    ) -> Any:
        """The schedule with the stages of this rank."""
        indices = self.stage_indices(mesh.get_local_rank("pp"))
        number = self.mesh["pp"] * self.num_parts
        pipeline_stages = [
            PipelineStage(part, index, number, torch.device("cpu"), group=mesh.get_group("pp"))
            for part, index in zip(stages.parts, indices, strict=True)
        ]
        make = SCHEDULES[self.schedule]
        given = pipeline_stages[0] if self.num_parts == 1 else pipeline_stages
        return make(
            given, details.num_micro, loss_fn=loss, scale_grads=details.normalization == "mean"
        )

    def make_step(self, elements: LossOfElements, details: Details) -> Callable[..., Any]:
        """The training step of a rank."""

        def train_step(model: Stages, batch: Batch, trainer: Trainer, mesh: DeviceMesh) -> Any:
            for optimizer in trainer.optimizers:
                optimizer.zero_grad()
            scale = 1.0 if self.has_fsdp else 1.0 / data_size(self, mesh)
            if details.normalization == "tokens":
                model.count = sum_over_data(batch["mask"].sum(), self, mesh)
                scale = float(data_size(self, mesh)) if self.has_fsdp else 1.0
            if model.schedule is None:
                model.schedule = self.build_schedule(
                    model, mesh, details, lambda x, y: scale * divide(x, y, model.count)
                )
            labels = batch["labels"]
            if details.normalization == "tokens":
                labels = labels.masked_fill(batch["mask"] == 0, IGNORED)
            total = self.run(model, batch["tokens"], labels, mesh, details)
            self.reduce_gradients(model, mesh)
            norm = clip_rank(model, self, details, mesh)
            update(model, trainer, details, norm)
            return self.report(model, trainer, batch, total, norm, details, mesh)

        return train_step

    def run(
        self, model: Stages, tokens: Tensor, labels: Tensor, mesh: DeviceMesh, details: Details
    ) -> Tensor:
        """Forward and backward of all micro-batches; the loss, on all ranks."""
        indices = self.stage_indices(mesh.get_local_rank("pp"))
        inputs = (tokens,) if 0 in indices else ()
        losses: list[Tensor] = []
        if self.mesh["pp"] * self.num_parts - 1 in indices:
            model.schedule.step(*inputs, target=labels, losses=losses)
        else:
            model.schedule.step(*inputs)
        total = torch.stack(losses).sum() if losses else torch.zeros(())
        total = total.detach() / (details.num_micro if details.normalization == "mean" else 1)
        dist.all_reduce(total, group=mesh.get_group("pp"))
        return total

    def reduce_gradients(self, model: nn.Module, mesh: DeviceMesh) -> None:
        if self.has_fsdp:
            return
        for parameter in model.parameters():
            for axis in self.data_axes:
                dist.all_reduce(parameter.grad, group=mesh.get_group(axis))

    def report(
        self,
        model: nn.Module,
        trainer: Trainer,
        batch: Batch,
        total: Tensor,
        norm: Tensor | None,
        details: Details,
        mesh: DeviceMesh,
    ) -> Any:
        """What the step returns."""
        trainer.tokens_seen += int(sum_over_data(batch["mask"].sum(), self, mesh))
        total = sum_over_data(total, self, mesh)
        if self.has_fsdp:
            total = total / data_size(self, mesh)
        if not details.is_logged:
            return total
        numbers = {"loss": total, "tokens": trainer.tokens_seen, "skipped": trainer.skipped}
        return numbers | ({} if norm is None else {"norm": norm})


def divide(logits: Tensor, labels: Tensor, count: Tensor | None) -> Tensor:
    """The mean cross entropy, or its sum divided by a number of tokens."""
    losses = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return losses.mean() if count is None else losses.sum() / count
