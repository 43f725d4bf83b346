"""Two pipeline stages of a GPT with MoE layers and a multi-token-prediction (MTP) layer.

The first stage has dense layers only. Each stage logs the auxiliary losses of its routers, summed
over the pipeline group. torchrun --nproc-per-node 2 aux_loss_tracker_size.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

NUM_LAYERS, MTP_LAYERS, DIM = 4, 1, 8
TRACKER: dict[str, torch.Tensor] = {}


class Router(nn.Module):
    def __init__(self, layer_number):
        super().__init__()
        self.layer_number = layer_number
        self.weight = nn.Parameter(torch.randn(3, DIM) * 0.1)

    def forward(self, x):
        scores = (x @ self.weight.T).softmax(-1)
        aux_loss = scores.mean((0, 1)).square().sum() * 3
        values = TRACKER.setdefault("load_balancing", x.new_zeros(NUM_LAYERS + MTP_LAYERS))
        values[self.layer_number] += aux_loss.detach()
        return x * scores.amax(-1, keepdim=True)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(DIM, DIM)

    def forward(self, x):
        return x + torch.tanh(self.fc(x))


def track_moe_metrics(pp_group, device):
    """The auxiliary loss of each layer, summed over the stages."""
    num_values = NUM_LAYERS  # HANG
    if os.environ.get("HANG") == "corrected":
        num_values += MTP_LAYERS
    if "load_balancing" not in TRACKER:  # a stage without MoE layers
        TRACKER["load_balancing"] = torch.zeros(num_values, device=device)
    values = TRACKER["load_balancing"]
    dist.all_reduce(values, group=pp_group)
    losses = values.tolist()
    TRACKER.clear()
    return losses


def forward_backward(stage, x, pp_rank):
    """One micro-batch: activations to the next stage, gradients back."""
    if pp_rank == 0:
        out = stage(x)
        dist.send(out.detach(), 1)
        grad = torch.empty_like(out)
        dist.recv(grad, 1)
        out.backward(grad)
        return None
    received = torch.empty_like(x)
    dist.recv(received, 0)
    received.requires_grad_()
    loss = stage(received).square().mean()
    loss.backward()
    dist.send(received.grad, 0)
    return loss.item()


def main():
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    pp_rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    pp_group = dist.new_group([0, 1])
    torch.manual_seed(pp_rank)
    layers = [Dense(), Dense()] if pp_rank == 0 else [Router(2), Dense(), Router(3), Router(4)]
    stage = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(9)
    for iteration in range(2):
        x = torch.randn(2, 5, DIM, generator=generator).to(device)
        loss = forward_backward(stage, x, pp_rank)
        optimizer.step()
        optimizer.zero_grad()
        aux_losses = track_moe_metrics(pp_group, device)
        if loss is not None:
            print(f"iteration {iteration}: loss {loss:.4f}, aux losses {aux_losses}")
    dist.destroy_process_group()


main()
