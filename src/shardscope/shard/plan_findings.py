"""Findings about a plan: rules that match nothing, and what a rule should have done and did not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from shardscope._torch.meshes import describe_placements
from shardscope.record import Finding, MarkKind, Severity
from shardscope.shard.plan import Rule, RuleBook
from shardscope.shard.sayings import RIGHT_ORDER, fold_names
from shardscope.shard.tensors import Held, Holdings

__all__ = ["find_plan_problems"]


def find_plan_problems(
    held: Holdings, rules: Sequence[Rule], *, is_applied: bool
) -> Iterator[Finding]:
    """Rules that match nothing, and, if the plan should have been applied, that had no effect."""
    modules = {module.name for module in held.modules}
    names = held.every_name()
    for rule in rules:
        is_used = rule.pattern in names
        if not is_used and rule.is_pattern:
            is_used = any(rule.matches(name) for name in names)
        if not is_used:
            yield _unused(rule, "it matches no module and no parameter of the model", modules)
    if is_applied or any(one.mesh is not None for one in held.tensors):
        yield from _find_missed(held, rules)
        yield from _find_idle(held, rules)


def _find_missed(held: Holdings, rules: Sequence[Rule]) -> Iterator[Finding]:
    """Parameters that lie otherwise than the plan means them to."""
    by_pattern = {rule.pattern: rule for rule in rules}
    missed: defaultdict[str, list[Held]] = defaultdict(list)
    for one in held.tensors:
        rule = None if one.record.rule is None else by_pattern[one.record.rule]
        if rule is not None and _is_missed(held, one, rule):
            missed[rule.pattern].append(one)
    for pattern, ones in missed.items():
        for name, same in fold_names(ones):
            yield _not_applied(by_pattern[pattern], name, _describe(held, same[0]))


def _find_idle(held: Holdings, rules: Sequence[Rule]) -> Iterator[Finding]:
    """Styles that cut nothing, as SequenceParallel, and that a module has no hook of."""
    book = RuleBook([rule for rule in rules if rule.is_style and rule.way is None])
    idle: defaultdict[str, list[str]] = defaultdict(list)
    for module in held.modules:
        rule = book.find((module.name, *module.aliases))
        has_style = any(mark.kind is MarkKind.TENSOR_PARALLEL for mark in module.marks)
        if rule is not None and not has_style:
            idle[rule.pattern].append(module.name)
    for rule in rules:
        if names := idle.get(rule.pattern):
            more = f" (×{len(names)})" if len(names) > 1 else ""
            yield _not_applied(rule, f"{names[0]}{more}", "without that style's hooks")


def _unused(rule: Rule, fact: str, modules: set[str]) -> Finding:
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


def _is_missed(held: Holdings, one: Held, rule: Rule) -> bool:
    lies = held.planned_placements(one)
    if rule.placements and len(rule.placements) == len(lies):
        return [_normal(p, one) for p in rule.placements] != [_normal(p, one) for p in lies]
    module = held.names.module_named(one.name.rpartition(".")[0])
    num_dims = len(one.record.shape)
    if num_dims < 2 and not rule.placements:  # a bias may rightly lie whole
        return False
    dim = None if module is None else rule.cut_dim(module, num_dims)
    cut = {_normal(placement, one) for placement in lies} - {None}
    if dim is not None:
        return dim not in cut
    return rule.way is not None and not cut


def _normal(placement: Any, one: Held) -> int | None:
    """The dim that a placement cuts, counted from the front; of strided ones too."""
    dim = getattr(placement, "dim", None)
    return None if dim is None else dim % max(1, len(one.record.shape))


def _describe(held: Holdings, one: Held) -> str:
    if one.mesh is None:
        return "a plain tensor"
    lies = describe_placements(held.planned_placements(one))
    return ", ".join(lies) if lies else "sharded by FSDP only"


def _not_applied(rule: Rule, name: str, lies: str) -> Finding:
    return Finding(
        rule="plan-not-applied",
        severity=Severity.ERROR,
        subject=name,
        fact=f"the plan shards it by {rule.meaning} (rule {rule.pattern!r}), but it is {lies}",
        remedy=f"Give the plan to parallelize_module before the model is wrapped. {RIGHT_ORDER}",
    )
