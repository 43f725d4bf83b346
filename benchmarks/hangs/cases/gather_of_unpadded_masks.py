"""Supervised fine-tuning with Accelerate that counts the tokens it has seen."""

import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Conversations(Dataset):
    """Token ids of different lengths; those of a language in a script of its own are longer."""

    def __init__(self, size=32):
        lengths = [int(n) for n in os.environ.get("LENGTHS", "11").split(",")]
        generator = torch.Generator().manual_seed(3)
        # With two processes and batches of four, batches go to the processes in turn.
        self.samples = [
            torch.randint(1, 60, (lengths[i // 4 % len(lengths)],), generator=generator)
            for i in range(size)
        ]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def collate(samples):
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


class SFTTrainer:
    def __init__(self, model, accelerator, loader):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        prepared = accelerator.prepare(model, optimizer, loader)
        self.model, self.optimizer, self.loader = prepared
        self.accelerator, self.num_tokens = accelerator, 0

    def compute_loss(self, batch):
        ids, mask = batch["input_ids"], batch["attention_mask"]
        logits = self.model(ids)
        losses = nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
        )
        if os.environ.get("HANG") == "corrected":
            self.num_tokens += self.accelerator.gather(mask.sum()).sum().item()
        else:
            self.num_tokens += self.accelerator.gather(mask).sum().item()  # HANG
        return (losses * mask[:, 1:]).sum() / mask[:, 1:].sum()

    def train(self):
        for step, batch in enumerate(self.loader):
            loss = self.compute_loss(batch)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.accelerator.print(f"step {step} loss {loss.item():.3f} tokens {self.num_tokens}")


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(60, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 60))
    loader = DataLoader(Conversations(), batch_size=4, collate_fn=collate)
    SFTTrainer(model, accelerator, loader).train()
    accelerator.end_training()


if __name__ == "__main__":
    main()
