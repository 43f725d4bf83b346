"""Writes logs of an outcome: torchrun's, NCCL's watchdog, NCCL's own, and `ncclras`."""

from __future__ import annotations

import json
from pathlib import Path

from hang.faults import SILENT, Outcome
from hang.writers import (
    FILE,
    NCCL_DTYPES,
    NCCL_NAMES,
    NCCL_REDUCTIONS,
    name_groups,
    sizes_of,
)

TIMEOUT_MS = 600_000
NCCL_OPS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
OP_TYPES = {"all_gather": "_ALLGATHER_BASE", "reduce_scatter": "_REDUCE_SCATTER_BASE",
            "all_reduce": "ALLREDUCE", "broadcast": "BROADCAST"}  # fmt: skip


def write_run_log(outcome: Outcome, folder: Path) -> None:
    """What torchrun prints: tracebacks of ranks, interleaved, and its report of failures."""
    fault = outcome.fault
    lines = ["loading the model", "step 1 loss 3.14"]
    if fault.kind in ("crash", "out_of_memory"):
        error = "ValueError: the batch has no labels"
        if fault.kind == "out_of_memory":
            error = (
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has "
                "a total capacity of 79.11 GiB of which 1.02 GiB is free."
            )
        lines += [
            f"[rank{fault.rank}]: Traceback (most recent call last):",
            f'[rank{fault.rank}]:   File "{FILE}", line 300, in <module>',
            f"[rank{fault.rank}]:     main()",
            f'[rank{fault.rank}]:   File "{FILE}", line 45, in step',
            f"[rank{fault.rank}]:     loss = model(batch)",
            f"[rank{fault.rank}]: {error}",
        ]
    lines += _list_watchdog(outcome)
    codes = {"crash": 1, "out_of_memory": 1, "killed": -9, "exit": 0}
    code = codes.get(fault.kind)
    if code:
        lines.append(
            f"E1119 12:00:01.000000 100 torch/distributed/elastic/multiprocessing/api.py:986] "
            f"failed (exitcode: {code}) local_rank: {fault.rank % 8} (pid: {4000 + fault.rank}) of "
            "binary: /opt/venv/bin/python"
        )
        lines += [
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
            "=" * 60,
            "train.py FAILED",
            "-" * 60,
            "Failures:",
            "  <NO_OTHER_FAILURES>",
            "-" * 60,
            "Root Cause (first observed failure):",
            "[0]:",
            "  time      : 2026-11-19_12:00:00",
            f"  host      : node-{fault.rank // 8}",
            f"  rank      : {fault.rank} (local_rank: {fault.rank % 8})",
            f"  exitcode  : {code} (pid: {4000 + fault.rank})",
            "  error_file: <N/A>",
            "  traceback : To enable traceback see: https://pytorch.org/docs",
            "=" * 60,
        ]
    (folder / "slurm-4711.out").write_text("\n".join(lines) + "\n")


def _list_watchdog(outcome: Outcome) -> list[str]:
    """Messages of the watchdogs of ranks whose collectives do not complete, as torch 2.13 has."""
    names = name_groups(outcome)
    lines = []
    for rank, calls in outcome.calls.items():
        if rank == outcome.fault.rank and outcome.fault.kind in SILENT:
            continue
        groups = {}
        for call in calls:
            if call.position >= 0:
                groups.setdefault((call.op.axis, call.group), []).append(call)
        for (axis, group), own in groups.items():
            name, description = names[axis, group]
            member = group.index(rank)
            done = max((call.position + 1 for call in own if call.is_done), default=0)
            place = f"[PG ID {name} PG GUID {name}({description}) Rank {member}]"
            status = f"last enqueued NCCL work: {own[-1].position + 1}, last completed NCCL work: {done}."
            prefix = f"[rank{rank}]:[E1119 12:10:00.{rank:09d} ProcessGroupNCCL.cpp:688]"
            stuck = next((call for call in own if not call.is_done), None)
            if stuck is not None:
                sent, received = sizes_of(stuck.op, len(group))
                lines.append(
                    f"{prefix} [Rank {member}] Watchdog caught collective operation timeout: "
                    f"WorkNCCL(SeqNum={stuck.position + 1}, OpType={OP_TYPES[stuck.op.kind]}, "
                    f"NumelIn={sent}, NumelOut={received}, Timeout(ms)={TIMEOUT_MS}) ran for 600021 "
                    "milliseconds before timing out."
                )
                lines.append(
                    f"{prefix} {place} Exception (either an error or timeout) detected by watchdog "
                    f"at work: {stuck.position + 1}, {status}"
                )
            else:
                status = status.replace("last enqueued", "Last enqueued")
                lines.append(
                    f"{prefix} {place} Received a dump signal due to a collective timeout from this "
                    f"local rank and we will try our best to dump the debug info. {status}"
                )
    return lines


