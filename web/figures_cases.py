"""Writes recordings with the figures of their pages, which the browser must compute likewise.

python web/figures_cases.py > web/src/store/figures.cases.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from shardscope.record import (
    Agreement,
    Axis,
    BucketReduce,
    Call,
    Compiled,
    FullyShard,
    Parallelization,
    Parity,
    Recording,
    Redistribute,
    SpmdCall,
    TensorKind,
    TensorVerdict,
    load,
)
from shardscope.report.html.html import build_page

ROOT = Path(__file__).resolve().parents[1]

# The fields that the browser reads of a recording that is dropped onto the page.
FIELDS: dict[str, tuple[str, ...]] = {
    "modules": ("name", "type", "parameters"),
    "collectives": (
        *("rank", "kind", "axis", "num_ranks", "phase", "dtype", "owner", "cause"),
        *("input_bytes", "wire_bytes"),
    ),
    "findings": ("rule", "severity"),
    "gaps": ("place", "fact", "is_loss"),
    "memory": (
        *("rank", "peak_bytes", "first_peak_bytes", "reserved_bytes", "needed_bytes"),
        "at_peak",
    ),
    "coverage": ("rank", "level", "ops"),
    "explanations": (
        *("rank", "target", "graphs", "break_sites", "recompiles", "skipped_frames"),
        *("guards", "stages"),
    ),
    "parity": ("axes", "tensors"),
    "parallel": ("program", "inserted", "fallbacks"),
    "parameters": ("axes", "placements", "is_annotated", "fsdp_group"),
    "ops": ("verdict", "kind"),
    "tensors": ("agreement",),
    "graphs": ("ops",),
    "break_sites": ("num_events",),
}


def write_cases() -> str:
    """Recordings of several ranks and instruments, as JSON, with the figures of their pages."""
    sys.path.insert(0, str(ROOT / "tests"))
    import sample_recordings
    from compared_recordings import make_pair

    varied = sample_recordings.make_varied()
    # Texts of a page are sanitized: hostile ones are not the same in a recording.
    plain = tuple(call for call in varied.collectives if call.axis is None)
    examples = (load(ROOT / f"examples/recordings/{name}.json.gz") for name in ("llama", "moe"))
    recordings = (
        make_pair()[1],
        replace(varied, collectives=plain, modules=(), findings=(), gaps=()),
        _add_parity(sample_recordings.make_llama(num_layers=1, dp=2, ranks=(0, 1))),
        sample_recordings.make_recording(
            tuple(
                sample_recordings.make_collective(order=order, cause=cause)
                for order, cause in enumerate(_CAUSES)
            )
        ),
        sample_recordings.make_explained(),
        *examples,
    )
    cases = [
        {
            "recording": {"run": {"world_size": recording.run.world_size}}
            | _prune(
                {
                    field: msgspec.to_builtins(getattr(recording, field))
                    for field in (*FIELDS, "format", "schema")
                    if hasattr(recording, field)
                }
            ),
            "figures": msgspec.to_builtins(build_page(recording).figures),
        }
        for recording in recordings
    ]
    return json.dumps(cases, ensure_ascii=False, sort_keys=True) + "\n"


_CAUSES = (
    Redistribute(
        before=("Partial(sum)", "Shard(0)"),
        after=("Replicate", "Replicate"),
        asked_by="aten.mm.default",
        is_implicit=True,
    ),
    Redistribute(
        before=("Shard(1)",), after=("Replicate",), asked_by="ColwiseParallel", is_implicit=False
    ),
    FullyShard(action="unshard", num_parameters=2),
    BucketReduce(bucket=0, parameters=("w",)),
    Call(api="torch.distributed.barrier"),
    Compiled(graph="backward"),
    SpmdCall(function="all_reduce", axis="tp", before="P", after="R"),
    SpmdCall(function="reshard", axis=None, before="R", after="S(0)", backward_of="all_gather"),
    None,
)


def _add_parity(recording: Recording) -> Recording:
    tensors = tuple(
        TensorVerdict(name=f"w{at}", kind=TensorKind.GRADIENT, agreement=agreement)
        for at, agreement in enumerate(Agreement)
    )
    axes = (Axis(name="dp", size=2), Axis(name="tp", size=2048))
    program = Parallelization(program="Net", axes=axes, is_training=True, num_ops=1)
    return replace(recording, parity=(Parity(axes=axes, tensors=tensors),), parallel=(program,))


def _prune(value: Any, name: str = "") -> Any:
    """Without fields that the browser does not read."""
    if isinstance(value, dict):
        fields = FIELDS.get(name, tuple(value))
        return {field: _prune(value[field], field) for field in fields if field in value}
    if isinstance(value, list | tuple):
        return [_prune(item, name) for item in value]
    return value


if __name__ == "__main__":
    sys.stdout.write(write_cases())
