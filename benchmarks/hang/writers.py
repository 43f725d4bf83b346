"""Writes what tools leave of an outcome: dumps, logs and stacks, in the formats of those tools."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

from hang.faults import BUSY, SILENT, Issued, Outcome
from hang.schedule import Op
from shardscope.record import (
    Call,
    Collective,
    CollectiveKind,
    Group,
    Phase,
    Recording,
    RunInfo,
    Source,
    SpanBegin,
    Stop,
    compress_ranks,
    save,
)

TORCH = "/opt/venv/lib/python3.12/site-packages/torch"
FILE = "/job/train.py"
ITEM_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8, "int64": 8}
C10_DTYPES = {"bfloat16": "BFloat16", "float32": "Float", "float64": "Double", "int64": "Long"}
NCCL_DTYPES = {"bfloat16": 9, "float32": 7, "float64": 8, "int64": 4}
NCCL_REDUCTIONS = {"sum": 0, "max": 2, "avg": 4, None: 0}
NCCL_NAMES = {
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_reduce": "AllReduce",
    "broadcast": "Broadcast",
    "send": "Send",
    "recv": "Recv",
}
FLIGHT_NAMES = {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base"}
BUSY_STACKS = {
    "data_loading": [
        ("wait", "/usr/lib/python3.12/threading.py", 359),
        ("_try_get_data", f"{TORCH}/utils/data/dataloader.py", 1251),
        ("__next__", f"{TORCH}/utils/data/dataloader.py", 708),
    ],
    "file_system": [
        ("_write_file", f"{TORCH}/distributed/checkpoint/filesystem.py", 300),
        ("save", f"{TORCH}/distributed/checkpoint/state_dict_saver.py", 180),
    ],
    "compiling": [
        ("compile_fx_inner", f"{TORCH}/_inductor/compile_fx.py", 800),
        ("_compile", f"{TORCH}/_dynamo/convert_frame.py", 1400),
    ],
    "compute": [("score_beams", FILE, 240)],
}


def sizes_of(op: Op, num_ranks: int) -> tuple[int, int]:
    """Elements of the input and of the output."""
    if op.kind == "all_gather":
        return op.elements, op.elements * num_ranks
    if op.kind == "reduce_scatter":
        return op.elements * num_ranks, op.elements
    if op.kind == "send":
        return op.elements, 0
    if op.kind == "recv":
        return 0, op.elements
    return op.elements, op.elements


def writes_dump(outcome: Outcome, rank: int) -> bool:
    return not (rank == outcome.fault.rank and outcome.fault.kind in SILENT)


def name_groups(outcome: Outcome) -> dict[tuple[str, tuple[int, ...]], tuple[str, str]]:
    """Torch's name and description of each group, numbered as torch does."""
    names = {}
    for axis in ("world", *outcome.world.axes):
        for rank in range(outcome.world.size):
            group = outcome.world.group(rank, axis)
            if (axis, group) not in names:
                description = "default_pg" if axis == "world" else f"mesh_{axis}"
                names[axis, group] = (str(len(names)), description)
    return names


def make_flight(outcome: Outcome, rank: int, *, names, stacks: bool) -> dict:
    """A dump of Flight Recorder as NCCL's process group writes it."""
    frames: dict[int, list] = {}
    counts: dict[str, int] = {}
    entries = []
    for index, call in enumerate(outcome.calls[rank]):
        op = call.op
        is_transfer = op.kind in ("send", "recv")
        counts[op.axis] = counts.get(op.axis, 0) + is_transfer
        if op.line not in frames:
            frames[op.line] = [
                {
                    "name": op.kind,
                    "filename": f"{TORCH}/distributed/distributed_c10d.py",
                    "line": 9,
                },
                {"name": "step", "filename": FILE, "line": op.line},
                {"name": "<module>", "filename": FILE, "line": 300},
            ]
        sent, received = sizes_of(op, len(call.group))
        dtype = C10_DTYPES[op.dtype]
        entry = {
            "frames": list(frames[op.line]),
            "record_id": index,
            "pg_id": int(names[op.axis, call.group][0]),
            "process_group": names[op.axis, call.group],
            "thread_name": "pt_main_thread",
            "thread_id": "1",
            "collective_seq_id": call.position + 1 if not is_transfer else 0,
            "p2p_seq_id": counts[op.axis],
            "op_id": index,
            "profiling_name": sys.intern(name_flight(op, call, rank)),
            "time_created_ns": call.created_ns,
            "input_sizes": [[sent]] if sent else [],
            "input_dtypes": [dtype] if sent else [],
            "output_sizes": [[received]] if received else [],
            "output_dtypes": [dtype] if received else [],
            "state": "completed" if call.is_done else "scheduled",
            "time_discovered_started_ns": None,
            "time_discovered_completed_ns": call.done_ns if call.is_done else None,
            "retired": call.is_done,
            "timeout_ms": 600_000,
            "is_p2p": is_transfer,
        }
        if not stacks:
            del entry["frames"]
        entries.append(entry)
    configs = {}
    for (_, group), (name, description) in names.items():
        if rank in group:
            configs[name] = {"name": name, "desc": description, "ranks": str(list(group))}
    return {
        "version": "2.10",
        "pg_config": configs,
        "comm_lib_version": "2.28.9",
        "pg_status": {},
        "entries": entries,
    }


def name_flight(op: Op, call: Issued, rank: int) -> str:
    if op.kind == "send":
        return f"nccl:send {call.group.index(rank)}->{call.group.index(op.peer)}"
    if op.kind == "recv":
        return f"nccl:recv {call.group.index(rank)}<-{call.group.index(op.peer)}"
    return f"nccl:{FLIGHT_NAMES.get(op.kind, op.kind)}"


