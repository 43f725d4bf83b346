"""Pre-training loop that can be canceled from outside, by a file that the first rank watches."""

import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

logging.basicConfig(level=logging.INFO, format="%(message)s")
log = logging.getLogger("train")
CANCEL_FILE = Path(os.environ.get("CANCEL_FILE", "cancel"))
CORRECTED = os.environ.get("HANG") == "corrected"


def synchronize_flag(flag, device):
    tensor = torch.tensor(int(flag), device=device)
    dist.broadcast(tensor, 0)
    return bool(tensor.item())


def synchronize_value(value, device):
    tensor = torch.tensor(value, device=device)
    dist.broadcast(tensor, 0)
    return tensor.item()


class Trainer:
    def __init__(self, device, max_steps=6):
        self.device, self.max_steps = device, max_steps
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32))
        self.model = fully_shard(self.model.to(device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.generator = torch.Generator().manual_seed(dist.get_rank())

    def train_step(self):
        ids = torch.randint(32, (4, 12), generator=self.generator).to(self.device)
        logits = self.model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def check_if_cancelled(self):
        """Whether the run is to end, and after how many more steps."""
        should_cancel, cancel_reason, extra_steps = False, None, 0
        if dist.get_rank() == 0 and CANCEL_FILE.exists():
            should_cancel, cancel_reason, extra_steps = True, "cancel file", 2
        run_canceled = synchronize_flag(should_cancel, self.device)
        if run_canceled and (CORRECTED or cancel_reason is not None):  # HANG
            extra_steps = synchronize_value(extra_steps, self.device)
            log.info(f"run canceled due to {cancel_reason}, stopping in {extra_steps} more steps")
        return run_canceled, extra_steps

    def fit(self):
        stop_at = self.max_steps
        is_canceled = False
        for step in range(1, self.max_steps + 1):
            loss = self.train_step()
            if dist.get_rank() == 0:
                log.info(f"step {step} loss {loss:.3f}")
            if not is_canceled and step % 2 == 0:
                is_canceled, extra_steps = self.check_if_cancelled()
                if is_canceled:
                    stop_at = min(stop_at, step + extra_steps)
            if step >= stop_at:
                break


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    Trainer(device).fit()
    dist.destroy_process_group()
