"""How far the memory that `memory()` tells is from what a GPU takes, case by case.

Each case is a training step. It is told on tensors without data, here with torch's own MemTracker
beside it, and run for real on CUDA, where `torch.cuda.max_memory_allocated` is the truth:

    python benchmarks/memory.py                 # both; needs a GPU
    python benchmarks/memory.py --tell          # what we tell, without a GPU
    python benchmarks/memory.py --measure -o measured.json
    python benchmarks/memory.py --tell --against measured.json
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from shardscope import simulate
from shardscope.cli import _llama
from shardscope.shard.memory.memory import Memory, memory

GIB = 1 << 30
BF16 = torch.bfloat16


class Block(nn.Module):
    """A decoder layer with biases, as in GPT-2."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.attention_norm, self.ffn_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and feed-forward, each beside a residual."""
        x = x + functional.dropout(self.attend(self.attention_norm(x)), self.dropout)
        hidden = functional.gelu(self.up(self.ffn_norm(x)))
        return x + functional.dropout(self.down(hidden), self.dropout)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Causal attention over `num_heads` heads."""
        batch, length, dim = x.shape
        heads = (part.view(batch, length, self.num_heads, -1) for part in self.qkv(x).chunk(3, -1))
        query, key, value = (part.transpose(1, 2) for part in heads)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


class GPT(nn.Module):
    """A decoder; `checkpointing` says whether blocks are run again in backward, and how."""

    def __init__(
        self,
        num_layers: int,
        dim: int,
        *,
        num_heads: int = 16,
        vocab_size: int = 32_000,
        dropout: float = 0.0,
        checkpointing: str | None = None,
        is_tied: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)
        self.checkpointing = checkpointing
        if is_tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of each token's successor."""
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpointing is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
        return self.output(self.norm(x))


