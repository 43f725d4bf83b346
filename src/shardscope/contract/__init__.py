"""Contracts: limits on a recording's figures, read, checked, recorded and written.

Imports only record and errors from this package.
"""

from __future__ import annotations

from shardscope.contract.check import check
from shardscope.contract.limits import BreachKind, Contract, Evidence, Figure, Limit, Violation
from shardscope.contract.read import ContractFile, open_contract, read_contract
from shardscope.contract.record import record_contract
from shardscope.contract.write import render_contract, write_contract

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
