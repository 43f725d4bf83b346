"""What really happens to each op of a model when it is sharded, found without shardscope.

`python dispatch_oracle.py OUT MODEL...` runs as one rank of a real gloo group. It calls each op
that a model calls, forwards and backwards, on DTensors with the model's own data, each dim of each
input sharded in turn, watches torch's CommDebugMode, and compares with the plain op.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode, _clear_sharding_prop_cache
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from coverage_models import MODELS

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
# From the best to the worst.
RANKING = ("free", "moves", "whole", "raises", "wrong")
# Ranks that send each other halos of different sizes are aborted by gloo; vit has it with none.
FATAL = {("resnet", "aten.convolution_backward.default")}


class Calls(TorchDispatchMode):
    """Keeps the first of every kind of call, with the tensors as they came."""

    def __init__(self, *, only_backward: bool) -> None:
        super().__init__()
        self.only_backward = only_backward
        self.calls: dict[str, Call] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_backward = torch._C._current_graph_task_id() != -1
        if is_backward or not self.only_backward:
            leaves, _ = tree_flatten((args, kwargs))
            shown = [
                (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else repr(x)
                for x in leaves
            ]
            copied = _map((args, kwargs or {}), torch.Tensor.clone)
            self.calls.setdefault(f"{func}{shown}", (func, *copied))
        return func(*args, **(kwargs or {}))


def capture(name: str) -> list[Call]:
    """Every kind of call that a model makes: without autograd forwards, with it backwards."""
    torch.manual_seed(0)
    model, args = MODELS[name]()
    forward, backward = Calls(only_backward=False), Calls(only_backward=True)
    with torch.inference_mode(), forward:
        model(*args)
    output = model(*args)
    roots = [one for one in tree_leaves(output) if one.requires_grad]
    with backward:
        torch.autograd.grad(
            roots,
            list(model.parameters()),
            [torch.ones_like(one) for one in roots],
            allow_unused=True,
        )
    with torch.no_grad():
        return [
            (func, *_map(rest, lambda one: one.detach().clone()))
            for func, *rest in (*forward.calls.values(), *backward.calls.values())
        ]


def _map(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    leaves, spec = tree_flatten(value)
    return tree_unflatten([change(x) if isinstance(x, torch.Tensor) else x for x in leaves], spec)


def shardings(call: Call, num_ranks: int) -> Iterator[tuple[int, int]]:
    """Which of the tensors, and on which of its dims."""
    tensors = [x for x in tree_leaves(call[1:]) if isinstance(x, torch.Tensor)]
    for index, tensor in enumerate(tensors):
        for dim, size in enumerate(tensor.shape):
            if size >= num_ranks:
                yield index, dim


def attempt(call: Call, mesh: DeviceMesh, sharded: tuple[int, int] | None) -> str:
    """What this rank sees when the call is made with one tensor sharded and the others whole."""
    func, args, kwargs = call
    counter = iter(range(1000))

    def place(tensor: torch.Tensor) -> torch.Tensor:
        index = next(counter)
        is_it = sharded is not None and index == sharded[0]
        where = Shard(sharded[1]) if is_it and sharded is not None else Replicate()
        return distribute_tensor(tensor.clone(), mesh, [where], src_data_rank=None)

    placed_args, placed_kwargs = _map((args, kwargs), place)
    _clear_sharding_prop_cache()
    try:
        with CommDebugMode() as watched:
            result = func(*placed_args, **placed_kwargs)
    except Exception:  # noqa: BLE001 - that it raises is the answer
        return "raises"
    plain_args, plain_kwargs = _map((args, kwargs), torch.clone)
    expected = func(*plain_args, **plain_kwargs)
    written = (placed_args, placed_kwargs), (plain_args, plain_kwargs)
    if not is_same(result, expected, func) or not is_same(*written, func):
        return "wrong"
    return "moves" if watched.get_total_counts() else "free"


def is_same(result: Any, expected: Any, func: Any) -> bool:
    """Whether DTensors hold what plain tensors do; of random ops, whether the shapes agree."""
    for one, other in zip(tree_leaves(result), tree_leaves(expected), strict=True):
        if not isinstance(other, torch.Tensor) or not isinstance(one, DTensor):
            continue
        try:
            whole = one.full_tensor()
        except Exception:  # noqa: BLE001 - a layout that cannot be
            return False
        if whole.shape != other.shape:
            return False
        is_arbitrary = any(word in str(func) for word in ("dropout", "bernoulli", "empty"))
        if not is_arbitrary and not torch.allclose(
            whole.double(), other.double(), rtol=1e-3, atol=1e-3, equal_nan=True
        ):
            return False
    return True


def agree(seen: str) -> str:
    """The worst that any rank sees."""
    all_seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_seen, seen)
    return max(all_seen, key=RANKING.index)


def judge(call: Call, mesh: DeviceMesh) -> str:
    """The best of all shardings, unless one is wrong."""
    seen = [agree(attempt(call, mesh, one)) for one in shardings(call, mesh.size())]
    if not seen:
        return "free" if not _has_tensors(call) else agree(attempt(call, mesh, None))
    if all(one == "raises" for one in seen):
        return "raises" if agree(attempt(call, mesh, None)) == "raises" else "whole"
    return "wrong" if "wrong" in seen else min(seen, key=RANKING.index)


def _has_tensors(call: Call) -> bool:
    return any(isinstance(x, torch.Tensor) for x in tree_leaves(call[1:]))


def main() -> None:
    """Judge models as one rank, started with torchrun's variables set."""
    out, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, dict[str, str]] = {}
    for name in names:
        verdicts = found[name] = {}
        for call in capture(name):
            op = str(call[0])
            if (name, op) in FATAL:
                continue
            verdict = judge(call, mesh)
            verdicts[op] = max(verdicts.get(op, "free"), verdict, key=RANKING.index)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # torch's gloo now and then aborts a process as it ends


if __name__ == "__main__":
    main()
