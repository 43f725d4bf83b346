"""Judges collectives by rules: what dominates, and which of them an expert would remove.

All figures are of the rank that sends most. Each rule has a section in docs/guide/verdict.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import final

from shardscope.record import (
    BucketReduce,
    Call,
    Collective,
    CollectiveKind,
    FullyShard,
    Group,
    Phase,
    Recording,
    Redistribute,
    Source,
    describe_cause,
    expand_ranks,
    format_ranks,
)
from shardscope.record.layer_names import fold_layers
from shardscope.record.recording import name_axis
from shardscope.record.units import format_bytes, plural
from shardscope.report.model.traffic_totals import (
    IdenticalRanks,
    find_busiest_ranks,
)
from shardscope.report.text.judgements import Concern, Judgement
from shardscope.report.text.style import format_share

MIN_SHARE = 0.05  # of the bytes, from which a cause other than the largest matters
NODE_RANKS = 8  # GPUs of a node where the recording does not say how many there are
REPLICATED_BYTES = 4 * 1024**3  # of gradients that every rank of an axis holds
REPLICATED_RANKS = 8
SMALL_BYTES, LARGE_BYTES = 64 * 1024, 1024**2  # of the input of a collective
MIN_SMALL, MIN_SMALL_SHARE = 32, 0.25  # collectives, and their share of all
MAX_GATHERS = 2  # of the same parameters in a forward pass and its backward pass

_TENSOR_AXES = {"tp", "tensor", "model", "mp"}
_GATHERS = (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL)


def judge_traffic(recording: Recording, rank_sets: Sequence[IdenticalRanks]) -> Iterator[Concern]:
    """Judge the collectives of the rank that sends most; its dominating cause comes last."""
    calls = rank_sets[find_busiest_ranks(rank_sets)].calls if rank_sets else ()
    if not calls:
        return
    yield from _judge_implicit(calls)
    yield from _judge_gathers(calls, recording.run.num_forwards)
    yield from _judge_small(calls, recording.run.world_size)
    yield from _judge_nodes(calls, recording)
    yield from _judge_gradients(calls, recording)
    yield from _judge_silent_axes(recording)
    yield _judge_dominating(calls, recording.run.world_size)


def _judge_implicit(calls: Sequence[Collective]) -> Iterator[Concern]:
    """Gathers and all-to-alls that DTensor inserted; a reduction is needed at some place anyway."""
    implicit = [
        call
        for call in calls
        if isinstance(call.cause, Redistribute) and call.cause.is_implicit and call.kind in _GATHERS
    ]
    if not implicit or _sent(implicit) < MIN_SHARE * _sent(calls):
        return
    yield _describe(
        implicit,
        calls,
        rule="implicit-redistribution",
        what="Redistributions that the program does not ask for make up",
        reason="DTensor inserts them where an op cannot use the placements of its inputs",
    )


def _judge_gathers(calls: Sequence[Collective], num_forwards: int | None) -> Iterator[Concern]:
    """Parameters that FSDP gathers more often than once in forward and once in backward."""
    gathers = [
        call
        for call in calls
        if isinstance(call.cause, FullyShard) and call.cause.action == "unshard"
    ]
    counts = Counter(call.owner for call in gathers)
    if not num_forwards or not counts:
        return
    often = {owner for owner, count in counts.items() if count > MAX_GATHERS * num_forwards}
    repeated = [call for call in gathers if call.owner in often]
    if repeated:
        most = max(counts.values()) / num_forwards
        yield _describe(
            repeated,
            calls,
            rule="gathered-often",
            what=f"Gathers of the same parameters by FSDP, {most:g} in a forward pass, make up",
            reason="once in forward and once in backward is enough",
        )


def _judge_small(calls: Sequence[Collective], world_size: int) -> Iterator[Concern]:
    """Many small collectives of one cause, each of which costs its latency."""
    if max(call.input_bytes for call in calls) < LARGE_BYTES:
        return  # a toy: all collectives are small
    groups: dict[tuple[str, str], list[Collective]] = {}
    for call in calls:
        label = f"{call.kind}[{name_axis(call, world_size)}] in {call.phase}"
        groups.setdefault((describe_cause(call.cause), label), []).append(call)
    for (words, label), group in groups.items():
        mean = sum(call.input_bytes for call in group) // len(group)
        share = len(group) / len(calls)
        if len(group) >= MIN_SMALL and mean <= SMALL_BYTES and share >= MIN_SMALL_SHARE:
            yield Concern(
                judgement=Judgement.COSTLY,
                rule="small-collectives",
                fact=f"{len(group):,} of {len(calls):,} collectives are {label}, "
                f"{format_bytes(mean)} each ({words})",
                reason="each costs its latency, and fewer, larger ones would do",
                view="communication",
                module=_main_module(group),
                source=group[0].source,
            )


def _judge_nodes(calls: Sequence[Collective], recording: Recording) -> Iterator[Concern]:
    """Tensor parallelism along an axis whose groups span several nodes, or stay within one."""
    nodes = _Nodes(recording)
    groups = {
        group.name: group
        for group in recording.groups
        if (group.axis or "").lower() in _TENSOR_AXES and group.num_ranks > 1
    }
    inside = [call for call in calls if call.group in groups]
    crossing = [call for call in inside if nodes.count(groups[call.group]) > 1]
    if crossing and _sent(crossing) >= MIN_SHARE * _sent(calls):
        group = groups[crossing[0].group]
        ranks = format_ranks(group.ranks)
        yield _describe(
            crossing,
            calls,
            rule="tensor-parallel-across-nodes",
            what=f"Collectives of tensor parallelism over ranks {ranks} make up",
            reason=nodes.describe_crossing(group),
            remedy=f"{_KEEP_INSIDE} {_GIVE_SIZE}" if nodes.is_assumed(group) else _KEEP_INSIDE,
        )
    elif inside and not crossing and _sent(inside) >= MIN_SHARE * _sent(calls):
        group = groups[inside[0].group]
        ranks = format_ranks(group.ranks)
        yield Concern(
            judgement=Judgement.FINE,
            rule="tensor-parallel-across-nodes",
            fact=f"Tensor parallelism over ranks {ranks} stays within a node",
            reason=nodes.describe_inside(group),
            view="communication",
        )


_KEEP_INSIDE = "Make the axis no larger than a node, and shard over the nodes along another axis."
_GIVE_SIZE = "If a node has more GPUs, say so with --nproc-per-node of show or report."


@final
class _Nodes:
    """Which ranks share a node: by its recorded size, else by the ranks' hosts, else by assumption.

    The processes of a simulation have run on one host, whatever they stand for.
    """

    def __init__(self, recording: Recording) -> None:
        self._recorded_size = recording.run.ranks_per_node
        self._size = self._recorded_size or NODE_RANKS
        self._hosts: dict[int, str] = {}
        if not recording.run.is_simulated and self._recorded_size is None:
            self._hosts = {item.rank: item.host for item in recording.processes if item.host}

    def count(self, group: Group) -> int:
        """Return the number of nodes that have ranks of a group."""
        ranks = expand_ranks(group.ranks)
        return len(self._find_hosts(group) or {rank // self._size for rank in ranks})

    def is_assumed(self, group: Group) -> bool:
        """Whether nothing that was recorded tells which of its ranks share a node."""
        return self._recorded_size is None and not self._find_hosts(group)

    def describe_crossing(self, group: Group) -> str:
        """Describe what it means that a group spans several nodes."""
        hosts = self._find_hosts(group)
        where = f"on {len(hosts):,} hosts" if hosts else f"with {self._name_size()} in a node"
        words = f"{where} this leaves the node in every layer"
        if self.is_assumed(group):
            words += ", if a node has no more, which was not recorded"
        return words

    def describe_inside(self, group: Group) -> str:
        """Describe the node of a group that is within one."""
        if hosts := self._find_hosts(group):
            return f"its ranks ran on {hosts.pop()}"
        if self._recorded_size is None:
            return f"{self._name_size()} in a node are assumed, as the number was not recorded"
        return f"it has {self._name_size()}"

    def _name_size(self) -> str:
        return plural(self._size, "GPU")

    def _find_hosts(self, group: Group) -> set[str]:
        """Return the hosts of a group's ranks; none unless those of all are known."""
        hosts = {self._hosts.get(rank, "") for rank in expand_ranks(group.ranks)}
        return set() if "" in hosts else hosts


