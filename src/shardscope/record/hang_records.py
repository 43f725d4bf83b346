"""Records of a hang, or of a slow run, that `shardscope hang` finds in what ranks left behind."""

from __future__ import annotations

from enum import StrEnum

from shardscope.record.base import CollectiveKind, Phase, Record, Source
from shardscope.record.ranks import Natural, NumRanks, Rank, RankSpan


class CauseKind(StrEnum):
    """Why ranks hang, as far as their files show it."""

    MISMATCH = "mismatch"  # the same collective, with other sizes, dtypes, reductions or roots
    DIFFERENT_CALL = "different_call"  # ranks issue different collectives: another branch
    SKIPPED_CALL = "skipped_call"  # a rank went past a collective without issuing it
    WRONG_ORDER = "wrong_order"  # collectives of several groups, or transfers, in another order
    UNMATCHED_TRANSFER = "unmatched_transfer"  # a send without its receive, or the reverse
    OUT_OF_MEMORY = "out_of_memory"
    CRASH = "crash"  # a rank raised, was killed by a signal, or exited
    STOPPED = "stopped"  # the process exists and does not run
    LOST = "lost"  # a rank left nothing: it ended, was stopped, or its host failed
    DATA_LOADING = "data_loading"
    FILE_SYSTEM = "file_system"
    COMPILING = "compiling"
    DIFFERENT_COMPILE = "different_compile"
    SLOW = "slow"  # a rank has not reached the collective: it computes, or waits outside of it
    NETWORK = "network"  # all ranks have issued it, and it does not complete
    UNKNOWN = "unknown"


class Certainty(StrEnum):
    """How far the files prove a cause."""

    CERTAIN = "certain"
    LIKELY = "likely"
    POSSIBLE = "possible"


class HangSource(Record, frozen=True, kw_only=True, gc=False):
    """Files of one format in one folder.

    `pattern` is their name, in which `*` stands for what differs. `detail` says what they hold or
    lack, `num_calls` how many calls of collectives, None if they list none.
    """

    pattern: str
    format: str
    num_files: Natural
    ranks: tuple[RankSpan, ...] = ()
    num_calls: Natural | None = None
    detail: str = ""


class HangCall(Record, frozen=True, kw_only=True, gc=False):
    """A collective or transfer as a rank issued it.

    `is_located` says whether the source records modules and phases: if not, `module` and `phase`
    are not known. `num_bytes`, `reduce_op` and `peer` are None where they are not recorded. `state`
    is issued, started, done or failed, or empty if not known.
    """

    kind: CollectiveKind | None
    op: str
    dtype: str = ""
    num_bytes: Natural | None = None
    reduce_op: str | None = None
    peer: Rank | None = None
    is_located: bool = False
    module: str | None = None
    phase: Phase | None = None
    source: Source | None = None
    state: str = ""


class GroupProgress(Record, frozen=True, kw_only=True, gc=False):
    """How far ranks of a group have come: those that issued the same number of collectives.

    `num_issued` counts from the start of the group if its source does, as Flight Recorder's
    sequence numbers; `num_done` is None where completion is not recorded. `behind` is by how many
    collectives these ranks are behind the first of the group.
    """

    group: str
    group_size: NumRanks | None
    ranks: tuple[RankSpan, ...]
    num_issued: Natural
    num_done: Natural | None = None
    behind: Natural = 0
    last: HangCall | None = None
    now: str = ""  # what the ranks do according to their stacks, logs or streams


class HangWait(Record, frozen=True, kw_only=True, gc=False):
    """Ranks that issued a call and wait in it for ranks that did not.

    `position` counts the collectives of the group; it is None for a send or receive. `is_certain`
    says that the call is known not to have completed.
    """

    group: str
    position: Natural | None
    waiters: tuple[RankSpan, ...]
    missing: tuple[RankSpan, ...]
    call: HangCall
    is_certain: bool = False


class HangSide(Record, frozen=True, kw_only=True, gc=False):
    """Ranks that did the same where a group diverges; `call` is None if they issued nothing."""

    ranks: tuple[RankSpan, ...]
    call: HangCall | None


class HangDivergence(Record, frozen=True, kw_only=True, gc=False):
    """The first position at which ranks of a group disagree.

    `differing` names what differs: kind, size, dtype, reduce op, root, line, or whether there is a
    call at all.
    """

    group: str
    position: Natural | None
    differing: tuple[str, ...]
    sides: tuple[HangSide, ...]


class HangCause(Record, frozen=True, kw_only=True, gc=False):
    """A likely cause: its kind, the responsible ranks, and what shows it.

    `group` and `position` are those of the collective in which the other ranks wait.
    """

    kind: CauseKind
    certainty: Certainty
    ranks: tuple[RankSpan, ...]
    fact: str
    remedy: str
    evidence: tuple[str, ...] = ()
    group: str | None = None
    position: Natural | None = None
    source: Source | None = None


class RankState(Record, frozen=True, kw_only=True, gc=False):
    """Where ranks are, by their stacks and logs: identical ones share a record.

    `frames` are the innermost frames of the main thread outside of torch.
    """

    ranks: tuple[RankSpan, ...]
    activity: str
    detail: str = ""
    frames: tuple[Source, ...] = ()


class GroupSkew(Record, frozen=True, kw_only=True, gc=False):
    """How long the ranks of a group waited for each other, and how long its collectives took.

    `skew_ns` is the mean time from a rank's arrival to that of the last rank, and `transfer_ns` the
    mean time from the last arrival to the end, None where ends are not recorded. `last_rank` came
    last most often, in `num_last` of the `num_collectives`.
    """

    group: str
    num_collectives: Natural
    skew_ns: Natural
    transfer_ns: Natural | None
    last_rank: Rank
    num_last: Natural


class SlowRank(Record, frozen=True, kw_only=True, gc=False):
    """A rank that others waited for, as far as the delay arose on it.

    At `num_last` of its `num_collectives` it came last, because it took longer than the others
    since its collective before: `excess_ns` in all, `mean_late_ns` on average, most of it before
    the collectives of `group`.
    """

    rank: Rank
    num_collectives: Natural
    num_last: Natural
    excess_ns: Natural
    mean_late_ns: Natural
    group: str
    source: Source | None = None


class HangAnalysis(Record, frozen=True, kw_only=True, gc=False):
    """What the files of a run's ranks show about a hang, or about which rank was slow.

    `is_hang` says whether a rank waits; `causes` are ordered, the best supported first. `cycle` are
    ranks each of which waits for the next, and the last for the first. `missing_ranks` left no
    file. `unknowns` are sentences on what the files cannot say. `progress` leaves out groups whose
    ranks are all level, which `num_level_groups` counts, if there are many.
    """

    is_hang: bool
    world_size: NumRanks | None = None
    ranks: tuple[RankSpan, ...] = ()
    missing_ranks: tuple[RankSpan, ...] = ()
    sources: tuple[HangSource, ...] = ()
    causes: tuple[HangCause, ...] = ()
    divergences: tuple[HangDivergence, ...] = ()
    waits: tuple[HangWait, ...] = ()
    cycle: tuple[Rank, ...] = ()
    progress: tuple[GroupProgress, ...] = ()
    num_level_groups: Natural = 0
    states: tuple[RankState, ...] = ()
    slow_ranks: tuple[SlowRank, ...] = ()
    skews: tuple[GroupSkew, ...] = ()
    unknowns: tuple[str, ...] = ()
