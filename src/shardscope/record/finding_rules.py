"""The rules of findings: what each means, which instrument checks it, and its page in the docs.

A finding whose rule is not in `FINDING_RULES` is a mistake of ours, which a test finds.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Effect(StrEnum):
    """What a finding means for the run, the gravest first."""

    WRONG_RESULT = "wrong_result"  # it runs, and computes something else
    FAILURE = "failure"  # it raises, hangs, crashes or runs out of memory
    COST = "cost"  # it works, with more communication, memory or time than it needs
    NOTE = "note"  # nothing is wrong; something to know when reading the figures


class FindingRule(Struct, frozen=True):
    """A rule, in the words that the page shows when the rule's name is pointed at."""

    name: str
    instrument: str
    effect: Effect
    explanation: str


_WRONG, _FAILURE, _COST, _NOTE = Effect

_RULES = {
    "trace": (
        (
            "implicit-gather",
            _COST,
            "DTensor inserted an all-gather that the program does not ask for, because an op has "
            "no sharding rule for its inputs' placements.",
        ),
        (
            "implicit-all-to-all",
            _COST,
            "DTensor inserted an all-to-all that the program does not ask for, to change the dim "
            "that a tensor is sharded along.",
        ),
        (
            "rank-mismatch",
            _FAILURE,
            "Ranks of a group issue different collectives at the same position: a real run hangs "
            "or mixes up data there.",
        ),
        (
            "rank-behind",
            _FAILURE,
            "A rank stopped or waits before a collective in which the other ranks of its group "
            "wait for it.",
        ),
        (
            "deadlock",
            _FAILURE,
            "Ranks wait for each other in a cycle, each in a collective that another has not "
            "reached.",
        ),
    ),
    "check": (
        (
            "divergence",
            _FAILURE,
            "Ranks do not issue the same collectives: a real run hangs or mixes up data there.",
        ),
        (
            "possible-divergence",
            _FAILURE,
            "Ranks do not issue the same collectives if some of them see something else: another "
            "batch, NaN in a loss, an exception, a later clock.",
        ),
    ),
    "hang": (
        (
            "rank-failed",
            _FAILURE,
            "A rank raised an error, ran out of memory or was killed; the other ranks wait for "
            "it in the next collective.",
        ),
        (
            "rank-lost",
            _FAILURE,
            "A rank does not answer, or left no file although the others wait for it: its process "
            "was stopped or ended, or its host failed.",
        ),
        (
            "call-skipped",
            _FAILURE,
            "A rank went past a collective that the other ranks of its group issue, and they wait "
            "for it there.",
        ),
        (
            "collective-stuck",
            _FAILURE,
            "All ranks of a group have issued a collective, and it completes on none of them: the "
            "cause is below torch, in a link, a device or a driver.",
        ),
        (
            "compile-differs",
            _FAILURE,
            "Ranks compiled different graphs of the same function, with different collectives in "
            "them.",
        ),
        (
            "slow-rank",
            _COST,
            "The other ranks wait for a rank that takes longer than they do between collectives.",
        ),
    ),
    "audit": (
        (
            "replicated",
            _COST,
            "A large parameter is the same on several ranks, although their mesh axis shards "
            "other parameters.",
        ),
        (
            "uneven-shards",
            _COST,
            "A dim does not divide by the axes that shard it, so that ranks hold shards of "
            "different sizes.",
        ),
        (
            "mixed-meshes",
            _FAILURE,
            "Trained parameters are on different meshes, or on none: gradient clipping and some "
            "optimizers refuse such a mixture.",
        ),
        (
            "mixed-tensors",
            _FAILURE,
            "An op gets a plain tensor together with a DTensor, which torch refuses.",
        ),
        (
            "root-not-sharded",
            _COST,
            "Parts of the model are under FSDP and the model itself is not: nothing is "
            "prefetched, and the remaining parameters are not sharded.",
        ),
        (
            "outside-groups",
            _WRONG,
            "A trained parameter is in no FSDP group, so that its gradient is not reduced and "
            "ranks train different weights.",
        ),
        (
            "tied-weights",
            _WRONG,
            "Parameters that were one tensor are separate now, or the plan would separate them: "
            "each would be trained by itself, or torch refuses them.",
        ),
        (
            "plan-unused",
            _COST,
            "A rule of the plan matches nothing, so what it was to shard is not sharded by it.",
        ),
        (
            "plan-not-applied",
            _COST,
            "A rule of the plan matches a parameter or module that is not sharded as it demands.",
        ),
        (
            "wrong-order",
            _COST,
            "Checkpointing, compilation and FSDP wrap a module in an order in which they work "
            "against each other.",
        ),
    ),
    "memory": (
        (
            "out-of-memory",
            _FAILURE,
            "A step needs more memory than the device has.",
        ),
        (
            "memory-advice",
            _COST,
            "A change that would lower the peak of memory, and by how much at most.",
        ),
        (
            "not-counted",
            _NOTE,
            "Backward or the optimizer did not run in the profiled step, so that training needs "
            "more memory than the figures say.",
        ),
    ),
    "explain": (
        (
            "graph-break",
            _COST,
            "A line that the compiler cannot trace splits a function into several graphs.",
        ),
        (
            "skipped-frame",
            _COST,
            "A function, or the rest of it after a graph break, is not compiled and runs eagerly.",
        ),
        (
            "recompiles",
            _COST,
            "A function is compiled again and again because its guards fail.",
        ),
        (
            "recompile-limit",
            _COST,
            "A function was recompiled so often that the compiler gave up: it runs eagerly.",
        ),
        (
            "raised",
            _FAILURE,
            "The function raised an error while it was compiled or ran.",
        ),
        (
            "compiled-collective-order",
            _FAILURE,
            "The compiled graphs of two ranks have different collectives in a group that both "
            "are in: they will wait for each other.",
        ),
        (
            "compiled-graphs-differ",
            _COST,
            "Ranks compiled different graphs of the same function; one that compiles later lets "
            "the others wait.",
        ),
    ),
    "diagnose": (
        (
            "compiled-wrong-result",
            _WRONG,
            "The compiled function returns other numbers than eager execution, by more than "
            "rounding explains.",
        ),
        (
            "compiled-nan",
            _WRONG,
            "The compiled function has NaN or infinity where eager execution has none, or none "
            "where it has.",
        ),
        (
            "compiled-missing-error",
            _WRONG,
            "The function raises an error in eager execution, and the compiled one returns.",
        ),
        (
            "compiled-different-error",
            _FAILURE,
            "The function and the compiled function raise different errors.",
        ),
        (
            "compiled-compile-error",
            _FAILURE,
            "The compiler raises an error for a function that runs eagerly.",
        ),
        (
            "compiled-runtime-error",
            _FAILURE,
            "The compiled function raises an error that eager execution does not raise.",
        ),
        (
            "compiled-crash",
            _FAILURE,
            "The process died while it compiled or ran the function.",
        ),
        (
            "compiled-hang",
            _FAILURE,
            "The compiler or the compiled function did not return in time.",
        ),
        (
            "compiled-nondeterministic",
            _NOTE,
            "The function gives other numbers when it is run again, so that it cannot be compared.",
        ),
    ),
    "parity": (
        (
            "parity-missing-reduction",
            _WRONG,
            "Ranks hold partial sums that were never added up, or a gradient of their own shard "
            "only.",
        ),
        (
            "parity-double-reduction",
            _WRONG,
            "A tensor was summed over ranks once too often, so that it is a number of ranks too "
            "large.",
        ),
        (
            "parity-scaled",
            _WRONG,
            "A tensor is the single device's, multiplied by a constant, or by one for each rank.",
        ),
        (
            "parity-wrong-slice",
            _WRONG,
            "A rank works on the shard that belongs to another rank.",
        ),
        (
            "parity-permuted",
            _WRONG,
            "A tensor has the right numbers in another order: transposed, or its dims or shards "
            "exchanged.",
        ),
        (
            "parity-wrong-group",
            _WRONG,
            "A tensor was reduced or gathered over other ranks than it should be.",
        ),
        (
            "parity-wrong-dim",
            _WRONG,
            "A tensor was sharded or gathered along another dim than it should be.",
        ),
        (
            "parity-broken-tie",
            _WRONG,
            "A tied parameter became several, and their gradients are not added up.",
        ),
        (
            "parity-randomness",
            _WRONG,
            "Random numbers are drawn anew on each rank where they should be the same, or are "
            "the same where they should differ.",
        ),
        (
            "parity-weights",
            _WRONG,
            "Replicated weights have different values on the ranks before the first step.",
        ),
        (
            "parity-rounding",
            _WRONG,
            "A tensor differs by more than its own precision explains, as if computed in a lower "
            "one.",
        ),
        (
            "parity-stale",
            _WRONG,
            "A tensor is zero, cleared or unchanged, or has no gradient, where the single device "
            "has one.",
        ),
        (
            "parity-norm",
            _WRONG,
            "The norm that gradients are clipped with is not that of all gradients: shards are "
            "not summed, or copies are counted several times.",
        ),
        (
            "parity-clipping",
            _WRONG,
            "Gradients and their norm agree, and differ after clipping: on some ranks, or by "
            "another factor.",
        ),
        (
            "parity-overwritten",
            _WRONG,
            "A tensor was overwritten in place, such as by its own reduction, and used afterwards.",
        ),
        (
            "parity-lost-hook",
            _WRONG,
            "The hook that reduces a gradient over ranks does not run for a parameter.",
        ),
        (
            "parity-out-of-sync",
            _WRONG,
            "Each rank has its own value of a buffer, a counter or a reported number.",
        ),
        (
            "parity-unknown",
            _WRONG,
            "A tensor differs from the single device's, and no known mistake explains how.",
        ),
        (
            "parity-differs",
            _WRONG,
            "A tensor differs from the single device's by more than rounding explains.",
        ),
        (
            "parity-ranks-disagree",
            _WRONG,
            "A replicated tensor is not the same on all ranks.",
        ),
        (
            "parity-nonfinite",
            _WRONG,
            "NaN or infinity is in other places than on the single device.",
        ),
        (
            "parity-reshaped",
            _WRONG,
            "A tensor has another shape than on the single device.",
        ),
        (
            "parity-missing",
            _WRONG,
            "The single device has a tensor that the ranks do not have.",
        ),
        (
            "parity-extra",
            _WRONG,
            "The ranks have a tensor that the single device does not have.",
        ),
        (
            "parity-summed-gradients",
            _NOTE,
            "Gradients are the sum over the ranks' batches, not their mean; the loss decides "
            "which of the two is right.",
        ),
        (
            "parity-same-samples",
            _NOTE,
            "Ranks that average their gradients are trained on the same samples.",
        ),
        (
            "parity-own-numbers",
            _NOTE,
            "A number that the program reads is that of a rank's own samples.",
        ),
        (
            "parity-noisy",
            _NOTE,
            "An output changes so much with the last place of the weights that almost any result "
            "would count as close.",
        ),
        (
            "parity-nothing",
            _NOTE,
            "The step produced no tensors, so that nothing was compared.",
        ),
        (
            "parity-dtype",
            _NOTE,
            "A tensor has another dtype on the ranks than on the single device.",
        ),
        (
            "parity-random",
            _NOTE,
            "Tensors differ only in the random numbers that were drawn.",
        ),
        (
            "parity-rounded",
            _NOTE,
            "Tensors are less accurate than on the single device, by rounding only.",
        ),
    ),
    "compare": (
        (
            "run-differs",
            _WRONG,
            "A tensor deviates between two runs by more than rounding explains, and what it is "
            "computed from agrees.",
        ),
        (
            "run-ranks-disagree",
            _WRONG,
            "Ranks of a run hold different copies of a tensor that should be the same on all of "
            "them.",
        ),
        (
            "run-inputs",
            _WRONG,
            "The model gets other inputs in one run than in the other, all ranks taken together.",
        ),
        (
            "run-weights",
            _WRONG,
            "Parameters differ between two runs before the first step that both have sampled.",
        ),
        (
            "run-setting",
            _WRONG,
            "A setting of the optimizer, such as the learning rate, differs between two runs.",
        ),
    ),
    "types": (
        (
            "types-unreduced-gradient",
            _WRONG,
            "A parameter is the same on all ranks of an axis, and its gradient is partial or "
            "varies, so that each rank trains weights of its own.",
        ),
        (
            "types-partial-as-complete",
            _WRONG,
            "A partial value, of which only the sum over ranks is the tensor, is used as if it "
            "were complete.",
        ),
        (
            "types-varying-as-replicated",
            _WRONG,
            "Each rank has an output of the model, or a parameter, of the full shape, with values "
            "of its own.",
        ),
        (
            "types-declared",
            _WRONG,
            "A placement of DTensor, or an annotation of spmd_types, is not what the values are.",
        ),
    ),
    "parallelize": (
        (
            "parallel-differs",
            _WRONG,
            "The partitioned program computes other numbers than the original: a bug of "
            "shardscope's.",
        ),
    ),
    "contract": (
        (
            "contract-exceeded",
            _FAILURE,
            "A figure is beyond the limit that the contract sets: what `shardscope contract check` "
            "fails on.",
        ),
        (
            "contract-not-measured",
            _NOTE,
            "The contract limits a figure that was not recorded here, so that it was not checked.",
        ),
    ),
}

FINDING_RULES = {
    name: FindingRule(name, instrument, effect, explanation)
    for instrument, rules in _RULES.items()
    for name, effect, explanation in rules
}
"""All rules, by name, grouped by the instrument that checks them."""


def documentation_page(rule: str) -> str:
    """Return the path of a rule's page in the documentation, with an example and the fix.

    Args:
        rule: The name of a rule, `Finding.rule`.

    Examples:
        >>> documentation_page("implicit-gather")
        'docs/findings/implicit-gather.md'
    """
    return f"docs/findings/{rule}.md"
