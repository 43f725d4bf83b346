"""Finds the functions in torch's source that branch on the type of a device or on a backend."""

from __future__ import annotations

import ast
import re
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

import torch

_ROOT = Path(torch.__file__).parent
# What a training program may call. Debugging tools, profilers and tests are left out.
_SEARCHED = (
    "_decomp",
    "_dynamo",
    "_functorch",
    "_higher_order_ops",
    "_inductor/comms.py",
    "_inductor/compile_fx.py",
    "_inductor/decomposition.py",
    "_inductor/fx_passes",
    "_meta_registrations.py",
    "_prims",
    "_refs",
    "_tensor.py",
    "amp",
    "autograd",
    "cuda/amp",
    "distributed/_composable",
    "distributed/_functional_collectives.py",
    "distributed/_state_dict_utils.py",
    "distributed/_symmetric_memory",
    "distributed/algorithms",
    "distributed/checkpoint",
    "distributed/collective_utils.py",
    "distributed/device_mesh.py",
    "distributed/distributed_c10d.py",
    "distributed/fsdp",
    "distributed/nn/functional.py",
    "distributed/optim",
    "distributed/pipelining",
    "distributed/tensor",
    "distributed/utils.py",
    "functional.py",
    "nn",
    "optim",
    "random.py",
    "utils/_foreach_utils.py",
    "utils/checkpoint.py",
)
_LEFT_OUT = re.compile(
    r"profiler|_dynamo/(repro|debug_utils|test_|device_interface|package|aot_compile|funcname)"
    r"|_functorch/(benchmark|fx_minifier)|_symmetric_memory/_(nv|roc)shmem"
)
_DEVICE = re.compile(
    r"device(\(\w*\))?\.type\b|device_type|dev_type|\bis_(cuda|cpu|gpu)\b|\bis_cpu_device\b"
    r"|(cuda|accelerator|handle|module|mod|gpu\))\.is_available|current_accelerator"
    r"|_get_accelerator|get_backend|_get_backend_name|is_(nccl|gloo)_available|device_hint"
    r"|supports_coalescing|get_device_capability|GPU_TYPES|get_gpu_type|_coll_device"
    r"|check_device\(|['\"](cuda|nccl|gloo)['\"]"
)
# Devices, and their look-alikes, that are never simulated.
_OTHER_TYPES = {"meta", "xla", "hpu", "mps", "mtia", "xpu", "lazy", "privateuse1", "threaded"}


def find_device_branches() -> set[str]:
    """Functions of torch, as `nn/functional.py:pad`, whose control flow depends on a device."""
    branches: set[str] = set()
    for path in _list_files():
        source = path.read_text()
        lines = [
            number for number, line in enumerate(source.split("\n"), 1) if _DEVICE.search(line)
        ]
        if lines:
            name = path.relative_to(_ROOT).as_posix()
            functions = _find_in(ast.parse(source), (), lines)
            branches.update(f"{name}:{function}" for function in functions)
    return branches


def _list_files() -> Iterator[Path]:
    for name in _SEARCHED:
        path = _ROOT / name
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            if not _LEFT_OUT.search(file.relative_to(_ROOT).as_posix()):
                yield file


def _find_in(tree: ast.AST, names: tuple[str, ...], lines: list[int]) -> Iterator[str]:
    """Names of the functions in `tree` with conditions on devices, which `lines` may be part of."""
    for node in ast.iter_child_nodes(tree):
        begin = getattr(node, "lineno", None)
        if begin is not None:
            position = bisect_left(lines, begin)
            if position == len(lines) or lines[position] > node.end_lineno:
                continue
        is_scope = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        inner = (*names, node.name) if is_scope else names
        if any(_depends_on_device(test) for test in _list_conditions(node)):
            yield ".".join(inner)
        yield from _find_in(node, inner, lines)


def _list_conditions(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return [node.test]
    if isinstance(node, ast.comprehension):
        return node.ifs
    is_value = isinstance(node, ast.BoolOp | ast.Compare)
    return [node] if is_value else []


def _depends_on_device(condition: ast.expr) -> bool:
    if not _DEVICE.search(ast.unparse(condition)):
        return False
    texts = {
        node.value
        for node in ast.walk(condition)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return not texts or not texts <= _OTHER_TYPES
