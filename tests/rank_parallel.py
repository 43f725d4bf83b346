"""Parallel programs on real ranks, many in one world: `python rank_parallel.py FOLDER NAME...`.

Each rank compares what it holds with its own piece of what one device computes, and writes what
went wrong to FOLDER/RANK.json, by the case's name.
"""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_leaves

from parallel_cases import all_cases
from parallel_cases.by_hand import local_inputs, own_piece
from parallel_cases.case import Case, Given, copied
from shardscope.parallel.program import ParallelProgram

__all__ = ["WAYS", "parse"]


def parse(name: str) -> tuple[str, str]:
    """`SAVED | CASE`: what is done with a case, and which; a case alone is run and trained."""
    way, _, case = name.rpartition(" | ")
    return way or "run", case


def run(case: Case) -> None:
    mesh = mesh_of(case.mesh)
    if case.runs:
        program = case.parallelize(mesh=mesh)
        check_forward(case, program, program.module())
    if case.trains:
        program = case.parallelize(mesh=mesh, training=True)
        check_backward(case, program, program.module())


def step(case: Case) -> None:
    program = case.parallelize(mesh=mesh_of(case.mesh), training=True)
    check_step(case, program, program.module())


def save_load_and_run(case: Case) -> None:
    program = case.parallelize(mesh=mesh_of(case.mesh))
    file = io.BytesIO()
    torch.export.save(program.exported(), file)
    file.seek(0)
    check_forward(case, program, torch.export.load(file).module())


def compile_and_run(case: Case, backend: str) -> None:
    for pick in (lambda one: one.module(), lambda one: one.exported().module()):
        program = case.parallelize(mesh=mesh_of(case.mesh))
        check_forward(case, program, torch.compile(pick(program), backend=backend))


WAYS: dict[str, Callable[[Case], None]] = {
    "run": run,
    "one step": step,
    "saved": save_load_and_run,
    "compiled": lambda case: compile_and_run(case, "aot_eager"),
    "built": lambda case: compile_and_run(case, "inductor"),
}


def check_forward(case: Case, program: ParallelProgram, module: nn.Module) -> None:
    given, model = case.given(), case.model()
    mine = copied(given)
    with torch.no_grad():
        wanted = model(*mine[0], **mine[1])
        found = module(*(local := local_inputs(program, given, dist.get_rank()))[0], **local[1])
    placed = [item for item, role in program.graph.outputs if role.kind == "output"]
    for at, (one, other, value) in enumerate(
        zip(tree_leaves(wanted), tree_leaves(found), placed, strict=True)
    ):
        compare(f"output {at}", one, other, value, program, case)
    compare_buffers(model, module, program, case)


def check_backward(case: Case, program: ParallelProgram, module: nn.Module) -> None:
    given = case.given()
    args, kwargs = local_inputs(program, given, dist.get_rank())
    loss = module(*args, **kwargs)
    loss.backward()
    compare_training(case, given, loss, module, program)


def check_step(case: Case, program: ParallelProgram, module: Any) -> None:
    given = case.given()
    args, kwargs = local_inputs(program, given, dist.get_rank())
    compare_training(case, given, module.step(*args, **kwargs), module, program)


def compare_training(
    case: Case, given: Given, loss: Tensor, module: nn.Module, program: ParallelProgram
) -> None:
    model, mine = case.model(training=True), copied(given)
    wanted = tree_leaves(model(*mine[0], **mine[1]))[0]
    wanted.backward()
    torch.testing.assert_close(loss.detach(), wanted.detach(), rtol=case.tolerance, atol=1e-9)
    own = dict(module.named_parameters())
    values = {role.name: value for value, role in program.graph.inputs}
    for name, parameter in model.named_parameters():
        if name in own and parameter.grad is not None:
            gradient = own[name].grad
            assert gradient is not None, f"no gradient of {name}"
            assert gradient.shape == own[name].shape, f"gradient of {name}: {gradient.shape}"
            compare(f"gradient of {name}", parameter.grad, gradient, values[name], program, case)
    compare_buffers(model, module, program, case)


def compare_buffers(
    model: nn.Module, module: nn.Module, program: ParallelProgram, case: Case
) -> None:
    values = {role.name: value for value, role in program.graph.inputs}
    own = {name.removeprefix("_orig_mod."): one for name, one in module.named_buffers()}
    for name, buffer in model.named_buffers():
        if name in own and name in values:
            compare(f"buffer {name}", buffer, own[name], values[name], program, case)


def compare(
    what: str, wanted: Any, found: Any, value: Any, program: ParallelProgram, case: Case
) -> None:
    if not isinstance(wanted, Tensor):
        assert found == wanted, f"{what}: {found}, not {wanted}"
        return
    piece = wanted.detach()
    if getattr(value, "placements", None):
        piece = own_piece(piece, value, program, dist.get_rank())
    scale = float(piece.abs().max()) if piece.numel() and piece.is_floating_point() else 1.0
    torch.testing.assert_close(
        found.detach(), piece, rtol=0, atol=case.tolerance * max(scale, 1e-3), equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )  # fmt: skip


@cache
def mesh_of(axes: str) -> DeviceMesh:
    named = dict(part.split("=") for part in axes.split(","))
    return init_device_mesh("cpu", tuple(map(int, named.values())), mesh_dim_names=tuple(named))


def main() -> None:
    folder, *names = sys.argv[1:]
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    cases, wrong = all_cases(), {}
    for name in names:
        try:
            way, case = parse(name)
            WAYS[way](cases[case])
        except Exception as error:  # noqa: BLE001  # told by the test, case by case
            wrong[name] = f"{type(error).__name__}: {error}"
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(wrong))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch's gloo now and then aborts a process as it ends, without us too


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
