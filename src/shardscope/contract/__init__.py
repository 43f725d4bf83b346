"""Contracts: limits on a recording's figures, such as bytes sent, peak memory or graph breaks.

`toml_reader.py` reads a contract from `shardscope.toml`, `check.py` compares its limits with the
figures of a recording (`totals.py`, `collective_totals.py`) and returns the violations;
`record.py` derives a contract from a recording and writes it. Imports only `record` and `errors`.
"""

from __future__ import annotations

from shardscope.contract.check import check
from shardscope.contract.limits import BreachKind, Contract, Evidence, Figure, Limit, Violation
from shardscope.contract.record import record_contract, render_contract, write_contract
from shardscope.contract.toml_reader import ContractFile, open_contract, read_contract

__all__ = [
    "Breach",
    "BreachKind",
    "Contract",
    "ContractFile",
    "Evidence",
    "Figure",
    "Limit",
    "Violation",
    "check",
    "open_contract",
    "read_contract",
    "record_contract",
    "render_contract",
    "write_contract",
]

Breach = Violation  # the name under which it was released
