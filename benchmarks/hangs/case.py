"""What is known of each case in `cases/`: a program `NAME.py`, and what it does in `NAME.toml`.

A program is a training script as users write them, started by torchrun; it knows nothing of
shardscope. HANG=corrected selects the corrected variant, anything else the wrong one. The line at
which ranks diverge ends with `# HANG`.

    HANG=wrong torchrun --nproc-per-node 2 benchmarks/hangs/cases/ddp_uneven_shards.py
    HANG=corrected shardscope check --nproc-per-node 2 -- benchmarks/hangs/cases/layer_drop.py

`NAME.toml` says where the hang was reported, what users saw, under which condition it happens, and
what a tool should say:

    source = "pytorch #33148"           # the thread, or the repository and commit
    url = "https://github.com/pytorch/pytorch/issues/33148"
    class = "uneven data"               # one of CLASSES
    summary = "…"                       # what users saw, and why
    nproc = 2
    variation = "early end"             # the key in VARIATIONS that makes it happen
    condition = "if the data of a rank ends earlier"  # absent: it happens as the program is
    remedies = ["join"]                 # the keys in REMEDIES that are right

    [differing]                         # the ranks that leave the common path
    ranks = "varied"                    # those that the tool varies, or a list
    calls = ["barrier"]                 # the kinds of collective they may be in; empty: none
    line = "dist.barrier()"             # the text of the line, or lines, that they may be at
    [others]                            # the ranks that wait for them
    calls = ["all_reduce"]
    line = "loss.backward()"
    modules = ["blocks.*"]              # patterns of modules that may be named instead

    [proof]                             # how the proof makes the condition true on gloo
    environment = { STEPS = "8" }       # of all ranks, in every run
    condition = { SEED = "1" }          # of all ranks, where the condition holds
    signal = { rank = 1, name = "SIGTERM", after = "step 2" }
    outcome = "failed"                  # if gloo does not wait where NCCL does
    attempts = 5                        # if the outcome depends on which rank is faster
    [proof.ranks.1]                     # of one rank, where the condition holds
    NUM_SAMPLES = "3"
    [proof.files]                       # in the folders that are the ranks' current ones
    "rank-1/data.txt" = "a\nb\n"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

CLASSES = (
    "module not run on every rank",
    "uneven data",
    "decision per rank",
    "collective on rank 0 only",
    "collective in a branch",
    "exception on a rank",
    "signal or time",
    "tensor sizes",
    "order of collectives",
    "process groups",
    "point to point",
    "compilation",
)

VARIATIONS = {
    "as is": "the program hangs as it is",
    "modality": "the batch of a rank lacks a modality, a kind of sample or a label",
    "routing": "no token of a rank is routed to an expert, or all are",
    "length": "the samples of a rank are shorter or longer, or its batch has fewer of them",
    "early end": "the data of a rank ends earlier",
    "nan": "a loss or gradient of a rank is not finite",
    "values": "the data of a rank has other values, so that a comparison has another result",
    "frozen": "parameters of the model are frozen, or a module is not used",
    "exception": "a call on a rank raises, as a loader that meets a broken file",
    "out of memory": "an allocation on a rank fails",
    "missing file": "a file exists on some ranks only, as on a local disk",
    "signal": "a rank receives SIGTERM or SIGUSR1",
    "clock": "the clocks of ranks differ, or a rank has been slower",
    "hash seed": "ranks iterate over a set in another order",
    "recompilation": "a rank compiles again, and the others do not",
}

REMEDIES = {
    "run the module": "run the module on every rank, on a dummy input that adds zero to the loss",
    "unused FSDP parameters": "set_reduce_scatter_unused_params, or gradients of zero",
    "wrap a larger module": "make the module around the branch the FSDP unit",
    "unused DDP parameters": "find_unused_parameters=True",
    "join": "Join, or an equal number of batches on every rank, agreed on or by drop_last",
    "agree": "all_reduce or broadcast the flag, and let every rank take the same branch",
    "every rank": "call it on every rank, outside the branch",
    "no collective": "call what needs no other rank, such as model.module or sync_on_compute=False",
    "same size": "pad to a common size, or exchange the sizes first",
    "same order": "issue the collectives in an order that is the same on every rank",
    "same names": "iterate over names that every rank has, with zeros for those it lacks",
    "right group": "use the group of the ranks that call it, or call it on all ranks of the group",
    "create groups": "call new_group on every rank, for all groups, in the same order",
    "pair the messages": "batch_isend_irecv, isend and irecv, or alternate who sends first",
    "propagate the failure": "let the exception end the rank, or all_reduce a flag of failure",
    "compile together": "guard collectives, mark_dynamic, or inputs of one shape",
}

_FOLDER = Path(__file__).parent / "cases"
_MARK = "# HANG"


@final
@dataclass(frozen=True)
class Side:
    """What some of the ranks do when the program hangs."""

    ranks: str | tuple[int, ...] = "others"
    calls: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()


@final
@dataclass(frozen=True)
class Signal:
    """A signal that the proof sends to a rank after it has printed a text."""

    rank: int
    name: str
    after: str


@final
@dataclass(frozen=True)
class Proof:
    """How the proof makes the condition true: variables, files by path, and a signal."""

    environment: Mapping[str, str] = field(default_factory=dict)
    condition: Mapping[str, str] = field(default_factory=dict)
    ranks: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    signal: Signal | None = None
    outcome: str = ""  # what a wrong run may end with beside a hang or a mismatch
    attempts: int = 1  # of a wrong run, whose outcome depends on which rank is faster


@final
@dataclass(frozen=True)
class Case:
    """A hang: where it was found, when it happens, and what a tool should say about it."""

    name: str
    source: str
    url: str
    kind: str
    summary: str
    nproc: int
    variation: str
    condition: str
    remedies: tuple[str, ...]
    differing: Side
    others: Side
    proof: Proof

    @property
    def file(self) -> Path:
        """The program."""
        return _FOLDER / f"{self.name}.py"

    def marked_lines(self) -> list[int]:
        """The numbers of the lines that end with `# HANG`."""
        lines = self.file.read_text().splitlines()
        return [number for number, line in enumerate(lines, 1) if line.endswith(_MARK)]

    def named_lines(self) -> list[int]:
        """The numbers of the lines whose text the record gives, on either side."""
        texts = self.differing.lines + self.others.lines
        lines = self.file.read_text().splitlines()
        return [n for n, line in enumerate(lines, 1) if any(text in line for text in texts)]


def list_cases() -> list[str]:
    """The names of all cases."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


