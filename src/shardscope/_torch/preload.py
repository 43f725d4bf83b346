"""Modules of torch that processes import in advance, because importing them takes seconds.

This module imports none of them: a process can start others that do, and go on meanwhile.
"""

from __future__ import annotations

FOR_WORKERS = ("torch", "torch._dynamo")
FOR_FORKS = (*FOR_WORKERS, "torch._functorch.aot_autograd")
"""Modules that the fork server imports; workers wait for it."""
FOR_SCRIPTS = (*FOR_FORKS, "torch.distributed.tensor.experimental")
"""Modules that the process for scripts imports, ahead of its first use."""
FOR_INDUCTOR = (*FOR_SCRIPTS, "torch._inductor.compile_fx")
"""The same for scripts that use Inductor."""
