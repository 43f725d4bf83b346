"""Which ops torch runs on CUDA: recorded on a GPU, compared with a simulated CUDA device.

    python benchmarks/device_choices.py record ops.json      # on a machine with a GPU
    python benchmarks/device_choices.py compare ops.json     # anywhere, with the same torch

Every sample of torch's own op and module databases is run forward and backward, as it is and under
autocast, and the ops below autograd are listed. `compare` prints the samples whose lists differ.
"""

from __future__ import annotations

import json
import sys
import time
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# torch's databases import it for their own tests, which do not run here.
sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # type: ignore[arg-type]

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.common_modules import module_db  # noqa: E402
from torch.testing._internal.common_optimizers import optim_db  # noqa: E402

DTYPES = (torch.float32, torch.bfloat16)
MAX_SAMPLES = 6
# They keep no order, or are answered without a kernel: which of them appear says nothing.
IGNORED = (
    "aten.detach",
    "aten.alias",
    "prim.device",
    "aten._local_scalar_dense",
    "aten._to_copy",
    "aten.clone",
    "aten.empty",
    "aten.new_empty",
    "aten.lift_fresh",
    "aten.is_same_size",
)


class Logger(TorchDispatchMode):
    """Lists the ops that are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(op)
        if not name.startswith(IGNORED):
            self.ops.append(name)
        return op(*args, **(kwargs or {}))


def list_ops(run: Callable[[], Any]) -> dict[str, Any]:
    """Ops and result dtypes of a forward and its backward, or the kind of error that ends it."""
    logger = Logger()
    found: dict[str, Any] = {}
    try:
        with logger:
            output = run()
        found["forward"] = sorted(Counter(logger.ops).items())
        tensors = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor)]
        found["dtypes"] = [str(one.dtype) for one in tensors]
        losses = [one for one in tensors if one.requires_grad]
        logger.ops.clear()
        if losses:
            with logger:
                torch.autograd.backward(losses, [torch.ones_like(one) for one in losses])
            found["backward"] = sorted(Counter(logger.ops).items())
    except Exception as error:  # noqa: BLE001 - some samples are for errors
        found["error"] = type(error).__name__
    return found


def to_cuda(value: Any) -> Any:
    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return torch.device("cuda") if isinstance(leaf, torch.device) else leaf
        return leaf.detach().to("cuda").requires_grad_(leaf.requires_grad)

    return tree_map(move, value)


def op_cases() -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
    for info in op_db:
        for dtype in DTYPES:
            if dtype not in info.dtypesIfCUDA:
                continue
            try:
                samples = list(
                    info.sample_inputs("cpu", dtype, requires_grad=info.supports_autograd)
                )
            except Exception:  # noqa: BLE001 - not all can be made on the CPU
                continue
            for index, sample in enumerate(samples[:MAX_SAMPLES]):

                def make(info: Any = info, sample: Any = sample) -> Callable[[], Any]:
                    source, args, kwargs = to_cuda((sample.input, sample.args, sample.kwargs))
                    return lambda: info(source, *args, **kwargs)

                yield f"{info.full_name}[{dtype}][{index}]", make


def module_cases() -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
    for info in module_db:
        for training in (True, False):
            try:
                samples = info.module_inputs_func(
                    info, device="cpu", dtype=torch.float32, requires_grad=True, training=training
                )
            except Exception:  # noqa: BLE001
                continue
            for index, sample in enumerate(samples[:MAX_SAMPLES]):
                if sample.forward_input is None:
                    continue

                def make(
                    info: Any = info, sample: Any = sample, training: bool = training
                ) -> Callable[[], Any]:
                    built, given = sample.constructor_input, sample.forward_input
                    module = info.module_cls(*built.args, **built.kwargs).to("cuda")
                    module.train(training)
                    args, kwargs = to_cuda((given.args, given.kwargs))
                    return lambda: module(*args, **kwargs)

                yield f"{info.name}[{'train' if training else 'eval'}][{index}]", make


def optimizer_cases() -> Iterator[tuple[str, Callable[[], Callable[[], Any]]]]:
    for info in optim_db:
        if info.optim_cls.__name__ in ("SparseAdam", "LBFGS"):
            continue
        for options in ({}, {"foreach": False}):

            def make(info: Any = info, options: dict[str, Any] = options) -> Callable[[], Any]:
                shapes = (4, 4), (4, 3)
                params = [nn.Parameter(torch.ones(shape, device="cuda")) for shape in shapes]
                for param in params:
                    param.grad = torch.ones_like(param)
                optimizer = info.optim_cls(params, **options)
                return lambda: (optimizer.step(), None)[1]

            yield f"{info.optim_cls.__name__}[{options}]", make


Cases = list[tuple[str, Callable[[], Callable[[], Any]]]]


def run_all(cases: Cases, *, limit_s: float = 1e9) -> dict[str, Any]:
    results: dict[str, Any] = {}
    begin = time.monotonic()
    for name, make in cases:
        for kind, context in (
            ("plain", nullcontext),
            ("autocast", lambda: torch.autocast("cuda", torch.bfloat16)),
        ):
            if time.monotonic() - begin > limit_s:
                return results
            torch.manual_seed(0)
            try:
                run = make()
            except Exception as error:  # noqa: BLE001
                results[f"{name} {kind}"] = {"error": f"making: {type(error).__name__}"}
                continue
            with context():
                results[f"{name} {kind}"] = list_ops(run)
    return results


def main() -> None:
    warnings.simplefilter("ignore")
    verb, path = sys.argv[1], Path(sys.argv[2])
    cases: Cases = [*op_cases(), *module_cases(), *optimizer_cases()]  # with data
    print(f"{len(cases)} cases", flush=True)
    if verb == "record":
        assert torch.cuda.is_available(), "record on a machine with a GPU"
        results = run_all(cases, limit_s=float(sys.argv[3]) if len(sys.argv) > 3 else 1e9)
        path.write_text(json.dumps({"torch": torch.__version__, "results": results}))
        print(f"{len(results)} runs")
        return
    from shardscope import simulate

    recorded = json.loads(path.read_text())
    with simulate(mesh={"dp": 1}, device="cuda"):
        simulated = json.loads(json.dumps(run_all(cases)))
    report(recorded, simulated)


def report(recorded: dict[str, Any], simulated: dict[str, Any]) -> None:
    same, different, failed = 0, [], []
    for name, expected in recorded["results"].items():
        found = simulated.get(name)
        if found is None or "error" in expected:
            continue
        if found == expected:
            same += 1
        elif "error" in found:
            failed.append((name, found["error"]))
        else:
            different.append((name, expected, found))
    print(f"torch {recorded['torch']} recorded, {torch.__version__} simulated")
    print(f"{same} the same, {len(different)} different, {len(failed)} failed")
    for name, expected, found in different:
        for part in ("forward", "backward", "dtypes"):
            if expected.get(part) != found.get(part):
                print(f"  {name} {part}\n    gpu  {expected.get(part)}\n    ours {found.get(part)}")
    for name, error in failed:
        print(f"  {name} failed: {error}")


if __name__ == "__main__":
    main()
