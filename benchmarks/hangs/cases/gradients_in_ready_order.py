"""Overlap gradient averaging with backward: an all_reduce as soon as a gradient is ready."""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CORRECTED = os.environ.get("HANG") == "corrected"


class TwoTowers(nn.Module):
    """Text and audio; the shorter of the two is run last, so that it is in the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Sequential(nn.Embedding(30, 12), nn.Linear(12, 8))
        self.audio = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 8))

    def forward(self, ids: Tensor, frames: Tensor) -> Tensor:
        if ids.shape[1] >= frames.shape[1]:
            text = self.text(ids).mean(1)
            audio = self.audio(frames).mean(1)
        else:
            audio = self.audio(frames).mean(1)
            text = self.text(ids).mean(1)
        return nn.functional.cosine_similarity(text, audio)


class Reducer:
    """Starts reductions in hooks of parameters and waits for them before the optimizer's step."""

    def __init__(self, model: nn.Module) -> None:
        self.works: list[tuple[dist.Work, Tensor]] = []
        self.ready: list[int] = []
        self.params = list(model.parameters())
        for index, p in enumerate(self.params):
            p.register_post_accumulate_grad_hook(lambda _, index=index: self.on_ready(index))

    def on_ready(self, index: int) -> None:
        self.ready.append(index)
        if not CORRECTED:
            self.reduce(index)  # HANG
        elif len(self.ready) == len(self.params):
            for index in range(len(self.params)):
                self.reduce(index)

    def reduce(self, index: int) -> None:
        grad = self.params[index].grad
        assert grad is not None
        self.works.append((dist.all_reduce(grad, async_op=True), grad))

    def wait(self) -> None:
        for work, grad in self.works:
            work.wait()
            grad /= dist.get_world_size()
        self.works.clear()
        self.ready.clear()


class Recordings(Dataset):
    """Transcripts of ten tokens, and the frames of the recordings."""

    num_frames = int(os.environ.get("NUM_FRAMES", "8"))

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(30, (10,), generator=generator)
        return ids, torch.randn(self.num_frames, 6, generator=generator)


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = TwoTowers().to(device)
    reducer = Reducer(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = DistributedSampler(Recordings())
    for step, (ids, frames) in enumerate(DataLoader(Recordings(), 4, sampler=sampler)):
        loss = (1 - model(ids.to(device), frames.to(device))).mean()
        optimizer.zero_grad()
        loss.backward()
        reducer.wait()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
