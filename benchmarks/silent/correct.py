"""Training programs that are right: models × parallelisms × details of the step.

Every program is a combination; none should give an alarm. `PROGRAMS` has all, by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from benchmarks.silent import correct_models as models
from benchmarks.silent.correct_by_hand import ContextParallel, ExpertParallel, Megatron
from benchmarks.silent.correct_layouts import (
    DDP,
    FSDP,
    Buckets,
    Layout,
    ReduceScattered,
    ReplicatedTensorParallel,
    ShardedTensorParallel,
    TensorParallel,
)
from benchmarks.silent.correct_parallel_scripts import PARALLEL_SCRIPTS
from benchmarks.silent.correct_pipelines import Pipeline
from benchmarks.silent.correct_scripts import SCRIPTS, Script
from benchmarks.silent.correct_steps import (
    Details,
    LossOfElements,
    Trainer,
    make_trainer,
    parse_details,
    rank_step,
    single_step,
)
from torch import nn


@final
@dataclass(frozen=True, eq=False)
class Family:
    """A kind of model with its batches, and the loss of each sample or token."""

    name: str
    make: Callable[[], nn.Module]
    make_batch: Callable[[int, int], models.Batch]
    elements: LossOfElements
    blocks: str = ""  # of what kind, for layouts that need to know
    is_random: bool = False


@final
@dataclass(frozen=True, eq=False)
class Program:
    """A training program: a model, a parallelism, and the details of the step."""

    family: Family
    layout: Layout
    details: Details
    batch_size: int = 8
    precision: torch.dtype | None = None

    @property
    def name(self) -> str:
        """What the program is made of."""
        uneven = f"batch{self.batch_size}" if self.batch_size != 8 else ""
        parts = (self.family.name, self.layout.label, self.details.label, uneven)
        return "/".join(filter(None, parts))

    def make_model(self) -> nn.Module:
        """The model, always with the same weights."""
        torch.manual_seed(7)
        return self.family.make()

    def make_batches(self) -> list[models.Batch]:
        """The batches of two steps."""
        return [self.family.make_batch(self.batch_size, seed) for seed in (1, 2)]

    def make_trainer(self, model: nn.Module) -> Trainer:
        """The optimizers and what belongs to them."""
        return make_trainer(model, self.details)

    @property
    def train_step(self) -> Callable[..., Any]:
        """The training step of a single device."""
        return single_step(self.family.elements, self.details)

    @property
    def rank_step(self) -> Callable[..., Any]:
        """The training step of a rank."""
        make = getattr(self.layout, "make_step", None)
        if make is not None:
            return make(self.family.elements, self.details)
        return rank_step(self.layout, self.family.elements, self.details)


VECTORS = (models.make_vectors, models.sum_squares)
TOKENS = (models.make_tokens, models.cross_entropies)

MLP = Family("mlp", models.MLP, *VECTORS)
MLP_AGAIN = Family("mlp-recompute", partial(models.MLP, is_checkpointed=True), *VECTORS)
MLP_DROPOUT = Family("mlp-dropout", partial(models.MLP, dropout=0.3), *VECTORS, is_random=True)
LORA = Family("lora", models.LowRankMLP, *VECTORS)
CONV = Family("conv-batch_norm", models.ConvNet, models.make_images, models.sum_squares)
CONV_GROUPS = Family(
    "conv-group_norm",
    partial(models.ConvNet, norm="group"),
    models.make_images,
    models.sum_squares,
)
LSTM = Family("lstm", models.Recurrent, models.make_sequences, models.sum_squares)
GRU = Family("gru", partial(models.Recurrent, nn.GRU), models.make_sequences, models.sum_squares)
GPT = Family("gpt", models.GPT, *TOKENS)
GPT_TIED = Family("gpt-tied", partial(models.GPT, is_tied=True), *TOKENS)
GPT_AGAIN = Family("gpt-recompute", partial(models.GPT, is_checkpointed=True), *TOKENS)
GPT_DROPOUT = Family("gpt-dropout", partial(models.GPT, dropout=0.2), *TOKENS, is_random=True)
GPT_DEEP = Family("gpt-deep", partial(models.GPT, 4), *TOKENS)
MOE = Family("moe", partial(models.GPT, has_experts=True), *TOKENS)


def combine(
    families: Sequence[Family],
    layouts: Sequence[Layout],
    details: str,
    *,
    batch_size: int = 8,
    precision: torch.dtype | None = None,
) -> Iterator[Program]:
    """A program for each family and layout; `details` are taken in turn, a line for each."""
    lines = [line.strip() for line in details.splitlines() if line.strip()]
    pairs = [(family, layout) for layout in layouts for family in families]
    for index, line in enumerate(lines if len(lines) > len(pairs) else range(len(pairs))):
        family, layout = pairs[index % len(pairs)]
        text = lines[index % len(lines)]
        del line
        parsed = parse_details(text)
        num_shards = math.prod(layout.mesh[axis] for axis in layout.batch_axes)
        if parsed.num_micro > max(1, batch_size // num_shards):
            parsed = replace(parsed, num_micro=2)
        yield Program(family, layout, parsed, batch_size, precision)


def list_programs() -> Iterator[Program]:
    """All programs."""
    yield from combine(
        [MLP, GPT, GPT_TIED, LSTM, LORA, CONV_GROUPS, MLP_AGAIN, GRU],
        [DDP({"dp": 2}), DDP({"dp": 4}), DDP({"dp": 2}, has_no_sync=True)],
        """
        sgd
        adamw norm
        momentum micro2 hand warmup
        foreach value
        groups tokens logged
        two decay average
        adafactor evaluation logged
        muon micro2 tokens total
        unfused norm skipping logged
        momentum micro4 tokens norm logged
        adamw average evaluation
        """,
    )
    yield from combine(
        [CONV, CONV_GROUPS],
        [DDP({"dp": 2}, broadcast_buffers=False), DDP({"dp": 4}), FSDP({"dp": 2})],
        """
        sgd
        adamw norm evaluation
        momentum tokens hand logged
        """,
    )
    yield from combine(
        [MLP, GPT_TIED, GPT, LORA, LSTM, MLP_AGAIN, GPT_AGAIN],
        [
            FSDP({"dp": 2}),
            FSDP({"dp": 4}, is_kept=True),
            FSDP({"replicas": 2, "dp": 2}),
            FSDP({"dp": 2}, is_deferred=True),
        ],
        """
        adamw norm
        sgd micro2 tokens logged
        momentum total warmup
        adafactor hand logged
        muon micro2 average
        groups value evaluation
        two hand skipping logged
        foreach micro4 tokens norm decay
        unfused tokens hand evaluation logged
        """,
    )
    yield from combine(
        [MLP, GPT],
        [
            TensorParallel({"tp": 2}),
            TensorParallel({"tp": 4}),
        ],
        """
        sgd
        adamw hand logged
        momentum micro2 tokens warmup
        groups
        adafactor hand
        muon average micro2 evaluation
        two evaluation
        """,
    )
    yield from combine(
        [GPT, GPT_AGAIN],
        [
            TensorParallel({"tp": 2}, is_sequence=True),
            TensorParallel({"tp": 2}, has_vocabulary=True),
            TensorParallel({"tp": 2}, has_vocabulary=True, is_sequence=True),
            TensorParallel({"tp": 2}, has_sharded_loss=True, has_vocabulary=True),
            TensorParallel({"tp": 2}, has_sharded_loss=True, is_sequence=True),
            TensorParallel({"tp": 4}, has_sharded_loss=True, is_sequence=True, has_vocabulary=True),
        ],
        """
        adamw hand logged
        momentum micro2 tokens
        sgd hand warmup evaluation
        groups average
        unfused hand tokens logged skipping
        """,
    )
    yield from combine(
        [GPT],
        [
            ShardedTensorParallel({"dp": 2, "tp": 2}),
            ShardedTensorParallel({"dp": 2, "tp": 2}, is_sequence=True),
            ShardedTensorParallel({"dp": 2, "tp": 2}, has_vocabulary=True),
            ShardedTensorParallel({"dp": 2, "tp": 4}, is_sequence=True, has_sharded_loss=True),
            ReplicatedTensorParallel({"dp": 2, "tp": 2}),
            ReplicatedTensorParallel({"dp": 2, "tp": 2}, is_sequence=True),
        ],
        """
        adamw hand
        sgd micro2 tokens logged
        momentum tokens hand evaluation logged
        unfused micro2 warmup
        """,
    )
    yield from combine(
        [MLP, GPT, GPT_TIED, LORA, GRU],
        [Buckets({"dp": 2}), Buckets({"dp": 2, "more": 2}), ReduceScattered({"dp": 2})],
        """
        sgd norm
        adamw tokens micro2 logged
        momentum hand skipping logged
        adafactor evaluation
        muon tokens total
        """,
    )
    yield from combine(
        [MLP_DROPOUT, GPT_DROPOUT],
        [DDP({"dp": 2}), FSDP({"dp": 2}), TensorParallel({"tp": 2})],
        """
        sgd
        adamw hand
        momentum micro2
        """,
    )
    yield from combine(
        [MLP, GPT_TIED],
        [DDP({"dp": 2}), FSDP({"dp": 2}), Buckets({"dp": 2})],
        """
        sgd tokens
        adamw tokens hand logged
        momentum tokens micro2
        """,
        batch_size=5,
    )
    yield from combine(
        [MLP, GPT],
        [FSDP({"dp": 2}, dtype=torch.bfloat16), FSDP({"rep": 2, "dp": 2}, dtype=torch.bfloat16)],
        """
        sgd
        adamw micro2 norm
        """,
        precision=torch.bfloat16,
    )
    yield from combine(
        [MLP, GPT, GPT_AGAIN],
        [Megatron({"tp": 2}), Megatron({"tp": 4}), Megatron({"dp": 2, "tp": 2})],
        """
        sgd hand
        adamw tokens micro2 logged
        momentum value decay
        foreach hand skipping logged
        unfused average evaluation
        """,
    )
    yield from combine(
        [GPT, GPT_AGAIN],
        [
            Megatron({"tp": 2}, is_sequence=True),
            Megatron({"tp": 2}, has_vocabulary=True),
            Megatron({"tp": 4}, is_sequence=True, has_vocabulary=True),
            Megatron({"dp": 2, "tp": 2}, is_sequence=True, has_vocabulary=True),
        ],
        """
        adamw hand logged
        sgd tokens micro2
        momentum tokens hand evaluation logged
        """,
    )
    yield from combine(
        [GPT, GPT_TIED],
        [
            ContextParallel({"cp": 2}),
            ContextParallel({"cp": 2}, is_zigzag=True),
            ContextParallel({"cp": 4}, is_ring=True),
            ContextParallel({"cp": 2}, is_ring=True, is_zigzag=True),
            ContextParallel({"cp": 2}, is_sliced=False),
            ContextParallel({"dp": 2, "cp": 2}, is_zigzag=True),
            ContextParallel({"dp": 2, "cp": 2}, is_ring=True, has_fsdp=True),
            ContextParallel({"cp": 2}, is_zigzag=True, has_fsdp=True),
        ],
        """
        adamw hand
        sgd tokens micro2 logged
        momentum tokens hand logged
        foreach tokens average
        adafactor evaluation
        """,
    )
    yield from combine(
        [MOE],
        [
            DDP({"dp": 2}),
            FSDP({"dp": 2}),
            ExpertParallel({"ep": 2}),
            ExpertParallel({"ep": 4}),
            ExpertParallel({"dp": 2, "ep": 2}),
            ExpertParallel({"dp": 2, "ep": 2}, has_fsdp=True),
        ],
        """
        sgd z_loss
        adamw tokens micro2 logged
        momentum tokens balance_loss
        adamw hand balance_loss logged
        momentum tokens hand z_loss
        foreach micro2 evaluation
        sgd tokens hand skipping logged
        """,
    )
    yield from combine(
        [GPT_DEEP],
        [
            Pipeline({"pp": 2}, "gpipe"),
            Pipeline({"pp": 2}, "1f1b"),
            Pipeline({"pp": 4}, "1f1b"),
            Pipeline({"pp": 2}, "interleaved"),
            Pipeline({"pp": 2}, "looped"),
            Pipeline({"pp": 2}, "zero_bubble"),
            Pipeline({"pp": 2}, "zbv"),
            Pipeline({"dp": 2, "pp": 2}, "1f1b"),
            Pipeline({"dp": 2, "pp": 2}, "interleaved"),
            Pipeline({"dp": 2, "pp": 2}, "1f1b", has_fsdp=True),
            Pipeline({"dp": 2, "pp": 4}, "1f1b"),
        ],
        """
        sgd micro4
        adamw micro4 tokens hand logged
        momentum micro4 hand warmup
        foreach micro4 tokens average
        unfused micro4 tokens value
        """,
    )


PROGRAMS: dict[str, Program | Script] = {
    **{program.name: program for program in list_programs()},
    **SCRIPTS,
    **PARALLEL_SCRIPTS,
}
