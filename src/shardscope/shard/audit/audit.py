"""`audit(model)`: how sharding changed a model, tensor by tensor, and what is wrong with it.

Below `audit` are the findings that need more than the model: its plan, the ties it had before, and
a step. `findings.py` has the others.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.tensor import DTensor

from shardscope._torch.autograd import is_in_backward
from shardscope._torch.dtensor import allow_mixing
from shardscope._torch.mesh import axis_names, describe_placements
from shardscope._torch.module_calls import watch_module_calls
from shardscope._torch.modules import unwrap
from shardscope._torch.private import explain_moved_names
from shardscope.attribution.call_sites import read_stack
from shardscope.attribution.module_calls import BucketRegistry, ModuleCalls
from shardscope.attribution.program_records import (
    describe_run,
    find_torch_gaps,
    read_axes,
    read_identity,
)
from shardscope.errors import AuditError
from shardscope.plan import Plan, PlanMatcher
from shardscope.plan.placements import Shard
from shardscope.plan.styles import Colwise, Rowwise
from shardscope.record import Axis, Finding, Gap, MarkKind, Module, Recording, Severity, Source
from shardscope.record.layer_names import fold_layers
from shardscope.record.text import describe_error
from shardscope.shard.audit.findings import (
    RIGHT_ORDER,
    describe_shared_parameter,
    find_mixed_meshes,
    find_outside_groups,
    find_replicated,
    find_root_not_sharded,
    find_uneven,
    find_wrong_order,
    fold_names,
    name_shared_parameters,
)
from shardscope.shard.audit.plan import PlanRule, read_plan, style_dim
from shardscope.shard.audit.sharded_tensors import ModelInventory, TensorEntry


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
    axes = _read_axes(inventory)
    run = describe_run(rank, world_size, axes, instrument="audit")
    inputs = {"ties": before, "step": step}
    skipped = tuple(check for check, value in inputs.items() if value is None)
    return Recording(
        run=replace(run, skipped_checks=skipped),
        modules=inventory.modules,
        findings=tuple(findings),
        gaps=(*find_torch_gaps(rank), *gaps),
    )


def audit_models(models: nn.Module | Mapping[str, nn.Module]) -> Recording:
    """An audit of several models, such as the stages of a pipeline that one rank runs.

    The names of modules begin with their model's name, as in a trace of the same models.
    """
    if isinstance(models, nn.Module):
        return audit(models)
    audits = [_with_prefix(audit(model), prefix) for prefix, model in models.items()]
    return replace(
        audits[0],
        modules=tuple(module for recording in audits for module in recording.modules),
        findings=tuple(finding for recording in audits for finding in recording.findings),
        gaps=tuple(dict.fromkeys(gap for recording in audits for gap in recording.gaps)),
    )


def _with_prefix(recording: Recording, prefix: str) -> Recording:
    def rename(name: str) -> str:
        return f"{prefix}.{name}".rstrip(".")

    def rename_module(module: Module) -> Module:
        parameters = []
        for parameter in module.parameters:
            group, alias = parameter.fsdp_group, parameter.alias_group
            group, alias = (name if name is None else rename(name) for name in (group, alias))
            parameters.append(replace(parameter, fsdp_group=group, alias_group=alias))
        return replace(
            module,
            name=rename(module.name),
            aliases=tuple(map(rename, module.aliases)),
            parameters=tuple(parameters),
        )

    return replace(
        recording,
        modules=tuple(map(rename_module, recording.modules)),
        findings=tuple(replace(f, subject=rename(f.subject)) for f in recording.findings),
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


def _read_axes(inventory: ModelInventory) -> tuple[Axis, ...]:
    """The axes of the run's mesh; without a mesh, those that annotations of spmd_types name."""
    axes = read_axes(inventory.names, inventory.report_gap)
    if axes:
        return axes
    types = (axis_type for entry in inventory.tensors for axis_type in entry.types)
    sizes = {axis_type.axis: axis_type.size for axis_type in types}
    return tuple(Axis(name=axis, size=size) for axis, size in sizes.items())


