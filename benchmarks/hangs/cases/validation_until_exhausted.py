"""Pre-training with validation on packed documents, until the validation set is exhausted."""

import os
from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset

SEQ_LEN = 16
# -1: use all of the validation set, which has other numbers of sequences on each rank.
VALIDATION_STEPS = 3 if os.environ.get("HANG") == "corrected" else -1


class PackedDocuments(IterableDataset):
    """Documents of this rank, concatenated and cut into sequences of SEQ_LEN + 1 tokens."""

    def __init__(self, seed: int, num_documents: int, document_length: int, infinite: bool) -> None:
        self.seed, self.num_documents, self.infinite = seed, num_documents, infinite
        self.document_length = document_length

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        buffer: list[int] = []
        while True:
            for _ in range(self.num_documents):
                document = torch.randint(48, (self.document_length,), generator=generator)
                buffer += document.tolist()
                while len(buffer) > SEQ_LEN:
                    yield torch.tensor(buffer[: SEQ_LEN + 1])
                    buffer = buffer[SEQ_LEN + 1 :]
            if not self.infinite:
                return


class Transformer(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(48, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.output = nn.Linear(dim, 48)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = h + F.silu(layer(h))
        return self.output(h)


def loss_of(model: nn.Module, sequence: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(sequence[:, :-1]).flatten(0, 1), sequence[:, 1:].flatten())


@torch.no_grad()
def validate(model: nn.Module, rank: int, device: torch.device) -> float:
    length = int(os.environ.get("DOCUMENT_LENGTH", "20"))  # of this rank's validation documents
    dataset = PackedDocuments(50 + rank, 4, length, infinite=VALIDATION_STEPS != -1)
    model.eval()
    losses = []
    for step, sequence in enumerate(DataLoader(dataset, batch_size=1)):  # HANG
        if step == VALIDATION_STEPS:
            break
        losses.append(loss_of(model, sequence.to(device)))
    model.train()
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def main() -> None:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device_type, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("dp",))
    index = int(os.environ["LOCAL_RANK"]) if device_type == "cuda" else 0
    device, rank = torch.device(device_type, index), mesh.get_rank()
    torch.manual_seed(0)
    model = Transformer().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_set = PackedDocuments(rank, 8, 20, infinite=True)
    train_loader = DataLoader(train_set, batch_size=1)
    for step, sequence in enumerate(islice(train_loader, 4), 1):
        loss = loss_of(model, sequence.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            print(f"step {step}: validation loss {validate(model, rank, device):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
