"""Op calls of one level summed by op, each with its worst verdict and a remedy."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, final

from shardscope._torch.dispatch import TORCHS_OWN, op_schema
from shardscope.attribution.module_names import ModuleNames
from shardscope.record import Move, OpCoverage, Sharding, Source, Verdict
from shardscope.shard.coverage.levels import FlopCounter
from shardscope.shard.coverage.op_calls import Capture, Signature, Use
from shardscope.shard.coverage.verdicts import BADNESS, CallVerdict, Judge, ShardingAttempt


def suggest(op: Any, verdict: Verdict, attempts: Sequence[ShardingAttempt]) -> str:
    """The remedy for a verdict: a sentence or a few lines of code; empty if none is needed."""
    if verdict is Verdict.WRONG:
        wrong = [attempt.name_inputs() for attempt in attempts if attempt.verdict is Verdict.WRONG]
        return (
            f"Do not shard {_join(wrong)}: redistribute to Replicate() before the op, "
            "and report it to PyTorch."
        )
    if verdict is Verdict.MISSING and any(
        "mixed torch.Tensor" in attempt.detail for attempt in attempts
    ):
        return (
            "A plain tensor meets a DTensor here. Make it one with distribute_tensor(), or call "
            "the model within torch.distributed.tensor.experimental.implicit_replication()."
        )
    unknown = next((attempt.failed_op or op for attempt in attempts if attempt.is_unknown), None)
    if verdict is Verdict.MISSING and unknown is not None:
        return _suggest_rule(unknown)
    if verdict is Verdict.MISSING and len(attempts) > 1:  # even with every input replicated
        return "Run it on plain tensors: x.full_tensor() before the op."
    if verdict is Verdict.MISSING:
        return "Redistribute its inputs to Replicate() before the op."
    if verdict is Verdict.REPLICATED:
        return "It runs replicated on every rank: keep it out of the sharded part, or rewrite it."
    return ""


def _suggest_rule(op: Any) -> str:
    lines = registration(op)
    if "_for_cpu" in str(op):
        return (
            "This is a CPU-only kernel. On CUDA the model calls another, which DTensor supports: "
            "test it on a CUDA device, or under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)."
        )
    if op.namespace in TORCHS_OWN:
        return (
            "Run it on local tensors (torch.distributed.tensor.experimental.local_map), "
            f"or register a rule:\n{lines}"
        )
    return f"Register it (torch.distributed.tensor.experimental.register_sharding):\n{lines}"


def registration(op: Any) -> str:
    """Three lines of code that register a strategy for `op`: all replicated, to be extended."""
    schema = op_schema(op)
    arguments = [argument for argument in schema.arguments if not argument.is_out]
    inputs = ["Replicate()" if "Tensor" in str(argument.type) else "None" for argument in arguments]
    outputs = ["Replicate()"] * len(schema.returns)
    name = schema.name.replace("::", "_").replace(".", "_")
    names = ", ".join(
        f"{argument.name}=None" if argument.has_default_value() else argument.name
        for argument in arguments
    )
    return (
        f"@register_sharding(torch.ops.{op})\n"
        f"def shard_{name}({names}):\n"
        f"    return [([{', '.join(outputs)}], [{', '.join(inputs)}])]"
    )


def _join(names: Sequence[str]) -> str:
    shown = list(dict.fromkeys(names))
    return ", ".join(shown[:3]) + (" and others" if len(shown) > 3 else "")


@final
class Summary:
    """Sums the calls of a level by op; the verdict on a call is shared between levels."""

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

    def summarize(
        self, calls: Capture, *, report_progress: Callable[[str, int, int], None] = lambda *_: None
    ) -> tuple[OpCoverage, ...]:
        """Ops with their verdicts, those that are called most first.

        `report_progress` is called with the op that is judged, its number and the number of ops.
        """
        by_op: dict[Any, list[tuple[Signature, Use]]] = defaultdict(list)
        for call, use in calls.items():
            by_op[call.op].append((call, use))
        ops = []
        for number, (op, uses) in enumerate(by_op.items(), start=1):
            report_progress(str(op), number, len(by_op))
            ops.append(self._summarize_op(op, uses))
        return tuple(
            sorted(
                ops,
                key=lambda op_coverage: (
                    -op_coverage.num_forward - op_coverage.num_backward,
                    op_coverage.op,
                ),
            )
        )

    def _summarize_op(self, op: Any, uses: list[tuple[Signature, Use]]) -> OpCoverage:
        verdicts = [self._judge.judge(call) for call, _ in uses]
        worst = max(verdicts, key=lambda verdict: BADNESS[verdict.verdict])
        attempts = [attempt for verdict in verdicts for attempt in verdict.attempts]
        self._report_unchecked(op, attempts)
        self._report_skipped(op, verdicts)
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
            remedy=suggest(op, worst.verdict, worst.attempts),
            moves=_gather_moves(verdicts),
            shardings=_gather_shardings(attempts),
            modules=self._modules(total),
            sources=_sources(total),
        )

    def _count_flops(self, uses: list[tuple[Signature, Use]]) -> int | None:
        counts = ((self._flops.count(call), use.num_calls) for call, use in uses)
        known = [flops * num_calls for flops, num_calls in counts if flops is not None]
        return sum(known) if known else None

    def _report_unchecked(self, op: Any, attempts: list[ShardingAttempt]) -> None:
        reasons = dict.fromkeys(attempt.unchecked for attempt in attempts if attempt.unchecked)
        if reasons:
            self._report(str(op), f"its numbers were not all compared: {'; '.join(reasons)[:400]}")

    def _report_skipped(self, op: Any, verdicts: list[CallVerdict]) -> None:
        num_skipped = sum(verdict.num_skipped for verdict in verdicts)
        if num_skipped:
            self._report(
                str(op),
                f"{num_skipped} of its shardings were not tested: DTensor has no rule for it "
                "and would try thousands of placements of its decomposition for each",
            )

    def _modules(self, use: Use) -> tuple[str, ...]:
        names = (self._names.name(module) for module, _ in use.locations)
        return tuple(dict.fromkeys(name for name in names if name is not None))


def _sources(use: Use) -> tuple[Source, ...]:
    lines: Counter[Source] = Counter()
    for (_, source), count in use.locations.items():
        if source is not None:
            lines[source] += count
    return tuple(source for source, _ in lines.most_common())


def _describe(verdict: CallVerdict) -> str:
    if verdict.verdict is Verdict.WRONG:
        wrong = next(attempt for attempt in verdict.attempts if attempt.verdict is Verdict.WRONG)
        return f"with {wrong.name_inputs()} {wrong.detail}"
    return verdict.detail


def _gather_moves(verdicts: list[CallVerdict]) -> tuple[Move, ...]:
    """Redistributions in the attempts that have the call's verdict; the largest of each kind."""
    largest: dict[tuple[str, tuple[str, ...], tuple[str, ...]], Move] = {}
    for verdict in verdicts:
        for attempt in verdict.attempts:
            for move in attempt.moves if attempt.verdict is verdict.verdict else ():
                key = (move.argument, move.before, move.after)
                if key not in largest or move.num_bytes > largest[key].num_bytes:
                    largest[key] = move
    return tuple(move for move in largest.values() if move.num_bytes)


def _gather_shardings(attempts: list[ShardingAttempt]) -> tuple[Sharding, ...]:
    """Each sharding of the inputs once, with its largest number of bytes."""
    worst: dict[tuple[tuple[str, ...], Verdict], Sharding] = {}
    for attempt in attempts:
        key = (attempt.inputs(), attempt.verdict)
        if key not in worst or (attempt.num_bytes or 0) > (worst[key].num_bytes or 0):
            worst[key] = Sharding(
                inputs=key[0],
                verdict=attempt.verdict,
                outputs=attempt.outputs,
                num_bytes=attempt.num_bytes,
                detail=attempt.detail,
            )
    return tuple(worst.values())
