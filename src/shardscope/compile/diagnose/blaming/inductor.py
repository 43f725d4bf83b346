"""Which part of Inductor is to blame: a pass, the lowering of an op, a setting, a kernel."""

from __future__ import annotations

import re
from dataclasses import replace

from shardscope.compile.diagnose.blaming.switching import (
    LOWERINGS,
    PASSES,
    Application,
    Report,
    Suspicion,
    Trial,
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

Found = tuple[str, tuple[str, ...]]


def name_application(application: Application) -> str:
    """As people would say it."""
    form = _KINDS.get(application.subsystem, f"{application.subsystem} {{}}")
    return form.format(application.what).strip()


def locate_in_inductor(suspicion: Suspicion) -> Found:
    """The part that makes the difference, with notes; the failure is known to be in the backend."""
    whole = suspicion.ask(Trial(settings=_NAMED))
    if not suspicion.holds(whole):
        return "", ("It does not fail when Inductor's caches are off: what it runs may be stale.",)
    careful = Trial(off=_CUDAGRAPHS, settings=_NAMED | _CAREFUL)
    unlowered = replace(careful, off=_CUDAGRAPHS | LOWERINGS)
    passed = suspicion.ask(unlowered)
    if suspicion.holds(passed):
        return _locate_pass(suspicion, unlowered, passed)
    lowered = suspicion.ask(careful)
    if suspicion.holds(lowered):
        return _locate_lowering(suspicion, careful, lowered)
    return _locate_setting(suspicion)


def _locate_pass(suspicion: Suspicion, unlowered: Trial, whole: Report) -> Found:
    if suspicion.fails(replace(unlowered, limited=PASSES, limit=0)):
        return "", ("It fails with all passes and lowerings of Inductor off.",)
    found = suspicion.find_first(unlowered, PASSES, whole=whole)
    return (name_application(found) if found else "", ())


def _locate_lowering(suspicion: Suspicion, careful: Trial, whole: Report) -> Found:
    found = suspicion.find_first(careful, LOWERINGS, whole=whole)
    if found is None:
        return "", ()
    kernels = _kernels_of(found, whole)
    where = f", in kernel {' or '.join(kernels)}" if kernels else ""
    return name_application(found) + where, ()


def _kernels_of(lowering: Application, whole: Report) -> list[str]:
    """The kernels that were named after the op, in the direction in which it was lowered."""
    op = re.escape(lowering.what.split(".")[1])
    named = [
        name
        for step, name in whole.kernels
        if step is lowering.step and re.search(rf"_{op}(_|$)", name)
    ]
    return list(dict.fromkeys(named))  # the judge may have compiled more than once


def _locate_setting(suspicion: Suspicion) -> Found:
    careful = Trial(settings=_NAMED | _CAREFUL)
    if suspicion.fails(careful):
        return "CUDA graphs", ()
    for name, value in _CAREFUL.items():
        settings = {key: one for key, one in careful.settings.items() if key != name}
        if suspicion.fails(replace(careful, settings=settings)):
            return f"setting {name} = {not value}", (f"With {name} = {value} it is correct.",)
    return "", (
        (f"It is correct with all of {', '.join(_CAREFUL)} set, but not with any single one."),
    )
