"""Options on what the verdict on a recording takes into account: a contract, the size of a node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import click
from msgspec.structs import replace

from shardscope.contract import BreachKind, ContractFile, Violation, check, open_contract
from shardscope.contract.violation_text import list_rows
from shardscope.record import Finding, Recording, Severity


def verdict_options(function: Any) -> Callable[..., Any]:
    """Add the options to a command, as `contract_path` and `ranks_per_node`."""
    node = click.option(
        "--nproc-per-node",
        "ranks_per_node",
        type=click.IntRange(1),
        metavar="N",
        show_default="as recorded; else 8 is assumed",
        help="GPUs of a node, for the verdict on tensor parallelism.",
    )
    contract = click.option(
        "--contract",
        "contract_path",
        metavar="FILE",
        help="Add the limits of this file that are exceeded to findings and verdict.",
    )
    decorated: Callable[..., Any] = node(contract(function))
    return decorated


def add_expectations(
    recording: Recording, contract_path: str | None, ranks_per_node: int | None
) -> Recording:
    """Return the recording with what the user expects of it: a node's size, a contract's limits."""
    if ranks_per_node is not None:
        recording = replace(recording, run=replace(recording.run, ranks_per_node=ranks_per_node))
    if contract_path is None:
        return recording
    file = open_contract(contract_path)
    added = _list_findings(check(file.contract, recording), file)
    return replace(recording, findings=(*recording.findings, *added))


def _list_findings(violations: tuple[Violation, ...], file: ContractFile) -> Iterator[Finding]:
    for violation in violations:
        place = f"{file.path}:{file.lines.get(violation.limit, 1)}"
        rows = {row.label: row.text for row in list_rows(violation)}
        source = next((item.source for item in violation.evidence if item.source), None)
        if violation.kind is BreachKind.NOT_MEASURED:
            yield Finding(
                rule="contract-not-measured",
                severity=Severity.INFO,
                subject=violation.title,
                fact=f"{place} expects {violation.expected}; {rows['actual']}",
                remedy=violation.remedy or "Record it, and name all recordings of the run.",
            )
        else:
            yield Finding(
                rule="contract-exceeded",
                severity=Severity.ERROR,
                subject=violation.title,
                fact=f"{place} expects {violation.expected}; found: {rows['actual']}",
                remedy=violation.remedy or f"Lower it, or change the limit in {file.path}.",
                source=source,
            )
