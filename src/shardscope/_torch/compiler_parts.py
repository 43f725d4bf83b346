"""The parts of the compiler that can be switched off: torch's hooks for bisecting, in memory.

Each time that a part is about to be applied (a decomposition, a pass, a lowering) torch asks
whether it may. Torch's own bisector answers from files and clears caches; here a function answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from shardscope._torch.private import find_name

__all__ = ["asked_for_parts", "generated_code", "inductor_settings", "without_caches"]

functorch_config = find_name("torch._functorch.config", "compile a graph again")
CompilerBisector = find_name(
    "torch._inductor.compiler_bisector.CompilerBisector", "disable parts of the compiler"
)

Answer = Callable[[str, str], bool]


@contextmanager
def asked_for_parts(may_apply: Answer) -> Iterator[None]:
    """Let `may_apply(subsystem, what)` decide about each application of a part."""

    def is_disabled(
        backend: str, subsystem: str, debug_info: Callable[[], str] | None = None
    ) -> bool:
        return not may_apply(subsystem, _describe(subsystem, debug_info))

    with patch.object(CompilerBisector, "disable_subsystem", staticmethod(is_disabled)):
        yield


def _describe(subsystem: str, debug_info: Callable[[], str] | None) -> str:
    if subsystem == "lowerings":
        from torch._inductor.virtualized import V

        return str(V.get_current_node().target)
    if debug_info is None:
        return ""
    return debug_info().removeprefix("<OpOverload(op='").partition("'")[0]


@contextmanager
def inductor_settings(**changes: Any) -> Iterator[None]:
    """Change settings of Inductor until the context ends."""
    from torch._inductor import config

    with config.patch(changes):
        yield


@contextmanager
def without_caches() -> Iterator[None]:
    """Let no graph that was compiled before answer for one that is compiled now.

    Kernels are found by their source, which cannot be stale: with those switched off too, Inductor
    would build its header again each time, for many seconds.
    """
    from torch._inductor import config

    with (
        config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
    ):
        yield


@contextmanager
def generated_code(keep: Callable[[str], None]) -> Iterator[None]:
    """Hand `keep` the source of each module that Inductor writes."""
    from torch._inductor.graph import GraphLowering

    with patch.object(GraphLowering, "save_output_code", staticmethod(keep)):
        yield