def load_case(name: str) -> Case:
    """Read the record of a case; an unknown key or value is an error."""
    table = tomllib.loads((_FOLDER / f"{name}.toml").read_text())
    proof = table.pop("proof", {})
    known = ("environment", "condition", "ranks", "files", "signal", "outcome", "attempts")
    assert set(proof) <= set(known), f"{name}: [proof] has {sorted(set(proof) - set(known))}"
    return Case(
        name=name,
        kind=_one_of(CLASSES, table.pop("class"), name),
        variation=_one_of(VARIATIONS, table.pop("variation"), name),
        condition=table.pop("condition", ""),
        remedies=tuple(_one_of(REMEDIES, remedy, name) for remedy in table.pop("remedies")),
        differing=_read_side(table.pop("differing")),
        others=_read_side(table.pop("others")),
        proof=Proof(
            environment=proof.get("environment", {}),
            condition=proof.get("condition", {}),
            ranks={int(rank): values for rank, values in proof.get("ranks", {}).items()},
            files=proof.get("files", {}),
            signal=Signal(**proof["signal"]) if "signal" in proof else None,
            outcome=proof.get("outcome", ""),
            attempts=proof.get("attempts", 1),
        ),
        **table,
    )


def _one_of(known: Any, value: str, name: str) -> str:
    assert value in known, f"{name}: {value!r} is none of {', '.join(known)}"
    return value


def _read_side(table: dict[str, Any]) -> Side:
    line = table.pop("line")
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}
    return Side(lines=(line,) if isinstance(line, str) else tuple(line), **values)
