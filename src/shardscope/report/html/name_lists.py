"""Lists of the names of collectives, which the columns of a page refer to by position."""

from __future__ import annotations

from typing import final

from shardscope.record import (
    Cause,
    Collective,
    CollectiveKind,
    Group,
    Phase,
    Recording,
    Redistribute,
    describe_cause,
)
from shardscope.record.recording import name_axis
from shardscope.report.html.page_index import Names


@final
class NameLists:
    """Lists of names that columns refer to by position."""

    def __init__(self, recording: Recording) -> None:
        self.world_size = recording.run.world_size
        used = {call.kind for call in recording.collectives}
        self.axes = Names(axis.name for axis in recording.run.axes)
        self.kinds = Names(kind for kind in CollectiveKind if kind in used)
        self.phases = Names(Phase)
        self.causes = Names()
        self.implicit_causes: set[int] = set()
        self._cause_positions: dict[Cause | None, int] = {}
        self.dtypes = Names()
        self.groups = Names(group.name for group in recording.groups)

    def axis(self, call: Collective) -> int:
        return self.axes.at(name_axis(call, self.world_size))

    def group_axis(self, group: Group) -> int:
        """The same for all collectives of a group."""
        number = "world" if group.num_ranks == self.world_size else f"{group.num_ranks} ranks"
        return self.axes.at(group.axis or number)

    def cause(self, cause: Cause | None) -> int:
        position = self._cause_positions.get(cause)
        if position is None:
            position = self._cause_positions[cause] = self.causes.at(describe_cause(cause))
            if isinstance(cause, Redistribute) and cause.is_implicit:
                self.implicit_causes.add(position)
        return position
