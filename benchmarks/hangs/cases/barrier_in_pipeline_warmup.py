"""1F1B schedule by hand, with barriers that measure the stall of the pipeline."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn

CORRECTED = os.environ.get("HANG") == "corrected"
NUM_MICRO_BATCHES = int(os.environ.get("NUM_MICRO_BATCHES", "2"))


class Pipeline:
    def __init__(self, module, device):
        self.module, self.device = module, device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.stall, self.sends = 0.0, []

    def barrier(self):
        start = time.perf_counter()
        dist.barrier()
        self.stall += time.perf_counter() - start

    def forward(self, micro_batch):
        x = micro_batch
        if self.rank > 0:
            x = torch.empty_like(micro_batch)
            dist.recv(x, self.rank - 1)
            x.requires_grad_()
        return x, self.module(x)

    def send_forward(self, out):
        if self.rank < self.size - 1:
            self.sends.append(dist.isend(out.detach(), self.rank + 1))

    def backward(self, x, out):
        if self.rank == self.size - 1:
            out.square().mean().backward()
        else:
            grad = torch.empty_like(out)
            dist.recv(grad, self.rank + 1)
            out.backward(grad)
        if self.rank > 0:
            dist.send(x.grad, self.rank - 1)

    def run(self, micro_batches):
        """Warm-up forwards, one forward and one backward in turn, and the backwards that remain."""
        num_warmup = min(self.size - self.rank - 1, len(micro_batches))
        measure_stall = not CORRECTED or len(micro_batches) >= self.size
        batches, states = iter(micro_batches), []
        for index in range(num_warmup):
            states.append(self.forward(next(batches)))
            if index == num_warmup - 1 and measure_stall:
                self.barrier()  # HANG
            self.send_forward(states[-1][1])
        if num_warmup == 0 and measure_stall:
            self.barrier()
        for _ in range(len(micro_batches) - num_warmup):
            states.append(self.forward(next(batches)))
            self.send_forward(states[-1][1])
            self.backward(*states.pop(0))
        while states:
            self.backward(*states.pop(0))
        while self.sends:
            self.sends.pop().wait()


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).to(device)
    pipeline = Pipeline(module, device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for step in range(2):
        x = torch.randn(NUM_MICRO_BATCHES, 2, 6, generator=generator).to(device)
        pipeline.run(list(x))
        optimizer.step()
        optimizer.zero_grad()
        print(f"stage {rank} step {step}: stalled for {pipeline.stall:.4f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
