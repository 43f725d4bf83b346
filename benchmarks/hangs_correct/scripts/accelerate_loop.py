"""Loops with Accelerate: accumulation, metrics, padding, uneven inputs, checkpoints."""

import argparse
import tempfile

import torch
from accelerate import Accelerator
from common import mlp
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader, TensorDataset

OPTIONS = ["plain", "accumulate", "metrics", "padding", "uneven", "checkpoint", "trigger"]


def train(accelerator, option, folder):
    torch.manual_seed(0)
    x = torch.randn(22, 6)
    dataset = TensorDataset(x, x.sum(-1, keepdim=True))
    loader = DataLoader(dataset, batch_size=4, shuffle=True)
    model = mlp(6, 12, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    num_samples = 0
    for epoch in range(2):
        for step, (x, y) in enumerate(loader):
            with accelerator.accumulate(model):
                predictions = model(x)
                loss = (predictions - y).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if option == "metrics":
                num_samples += len(accelerator.gather_for_metrics(predictions.detach()))
            elif option == "padding":
                rows = predictions.detach()[: 2 + accelerator.process_index]
                rows = accelerator.pad_across_processes(rows, dim=0)
                num_samples += len(accelerator.gather(rows))
            elif option == "trigger":
                if accelerator.process_index == 1 and step == 1:
                    accelerator.set_trigger()
                if accelerator.check_trigger():
                    break
        if option == "checkpoint":
            accelerator.wait_for_everyone()
            accelerator.save_state(f"{folder}/{epoch}")
        elif option == "uneven":
            num_own = 2 + accelerator.process_index
            with Join([model]):  # what accelerator.join_uneven_inputs does with GPUs
                for _ in range(num_own):
                    accelerator.backward(model(torch.ones(2, 6, device=accelerator.device)).sum())
            optimizer.zero_grad()
    accelerator.print("done", num_samples)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--option", choices=OPTIONS, default="plain")
    args = parser.parse_args()
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=2 if args.option == "accumulate" else 1,
    )
    with tempfile.TemporaryDirectory() as folder:
        train(accelerator, args.option, folder)
        accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()
