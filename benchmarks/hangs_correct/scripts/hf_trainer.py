"""Hugging Face's Trainer with evaluation, checkpoints, accumulation and callbacks."""

import argparse
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

OPTIONS = ["plain", "evaluation", "saving", "accumulation", "early-stopping", "iterable"]


class Sequences(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        ids = torch.arange(index, index + 6) % 16
        return {"input_ids": ids, "labels": ids}


class Stream(IterableDataset):
    def __iter__(self):
        sequences = Sequences(20)
        for index in range(len(sequences)):
            yield sequences[index]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 12), nn.Linear(12, 16)

    def forward(self, input_ids, labels=None, **kwargs):
        logits = self.head(torch.tanh(self.embed(input_ids)))
        targets = labels[:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets)
        return {"loss": loss, "logits": logits}


def make_arguments(option, folder):
    keywords = {"eval_strategy": "no", "save_strategy": "no"}
    if option in ("evaluation", "early-stopping"):
        keywords |= {"eval_strategy": "steps", "eval_steps": 2}
    if option in ("saving", "early-stopping"):
        keywords |= {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
    if option == "early-stopping":
        keywords |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    if option == "accumulation":
        keywords |= {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=2,
        max_steps=5,
        logging_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        **keywords,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--option", choices=OPTIONS, default="plain")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [EarlyStoppingCallback(1)] if args.option == "early-stopping" else None
        trainer = Trainer(
            Model(),
            make_arguments(args.option, folder),
            train_dataset=Stream() if args.option == "iterable" else Sequences(23),
            eval_dataset=Sequences(7),
            callbacks=callbacks,
        )
        trainer.train()
        trainer.save_model(folder)
        if trainer.is_world_process_zero():
            print("trained", trainer.state.global_step, "steps")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