def write_nccl_log(outcome: Outcome, folder: Path) -> None:
    """One file with the lines of all processes, as NCCL_DEBUG=INFO prints them."""
    names = name_groups(outcome)
    rows: list[tuple[int, str]] = []
    for rank, calls in outcome.calls.items():
        head = f"node-{rank // 8}:{4000 + rank}:{4000 + rank} [{rank % 8}] NCCL INFO"
        pointers = {}
        for (axis, group), (name, _) in names.items():
            if rank not in group:
                continue
            pointers[axis, group] = pointer = f"0x{(rank + 1) * 4096 + int(name):x}"
            rows.append(
                (
                    0,
                    f"{head} ncclCommInitRankConfig comm {pointer} rank {group.index(rank)} nranks "
                    f"{len(group)} cudaDev {rank % 8} nvmlDev {rank % 8} busId {rank % 8}000 commId "
                    f"0x{0xABC0000 + int(name):x} - Init COMPLETE",
                )
            )
        counts: dict[tuple, int] = {}
        for call in calls:
            key = call.op.axis, call.group
            number = counts[key] = counts.get(key, -1) + 1
            op = call.op
            root = 0
            if op.kind in ("send", "recv"):
                root = call.group.index(op.peer)
            elif op.root is not None:
                root = call.group.index(op.root)
            sent, received = sizes_of(op, len(call.group))
            count = min(filter(None, (sent, received)))
            rows.append(
                (
                    call.created_ns,
                    f"{head} {NCCL_NAMES[op.kind]}: opCount {number:x} sendbuff 0x7f00 recvbuff "
                    f"0x7f80 count {count} datatype {NCCL_DTYPES[op.dtype]} op "
                    f"{NCCL_REDUCTIONS[op.reduce_op]} root {root} comm {pointers[key]} "
                    f"[nranks={len(call.group)}] stream 0x55",
                )
            )
    rows.sort(key=lambda row: row[0])
    (folder / "nccl.log").write_text("\n".join(text for _, text in rows) + "\n")


def _count_ops(outcome: Outcome) -> dict[tuple, dict[int, dict[str, int]]]:
    """How many operations of each kind each rank has launched in each group."""
    counts: dict[tuple, dict[int, dict[str, int]]] = {}
    for rank, calls in outcome.calls.items():
        for call in calls:
            if call.position >= 0:
                own = counts.setdefault((call.op.axis, call.group), {}).setdefault(
                    rank, dict.fromkeys(NCCL_OPS, 0)
                )
                own[NCCL_NAMES[call.op.kind]] += 1
    return counts


def write_ras_json(outcome: Outcome, folder: Path) -> None:
    names = name_groups(outcome)
    communicators = []
    for (axis, group), by_rank in _count_ops(outcome).items():
        ranks, missing = [], []
        for member, rank in enumerate(group):
            row = {"rank": member, "host": f"10.0.0.{rank // 8}", "pid": 4000 + rank,
                   "cuda_dev": rank % 8, "nvml_dev": rank % 8}  # fmt: skip
            if rank == outcome.fault.rank and outcome.fault.kind in SILENT:
                is_dead = outcome.fault.kind != "stopped"
                status = {"unresponsive": True, "considered_dead": is_dead}
                missing.append({**row, "status": status})
                continue
            status = {"init_state": 0, "async_error": 0, "finalize_called": False,
                      "destroy_flag": False, "abort_flag": False}  # fmt: skip
            counts = by_rank.get(rank, dict.fromkeys(NCCL_OPS, 0))
            ranks.append({**row, "status": status, "collective_counts": counts})
        communicators.append(
            {
                "hash": f"0x{0xABC0000 + int(names[axis, group][0]):x}",
                "secondary_hash": "0x1:0x2",
                "size": len(group),
                "ranks_count": len(ranks),
                "missing_ranks_count": len(missing),
                "ranks": ranks,
                "missing_ranks": missing,
            }
        )
    document = {
        "nccl_version": "2.29.7",
        "cuda_runtime_version": 13000,
        "cuda_driver_version": 13000,
        "timestamp": "2026-11-19 12:00:00",
        "communicators_count": len(communicators),
        "communicators": communicators,
        "ras": {"collection_time_sec": 0.0, "timeouts_count": 0},
    }
    (folder / "ncclras.json").write_text(json.dumps(document, indent=2))