def find_plan_problems(
    inventory: ModelInventory, rules: Sequence[PlanRule], *, is_applied: bool
) -> Iterator[Finding]:
    """Find rules that match nothing and, if the plan should have been applied, had no effect."""
    modules = {module.name for module in inventory.modules}
    matcher = PlanMatcher(rules)
    used = {rule.pattern for name in inventory.every_name() for rule in matcher.find(name)}
    for rule in rules:
        if rule.pattern not in used:
            yield _unused(rule, "it matches no module and no parameter of the model", modules)
    if is_applied or any(entry.is_placed for entry in inventory.tensors):
        yield from _find_missed(inventory, rules)
        yield from _find_idle(inventory, rules)


def _find_missed(inventory: ModelInventory, rules: Sequence[PlanRule]) -> Iterator[Finding]:
    """Find parameters whose placements are not those of the plan."""
    by_pattern = {rule.pattern: rule for rule in rules}
    missed: defaultdict[str, list[TensorEntry]] = defaultdict(list)
    for entry in inventory.tensors:
        rule = None if entry.record.rule is None else by_pattern[entry.record.rule]
        if rule is not None and _is_missed(inventory, entry, rule):
            missed[rule.pattern].append(entry)
    for pattern, entries in missed.items():
        for name, group in fold_names(entries):
            yield _not_applied(by_pattern[pattern], name, _describe(inventory, group[0]))


def _find_idle(inventory: ModelInventory, rules: Sequence[PlanRule]) -> Iterator[Finding]:
    """Find styles that shard no weight, such as SequenceParallel, whose hooks a module lacks."""
    matcher = PlanMatcher(
        [rule for rule in rules if rule.is_torch_style and not rule.shards_weights]
    )
    idle: defaultdict[str, list[str]] = defaultdict(list)
    for module in inventory.modules:
        has_style = any(mark.kind is MarkKind.TENSOR_PARALLEL for mark in module.marks)
        for rule in [] if has_style else matcher.find(module.name, *module.aliases)[:1]:
            idle[rule.pattern].append(module.name)
    for rule in rules:
        if names := idle.get(rule.pattern):
            more = f" (×{len(names)})" if len(names) > 1 else ""
            yield _not_applied(rule, f"{names[0]}{more}", "without that style's hooks")


def _unused(rule: PlanRule, fact: str, modules: set[str]) -> Finding:
    last = rule.pattern.rpartition(".")[2]
    near = sorted(name for name in modules if last and name.rpartition(".")[2] == last)[:3]
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return Finding(
        rule="plan-unused",
        severity=Severity.WARNING,
        subject=rule.pattern or "(the root)",
        fact=f"the plan gives {rule.meaning} to {rule.pattern!r}, but {fact}",
        remedy=f"Fix or remove the rule.{hint}",
    )


def _is_missed(inventory: ModelInventory, entry: TensorEntry, rule: PlanRule) -> bool:
    num_dims = len(entry.record.shape)
    actual = {
        axis: _shard_dim(placement, entry)
        for axis, placement in inventory.planned_placements(entry).items()
    }
    if rule.placements and len(rule.placements) == len(actual):
        return [_shard_dim(p, entry) for p in rule.placements] != list(actual.values())
    module_name, _, name = entry.name.rpartition(".")
    module = inventory.names.module_named(module_name)
    for axis, style in (*((None, placement) for placement in rule.placements), *rule.styles):
        dims = {actual[axis]} if axis in actual else set(actual.values())
        if isinstance(style, (Colwise, Rowwise)) and num_dims < 2:
            continue  # a bias may be replicated
        if isinstance(style, (Colwise, Rowwise, Shard)):
            dim = style_dim(style, module, name, num_dims)
            return not dims - {None} if dim is None else dim not in dims
    return False


def _shard_dim(placement: Any, entry: TensorEntry) -> int | None:
    """The dim that a placement shards, counted from the front; also for strided shards."""
    dim = getattr(placement, "dim", None)
    return None if dim is None else dim % max(1, len(entry.record.shape))


def _describe(inventory: ModelInventory, entry: TensorEntry) -> str:
    if not entry.is_placed:
        return "a plain tensor"
    placements = describe_placements(inventory.planned_placements(entry).values())
    return ", ".join(placements) if placements else "sharded by FSDP only"


