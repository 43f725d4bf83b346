"""A GAN on one GPU without torch.distributed, in a process that the program starts by hand.

Its transforms are modules, which workers of the data loader call, and it evaluates a classifier on
many batches before it trains.
"""

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Scale(nn.Module):
    def forward(self, x):
        return x / 2


class Images(Dataset):
    def __init__(self):
        self.transform = Scale()

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.transform(torch.randn(16))


def train(rank, generator, discriminator):
    assert rank == 0
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-3) for m in (generator, discriminator)]
    loader = DataLoader(Images(), batch_size=8, num_workers=1, pin_memory=True)
    criterion = nn.BCEWithLogitsLoss()
    with torch.no_grad():
        scores = [discriminator(torch.randn(8, 16, device="cuda")).mean().item() for _ in range(50)]
    print(f"score {sum(scores) / 50}")
    for index, real in enumerate(loader):
        real = real.cuda(non_blocking=True)
        ones, zeros = torch.ones(8, 1, device="cuda"), torch.zeros(8, 1, device="cuda")
        fake = generator(torch.randn(8, 4, device="cuda"))
        assert (fake.abs() < 100).all(), "the generator has diverged"
        optimizers[1].zero_grad()
        criterion(discriminator(real), ones).backward()
        criterion(discriminator(fake.detach()), zeros).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        criterion(discriminator(fake), ones).backward()
        optimizers[0].step()
        print(f"iteration {index}")


if __name__ == "__main__":
    mp.set_start_method("spawn", force=True)
    generator, discriminator = nn.Linear(4, 16).cuda(), nn.Linear(16, 1).cuda()
    generator.share_memory()
    processes = [mp.Process(target=train, args=(rank, generator, discriminator)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
