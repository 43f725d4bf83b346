"""Personalize a small diffusion model with Accelerate, and save it every few steps."""

import os
import tempfile

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Denoiser(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.time = nn.Embedding(10, dim)
        self.net = nn.Sequential(nn.Linear(dim, 32), nn.SiLU(), nn.Linear(32, dim))

    def forward(self, x, t):
        return self.net(x + self.time(t))


def save(accelerator, model, output_dir, global_step):
    state = accelerator.unwrap_model(model).state_dict()
    path = os.path.join(output_dir, f"checkpoint-{global_step}.pt")
    torch.save({name: tensor.cpu() for name, tensor in state.items()}, path)


def main(num_epochs=2, checkpointing_steps=2):
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(42)
    dataset = TensorDataset(torch.randn(32, 12))
    loader = DataLoader(dataset, batch_size=4, shuffle=True)
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    global_step = 0
    with tempfile.TemporaryDirectory() as output_dir:
        for _ in range(num_epochs):
            for (x,) in loader:
                noise = torch.randn_like(x)
                t = torch.randint(10, (len(x),), device=x.device)
                with accelerator.accumulate(model):
                    loss = F.mse_loss(model(x + noise * t[:, None] / 10, t), noise)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                global_step += 1
                if global_step % checkpointing_steps == 0:
                    if os.environ.get("HANG") == "corrected":
                        accelerator.wait_for_everyone()
                    if accelerator.is_main_process:
                        accelerator.print(f"saving checkpoint in {global_step=}")
                        if os.environ.get("HANG") != "corrected":
                            accelerator.wait_for_everyone()  # HANG
                        save(accelerator, model, output_dir, global_step)
    accelerator.end_training()


if __name__ == "__main__":
    main()
