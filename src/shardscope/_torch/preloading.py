"""Modules that a process imports before it is given something to compile: they take seconds."""

from __future__ import annotations

__all__ = ["FOR_SCRIPTS", "FOR_WORKERS"]

FOR_WORKERS = ("torch", "torch._dynamo")
FOR_SCRIPTS = (*FOR_WORKERS, "torch._functorch.aot_autograd")
