"""Sentences on causes: where a rank was, who waits for it, and what to do about each class."""

from __future__ import annotations

from collections.abc import Iterable

from shardscope.hang.activities import read_activity
from shardscope.hang.evidence import EventKind, RankEvent, ThreadStack
from shardscope.hang.rank_calls import Wait, describe_call, line_of, name_ranks
from shardscope.hang.run import HangRun
from shardscope.record.base import Source
from shardscope.record.hang_records import CauseKind, Certainty, HangCause
from shardscope.record.ranks import compress_ranks

_REMEDIES = {
    CauseKind.MISMATCH: "Pass the same shapes, dtypes, reduction and root on every rank of the "
    "group: pad or drop the last batch (drop_last=True), or exchange the sizes first.",
    CauseKind.DIFFERENT_CALL: "Let every rank of the group take the same branch there: move the "
    "collective out of the condition, or all_reduce the decision first.",
    CauseKind.SKIPPED_CALL: "Issue the collective on every rank: move it out of the condition. "
    "For modules that do not run on every rank: set_reduce_scatter_unused_params(True) with "
    "fully_shard (torch 2.13), find_unused_parameters=True with DDP; for uneven inputs, "
    "`with model.join():` or drop_last=True.",
    CauseKind.WRONG_ORDER: "Issue the collectives and transfers of these groups in the same order "
    "on every rank.",
    CauseKind.UNMATCHED_TRANSFER: "Give every send one receive of the same size on the other rank, "
    "and issue those of a step together with batch_isend_irecv.",
    CauseKind.OUT_OF_MEMORY: "Let {names} use less memory: the other ranks only waited. "
    "`shardscope memory` estimates the peak of a step by kind and module; "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True reduces what fragmentation costs.",
    CauseKind.CRASH: "Fix what ended {names} first: the other ranks only waited.",
    CauseKind.STOPPED: "Look at the process of {names} on its host: `ps -o stat,wchan,cmd -p PID` "
    "shows whether it is stopped (T), in a device or file system (D), or gone.",
    CauseKind.LOST: "Read the log of {names} and that of its host (dmesg, the scheduler): it "
    "ended, was stopped, or its host failed.",
    CauseKind.DATA_LOADING: "Let the loader fail instead of wait (DataLoader(timeout=…)), look at "
    "its workers and storage on the host of {names}, and give every rank as many batches "
    "(DistributedSampler, drop_last=True).",
    CauseKind.FILE_SYSTEM: "Look at the file system on the host of {names}; write checkpoints with "
    "torch.distributed.checkpoint.async_save, and let nothing with collectives wait for files.",
    CauseKind.COMPILING: "Let ranks share what they compile (TORCHINDUCTOR_CACHE_DIR on a shared "
    "file system, torch.compiler.save_cache_artifacts), compile before the first collective, or "
    "allow more time with init_process_group(timeout=…).",
    CauseKind.DIFFERENT_COMPILE: "Make all ranks compile the same graphs: mark sizes that differ "
    "as dynamic, or set torch._dynamo.config.enable_compiler_collectives = True; `shardscope "
    "explain` shows the graphs of each rank.",
    CauseKind.SLOW: "Look at what {names} did {where}: every rank of the group must issue the same "
    "collectives. If the run still made progress when the files were written, this is only where "
    "it was slowest.",
    CauseKind.NETWORK: "Check the links and devices between these hosts: NCCL_DEBUG=INFO, "
    "`ncclras -v` while it hangs, nccl-tests, and dmesg for Xid errors.",
    CauseKind.UNKNOWN: "Collect more: Flight Recorder (TORCH_FR_BUFFER_SIZE=2000), stacks of "
    "all ranks (py-spy dump), and `ncclras -v` while it hangs.",
}


def suggest(kind: CauseKind, ranks: Iterable[int], where: str = "there") -> str:
    """What to do about a class of cause, in torch's terms."""
    return _REMEDIES[kind].format(names=name_ranks(ranks), where=where)


def make_cause(
    kind: CauseKind,
    certainty: Certainty,
    ranks: Iterable[int],
    facts: Iterable[str],
    *,
    evidence: Iterable[str] = (),
    wait: Wait | None = None,
    group: str | None = None,
    position: int | None = None,
    source: Source | None = None,
    where: str = "there",
) -> HangCause:
    """A cause, whose facts are joined to a sentence."""
    ranks = sorted(set(ranks))
    return HangCause(
        kind=kind,
        certainty=certainty,
        ranks=compress_ranks(ranks),
        fact="; ".join(fact for fact in facts if fact),
        remedy=suggest(kind, ranks, where),
        evidence=tuple(dict.fromkeys(item for item in evidence if item)),
        group=wait.group if wait is not None else group,
        position=wait.position if wait is not None else position,
        source=source,
    )


def describe_event(event: RankEvent) -> str:
    """`ran out of memory: …`, `was killed by SIGKILL`: what a log says happened to a rank."""
    match event.kind:
        case EventKind.OUT_OF_MEMORY:
            return f"ran out of memory: {event.text}"
        case EventKind.EXCEPTION:
            return f"raised {event.text}"
        case EventKind.GPU:
            return f"had an error of its GPU: {event.text}"
    return event.text


def describe_rank(run: HangRun, rank: int, *, has_last: bool = True) -> str:
    """Where a rank was: its last call, unless `has_last` is false, its stack, and its phases."""
    parts = []
    last = run.last.get(rank)
    files = run.ranks.get(rank)
    if last is not None and has_last:
        parts.append(f"last issued {describe_call(last)} in group {last.group}")
    activity = run.activities.get(rank)
    if activity is not None:
        parts.append(f"is {activity.detail}")
    if files is not None and files.num_same_stack > 1:
        parts.append(f"has the same stack in {files.num_same_stack} of {files.num_stacks} dumps")
    if files is not None and files.stop is not None:
        phases = [begin.name for begin in files.stop.open_spans if not begin.thread]
        if phases and has_last:
            parts.append(f"was in phase {' > '.join(phases)}")
    return f"rank {rank} {', '.join(parts)}" if parts else ""


def describe_waiters(wait: Wait | None) -> str:
    """Who waits, in what and where."""
    if wait is None:
        return ""
    ranks = sorted(wait.waiters)
    verb = "waits" if len(ranks) == 1 else "wait"
    place = "in" if wait.position is None else f"at position {wait.position} of"
    call = describe_call(wait.waiters[ranks[0]])
    missing = name_ranks(wait.missing)
    return f"{name_ranks(ranks)} {verb} for {missing} in {call} {place} group {wait.group}"


def find_source(run: HangRun, rank: int) -> Source | None:
    """The line at which a rank was, by its traceback, its stack or its last call."""
    event = run.failures.get(rank)
    if event is not None and event.frames:
        return read_activity(ThreadStack("", event.frames, is_main=True)).line
    activity = run.activities.get(rank)
    if activity is not None and activity.line is not None:
        return activity.line
    last = run.last.get(rank)
    return None if last is None else last.source


def describe_place(run: HangRun, rank: int) -> str:
    """`after train.py:12`, or where a rank was before its first collective."""
    line = line_of(run.last.get(rank))
    return f"after {line}" if line else "after its last collective"
