"""An ordinary training program, for `launched_on_accelerator.py`: torchrun starts it on a GPU, and
`shardscope run` without one. It knows nothing of shardscope."""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    """A decoder layer."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.ffn_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and feed-forward, each beside a residual."""
        batch, length, dim = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.down(functional.gelu(self.up(self.ffn_norm(x))))


class GPT(nn.Module):
    """A decoder; with `is_checkpointed`, blocks are recomputed in backward."""

    def __init__(self, num_layers: int, dim: int, vocab: int, is_checkpointed: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, dim // 64) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        self.is_checkpointed = is_checkpointed

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits for each token."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(self.norm(x))


def main() -> None:
    """Train for a few steps, and print the loss and the memory of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="fsdp")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    parser.add_argument("--optimizer", choices=["AdamW", "SGD"], default="AdamW")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    vocab = 32_000
    model: nn.Module = GPT(args.layers, args.dim, vocab, args.checkpoint).to(device)
    if args.parallel == "ddp":
        model = DistributedDataParallel(model, device_ids=[device.index])
    else:
        options = {}
        if args.precision == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda", enabled=args.precision == "fp16")
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float16
    uses_autocast = args.precision == "fp16" or (
        args.precision == "bf16" and args.parallel == "ddp"
    )
    for step in range(args.steps):
        torch.cuda.reset_peak_memory_stats()
        for index in range(args.accumulate):
            is_last = index == args.accumulate - 1
            skips_sync = args.parallel == "ddp" and not is_last
            tokens = torch.randint(vocab, (4, args.length), device=device)
            with (
                model.no_sync() if skips_sync else nullcontext(),
                torch.autocast("cuda", dtype, enabled=uses_autocast),
            ):
                logits = model(tokens)
                loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
                scaler.scale(loss / args.accumulate).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}, norm {float(norm):.3f}")
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        print(f"PEAK {step} {allocated} {reserved}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