def _judge_gradients(calls: Sequence[Collective], recording: Recording) -> Iterator[Concern]:
    """Gradients that all ranks of a large axis hold in full."""
    buckets = [
        call
        for call in calls
        if isinstance(call.cause, BucketReduce) and call.num_ranks >= REPLICATED_RANKS
    ]
    num_bytes = sum(call.input_bytes for call in buckets) // (recording.run.num_forwards or 1)
    if num_bytes >= REPLICATED_BYTES:
        yield _describe(
            buckets,
            calls,
            rule="replicated-gradients",
            what=f"Reductions of {format_bytes(num_bytes)} of gradients, the same on "
            f"{buckets[0].num_ranks:,} ranks, make up",
            reason="parameters and optimizer state are replicated as well; FSDP would shard them",
        )


def _judge_silent_axes(recording: Recording) -> Iterator[Concern]:
    """Mesh axes along which nothing is sent: their ranks are replicas that exchange no gradients.

    Nothing is claimed where collectives may be missing, or if ranks are not those of the mesh.
    """
    run, used = recording.run, {call.group for call in recording.collectives}
    groups = [group for group in recording.groups if group.name in used]
    is_known = len(groups) == len(used) and not recording.gaps and not recording.stops
    if not is_known or prod(axis.size for axis in run.axes) != run.world_size:
        return
    silent, stride = [], run.world_size
    for axis in run.axes:
        stride //= axis.size
        is_crossed = any(
            group.axis == axis.name
            or len({rank // stride % axis.size for rank in expand_ranks(group.ranks)}) > 1
            for group in groups
        )
        if axis.size > 1 and not is_crossed:
            silent.append(f"{axis.name} ({axis.size:,} ranks)")
    if not silent:
        return
    trains = any(call.phase is Phase.BACKWARD for call in recording.collectives)
    reason = "its replicas do not exchange gradients, and their parameters drift apart"
    yield Concern(
        judgement=Judgement.SUSPECT if trains else Judgement.UNKNOWN,
        rule="silent-axis",
        fact=f"Nothing is sent along {' and '.join(silent)}",
        reason=reason if trains else f"if this step trains, {reason}",
        view="communication",
    )


def _judge_dominating(calls: Sequence[Collective], world_size: int) -> Concern:
    """Judge the cause that sends most bytes, or has most collectives if none are sent."""
    causes: dict[tuple[str, str], list[Collective]] = {}
    for call in calls:
        label = f"{call.kind}[{name_axis(call, world_size)}]"
        causes.setdefault((describe_cause(call.cause), label), []).append(call)
    (words, label), group = max(
        causes.items(), key=lambda item: (_sent(item[1]), len(item[1]), item[0])
    )
    judgement, reason = _judge_cause(group[0])
    return _describe(
        group,
        calls,
        rule="dominating-cause",
        what=f"{_capitalize(words)} ({label}) {'makes up' if _sent(calls) else 'has'}",
        reason=reason,
        judgement=judgement,
    )


def _capitalize(words: str) -> str:
    """Start a cause with a capital, unless it starts with a name."""
    return words if words.startswith("spmd_types") else words[0].upper() + words[1:]


def _judge_cause(call: Collective) -> tuple[Judgement, str]:
    match call.cause:
        case FullyShard(action="unshard"):
            return Judgement.FINE, "FSDP gathers parameters before they are used"
        case FullyShard():
            return Judgement.FINE, "FSDP reduces gradients after backward"
        case BucketReduce():
            return Judgement.FINE, "DDP reduces every gradient once"
        case Redistribute(is_implicit=False, asked_by=asked_by):
            return Judgement.FINE, f"{asked_by.removesuffix('.default')} asks for it"
        case Redistribute() if call.kind in _GATHERS:
            return Judgement.COSTLY, "the program does not ask for it"
        case Redistribute():
            return Judgement.UNKNOWN, "partial sums have to be reduced, here or at another place"
        case Call():
            return Judgement.UNKNOWN, "the program itself calls it, and may need it or not"
        case None:
            return Judgement.UNKNOWN, "its cause is not known"
    return Judgement.UNKNOWN, "the program itself asks for it"


def _describe(
    part: Sequence[Collective],
    calls: Sequence[Collective],
    *,
    rule: str,
    what: str,
    reason: str,
    judgement: Judgement = Judgement.COSTLY,
    remedy: str = "",
) -> Concern:
    sent, total = _sent(part), _sent(calls)
    module = _main_module(part)
    of_all = f" of the {format_bytes(total)} that a rank sends"
    if total:
        fact = f"{what} {format_share(sent, total)}{of_all}"
    else:
        fact = f"{what} {plural(len(part), 'collective')}"
    if module:
        is_alone = len({fold_layers(call.owner or "") for call in part}) == 1
        fact += f", in {module}" if is_alone else f", most in {module}"
    return Concern(
        judgement=judgement,
        rule=rule,
        fact=fact,
        reason=reason,
        view="communication",
        module=module,
        source=_main_source(part),
        remedy=remedy,
    )


def _sent(calls: Iterable[Collective]) -> int:
    return sum(call.wire_bytes for call in calls)


def _main_module(calls: Sequence[Collective]) -> str | None:
    """The module, or the repeated layers, that sends most; None if that is the root or none."""
    sent: Counter[str] = Counter()
    owners: dict[str, set[str]] = {}
    for call in calls:
        owner = call.owner or ""
        sent[fold_layers(owner)] += call.wire_bytes + 1
        owners.setdefault(fold_layers(owner), set()).add(owner)
    pattern = sent.most_common(1)[0][0]
    names = owners[pattern]
    return (pattern if len(names) > 1 else names.pop()) or None


def _main_source(calls: Sequence[Collective]) -> Source | None:
    sent: Counter[Source] = Counter()
    for call in calls:
        if call.source is not None:
            sent[call.source] += call.wire_bytes + 1
    return sent.most_common(1)[0][0] if sent else None
