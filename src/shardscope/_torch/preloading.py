"""Modules that a process imports before it is given something to compile: they take seconds."""

from __future__ import annotations

__all__ = ["FOR_FORKS", "FOR_INDUCTOR", "FOR_SCRIPTS", "FOR_WORKERS"]

FOR_WORKERS = ("torch", "torch._dynamo")
FOR_FORKS = (*FOR_WORKERS, "torch._functorch.aot_autograd")
"""What a process imports that is forked for everything else: others wait for it."""
FOR_SCRIPTS = (*FOR_FORKS, "torch.distributed.tensor.experimental")
"""What a script's process imports, for which nobody waits yet."""
FOR_INDUCTOR = (*FOR_SCRIPTS, "torch._inductor.compile_fx")
"""The same for one that uses inductor."""