class ConvNet(nn.Module):
    """Residual convolutions with batch norm."""

    def __init__(self, width: int = 128, depth: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=2, padding=3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores of the classes."""
        x = functional.max_pool2d(self.stem(images), 2)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


MakeModel = Callable[[], nn.Module]
Step = Callable[[nn.Module], None]


@dataclass(frozen=True)
class Case:
    """A model, its sharding, its step and its optimizer."""

    name: str
    model: MakeModel
    step: Step
    dtype: torch.dtype = torch.float32
    optimizer: Callable[[nn.Module], Optimizer] = lambda model: torch.optim.AdamW(
        model.parameters()
    )
    shard: Callable[[nn.Module, DeviceMesh], None] | None = None


def language(
    batch: int,
    length: int,
    *,
    num_micro: int = 1,
    autocast: bool = False,
    is_fp32_loss: bool = True,
    vocab_size: int = 32_000,
) -> Step:
    """A step on `num_micro` micro-batches of random tokens."""

    def step(model: nn.Module) -> None:
        for _ in range(num_micro):
            tokens = torch.randint(0, vocab_size, (batch, length + 1))
            device = tokens.device.type
            with torch.autocast(device, dtype=BF16, enabled=autocast):
                logits = model(tokens[:, :-1]).flatten(0, 1)
                if is_fp32_loss:
                    logits = logits.float()
                loss = functional.cross_entropy(logits, tokens[:, 1:].flatten())
            (loss / num_micro).backward()

    return step


def images(model: nn.Module) -> None:
    """A step on random images."""
    dtype = next(model.parameters()).dtype
    scores = model(torch.randn(64, 3, 224, 224, dtype=dtype))
    functional.cross_entropy(scores, torch.randint(0, 1000, (64,))).backward()


def vectors(model: nn.Module) -> None:
    """A step on random vectors."""
    model(torch.randn(16, 512, 1024)).square().mean().backward()


def clipped(step: Step) -> Step:
    """The step, and the norm of the gradients bounded."""

    def step_and_clip(model: nn.Module) -> None:
        step(model)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return step_and_clip


def fully_sharded(policy: MixedPrecisionPolicy) -> Callable[[nn.Module, DeviceMesh], None]:
    """FSDP2 on each block and on the whole."""

    def shard(model: nn.Module, mesh: DeviceMesh) -> None:
        blocks = model.blocks if isinstance(model, GPT) else model.layers
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    return shard


def fused(model: nn.Module) -> Optimizer:
    """AdamW in one kernel."""
    return torch.optim.AdamW(model.parameters(), fused=True)


def one_by_one(model: nn.Module) -> Optimizer:
    """AdamW parameter by parameter."""
    return torch.optim.AdamW(model.parameters(), foreach=False)


LLAMA = dataclasses.replace(
    _llama.LLAMA_8B,
    dim=2048,
    num_layers=8,
    num_heads=16,
    num_kv_heads=4,
    hidden_dim=7168,
    vocab_size=32_000,
)
MIXED = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
LLAMA_MIXED = MixedPrecisionPolicy(
    param_dtype=BF16, reduce_dtype=torch.float32, cast_forward_inputs=False
)

CASES = (
    Case("GPT 16 × 2048, bf16", lambda: GPT(16, 2048), language(4, 2048), BF16),
    Case(
        "GPT 16 × 2048, bf16, checkpointed",
        lambda: GPT(16, 2048, checkpointing="non-reentrant"),
        language(4, 2048),
        BF16,
    ),
    Case("GPT 8 × 1536, fp32", lambda: GPT(8, 1536), language(4, 1024)),
    Case(
        "GPT 26 × 3072, bf16, checkpointed (reentrant)",
        lambda: GPT(26, 3072, num_heads=24, checkpointing="reentrant"),
        language(4, 2048),
        BF16,
    ),
    Case(
        "GPT 8 × 2048, bf16, 4 micro-batches, clipped",
        lambda: GPT(8, 2048, is_tied=True),
        clipped(language(2, 2048, num_micro=4)),
        BF16,
    ),
    Case("GPT 8 × 2048, autocast", lambda: GPT(8, 2048), language(4, 2048, autocast=True)),
    Case(
        "GPT 8 × 1024, bf16, dropout, for-loop AdamW",
        lambda: GPT(8, 1024, dropout=0.1),
        language(8, 1024, is_fp32_loss=False),
        BF16,
        one_by_one,
    ),
    Case(
        "Llama 8 × 2048, bf16, fused AdamW",
        lambda: _llama.Llama(LLAMA),
        language(2, 4096),
        BF16,
        fused,
    ),
    Case(
        "GPT 8 × 2048, FSDP2 on one rank, fp32",
        lambda: GPT(8, 2048),
        language(2, 1024),
        shard=fully_sharded(MixedPrecisionPolicy()),
    ),
    Case(
        "GPT 8 × 2048, FSDP2 on one rank, mixed",
        lambda: GPT(8, 2048, checkpointing="non-reentrant"),
        language(4, 2048),
        shard=fully_sharded(MIXED),
    ),
    Case(
        "Llama 8 × 2048, FSDP2 on one rank, mixed, 2 micro-batches",
        lambda: _llama.Llama(LLAMA),
        clipped(language(2, 2048, num_micro=2)),
        optimizer=fused,
        shard=fully_sharded(LLAMA_MIXED),
    ),
    # With few words the peak is in the layers, not in the loss.
    Case(
        "GPT 12 × 2048, bf16, 512 words",
        lambda: GPT(12, 2048, vocab_size=512),
        language(4, 2048, vocab_size=512),
        BF16,
        fused,
    ),
    Case(
        "GPT 12 × 2048, bf16, checkpointed, 512 words",
        lambda: GPT(12, 2048, vocab_size=512, checkpointing="non-reentrant"),
        language(16, 2048, vocab_size=512),
        BF16,
        fused,
    ),
    Case(
        "GPT 6 × 1536, fp32, 512 words",
        lambda: GPT(6, 1536, vocab_size=512),
        language(8, 1024, vocab_size=512),
        optimizer=fused,
    ),
    Case(
        "GPT 6 × 1536, autocast, dropout, 512 words",
        lambda: GPT(6, 1536, vocab_size=512, dropout=0.1),
        language(8, 1024, vocab_size=512, autocast=True),
        optimizer=fused,
    ),
    Case(
        "Llama 6 × 2048, bf16, 512 words",
        lambda: _llama.Llama(dataclasses.replace(LLAMA, num_layers=6, vocab_size=512)),
        language(4, 4096, vocab_size=512),
        BF16,
        fused,
    ),
    Case(
        "Llama 8 × 2048, FSDP2 on one rank, mixed, 512 words",
        lambda: _llama.Llama(dataclasses.replace(LLAMA, vocab_size=512)),
        language(4, 4096, vocab_size=512),
        optimizer=fused,
        shard=fully_sharded(LLAMA_MIXED),
    ),
    Case(
        "nn.TransformerEncoder 6 × 1024, fp32",
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(1024, 16, batch_first=True, norm_first=True), 6
        ),
        vectors,
    ),
    Case("ConvNet, fp32", ConvNet, images),
    Case("ConvNet, bf16", ConvNet, images, BF16, lambda m: torch.optim.SGD(m.parameters(), 0.1)),
)


# ---------------------------------------------------------------- telling


def tell(case: Case) -> dict[str, Any]:
    """What we say, without a GPU."""
    started = time.perf_counter()
    with _default_dtype(case.dtype), torch.device("meta"):
        model = case.model()
    if case.shard is None:
        told = _tell(case, model)
    else:
        with simulate({"dp": 1}) as world:
            case.shard(model, world.mesh)
            world.materialize(model)
            told = _tell(case, model)
    profile = told.profile
    kinds: Counter[str] = Counter()
    for use in profile.at_peak:
        kinds[use.kind] += use.num_bytes
    return {
        "peak": profile.peak_bytes,
        "first": profile.first_peak_bytes,
        "reserved": profile.reserved_bytes,
        "where": f"{profile.peak_phase} {profile.peak_module}",
        "kinds": dict(kinds),
        "seconds": time.perf_counter() - started,
    }


def _tell(case: Case, model: nn.Module) -> Memory:
    return memory(model, lambda: case.step(model), case.optimizer)


# ---------------------------------------------------------------- measuring


def measure(case: Case, *, has_history: bool) -> dict[str, Any]:
    """What CUDA takes: the first step's peak, and that of a later one."""
    _clean()
    base = torch.cuda.memory_allocated()
    if has_history:
        torch.cuda.memory._record_memory_history(max_entries=2_000_000, stacks="python")
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.device("cuda"))
        with _default_dtype(case.dtype):
            model = case.model()
        if case.shard is not None:
            case.shard(model, stack.enter_context(_one_rank()))
        optimizer = case.optimizer(model)
        peaks = []
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            case.step(model)
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated() - base)
        measured = {
            "peak": peaks[-1],
            "first": peaks[0],
            "reserved": torch.cuda.max_memory_reserved(),
            "base": base,
        }
        if has_history:
            measured["held_at_peak"] = _read_history()
        del model, optimizer
    return measured


