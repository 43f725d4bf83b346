"""Paths through the stack: by them a collective that is issued as before is recognised quickly.

`walk_stack` decides by the code of each frame what it is. On the same path, from the same line, it
finds the same, but for the locals from which the cause is read. Comparing the code of frames takes
a fraction of the time.
"""

from __future__ import annotations

from types import CodeType, FrameType
from typing import Any, final

from shardscope._torch.frames import LOCALS_BY_ROLE, Role, find_roles
from shardscope.attribution.call_sites import Stack

_SPMD = (Role.SPMD_CALL, Role.SPMD_BACKWARD)  # whose locals decide whether they count
_NUM_ABOVE_ENGINE = 2  # frames that show whether a recomputed function called the engine

Locals = tuple[tuple[Any, ...], ...]
"""The values of `LOCALS_BY_ROLE` of the frames that show the cause, from the innermost on."""


@final
class CallPath:
    """The code of the frames that `walk_stack` has looked at, from the innermost on."""

    __slots__ = ("_has_all", "_instruction", "_key", "_segments", "has_user", "roles")

    def __init__(
        self, frames: list[FrameType], stack: Stack, user: CodeType | None, *, has_all: bool
    ) -> None:
        self._has_all = has_all  # they are all frames
        self._key = (stack.instruction, *(id(frame.f_code) for frame in frames))
        self._instruction = stack.instruction
        roles: list[Role] = []
        # Codes up to a frame that is read: of the user's line, no names; of a cause, of its locals.
        segments: list[tuple[tuple[CodeType, ...], tuple[str, ...] | None]] = []
        codes: list[CodeType] = []
        self.has_user = False
        for frame in frames:
            code = frame.f_code
            codes.append(code)
            role = find_roles().get(id(code))
            if role is not None and role in stack.frame_locals and role not in roles:
                roles.append(role)
                segments.append((tuple(codes), LOCALS_BY_ROLE[role]))
                codes.clear()
            elif code is user and not self.has_user:
                self.has_user = True
                segments.append((tuple(codes), ()))
                codes.clear()
        segments.append((tuple(codes), None))
        self._segments = tuple(segments)
        self.roles = tuple(roles)

    def is_same(self, path: CallPath) -> bool:
        """Whether both are the same path."""
        return self._key == path._key

    def match(self, frame: FrameType | None) -> Locals | None:
        """The locals of the causes, if the stack at `frame` has this path; else None."""
        values: Locals = ()
        last: Any = None
        inner: Any = frame
        try:
            for codes, names in self._segments:
                for code in codes:
                    if inner.f_code is not code:
                        return None
                    last, inner = inner, inner.f_back
                if names:
                    frame_locals = last.f_locals
                    values = (*values, tuple([frame_locals[name] for name in names]))
                elif names is not None and last.f_lasti != self._instruction:
                    return None
        except AttributeError:  # there are fewer frames
            return None
        return None if self._has_all and inner is not None else values


def make_path(
    frame: FrameType | None,
    outermost: FrameType | None,
    stack: Stack,
    user: CodeType | None,
) -> CallPath | None:
    """The path of what `walk_stack` has read at `frame`; None if the path does not decide that.

    `user` is the user's code that was found on the stack of this thread, if any.
    """
    if stack.is_nested or any(role in stack.frame_locals for role in _SPMD):
        return None
    frames: list[FrameType] = []
    while frame is not None and (not frames or frames[-1] is not outermost):
        frames.append(frame)
        frame = frame.f_back
    if stack.boundary is Role.ENGINE:
        roles = [find_roles().get(id(frame.f_code)) for frame in frames]
        num_needed = roles.index(Role.ENGINE) + 1 + _NUM_ABOVE_ENGINE
        while frame is not None and len(frames) < num_needed:
            frames.append(frame)
            frame = frame.f_back
    return CallPath(frames, stack, user, has_all=frame is None)
