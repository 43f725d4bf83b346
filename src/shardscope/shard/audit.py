"""`audit(model)`: what sharding really did to a model, tensor by tensor, and what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace
from torch import nn

from shardscope._torch.meshes import describe_axes, meshes_of, root_mesh
from shardscope._torch.private import explain_moved_names
from shardscope.comm.run import describe_run, find_torch_gaps, read_identity
from shardscope.errors import AuditError
from shardscope.record import Axis, Finding, Gap, Recording
from shardscope.record.words import describe_error
from shardscope.shard.mixing import find_mixed_tensors
from shardscope.shard.placement_findings import find_mixed_meshes, find_replicated, find_uneven
from shardscope.shard.plan import Plan, Rule, read_plan
from shardscope.shard.plan_findings import find_plan_problems
from shardscope.shard.structure_findings import (
    find_outside_groups,
    find_root_not_sharded,
    find_wrong_order,
)
from shardscope.shard.tensors import Holdings
from shardscope.shard.tie_findings import find_broken_ties
from shardscope.world import current_world

__all__ = ["audit"]


@explain_moved_names
def audit(
    model: nn.Module,
    *,
    plan: Plan | None = None,
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
    held = Holdings(model, rank=rank, rules=rules)
    findings = list(_find_all(held, rules, before))
    gaps = list(held.gaps)
    if step is not None:
        findings += _run_step(held, step, gaps)
    run = describe_run(rank, world_size, _read_axes(model), instrument="audit")
    inputs = {"ties": before, "step": step}
    skipped = tuple(check for check, needed in inputs.items() if needed is None)
    return Recording(
        run=replace(run, skipped_checks=skipped),
        modules=held.modules,
        findings=tuple(findings),
        gaps=(*find_torch_gaps(rank), *gaps),
    )


def _find_all(held: Holdings, rules: Sequence[Rule], before: Recording | None) -> Iterator[Finding]:
    yield from find_broken_ties(held, rules, before)
    yield from find_plan_problems(held, rules, is_applied=before is not None)
    yield from find_wrong_order(held)
    yield from find_root_not_sharded(held)
    yield from find_outside_groups(held)
    yield from find_mixed_meshes(held)
    yield from find_replicated(held)
    yield from find_uneven(held)


def _run_step(held: Holdings, step: Callable[[], object], gaps: list[Gap]) -> list[Finding]:
    findings, error = find_mixed_tensors(held, step)
    if error is not None:
        fact = f"it ended early, so later ops were not checked ({describe_error(error)})"
        gaps.append(Gap(place="step", fact=fact, rank=held.rank))
    return findings


def _read_axes(model: nn.Module) -> tuple[Axis, ...]:
    """The axes of the largest mesh that there is, or that any part of the model lies on."""
    world = current_world()
    meshes = [root_mesh(mesh) for mesh in meshes_of(model)]
    meshes += [] if world is None else [world.mesh]
    if not meshes:
        return ()
    largest = max(meshes, key=lambda mesh: mesh.size())
    return describe_axes(largest)
