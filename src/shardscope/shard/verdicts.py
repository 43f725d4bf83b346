"""What happens to a call when it is sharded: of all shardings the best, unless one is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, final

from torch.distributed.device_mesh import DeviceMesh

from shardscope.record import Verdict
from shardscope.shard.dispatch import MAX_TRIED
from shardscope.shard.signature import Signature
from shardscope.shard.trials import Trial, Tryer, lay_out, possible_shardings

__all__ = ["BADNESS", "Judge", "Judgement"]

# From the best to the worst.
BADNESS = {
    verdict: rank
    for rank, verdict in enumerate(
        (
            Verdict.LOCAL,
            Verdict.SHARDED,
            Verdict.DECOMPOSED,
            Verdict.REDISTRIBUTED,
            Verdict.REPLICATED,
            Verdict.MISSING,
            Verdict.WRONG,
        )
    )
}


class Judgement(NamedTuple):
    """The verdict on a call, the trials it rests on, and how many more would have been possible."""

    verdict: Verdict
    detail: str
    trials: tuple[Trial, ...]
    num_skipped: int = 0


@final
class Judge:
    """Judges each call once, however often it is made."""

    def __init__(self, tryer: Tryer, mesh: DeviceMesh, *, has_plan: bool) -> None:
        self._tryer = tryer
        self._mesh = mesh
        self._judge: Callable[[Signature], Judgement] = (
            self._judge_as_placed if has_plan else self._judge_every_sharding
        )
        self._known: dict[Signature, Judgement] = {}

    def judge(self, call: Signature) -> Judgement:
        """What happens to this call."""
        if call not in self._known:
            self._known[call] = self._judge(call)
        return self._known[call]

    def _judge_as_placed(self, call: Signature) -> Judgement:
        if all(spec.placements is None for _, spec in call.tensors()):
            return Judgement(Verdict.LOCAL, "its inputs are plain tensors, each rank's own", ())
        trial = self._tryer.attempt(call)
        if trial.is_stopped:
            return _judge_unsharded(self._try_whole(call), [], num_skipped=1)
        if trial.verdict in (Verdict.SHARDED, Verdict.DECOMPOSED) and not trial.inputs():
            return Judgement(Verdict.LOCAL, "its inputs are replicated", (trial,))
        return Judgement(trial.verdict, trial.detail, (trial,))

    def _judge_every_sharding(self, call: Signature) -> Judgement:
        if not any(True for _ in call.tensors()):
            return Judgement(Verdict.LOCAL, "takes no tensors", ())
        trials: list[Trial] = []
        whole: Trial | None = None
        possible = list(possible_shardings(call, self._mesh))
        for sharded in possible:
            if sum(trial.num_tried for trial in trials) > MAX_TRIED:
                break
            trial = self._tryer.attempt(sharded)
            if trial.is_stopped:
                break
            trials.append(trial)
            if trials[-1].is_unknown and whole is None:
                whole = self._try_whole(call)
                if whole.is_unknown:  # it is no more known in any other way
                    break
        num_skipped = len(possible) - len(trials)
        if all(trial.verdict is Verdict.MISSING for trial in trials):
            if whole is not None and whole.is_unknown:
                num_skipped = 0
            return _judge_unsharded(whole or self._try_whole(call), trials, num_skipped)
        worst = max(trials, key=lambda trial: BADNESS[trial.verdict])
        best = min(trials, key=lambda trial: BADNESS[trial.verdict])
        chosen = worst if worst.verdict is Verdict.WRONG else best
        return Judgement(chosen.verdict, chosen.detail, tuple(trials), num_skipped)

    def _try_whole(self, call: Signature) -> Trial:
        return self._tryer.attempt(lay_out(call, self._mesh))


def _judge_unsharded(whole: Trial, trials: list[Trial], num_skipped: int) -> Judgement:
    """Where no sharding works, whether the op works at all."""
    every = (*trials, whole)
    if whole.verdict in (Verdict.MISSING, Verdict.WRONG):
        return Judgement(whole.verdict, whole.detail, every, num_skipped)
    if num_skipped:
        detail = f"DTensor finds no other placements among {MAX_TRIED:,} layouts of its parts"
        return Judgement(Verdict.REPLICATED, detail, every, num_skipped)
    if trials:
        return Judgement(Verdict.REPLICATED, trials[0].detail, every)
    return Judgement(Verdict.LOCAL, "no input has a dim to shard", every)
