"""`audit(model)`: how sharding changed a model, tensor by tensor, and what is wrong with it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.tensor import DTensor

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.dtensor import allow_mixing
from shardscope._torch.fsdp import meshes_of
from shardscope._torch.mesh import axis_names, describe_axes, root_mesh
from shardscope._torch.module_calls import watch_module_calls
from shardscope._torch.private import explain_moved_names
from shardscope.attribution.call_sites import read_stack
from shardscope.attribution.module_calls import BucketRegistry, ModuleCalls
from shardscope.attribution.run_identity import describe_run, find_torch_gaps, read_identity
from shardscope.errors import AuditError
from shardscope.plan import Plan
from shardscope.record import Axis, Finding, Gap, Recording, Severity, Source
from shardscope.record.layer_names import fold_layers
from shardscope.record.text import describe_error
from shardscope.shard.audit.findings import (
    find_mixed_meshes,
    find_outside_groups,
    find_replicated,
    find_root_not_sharded,
    find_uneven,
    find_wrong_order,
)
from shardscope.shard.audit.plan import PlanRule, read_plan
from shardscope.shard.audit.plan_findings import find_broken_ties, find_plan_problems
from shardscope.shard.audit.sharded_tensors import ModelInventory
from shardscope.world import current_world


def find_mixed_tensors(
    inventory: ModelInventory, step: Callable[[], object]
) -> tuple[list[Finding], Exception | None]:
    """Run `step` with plain tensors treated as replicated; find ops that mix them with DTensors.

    Returns a finding for each source line that mixes, and the error that ended the step, if any.
    """
    finder = _MixedTensorFinder(inventory)
    names = inventory.names
    calls = ModuleCalls(names, BucketRegistry(names, _ignore), _ignore)
    finder.running = lambda: names.name(calls.running())
    try:
        with (
            calls.marking_threads(),
            watch_module_calls(calls),
            allow_mixing(report_mixing=finder.note_mixing, make=finder.note_new_tensor),
        ):
            step()
    except Exception as error:  # noqa: BLE001 - a program may raise anything
        return finder.findings, error
    return finder.findings, None


def _ignore(place: str, fact: str) -> None:
    """Ignore gaps in attributing collectives to modules: the audit does not use them."""


@final
class _MixedTensorFinder:
    """Finds each source line that mixes a plain tensor with a DTensor, and where it was created."""

    def __init__(self, inventory: ModelInventory) -> None:
        self.findings: list[Finding] = []
        self.running: Callable[[], str | None] = lambda: None
        self._plain_entries = {
            id(entry.tensor): entry for entry in inventory.tensors if entry.mesh is None
        }
        # By identity: tensors compare element by element.
        self._origins: dict[int, tuple[weakref.ref[torch.Tensor], Source]] = {}
        self._reported: set[tuple[str, Source | None]] = set()

    def note_new_tensor(self, tensor: torch.Tensor) -> None:
        """Remember the line of an op that returned `tensor` from plain tensors only."""
        source = read_stack(sys._getframe(1)).source
        if source is not None:
            self._origins[id(tensor)] = weakref.ref(tensor), source

    def note_mixing(self, op: str, plain: Sequence[torch.Tensor], placed: DTensor) -> None:
        """Report that `op` was called with the tensors `plain` and the DTensor `placed`."""
        source = read_stack(sys._getframe(1)).source
        for tensor in plain:
            name = self._name_tensor(tensor)
            # Repeated layers are reported once, and so are a forward and its backward.
            folded_name = " ".join(map(fold_layers, name.split(" ")))
            key = (folded_name, None) if is_in_backward() else (folded_name, source)
            if key not in self._reported:
                self._reported |= {key, (folded_name, None)}
                self.findings.append(self._make_finding(op, name, source, placed))

    def _make_finding(self, op: str, name: str, source: Source | None, placed: DTensor) -> Finding:
        mesh = ", ".join(axis_names(placed.device_mesh))
        replicated = ", ".join(["Replicate()"] * placed.device_mesh.ndim)
        module = self.running()
        return Finding(
            rule="mixed-tensors",
            severity=Severity.ERROR,
            subject=module or name,
            fact=f"{op} gets {name} together with a DTensor on ({mesh}), which torch refuses",
            remedy=f"If it is the same on every rank, make it one with distribute_tensor(…, mesh, "
            f"[{replicated}]); otherwise pass the DTensor's to_local().",
            source=source,
        )

    def _name_tensor(self, tensor: torch.Tensor) -> str:
        entry = self._plain_entries.get(id(tensor))
        if entry is not None:
            kind = "buffer" if entry.record.is_buffer else "parameter"
            return f"the plain {kind} {entry.name}"
        shape = "×".join(map(str, tensor.shape))
        reference, origin = self._origins.get(id(tensor), (None, None))
        is_known = reference is not None and reference() is tensor and origin is not None
        origin_text = f", made at {origin.file}:{origin.line}" if is_known and origin else ""
        return f"a plain tensor of {shape}{origin_text}"


@explain_moved_names
def audit(
    model: nn.Module,
    *,
    plan: Plan | Mapping[str, Any] | None = None,
    before: Recording | None = None,
    step: Callable[[], object] | None = None,
) -> Recording:
    """List every module with how it is sharded, and every parameter and buffer with its placements.

    Findings report plan rules without effect, broken weight ties, large replicated parameters,
    uneven shards, mixed meshes and wrappers in the wrong order.

    Args:
        model: The sharded model.
        plan: The plan that was meant to be applied. Each parameter then has the rule that matched
            it.
        before: An audit of the model before it was sharded, to detect broken weight ties.
        step: Runs the model once. Every plain tensor that meets a DTensor in it is a finding with
            its line.

    Examples:
        >>> before = audit(model)
        >>> parallelize_module(model, mesh, plan)
        >>> show(audit(model, plan=plan, before=before))
    """
    if not isinstance(model, nn.Module):
        raise AuditError(
            f"audit() got {type(model).__name__}, not a torch.nn.Module. Give it the model."
        )
    if before is not None and not isinstance(before, Recording):
        raise AuditError(
            f"audit()'s `before` is {type(before).__name__}, not a recording. Give it the "
            "result of audit() on the unsharded model."
        )
    if step is not None and not callable(step):
        raise AuditError(
            f"audit()'s `step` is {type(step).__name__}, not a function. Give it one that runs the "
            "model, such as lambda: model(batch)."
        )
    rank, world_size = read_identity()
    rules = [] if plan is None else read_plan(plan)
    inventory = ModelInventory(model, rank=rank, rules=rules)
    findings = list(_find_all(inventory, rules, before))
    gaps = list(inventory.gaps)
    if step is not None:
        findings += _run_step(inventory, step, gaps)
    run = describe_run(rank, world_size, _read_axes(model), instrument="audit")
    inputs = {"ties": before, "step": step}
    skipped = tuple(check for check, value in inputs.items() if value is None)
    return Recording(
        run=replace(run, skipped_checks=skipped),
        modules=inventory.modules,
        findings=tuple(findings),
        gaps=(*find_torch_gaps(rank), *gaps),
    )


def _find_all(
    inventory: ModelInventory, rules: Sequence[PlanRule], before: Recording | None
) -> Iterator[Finding]:
    yield from find_broken_ties(inventory, rules, before)
    yield from find_plan_problems(inventory, rules, is_applied=before is not None)
    yield from find_wrong_order(inventory)
    yield from find_root_not_sharded(inventory)
    yield from find_outside_groups(inventory)
    yield from find_mixed_meshes(inventory)
    yield from find_replicated(inventory)
    yield from find_uneven(inventory)


def _run_step(
    inventory: ModelInventory, step: Callable[[], object], gaps: list[Gap]
) -> list[Finding]:
    findings, error = find_mixed_tensors(inventory, step)
    if error is not None:
        fact = f"it ended early, so later ops were not checked ({describe_error(error)})"
        gaps.append(Gap(place="step", fact=fact, rank=inventory.rank))
    return findings


def _read_axes(model: nn.Module) -> tuple[Axis, ...]:
    """The axes of the largest mesh among the simulated world's and those of the model's tensors."""
    world = current_world()
    meshes = [root_mesh(mesh) for mesh in meshes_of(model)]
    meshes += [] if world is None else list(world.meshes)
    if not meshes:
        return ()
    largest = max(meshes, key=lambda mesh: mesh.size())
    return describe_axes(largest)