def write_flight(outcome: Outcome, folder: Path, *, as_json: bool) -> None:
    names = name_groups(outcome)
    for rank in outcome.calls:
        if writes_dump(outcome, rank):
            dump = make_flight(outcome, rank, names=names, stacks=not as_json)
            if as_json:
                (folder / f"fr_rank{rank}.json").write_text(json.dumps(dump))
            else:
                (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))


def write_recordings(outcome: Outcome, folder: Path) -> None:
    """Recordings of each rank up to where it stopped, as those of a stream that was cut."""
    names = name_groups(outcome)
    fault = outcome.fault
    for rank, calls in outcome.calls.items():
        error = None
        spans: tuple[SpanBegin, ...] = ()
        if rank == fault.rank:
            error = {"crash": "ValueError: no labels", "out_of_memory": "torch.OutOfMemoryError: "
                     "CUDA out of memory. Tried to allocate 2.00 GiB"}.get(fault.kind)  # fmt: skip
            if fault.kind in BUSY and fault.kind != "compute":
                spans = (SpanBegin(rank=rank, name=fault.kind, start_ns=10**12),)
        is_finished = rank == fault.rank and fault.kind == "exit"
        stops = () if is_finished else (
            Stop(rank=rank, error=error, is_gapless=True, open_spans=spans),
        )  # fmt: skip
        groups = tuple(
            Group(
                name=f"{axis}[{group[0]}-{group[-1]}/{len(group)}]",
                torch_name=name,
                ranks=compress_ranks(group),
                num_ranks=len(group),
                axis=axis,
                backend="gloo" if fault.blocking else "nccl",
            )
            for (axis, group), (name, _) in names.items()
            if rank in group
        )
        recording = Recording(
            run=RunInfo(
                torch_version="2.13.0",
                shardscope_version="0",
                world_size=outcome.world.size,
                ranks=compress_ranks([rank]),
            ),
            groups=groups,
            collectives=tuple(make_collectives(rank, calls)),
            stops=stops,
        )
        save(recording, folder / f"run-{rank}.json", force=True)


def make_collectives(rank: int, calls: list[Issued]):
    counts: dict[str, int] = {}
    for order, call in enumerate(calls):
        op = call.op
        sent, received = sizes_of(op, len(call.group))
        item = ITEM_BYTES[op.dtype]
        position = counts[op.axis] = counts.get(op.axis, -1) + 1
        yield Collective(
            rank=rank,
            order=order,
            group=f"{op.axis}[{call.group[0]}-{call.group[-1]}/{len(call.group)}]",
            group_order=position,
            kind=CollectiveKind(op.kind),
            op=f"c10d.{op.kind}",
            num_ranks=len(call.group),
            axis=op.axis,
            dtype=op.dtype,
            num_tensors=1,
            input_bytes=sent * item,
            output_bytes=received * item,
            wire_bytes=0,
            phase=Phase(op.phase),
            owner=op.module,
            trigger=op.module,
            cause=Call(api=f"torch.distributed.{op.kind}"),
            source=Source(file="train.py", line=op.line),
            reduce_op=op.reduce_op,
            peer=op.root if op.kind == "broadcast" else op.peer,
            start_ns=order * 2_000_000,
        )


def find_stack(outcome: Outcome, rank: int) -> list[tuple[str, str, int]]:
    """The stack of a rank's main thread, innermost frame first."""
    fault = outcome.fault
    end = [("main", FILE, 290), ("<module>", FILE, 300)]
    if rank == fault.rank and fault.kind in BUSY_STACKS:
        return [*BUSY_STACKS[fault.kind], ("train", FILE, 250), *end]
    last = outcome.calls[rank][-1]
    return [
        (last.op.kind, f"{TORCH}/distributed/distributed_c10d.py", 3245),
        ("wrapper", f"{TORCH}/distributed/c10d_logger.py", 83),
        ("step", FILE, last.op.line),
        *end,
    ]


def write_py_spy(outcome: Outcome, folder: Path) -> None:
    for rank in outcome.calls:
        if not (rank == outcome.fault.rank and outcome.fault.kind in SILENT):
            lines = [f"Process {4000 + rank}: python -u train.py", "Python v3.12.3 (python3)", ""]
            lines.append(f'Thread {4000 + rank} (active): "MainThread"')
            lines += [
                f"    {name} ({file}:{line})" for name, file, line in find_stack(outcome, rank)
            ]
            (folder / f"pyspy_rank_{rank}.txt").write_text("\n".join(lines) + "\n")


def write_debug_stacks(outcome: Outcome, folder: Path) -> None:
    """The debug server's periodic dump of stacks."""
    parts = []
    absent = []
    for rank in outcome.calls:
        parts.append(
            f"=== Rank {rank}: http://node-{rank // 8}:4{rank}/handler/dump_traceback? ==="
        )
        if rank == outcome.fault.rank and outcome.fault.kind in SILENT:
            absent.append(f"  Rank {rank}: TimeoutError: ")
            parts.append("Error: 408")
            continue
        parts.append("Thread 0x00007f00 (most recent call first):")
        parts += [
            f'  File "{file}", line {line} in {name}'
            for name, file, line in find_stack(outcome, rank)
        ]
        parts.append("")
    size = outcome.world.size
    head = [f"PARTIAL DATA: {size - 1}/{size} workers responded", *absent, ""] if absent else []
    (folder / "stacks_20261119_120000.txt").write_text("\n".join([*head, *parts]))