def _not_applied(rule: PlanRule, name: str, actual: str) -> Finding:
    return Finding(
        rule="plan-not-applied",
        severity=Severity.ERROR,
        subject=name,
        fact=f"the plan shards it by {rule.meaning} (rule {rule.pattern!r}), but it is {actual}",
        remedy=f"Give the plan to parallelize_module before the model is wrapped. {RIGHT_ORDER}",
    )


def find_broken_ties(
    inventory: ModelInventory, rules: Sequence[PlanRule], before: Recording | None
) -> Iterator[Finding]:
    """Find tied weights that are now separate tensors, or that the plan would separate."""
    tensors = {entry.name: entry for entry in inventory.tensors}
    yield from _find_ties_broken_by_plan(inventory, rules)
    shared = name_shared_parameters(inventory)
    yield from map(describe_shared_parameter, shared)
    for first, second in dict.fromkeys((*_ties_before(before), *_declared_ties(inventory.model))):
        first_entry, second_entry = tensors.get(first), tensors.get(second)
        if first_entry is None or second_entry is None or _is_tied(first_entry, second_entry):
            continue
        if any({first, second} <= names.keys() for names in shared):
            continue
        yield Finding(
            rule="tied-weights",
            severity=Severity.ERROR,
            subject=f"{first}, {second}",
            fact=f"the tie is broken, they are now two tensors: {_describe_layout(first_entry)} "
            f"and {_describe_layout(second_entry)}, "
            "which will be trained independently",
            remedy="Give both the same placements and the same FSDP group (that of a module that "
            "holds both, or fully_shard([first, second])), and tie them again after sharding.",
        )


def _is_tied(first: TensorEntry, second: TensorEntry) -> bool:
    return (
        first.record.alias_group is not None
        and first.record.alias_group == second.record.alias_group
    )


def _describe_layout(entry: TensorEntry) -> str:
    placements = ", ".join(entry.record.placements) or "replicated"
    group = entry.record.fsdp_group
    return placements if group is None else f"{placements} in FSDP group {group or 'of the root'}"


def _ties_before(before: Recording | None) -> Iterator[tuple[str, str]]:
    for module in () if before is None else before.modules:
        for parameter in module.parameters:
            name = f"{module.name}.{parameter.name}".lstrip(".")
            if parameter.alias_group not in (None, name):
                assert parameter.alias_group is not None
                yield parameter.alias_group, name
            yield from ((name, f"{alias}.{parameter.name}") for alias in module.aliases)


def _declared_ties(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The ties that a transformers model declares, if its config enables them."""
    model = unwrap(model)
    declared = getattr(model, "_tied_weights_keys", None)
    is_enabled = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if isinstance(declared, Mapping) and is_enabled is True:
        yield from ((str(source), str(target)) for target, source in declared.items())


def _find_ties_broken_by_plan(
    inventory: ModelInventory, rules: Sequence[PlanRule]
) -> Iterator[Finding]:
    groups: defaultdict[str, list[TensorEntry]] = defaultdict(list)
    for entry in inventory.tensors:
        if entry.record.alias_group is not None:
            groups[entry.record.alias_group].append(entry)
    for entries in groups.values():
        layouts = {_planned_layout(inventory, entry, rules) for entry in entries}
        if len(layouts) > 1:
            layout_list = "; ".join(
                f"{entry.name}: {_planned_layout(inventory, entry, rules)}" for entry in entries
            )
            yield Finding(
                rule="tied-weights",
                severity=Severity.ERROR,
                subject=", ".join(entry.name for entry in entries),
                fact=f"they are one tensor, but the plan gives it several layouts ({layout_list})",
                remedy="Give all of them rules that shard the same dim of the weight: "
                "RowwiseParallel for an embedding goes with ColwiseParallel for the linear layer "
                "tied to it.",
            )


def _planned_layout(
    inventory: ModelInventory, entry: TensorEntry, rules: Sequence[PlanRule]
) -> str:
    rule = next((rule for rule in rules if rule.pattern == entry.record.rule), None)
    if rule is None:
        return "unchanged"
    module_name, _, name = entry.name.rpartition(".")
    module = inventory.names.module_named(module_name)
    dim = rule.shard_dim(module, name, len(entry.record.shape))
    return rule.meaning if dim is None else f"sharded along dim {dim}"


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
