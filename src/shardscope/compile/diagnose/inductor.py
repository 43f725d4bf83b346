"""Which part of Inductor is to blame: a pass, the lowering of an op, a setting, a kernel."""

from __future__ import annotations

import re

from shardscope._torch.aot_stages import AotRun
from shardscope.compile.diagnose.switching import (
    LOWERINGS,
    PASSES,
    Application,
    Switches,
    Trial,
    Trials,
    find_first,
)

__all__ = ["locate_in_inductor", "name_application"]

_CUDAGRAPHS = frozenset({"cudagraphs"})
# What a careful user would set, one after the other, to be nearer to eager execution.
_CAREFUL = {
    "fallback_random": True,
    "emulate_precision_casts": True,
    "layout_optimization": False,
    "comprehensive_padding": False,
}
_KINDS = {
    "decomposition": "decomposition of {}",
    "pre_grad_passes": "pre-grad pass {!r}",
    "joint_graph_passes": "joint-graph pass {!r}",
    "post_grad_passes": "post-grad pass {!r}",
    "lowerings": "lowering of {}",
    "cudagraphs": "CUDA graphs",
}
# Kernels are named after the ops as they are lowered, so that one can be told from the other.
_NAMED = {"cpp.descriptive_names": "inductor_node", "triton.descriptive_names": "inductor_node"}
_KERNEL = re.compile(r"^(\w+) = async_compile\.", re.MULTILINE)


def name_application(application: Application) -> str:
    """As people would say it."""
    form = _KINDS.get(application.subsystem, f"{application.subsystem} {{}}")
    return form.format(application.what).strip()


def locate_in_inductor(trials: Trials) -> tuple[str, tuple[str, ...]]:
    """The part that makes the difference, with notes; the failure is known to be in the backend."""
    whole = trials.run(AotRun(), settings=_NAMED)
    if not trials.fails(whole):
        return "", ("It does not fail when Inductor's caches are off: what it runs may be stale.",)
    if trials.fails(_run(trials, off=LOWERINGS | _CUDAGRAPHS)):
        return _locate_pass(trials, whole)
    if trials.fails(_run(trials, off=_CUDAGRAPHS)):
        return _locate_lowering(trials, whole)
    return _locate_setting(trials)


def _run(
    trials: Trials,
    *,
    off: frozenset[str] = frozenset(),
    limited: frozenset[str] = frozenset(),
    limit: int = 0,
    careless: tuple[str, ...] = (),
) -> Trial:
    settings = {name: value for name, value in _CAREFUL.items() if name not in careless}
    return trials.run(AotRun(), Switches(off, limited, limit), settings | _NAMED)


def _locate_pass(trials: Trials, whole: Trial) -> tuple[str, tuple[str, ...]]:
    off = LOWERINGS | _CUDAGRAPHS

    def fails(limit: int) -> bool:
        return trials.fails(_run(trials, off=off, limited=PASSES, limit=limit))

    passes = whole.applied(PASSES)
    if not passes or fails(0):
        return "", ("It fails with all passes and lowerings of Inductor off.",)
    return name_application(passes[find_first(fails, len(passes)) - 1]), ()


def _locate_lowering(trials: Trials, whole: Trial) -> tuple[str, tuple[str, ...]]:
    def fails(limit: int) -> bool:
        return trials.fails(_run(trials, off=_CUDAGRAPHS, limited=LOWERINGS, limit=limit))

    lowered = whole.applied(LOWERINGS)
    found = lowered[find_first(fails, len(lowered)) - 1]
    kernels = _kernels_of(found, whole)
    where = f", in kernel {' or '.join(kernels)}" if kernels else ""
    return name_application(found) + where, ()


def _kernels_of(lowering: Application, whole: Trial) -> list[str]:
    """The kernels that were named after the op, in the direction in which it was lowered."""
    op = lowering.what.split(".")[1]
    return [
        name
        for step, source in whole.sources
        if step is lowering.step
        for name in _KERNEL.findall(source)
        if re.search(rf"_{re.escape(op)}(_|$)", name)
    ]


def _locate_setting(trials: Trials) -> tuple[str, tuple[str, ...]]:
    if not trials.fails(_run(trials)):
        for name, value in _CAREFUL.items():
            if trials.fails(_run(trials, careless=(name,))):
                return f"setting {name} = {not value}", (f"With {name} = {value} it is right.",)
        return "", (f"It is right with {_CAREFUL} all set, and no single one of them tells.",)
    return "CUDA graphs", ()
