"""Calls of one level added up by op, each with the worst that happens to any of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, final

from shardscope._torch.dispatch import op_schema
from shardscope.comm.names import ModuleNames
from shardscope.record import Move, OpCoverage, Sharding, Source, Verdict
from shardscope.shard.capture import Capture, Use
from shardscope.shard.flops import FlopCounter
from shardscope.shard.remedies import suggest
from shardscope.shard.signature import Signature
from shardscope.shard.trials import Trial
from shardscope.shard.verdicts import BADNESS, Judge, Judgement

__all__ = ["Summary"]


@final
class Summary:
    """Adds up levels; what is found of a call at one level holds at the others."""

    def __init__(
        self,
        names: ModuleNames,
        judge: Judge,
        flops: FlopCounter,
        report: Callable[[str, str], None],
    ) -> None:
        self._names = names
        self._judge = judge
        self._flops = flops
        self._report = report

    def add_up(
        self, calls: Capture, *, tell: Callable[[str, int, int], None] = lambda *_: None
    ) -> tuple[OpCoverage, ...]:
        """Ops with their verdicts, those that are called most first.

        `tell` is told which op is judged, the how many-th it is and of how many.
        """
        by_op: dict[Any, list[tuple[Signature, Use]]] = defaultdict(list)
        for call, use in calls.items():
            by_op[call.op].append((call, use))
        ops = []
        for number, (op, uses) in enumerate(by_op.items(), start=1):
            tell(str(op), number, len(by_op))
            ops.append(self._add_up_op(op, uses))
        return tuple(sorted(ops, key=lambda one: (-one.num_forward - one.num_backward, one.op)))

    def _add_up_op(self, op: Any, uses: list[tuple[Signature, Use]]) -> OpCoverage:
        judged = [self._judge.judge(call) for call, _ in uses]
        worst = max(judged, key=lambda one: BADNESS[one.verdict])
        trials = [trial for one in judged for trial in one.trials]
        self._report_unchecked(op, trials)
        self._report_skipped(op, judged)
        total = Use()
        for _, use in uses:
            total.add(use)
        return OpCoverage(
            op=str(op),
            schema=str(op_schema(op)),
            verdict=worst.verdict,
            num_forward=total.forward.total(),
            num_backward=total.backward.total(),
            flops=self._count_flops(uses),
            detail=_describe(worst),
            remedy=suggest(op, worst.verdict, worst.trials),
            moves=_gather_moves(judged),
            shardings=_gather_shardings(trials),
            modules=self._modules(total),
            sources=_sources(total),
        )

    def _count_flops(self, uses: list[tuple[Signature, Use]]) -> int | None:
        counts = ((self._flops.count(call), use.num_calls) for call, use in uses)
        known = [flops * num_calls for flops, num_calls in counts if flops is not None]
        return sum(known) if known else None

    def _report_unchecked(self, op: Any, trials: list[Trial]) -> None:
        reasons = dict.fromkeys(trial.unchecked for trial in trials if trial.unchecked)
        if reasons:
            self._report(str(op), f"its numbers were not all compared: {'; '.join(reasons)[:400]}")

    def _report_skipped(self, op: Any, judged: list[Judgement]) -> None:
        num_skipped = sum(one.num_skipped for one in judged)
        if num_skipped:
            self._report(
                str(op),
                f"{num_skipped} of its shardings were not tested: DTensor has no rule for it "
                "and would try thousands of placements of its decomposition for each",
            )

    def _modules(self, use: Use) -> tuple[str, ...]:
        names = (self._names.name(module) for module, _ in use.places)
        return tuple(dict.fromkeys(name for name in names if name is not None))


def _sources(use: Use) -> tuple[Source, ...]:
    lines: Counter[Source] = Counter()
    for (_, source), count in use.places.items():
        if source is not None:
            lines[source] += count
    return tuple(source for source, _ in lines.most_common())


def _describe(judged: Judgement) -> str:
    if judged.verdict is Verdict.WRONG:
        wrong = next(one for one in judged.trials if one.verdict is Verdict.WRONG)
        return f"with {wrong.name_inputs()} {wrong.detail}"
    return judged.detail


def _gather_moves(judged: list[Judgement]) -> tuple[Move, ...]:
    """Moves that cannot be avoided, at the verdict's own trials; the largest of each kind."""
    largest: dict[tuple[str, tuple[str, ...], tuple[str, ...]], Move] = {}
    for one in judged:
        for trial in one.trials:
            for move in trial.moves if trial.verdict is one.verdict else ():
                key = (move.argument, move.before, move.after)
                if key not in largest or move.num_bytes > largest[key].num_bytes:
                    largest[key] = move
    return tuple(move for move in largest.values() if move.num_bytes)


def _gather_shardings(trials: list[Trial]) -> tuple[Sharding, ...]:
    """Each layout of the inputs once, with the worst that came of it."""
    worst: dict[tuple[tuple[str, ...], Verdict], Sharding] = {}
    for trial in trials:
        key = (trial.inputs(), trial.verdict)
        if key not in worst or (trial.num_bytes or 0) > (worst[key].num_bytes or 0):
            worst[key] = Sharding(
                inputs=key[0],
                verdict=trial.verdict,
                outputs=trial.outputs,
                num_bytes=trial.num_bytes,
                detail=trial.detail,
            )
    return tuple(worst.values())
