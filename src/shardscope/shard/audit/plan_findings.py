"""Findings on a plan and on weight ties: rules that match nothing or have no effect, broken
ties.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from shardscope._torch.mesh import describe_placements
from shardscope._torch.modules import unwrap
from shardscope.plan import PlanMatcher
from shardscope.plan.placements import Shard
from shardscope.plan.styles import Colwise, Rowwise
from shardscope.record import Finding, MarkKind, Recording, Severity
from shardscope.shard.audit.findings import RIGHT_ORDER, fold_names
from shardscope.shard.audit.plan import PlanRule, style_dim
from shardscope.shard.audit.sharded_tensors import ModelInventory, TensorEntry


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
    tensors = {first_entry.name: first_entry for first_entry in inventory.tensors}
    yield from _find_ties_broken_by_plan(inventory, rules)
    for first, second in dict.fromkeys((*_ties_before(before), *_declared_ties(inventory.model))):
        first_entry, second_entry = tensors.get(first), tensors.get(second)
        if first_entry is None or second_entry is None or _is_tied(first_entry, second_entry):
            continue
        yield Finding(
            rule="tied-weights",
            severity=Severity.ERROR,
            subject=f"{first}, {second}",
            fact=f"the tie is broken, they are now two tensors: {_describe_layout(first_entry)} "
            f"and {_describe_layout(second_entry)}, "
            "which will be trained independently",
            remedy="Give both the same placements and the same FSDP group (that of a module that "
            "holds both, or fully_shard([one, other])), and tie them again after sharding.",
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