def _read_history() -> list[tuple[int, int, str]]:
    """Who held most at the peak: bytes, number of allocations, lines."""
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    live: dict[int, Any] = {}
    total = peak = position = 0
    for index, event in enumerate(events):
        if event["action"] == "alloc":
            total += event["size"]
            if total > peak:
                peak, position = total, index
        elif event["action"] == "free_completed":
            total -= event["size"]
    for event in events[: position + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in live.values():
        lines = [
            f"{frame['filename'].rpartition('/')[2]}:{frame['line']} {frame['name']}"
            for frame in event["frames"][:6]
        ]
        key = " < ".join(lines)
        sizes[key] += event["size"]
        counts[key] += 1
    return [(size, counts[key], key) for key, size in sizes.most_common(40)]


def track(case: Case) -> int | None:
    """What torch's MemTracker says of a later step, on CUDA's tensors without data."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    if case.shard is not None:
        return None  # it has to be told of FSDP in another way
    with FakeTensorMode(), torch.device("cuda"), _default_dtype(case.dtype):
        model = case.model()
        optimizer = case.optimizer(model)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for index in range(2):
                case.step(model)
                optimizer.step()
                optimizer.zero_grad()
                if index == 0:
                    tracker.reset_mod_stats()
        peaks = tracker.get_tracker_snapshot("peak")
        return max(sum(kinds["Total"] for kinds in [one]) for one in peaks.values())


@contextlib.contextmanager
def _one_rank() -> Iterator[DeviceMesh]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cuda", (1,), mesh_dim_names=("dp",))
    finally:
        dist.destroy_process_group()


def _clean() -> None:
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---------------------------------------------------------------- printing


def show(name: str, told: dict[str, Any], measured: dict[str, Any] | None) -> None:
    """One line: what was told, what is so, and by how much the two differ."""
    line = f"{name:60} told {told['peak'] / GIB:7.3f} GiB"
    if measured is not None and "peak" in measured:
        line += f"  real {measured['peak'] / GIB:7.3f} {_error(told, measured, 'peak')}"
        line += f"  first {_error(told, measured, 'first')}"
        line += f"  reserved {_error(told, measured, 'reserved')}"
        if measured.get("tracker"):
            line += f"  MemTracker {measured['tracker'] / measured['peak'] - 1:+6.1%}"
    print(line + f"  at {told['where']}, {told['seconds']:.1f} s", flush=True)


def _error(told: dict[str, Any], measured: dict[str, Any], key: str) -> str:
    return f"{told[key] / measured[key] - 1:+6.2%}"


def main() -> int:
    """Run what was asked for; 1 if a case fails or is off by more than 3 %."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tell", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--against", help="measurements to compare with")
    parser.add_argument("--history", action="store_true", help="note who held what at the peak")
    parser.add_argument("--only", help="part of a case's name")
    parser.add_argument("-o", "--output")
    options = parser.parse_args()
    does_both = not options.tell and not options.measure
    known = json.loads(Path(options.against).read_text()) if options.against else {}
    results: dict[str, dict[str, Any]] = {}
    has_failed = False
    for case in CASES:
        if options.only and options.only not in case.name:
            continue
        measured = known.get(case.name)
        try:
            if options.measure or does_both:
                measured = measure(case, has_history=options.history)
                with contextlib.suppress(Exception):
                    measured["tracker"] = track(case)
                results[case.name] = measured
                if not does_both:
                    print(f"{case.name:60} real {measured['peak'] / GIB:.3f} GiB", flush=True)
            if options.tell or does_both:
                told = tell(case)
                show(case.name, told, measured)
                results[case.name] = {**(measured or {}), "told": told}
                is_off = measured is not None and abs(told["peak"] / measured["peak"] - 1) > 0.03
                has_failed |= is_off
        except Exception:  # noqa: BLE001 - the next case still runs
            has_failed = True
            print(f"{case.name:60} FAILED")
            traceback.print_exc()
    if options.output:
        Path(options.output).write_text(json.dumps(results, indent=1))
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
