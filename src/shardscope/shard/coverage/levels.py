"""The op calls of a level: decomposed to core ATen or as far as Inductor does, and summed by op.

The summary has for each op its FLOPs, its worst verdict and a remedy.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.flop_counter import flop_registry

from shardscope._torch.decompositions import (
    core_aten_table,
    functional_variant,
    inductor_table,
    is_composite,
    parts_of,
    with_defaults,
)
from shardscope._torch.dispatch import (
    FLOP_ALIASES,
    TORCHS_OWN,
    TorchDispatchMode,
    is_higher_order,
    op_packet,
    op_schema,
)
from shardscope._torch.dtensor import implicit_replicas
from shardscope._torch.fake import NO_DATA, without_data
from shardscope.attribution.module_names import ModuleNames
from shardscope.attribution.tensors import map_tensors, tensors_in
from shardscope.record import Level, Move, OpCoverage, OpVerdict, Sharding, Source
from shardscope.shard.coverage.dispatch import Dispatcher, describe
from shardscope.shard.coverage.op_calls import (
    NON_MODEL_NAMESPACES,
    Capture,
    Signature,
    Use,
    freeze_call,
)
from shardscope.shard.coverage.verdicts import BADNESS, CallVerdict, Judge, ShardingAttempt


def run_or_replicate(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the op; where DTensor raises, on plain tensors of the global shapes, without data.

    The error is found again, and reported, when the call is judged.
    """
    try:
        return op(*args, **kwargs)
    except NO_DATA:
        raise
    except Exception:
        placed = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, DTensor)]
        if not placed:
            raise
        try:
            result = op(*map_tensors(args, _empty), **map_tensors(kwargs, _empty))
        except Exception:  # noqa: BLE001 - then it is not DTensor's fault
            result = NotImplemented
        if result is NotImplemented:
            raise
    if op_schema(op).is_mutable:
        return args[0]
    mesh = placed[0].device_mesh
    replicated = [Replicate() for _ in range(mesh.ndim)]
    return map_tensors(
        result, lambda tensor: DTensor.from_local(tensor, mesh, replicated, run_check=False)
    )


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    device = tensor.to_local().device
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


Table = Mapping[Any, Callable[..., Any]]
Report = Callable[[str, str], None]
TABLES: dict[Level, Callable[[], Table]] = {
    Level.CORE_ATEN: core_aten_table,
    Level.INDUCTOR: inductor_table,
}


@final
class _DecomposeMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Decomposes the ops that it sees by a table, and counts those that cannot be decomposed."""

    def __init__(self, table: Table) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts: Counter[Signature] = Counter()
        self._table = table

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Decompose the call, or run it."""
        kwargs = kwargs or {}
        if is_higher_order(func) or func.namespace in NON_MODEL_NAMESPACES:
            return func(*args, **kwargs)
        functional = functional_variant(func)
        if functional is None:
            return self._decompose(func, args, kwargs)
        self._decompose(functional, with_defaults(func, functional, args), kwargs)
        return args[0]

    def _decompose(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = self._table.get(op) or (parts_of(op) if is_composite(op) else None)
        if run is not None:
            with self:
                result = run(*args, **kwargs)
            if result is not NotImplemented:
                return result
        self.parts[_replicate_constants(freeze_call(op, args, kwargs))] += 1
        return run_or_replicate(op, args, kwargs)


def _replicate_constants(call: Signature) -> Signature:
    """The call with its plain tensors, constants of a decomposition, as replicated DTensors."""
    meshes = [spec.mesh for _, spec in call.tensors() if spec.mesh is not None]
    if not meshes:
        return call
    replicated = tuple(Replicate() for _ in meshes[0].shape)
    return call.change(
        lambda _, spec: spec if spec.mesh else spec._replace(placements=replicated, mesh=meshes[0])
    )


def count_parts(
    call: Signature, table: Table, dispatcher: Dispatcher, report: Report = lambda *_: None
) -> Counter[Signature]:
    """The calls that a call decomposes into, with counts; the call itself if that fails."""
    mode = _DecomposeMode(table)
    try:
        args, kwargs = call.arguments(dispatcher.make)
        with implicit_replicas(), mode:
            call.op(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - decompositions do not expect DTensors
        report(str(call.op), f"it could not be decomposed and counts as one op: {describe(error)}")
        return Counter({call: 1})
    return mode.parts


def decompose(captured: Capture, level: Level, dispatcher: Dispatcher, report: Report) -> Capture:
    """The captured calls decomposed to `level`, with where they were called from."""
    table = TABLES[level]()
    result: Capture = {}
    for call, use in captured.items():
        for part, times in count_parts(call, table, dispatcher, report).items():
            result.setdefault(part, Use()).add(use, times)
    return result


@final
class FlopCounter:
    """Counts the FLOPs of each distinct call once; a composite op has those of its parts."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._known: dict[Signature, int | None] = {}

    def count(self, call: Signature) -> int | None:
        """FLOPs of the call, as if nothing were sharded; None where torch has no formula for it."""
        plain = call.plain()
        if plain not in self._known:
            self._known[plain] = self._count(plain)
        return self._known[plain]

    def _count(self, call: Signature) -> int | None:
        packet = op_packet(call.op)
        formula = flop_registry.get(FLOP_ALIASES.get(packet.__name__, packet))
        if formula is not None:
            return self._apply(formula, call)
        if not is_composite(call.op):
            return None
        parts = count_parts(call, {}, self._dispatcher)
        counts = ((self.count(part), times) for part, times in parts.items() if part != call)
        known = [flops * times for flops, times in counts if flops is not None]
        return sum(known) if known else None

    def _apply(self, formula: Any, call: Signature) -> int | None:
        with without_data():
            try:
                args, kwargs = call.arguments(self._dispatcher.make)
                return int(formula(*args, **kwargs, out_val=call.op(*args, **kwargs)))
            except Exception:  # noqa: BLE001 - formulas assert what ops do not ask for
                return None


def suggest(op: Any, verdict: OpVerdict, attempts: Sequence[ShardingAttempt]) -> str:
    """The remedy for a verdict: a sentence or a few lines of code; empty if none is needed."""
    if verdict is OpVerdict.WRONG:
        wrong = [
            attempt.name_inputs() for attempt in attempts if attempt.verdict is OpVerdict.WRONG
        ]
        return (
            f"Do not shard {_join(wrong)}: redistribute to Replicate() before the op, "
            "and report it to PyTorch."
        )
    if verdict is OpVerdict.MISSING and any(
        "mixed torch.Tensor" in attempt.detail for attempt in attempts
    ):
        return (
            "A plain tensor meets a DTensor here. Make it one with distribute_tensor(), or call "
            "the model within torch.distributed.tensor.experimental.implicit_replication()."
        )
    unknown = next((attempt.failed_op or op for attempt in attempts if attempt.is_unknown), None)
    if verdict is OpVerdict.MISSING and unknown is not None:
        return _suggest_rule(unknown)
    if verdict is OpVerdict.MISSING and len(attempts) > 1:  # even with every input replicated
        return "Run it on plain tensors: x.full_tensor() before the op."
    if verdict is OpVerdict.MISSING:
        return "Redistribute its inputs to Replicate() before the op."
    if verdict is OpVerdict.REPLICATED:
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
    if verdict.verdict is OpVerdict.WRONG:
        wrong = next(attempt for attempt in verdict.attempts if attempt.verdict is OpVerdict.WRONG)
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
    worst: dict[tuple[tuple[str, ...], OpVerdict], Sharding] = {}
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
