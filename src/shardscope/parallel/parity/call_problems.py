"""Explains modules that are called in other modes, or again with other random numbers."""

from __future__ import annotations

from collections.abc import Sequence

from shardscope.parallel.equivalence import TensorComparison
from shardscope.parallel.parity.explanation import Explanation, list_names
from shardscope.parallel.parity.problem import Problem
from shardscope.record import Phase, Suspect, TensorKind
from shardscope.record.layer_names import fold_layers
from shardscope.record.ranks import list_ranks


def find_call_problem(wrong: Sequence[TensorComparison]) -> Problem | None:
    """The problem of modules that ranks do not call as they should; None if there are none.

    All else that differs may follow from it.
    """
    redrawn = [result for result in wrong if result.case.kind is TensorKind.REDRAWN]
    return _find_mode_problem(wrong) or (_describe_redrawn(redrawn) if redrawn else None)


def _describe_redrawn(wrong: Sequence[TensorComparison]) -> Problem:
    """The problem of a recomputation in backward that draws other numbers than forward did."""
    names = [result.case.name.removesuffix(".draws") for result in wrong]
    cause = Explanation(
        Suspect.RANDOMNESS,
        f"backward calls {list_names([f'`{name}`' for name in names])} again, as a checkpoint "
        "does, and there other random numbers are drawn than in forward, so that gradients are not "
        "those of the loss",
        remedy="Restore the random state for the recomputation: preserve_rng_state=True, and the "
        "state of every generator that a tracker of the program uses.",
    )
    return Problem(
        cause,
        _list_locations(names),
        cause.to_sentence(),
        cause.remedy,
        module=names[0],
        phase=Phase.BACKWARD,
        names=tuple(result.case.name for result in wrong),
    )


def _list_locations(names: Sequence[str]) -> str:
    """The modules, of several layers as a pattern."""
    locations = list(dict.fromkeys(map(fold_layers, names))) if len(names) > 1 else names
    return ", ".join(locations) or "the model itself"


def _find_mode_problem(wrong: Sequence[TensorComparison]) -> Problem | None:
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
    return Problem(
        cause,
        _list_locations(names),
        cause.to_sentence(),
        cause.remedy,
        module=names[0],
        names=tuple(result.case.name for result in modes),
    )