def write_ras_text(outcome: Outcome, folder: Path) -> None:
    """`ncclras -v` of NCCL 2.28: communicators by size, and ranks that differ from the others."""
    names = name_groups(outcome)
    size = outcome.world.size
    lines = [
        "NCCL version 2.28.9 compiled with CUDA 13.0",
        "CUDA runtime version 13000, driver version 13000",
        "",
        "Job summary",
        "===========",
        "",
        "  Nodes  Processes         GPUs  Processes     GPUs",
        "(total)   per node  per process    (total)  (total)",
        f"{size // 8 or 1:7d}  {8:9d}  {1:11d}  {size:9d}  {size:7d}",
        "",
        "Communicators... (0.00s)",
        "=============",
        "",
        "Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors",
        "    #  in group  per comm  per node  per comm  in group",
    ]
    groups = sorted(_count_ops(outcome).items(), key=lambda item: -len(item[0][1]))
    errors, warnings = [], []
    for number, ((axis, group), by_rank) in enumerate(groups):
        identity = f"#{number}-0 ({0xABC0000 + int(names[axis, group][0]):016x})"
        is_silent = outcome.fault.rank in group and outcome.fault.kind in SILENT
        body = [] if is_silent else _list_mismatches(group, by_rank)
        if is_silent:
            rank = outcome.fault.rank
            errors += [
                f"{identity} INCOMPLETE",
                "  Missing communicator data from 1 rank",
                f"  Rank {group.index(rank)} -- GPU {rank % 8} managed by process {4000 + rank} on "
                f"node 10.0.0.{rank // 8}",
                "",
            ]
        if body:
            warnings += [f"{identity} MISMATCH", *body, ""]
        state = "INCOMPLETE" if is_silent else "MISMATCH" if body else "OK"
        lines.append(
            f"{number:5d}  {1:8d}  {max(1, len(group) // 8):8d}  {min(8, len(group)):8d}  "
            f"{len(group):8d}  {len(group):8d}  {'RUNNING':>8s}  {state:>6s}"
        )
    if outcome.fault.kind in SILENT and outcome.fault.kind != "stopped":
        rank = outcome.fault.rank
        dead = [
            "DEAD",
            "  1 job process is considered dead (unreachable via the RAS network)",
            f"  Process {4000 + rank} on node 10.0.0.{rank // 8} managing GPU {rank % 8}",
            "",
        ]
        errors = [*dead, *errors]
    lines += ["", "Errors", "======", "", *errors, "Warnings", "========", "", *warnings]
    (folder / "ncclras.txt").write_text("\n".join(lines) + "\n")


def _list_mismatches(group: tuple[int, ...], by_rank: dict[int, dict[str, int]]) -> list[str]:
    lines = []
    for op in NCCL_OPS:
        counts: dict[int, list[int]] = {}
        for member, rank in enumerate(group):
            counts.setdefault(by_rank.get(rank, {}).get(op, 0), []).append(member)
        if len(counts) < 2:
            continue
        lines.append(f"  Communicator ranks have different {op} operation counts")
        for count, members in sorted(counts.items(), key=lambda item: -len(item[1])):
            what = f"launched up to operation {count}" if count else "not launched any operations"
            if len(members) > 1:
                lines.append(f"  {len(members)} ranks have {what}")
            if len(members) < 0.5 * len(group):
                for member in members:
                    rank = group[member]
                    alone = f" has {what}" if len(members) == 1 else ""
                    lines.append(
                        f"  Rank {member}{alone} -- GPU {rank % 8} managed by process {4000 + rank} "
                        f"on node 10.0.0.{rank // 8}"
                    )
    return lines
