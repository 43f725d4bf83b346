"""Measure the throughput of fine-tuning with Hugging Face's Trainer for a given time."""

import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments


class StopAfterSeconds(TrainerCallback):
    def __init__(self, seconds):
        self.seconds, self.start = seconds, None

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.monotonic()

    def on_step_end(self, args, state, control, **kwargs):
        is_over = time.monotonic() - self.start >= self.seconds
        if os.environ.get("HANG") == "corrected":
            flag = torch.tensor(int(is_over), device=args.device)
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
            is_over = bool(flag)
        if is_over:
            control.should_training_stop = True  # HANG


class Sequences(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.arange(index, index + 8) % 24
        return {"input_ids": ids, "labels": ids}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(24, 16), nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 24)

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.head(self.rnn(self.embed(input_ids))[0])
        targets = labels[:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
        return {"loss": loss, "logits": logits}


def main():
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            max_steps=6,
            logging_steps=2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            ddp_find_unused_parameters=False,
        )
        stop = StopAfterSeconds(float(os.environ.get("STOP_AFTER_SECONDS", "3600")))
        trainer = Trainer(Model(), args, train_dataset=Sequences(), callbacks=[stop])
        result = trainer.train()
        samples = torch.tensor(float(result.global_step * 4), device=args.device)
        dist.all_reduce(samples)
        if trainer.is_world_process_zero():
            print("samples of all ranks:", samples.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
