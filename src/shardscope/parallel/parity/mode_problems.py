"""Explains modules that train on some ranks, or in one version, and evaluate on the others."""

from __future__ import annotations

from collections.abc import Sequence

from shardscope.parallel.equivalence import TensorComparison
from shardscope.parallel.parity.explanation import Explanation, list_names
from shardscope.parallel.parity.problem import Problem
from shardscope.record import Suspect, TensorKind
from shardscope.record.layer_names import fold_layers
from shardscope.record.ranks import list_ranks


def find_mode_problem(wrong: Sequence[TensorComparison]) -> Problem | None:
    """The problem of modules that are called in different modes; None if there are none."""
    modes = [result for result in wrong if result.case.kind is TensorKind.MODE]
    if not modes:
        return None
    names = [result.case.name.removesuffix("training").removesuffix(".") for result in modes]
    case = modes[0].case
    off = [rank for rank, mode in enumerate(case.ranks) if mode is not None and not int(mode)]
    if len(off) in (0, len(case.ranks)):
        where, mode = "the ranks call", "evaluation" if off else "training"
        others = "the single device does not"
    else:
        where = f"rank {list_ranks(off)} calls"
        mode, others = "evaluation", "the other ranks call it in training mode"
    which = list_names([f"`{name}`" if name else "the model" for name in names])
    cause = Explanation(
        Suspect.OUT_OF_SYNC,
        f"in the training step {where} {which} in {mode} mode, and {others}",
        remedy="Call model.train() on every rank after an evaluation, also where only some ranks "
        "evaluate.",
    )
    locations = list(dict.fromkeys(map(fold_layers, names))) if len(names) > 1 else names
    return Problem(
        cause,
        ", ".join(locations) or "the model itself",
        cause.to_sentence(),
        cause.remedy,
        module=names[0],
        names=tuple(result.case.name for result in modes),
    )
