"""All correct programs by name: scripts with options, and the programs of `benchmarks/silent`.

    PYTHONPATH=src:. python benchmarks/hangs.py --correct '*' --list

Many are traps for a tool that varies what ranks see: a sampler that gives each rank as many
batches, a batch that rank 0 sends to all, a decision that is agreed on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

_FOLDER = Path(__file__).parent
# gloo has no PREMUL_SUM, which FSDP2 uses for a divide factor in single precision.
_NOT_ON_GLOO = ("moe/ep-fsdp", "summed/fsdp")

# The options of each script of `scripts/` that are tried in turn, or combinations with a number of
# ranks other than two.
_OPTIONS: Mapping[str, tuple[str, str]] = {
    "accelerate_loop": ("option", "plain accumulate metrics padding uneven checkpoint trigger"),
    "accumulation": ("way", "no-sync fsdp tokens last-batch buckets"),
    "async_work": ("order", "issued reversed hooks coalesced two-groups overlapped"),
    "checkpoints": ("kind", "sharded full resume per-rank exists"),
    "compiled": ("wrapper", "ddp fsdp tp loss"),
    "contexts": ("algorithm", "ring all-gather heads"),
    "ddp_parameters": ("mode", "find-unused static-graph frozen ignored zero-loss"),
    "experts": ("dispatch", "capacity all-to-all gathered masked-fsdp masked-ddp layer-fsdp"),
    "failures": (
        "policy",
        "substitute skip-together retry-load reraise reraise-memory default-value",
    ),
    "hf_trainer": ("option", "plain evaluation saving accumulation early-stopping iterable"),
    "lightning_loop": (
        "option",
        "plain logging checkpoint early-stopping manual timer gather",
    ),
    "messages": ("pattern", "ring-batched ring-isend even-odd any-source parameter-server"),
    "objects": ("call", "all-gather gather broadcast scatter empty"),
    "optional_modules": ("way", "dummy empty-input larger-unit replicated"),
    "pipelines": ("schedule", "gpipe 1f1b looped interleaved zero-bubble zbv"),
    "rank_zero": (
        "task",
        "log save save-full evaluate download config init metric late-barrier",
    ),
    "reinforcement": (
        "way",
        "fixed-length synced-generation dynamic-agreed filtered dummy-chunks",
    ),
    "samplers": ("kind", "padded drop-last batches drawn-by-rank-zero same-seed"),
    "seeds": ("source", "dropout shuffle time layer-scale agreed-layer-drop augmentation"),
    "sharded": ("layout", "blocks root kept fsdp1 prefetch no-sync"),
    "skipping": (
        "decision",
        "loss-flag reduced-loss gradient-norm fsdp-norm scaler zeroed-loss",
    ),
    "stopping": ("rule", "rank-zero any-rank all-ranks mean-loss object same-loss"),
    "timed": ("task", "save stop evaluate log"),
    "uneven_data": ("ending", "join join-zero flag shortest cycle substitute"),
}
_COMBINATIONS: Mapping[str, Sequence[tuple[str, int]]] = {
    "compiled": [("--wrapper ddp --lengths per-rank", 2), ("--wrapper fsdp --lengths per-rank", 2)],
    "contexts": [("--algorithm ring", 4), ("--algorithm all-gather", 3)],
    "groups": [
        (f"--way {way}", 4)
        for way in ("mesh", "all-create-all", "subgroups", "students", "local", "monitor")
    ],
    "messages": [("--pattern even-odd", 4), ("--pattern tree", 4)],
    "pipeline_by_hand": [
        ("--schedule gpipe --messages blocking", 2),
        ("--schedule gpipe --messages batched", 3),
        ("--schedule 1f1b --messages isend", 3),
        ("--schedule 1f1b --messages batched", 4),
        ("--schedule 1f1b --messages isend --micro-batches 2", 4),
    ],
    "pipelines": [
        ("--schedule 1f1b --pp 4", 4),
        ("--schedule 1f1b --pp 2", 4),
        ("--schedule interleaved --pp 2 --micro-batches 6", 4),
        ("--schedule zbv --pp 4 --micro-batches 8", 4),
    ],
    "shared_batches": [
        (f"--way {way}", 4) for way in ("broadcast", "same-seed", "lengths-first", "scattered")
    ],
    "sharded": [("--layout hsdp", 4), ("--layout tp", 4), ("--layout blocks", 3)],
    "signals": [("--signal SIGTERM", 2), ("--signal SIGUSR1 --from-self", 2)],
    "stopping": [("--rule any-rank", 4)],
    "uneven_data": [("--ending join", 4), ("--ending flag", 3)],
}


@final
@dataclass(frozen=True)
class CorrectProgram:
    """A script, its arguments, and the number of its ranks."""

    script: Path
    arguments: tuple[str, ...]
    nproc: int


def _make(script: str, text: str, nproc: int) -> tuple[str, CorrectProgram]:
    words = tuple(text.split())
    label = "-".join(word.lstrip("-") for word in words[1:])
    path = _FOLDER / "scripts" / f"{script}.py"
    return f"{script}/{label}/{nproc}", CorrectProgram(path, words, nproc)


def _list_scripts() -> Iterator[tuple[str, CorrectProgram]]:
    for script, (option, values) in _OPTIONS.items():
        for value in values.split():
            yield _make(script, f"--{option} {value}", 2)
    for script, combinations in _COMBINATIONS.items():
        for text, nproc in combinations:
            yield _make(script, text, nproc)


SCRIPTS: Mapping[str, CorrectProgram] = dict(_list_scripts())


def load_programs() -> dict[str, CorrectProgram]:
    """All programs by name: the scripts, and after them the programs of `benchmarks/silent`."""
    from benchmarks.silent.correct import PROGRAMS

    programs = dict(SCRIPTS)
    for name, program in PROGRAMS.items():
        if not name.startswith(_NOT_ON_GLOO):
            nproc = math.prod(program.layout.mesh.values())
            path = _FOLDER / "silent_ranks.py"
            programs[f"silent/{name}"] = CorrectProgram(path, (name,), nproc)
    return programs
