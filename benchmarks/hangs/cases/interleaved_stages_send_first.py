"""Inference with a looped pipeline: two ranks have two stages each, tensors visit a rank twice."""

import os

import torch
import torch.distributed as dist
from torch import nn

DIM, NUM_MICRO_BATCHES, STAGES_PER_RANK = 8, 3, 2
ASYNCHRONOUS = os.environ.get("HANG") == "corrected"


class LoopedPipeline:
    """Breadth-first: all micro-batches through a stage, then all through the next one."""

    def __init__(self, stages, device):
        self.stages, self.device = stages, device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.pending = []

    def is_first(self, index):
        return self.rank == 0 and index == 0

    def is_last(self, index):
        return self.rank == self.size - 1 and index == len(self.stages) - 1

    def receive(self, shape):
        x = torch.empty(shape, device=self.device)
        dist.recv(x, (self.rank - 1) % self.size)
        return x

    def send(self, x):
        target = (self.rank + 1) % self.size
        if ASYNCHRONOUS:
            self.pending.append((dist.isend(x, target), x))
        else:
            dist.send(x, target)  # HANG

    def run(self, micro_batches):
        outputs = []
        for index, stage in enumerate(self.stages):
            for x in micro_batches:
                if not self.is_first(index):
                    x = self.receive(x.shape)
                x = stage(x).contiguous()
                if self.is_last(index):
                    outputs.append(x)
                else:
                    self.send(x)
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()
        return outputs


@torch.no_grad()
def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(rank)
    stages = [
        nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.GELU()).to(device)
        for _ in range(STAGES_PER_RANK)
    ]
    pipeline = LoopedPipeline(stages, device)
    generator = torch.Generator().manual_seed(0)
    for request in range(2):
        batch = torch.randn(2 * NUM_MICRO_BATCHES, DIM, generator=generator).to(device)
        outputs = pipeline.run(list(batch.split(2)))
        if outputs:
            print(f"request {request}: {torch.cat(outputs).mean().item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
