"""WHAT IT MUST KEEP: limits on what a recording holds; of ours imports record and errors alone."""

from __future__ import annotations

from shardscope.contract.breach import Breach, BreachKind, Evidence
from shardscope.contract.check import check
from shardscope.contract.limits import Contract, Figure, Limit
from shardscope.contract.reading import ContractFile, open_contract, read_contract
from shardscope.contract.recording import record_contract
from shardscope.contract.writing import render_contract, write_contract

__all__ = [
    "Breach",
    "BreachKind",
    "Contract",
    "ContractFile",
    "Evidence",
    "Figure",
    "Limit",
    "check",
    "open_contract",
    "read_contract",
    "record_contract",
    "render_contract",
    "write_contract",
]
