"""Findings about a plan: rules that match nothing, and parameters that a rule did not reach."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from shardscope.record import Finding, Severity
from shardscope.shard.plan import Rule
from shardscope.shard.sayings import RIGHT_ORDER, fold_names
from shardscope.shard.tensors import Held, Holdings

__all__ = ["find_plan_problems"]


def find_plan_problems(held: Holdings, rules: Sequence[Rule]) -> Iterator[Finding]:
    """Rules that match nothing, and parameters that a rule meant to cut and did not."""
    modules = {module.name for module in held.modules}
    names = modules | {alias for module in held.modules for alias in module.aliases}
    names |= {one.name for one in held.tensors}
    for rule in rules:
        if not any(rule.matches(name) for name in names):
            yield _unused(rule, "it matches no module and no parameter of the model", modules)
    if any(one.mesh is not None for one in held.tensors):  # else nobody has applied it yet
        yield from _find_missed(held, rules)


def _find_missed(held: Holdings, rules: Sequence[Rule]) -> Iterator[Finding]:
    by_pattern = {rule.pattern: rule for rule in rules}
    missed: defaultdict[str, list[Held]] = defaultdict(list)
    for one in held.tensors:
        matched = None if one.record.rule is None else by_pattern[one.record.rule]
        if matched is not None and _is_missed(one, matched):
            missed[matched.pattern].append(one)
    for pattern, ones in missed.items():
        for name in fold_names(ones):
            yield _not_applied(by_pattern[pattern], name, ones[0])


def _unused(rule: Rule, fact: str, modules: set[str]) -> Finding:
    last = rule.pattern.rpartition(".")[2]
    near = sorted(name for name in modules if last and name.rpartition(".")[2] == last)[:3]
    hint = f" There is {', '.join(near)}." if near else ""
    return Finding(
        rule="plan-unused",
        severity=Severity.WARNING,
        subject=rule.pattern or "(the root)",
        fact=f"the plan gives {rule.meaning} to {rule.pattern!r}, but {fact}",
        remedy=f"Mend the pattern or remove the rule.{hint}",
    )


def _is_missed(one: Held, rule: Rule) -> bool:
    if rule.placements:
        return one.record.placements != rule.placements
    is_weight = len(one.record.shape) > 1  # a bias may rightly lie whole
    return rule.is_sharding and is_weight and not _is_cut(one)


def _is_cut(one: Held) -> bool:
    return any("Shard" in placement for placement in one.record.placements)


def _not_applied(rule: Rule, name: str, one: Held) -> Finding:
    lies = ", ".join(one.record.placements) or "a plain tensor"
    return Finding(
        rule="plan-not-applied",
        severity=Severity.ERROR,
        subject=name,
        fact=f"the plan means to lay it out by {rule.meaning} (rule {rule.pattern!r}), but it is "
        f"{lies}",
        remedy=f"Give the plan to parallelize_module before the model is wrapped. {RIGHT_ORDER}",
    )
