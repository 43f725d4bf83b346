"""Findings about tied tensors: that a plan would tear, or that sharding has torn already."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from shardscope._torch.modules import unwrap
from shardscope.record import Finding, Recording, Severity
from shardscope.shard.plan import Rule
from shardscope.shard.tensors import Held, Holdings

__all__ = ["find_broken_ties"]


def find_broken_ties(
    held: Holdings, rules: Sequence[Rule], before: Recording | None
) -> Iterator[Finding]:
    """Tensors that are, were or should be one, and that lie, or will lie, apart."""
    tensors = {one.name: one for one in held.tensors}
    yield from _find_ties_torn_by_plan(held, rules)
    for first, second in dict.fromkeys((*_ties_before(before), *_declared_ties(held.model))):
        one, other = tensors.get(first), tensors.get(second)
        if one is None or other is None or _is_tied(one, other):
            continue
        yield Finding(
            rule="tied-weights",
            severity=Severity.ERROR,
            subject=f"{first}, {second}",
            fact=f"the tie is broken, they are now two tensors: {_lie(one)} and {_lie(other)}, "
            "which will be trained independently",
            remedy="Give both the same placements and the same FSDP group (that of a module that "
            "holds both, or fully_shard([one, other])), and tie them again after sharding.",
        )


def _is_tied(one: Held, other: Held) -> bool:
    return one.record.alias_group is not None and one.record.alias_group == other.record.alias_group


def _lie(one: Held) -> str:
    lies = ", ".join(one.record.placements) or "replicated"
    group = one.record.fsdp_group
    return lies if group is None else f"{lies} in FSDP group {group or 'of the root'}"


def _ties_before(before: Recording | None) -> Iterator[tuple[str, str]]:
    for module in () if before is None else before.modules:
        for parameter in module.parameters:
            name = f"{module.name}.{parameter.name}".lstrip(".")
            if parameter.alias_group not in (None, name):
                assert parameter.alias_group is not None
                yield parameter.alias_group, name
            yield from ((name, f"{alias}.{parameter.name}") for alias in module.aliases)


def _declared_ties(model: nn.Module) -> Iterator[tuple[str, str]]:
    """What a model of transformers says of itself: could tie, and was told to."""
    model = unwrap(model)
    declared = getattr(model, "_tied_weights_keys", None)
    is_told = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    if isinstance(declared, Mapping) and is_told is True:
        yield from ((str(source), str(target)) for target, source in declared.items())


def _find_ties_torn_by_plan(held: Holdings, rules: Sequence[Rule]) -> Iterator[Finding]:
    groups: defaultdict[str, list[Held]] = defaultdict(list)
    for one in held.tensors:
        if one.record.alias_group is not None:
            groups[one.record.alias_group].append(one)
    for ones in groups.values():
        wishes = {_wish(held, one, rules) for one in ones}
        if len(wishes) > 1:
            told = "; ".join(f"{one.name}: {_wish(held, one, rules)}" for one in ones)
            yield Finding(
                rule="tied-weights",
                severity=Severity.ERROR,
                subject=", ".join(one.name for one in ones),
                fact=f"they are one tensor, but the plan gives it several layouts ({told})",
                remedy="Give all of them rules that shard the same dim of the weight: "
                "RowwiseParallel for an embedding goes with ColwiseParallel for the linear layer "
                "tied to it.",
            )


def _wish(held: Holdings, one: Held, rules: Sequence[Rule]) -> str:
    rule = next((rule for rule in rules if rule.pattern == one.record.rule), None)
    if rule is None:
        return "unchanged"
    module = held.names.module_named(one.name.rpartition(".")[0])
    dim = None if module is None else rule.cut_dim(module, len(one.record.shape))
    return rule.meaning if dim is None else f"sharded along dim {dim}"
