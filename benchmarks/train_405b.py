"""Train a Llama 3 of 405B parameters on 16,384 GPUs: 16 stages, FSDP2 over 128 ranks, tensor parallelism of 8.

    shardscope check --nnodes 2048 -- benchmarks/train_405b.py
    shardscope check --nnodes 2048 -- benchmarks/train_405b.py --mistake last-stage

An own norm of the gradients is reduced over the pipeline; with `--mistake last-stage` only the last
stage takes part. `--mistake empty` skips the optimizer on a rank whose loss is not finite.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "gallery"))
from llama3 import LLAMA3_405B, Block  # noqa: E402

PP, TP = 16, 8


class Stage(nn.Module):
    """The blocks of a stage; the first embeds the tokens, the last returns logits."""

    def __init__(self, config, blocks, *, is_first, is_last):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.dim) if is_first else None
        self.layers = nn.ModuleDict({str(index): Block(config) for index in blocks})
        self.norm = nn.RMSNorm(config.dim) if is_last else None
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False) if is_last else None

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        for block in self.layers.values():
            x = block(x)
        return x if self.norm is None else self.head(self.norm(x))


def parallelize(stage, mesh):
    replicated, sequence = Replicate(), Shard(1)
    gather = tp.PrepareModuleInput(input_layouts=replicated, desired_input_layouts=replicated)
    plan = {
        "layers.*.attention": gather,
        "layers.*.attention.w[qkv]": tp.ColwiseParallel(),
        "layers.*.attention.wo": tp.RowwiseParallel(),
        "layers.*.ffn": gather,
        "layers.*.ffn.gate": tp.ColwiseParallel(),
        "layers.*.ffn.up": tp.ColwiseParallel(),
        "layers.*.ffn.down": tp.RowwiseParallel(),
    }
    if stage.embed is not None:
        plan["embed"] = tp.RowwiseParallel(input_layouts=replicated)
    if stage.head is not None:
        plan["head"] = tp.ColwiseParallel(output_layouts=replicated)
    tp.parallelize_module(stage, mesh["tp"], plan)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in stage.layers.values():
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(stage, mesh=mesh["dp"], mp_policy=policy)
    del sequence


def loss_of(logits, targets):
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", choices=["last-stage", "empty"])
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=1024)
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl")
    shape = (PP, dist.get_world_size() // PP // TP, TP)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("pp", "dp", "tp"))
    index = mesh["pp"].get_local_rank()
    layers = range(LLAMA3_405B.num_layers)
    blocks = layers[index * len(layers) // PP : (index + 1) * len(layers) // PP]
    with torch.device("meta"):
        model = Stage(LLAMA3_405B, blocks, is_first=index == 0, is_last=index == PP - 1)
    parallelize(model, mesh)
    model.to_empty(device=device)
    stage = PipelineStage(model, index, PP, device, group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, n_microbatches=arguments.micro_batches, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(3):
        shape = (arguments.micro_batches, arguments.seq_len)
        tokens = torch.randint(LLAMA3_405B.vocab_size, shape, device=device)
        losses = []
        if index == 0:
            schedule.step(tokens)
        elif index == PP - 1:
            schedule.step(target=tokens, losses=losses)
        else:
            schedule.step()
        norm = torch.zeros((), device=device)
        if arguments.mistake != "last-stage" or index == PP - 1:
            dist.all_reduce(norm, group=mesh["pp"].get_group())
        if arguments.mistake == "empty" and losses and not torch.isfinite(torch.stack(losses)).all():
            continue
        optimizer.step()
        dist.all_reduce(norm, group=mesh["dp"].get_group())
        optimizer.zero_grad()
    dist.destroy_process_group()


main()
