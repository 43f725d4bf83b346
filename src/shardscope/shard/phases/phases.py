"""`phases`: how long named parts of a step take, on each rank, on the host and on the device."""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from enum import Enum
from types import CoroutineType, TracebackType
from typing import Any, ClassVar, ParamSpec, Self, TypeVar, final

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling
from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]

from shardscope._torch.logs import SIMPLE_PROFILER_LOG
from shardscope.attribution.spans import SUBSCRIPTIONS
from shardscope.errors import PhaseError
from shardscope.shard.phases.timing import PhaseTimes, close_span, open_span

_MAX_REPR = 100  # characters of a name

P = ParamSpec("P")
R = TypeVar("R")


@final
class Phase:
    """A named phase: a context manager and a decorator, for use anywhere and any number of times.

    It may be entered within itself, on several threads and in several tasks. A program that
    torch.compile has captured runs as if it were not there. But before torch 2.14, torch.compile
    enters only contexts that are created in the code it compiles: there write
    `with phases("load"):`, because `with LOAD:`, created elsewhere, leaves the entire function
    uncompiled. `@LOAD` is fine.
    """

    __slots__ = ("__weakref__", "_was_observed", "device", "name")

    def __init__(self, name: str, device: str | None = None) -> None:
        self.name = name
        self.device = device
        self._was_observed = False  # by a subscriber, ever: most never are, and should cost little

    def __enter__(self) -> Self:
        # Checked first, so that compiled code gets no other guard.
        if is_dynamo_compiling():
            return self
        # Without subscribers now but not ever, its end must not end a span around it.
        if SUBSCRIPTIONS or self._was_observed:
            self._was_observed = True
            open_span(self, self.name, self.device)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._was_observed:
            close_span(self)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """`function`, each call of which is timed as this phase; a coroutine until it ends."""
        _check_function(function, self.name)
        # A new Phase for each call: torch.compile before 2.14 accepts no other context.
        name, device = self.name, self.device
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def timed_coroutine(*args: Any, **kwargs: Any) -> Any:
                with Phase(name, device):
                    return await function(*args, **kwargs)

            return timed_coroutine  # type: ignore[return-value]

        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            with Phase(name, device):
                result = function(*args, **kwargs)
            if not is_dynamo_compiling() and isinstance(result, CoroutineType):
                _refuse_coroutine(result, name)
            return result

        return timed

    def __repr__(self) -> str:
        is_long = len(self.name) > _MAX_REPR
        return f"phases({self.name[:_MAX_REPR]!r}{'…' if is_long else ''})"


@final
class Phases:
    """Times named parts of a step.

    Nothing is timed unless `record` or a `trace` is active. If CUDA is in use, each phase is timed
    on the host and on the current stream.

    Examples:
        >>> with phases("load"):
        ...     batch = next(batches)
        >>> @phases.all_gather
        ... def gather(): ...
        >>> with phases.record() as times:
        ...     step()
        >>> print(times)
    """

    __slots__ = ()

    def __call__(self, name: str, *, device: str | torch.device | None = None) -> Phase:
        """A phase, as a context manager or decorator.

        Args:
            name: Its name.
            device: "cpu" to time it on the host only.
        """
        if type(name) is not str:
            name = _read_name(name)
        return Phase(name, device if device is None else _read_device(device))

    def record(self, *, keep: int = 10_000) -> PhaseTimes:
        """A context in which the times of every phase are summed.

        Args:
            keep: How many spans to keep: the last ones.
        """
        return PhaseTimes(keep=keep)

    # Properties, not attributes: see Phase.__call__.

    @property
    def all(self) -> Phase:
        """An entire step or section."""
        return Phase("all")

    @property
    def all_gather(self) -> Phase:
        """Gathering tensors."""
        return Phase("all_gather")

    @property
    def all_gather_object(self) -> Phase:
        """Gathering objects."""
        return Phase("all_gather_object")

    @property
    def resharding(self) -> Phase:
        """Changing placements."""
        return Phase("resharding")

    @property
    def H2D(self) -> Phase:  # noqa: N802 - the usual spelling
        """From host to device."""
        return Phase("H2D")

    @property
    def D2H(self) -> Phase:  # noqa: N802
        """From device to host."""
        return Phase("D2H")


def _read_name(name: object) -> str:
    if isinstance(name, str):
        return str(name.value) if isinstance(name, Enum) else str(name)
    if callable(name):
        function_name = getattr(name, "__name__", type(name).__name__)
        raise PhaseError(
            f"a phase needs a name, and {function_name} has none. Write @phases({function_name!r})."
        )
    raise PhaseError(f"a phase's name is text, not {name!r}. Write phases('load').")


def _read_device(device: str | torch.device) -> str:
    name = str(device)
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise PhaseError(
            f"phases are timed on 'cpu' or 'cuda', not on {name!r}. Leave device out to have them "
            "timed wherever that is possible."
        )
    if kind == "cuda" and not torch.cuda.is_available():
        raise PhaseError(
            f"this phase is to be timed on {name!r}, but there is no CUDA device here. Leave "
            "device out to have it timed wherever that is possible."
        )
    return kind if kind == "cpu" else name


def _empty_generator() -> Iterator[None]:
    yield


async def _empty_async_generator() -> AsyncIterator[None]:
    yield


# @contextmanager returns the same function, with the same code, for every generator.
_CONTEXT_MAKERS = (
    contextmanager(_empty_generator).__code__,
    asynccontextmanager(_empty_async_generator).__code__,
)


def _refuse_coroutine(coroutine: CoroutineType[Any, Any, Any], phase: str) -> None:
    name = coroutine.__qualname__
    coroutine.close()  # or Python would warn that it was never awaited
    raise PhaseError(
        f"phases({phase!r}) timed a function that returns the coroutine {name} before that has "
        f"run. Put it on `async def {name}` itself, or write `with phases({phase!r}):` around the "
        "await."
    )


def _check_function(function: object, phase: str) -> None:
    name = getattr(function, "__qualname__", type(function).__name__)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise PhaseError(
            f"phases({phase!r}) cannot time {name}, a generator: its body runs in parts, "
            f"between its caller's lines. Write `with phases({phase!r}):` inside it, around lines "
            "without a yield, or around what asks it for the next item."
        )
    if getattr(function, "__code__", None) in _CONTEXT_MAKERS:
        raise PhaseError(
            f"phases({phase!r}) is applied above @contextmanager to {name}: it would time the "
            f"creation of the context, not what runs in it. Write `with phases({phase!r}):` around "
            "its use."
        )
    if isinstance(function, classmethod | staticmethod):
        kind = type(function).__name__
        raise PhaseError(
            f"phases({phase!r}) is applied above @{kind} to {name}. Put it below: it times a "
            "function."
        )
    if not (inspect.isroutine(function) or isinstance(function, functools.partial)):
        raise PhaseError(
            f"phases({phase!r}) times functions, and {name} is not one. Write "
            f"`with phases({phase!r}):` around the code to time."
        )


phases = Phases()


# Torch's own logger, so that its level and handlers apply to our lines too.
_LOGGER = logging.getLogger(SIMPLE_PROFILER_LOG)


class SimpleProfiler:
    """Sums seconds by type, for this process; a drop-in for FSDP's class of this name.

    A type may not be profiled inside itself. Inside a `trace`, profiled sections are also in the
    recording.

    Examples:
        >>> with SimpleProfiler.profile(SimpleProfiler.Type.ALL_GATHER):
        ...     gather()
    """

    class Type(str, Enum):  # noqa: UP042 - torch's prints as an Enum does
        """The types that torch defines; `profile` accepts any other text too."""

        ALL = "all"
        ALLGATHER = "all_gather"
        ALLGATHER_OBJ = "all_gather_object"
        RESHARDING = "resharding"
        H2D = "H2D"
        D2H = "D2H"

    results: ClassVar[dict[str, float]] = defaultdict(float)
    profiling: ClassVar[set[str]] = set()

    @classmethod
    def reset(cls) -> None:
        """Clear the results and the types that are being profiled."""
        cls.results.clear()
        cls.profiling.clear()

    @classmethod
    @contextmanager
    def profile(cls, profile_type: str) -> Iterator[None]:
        """Add the time inside the context to `profile_type`."""
        if profile_type in cls.profiling:
            raise AssertionError(
                f"{profile_type} is already being profiled. SimpleProfiler does not support "
                "profiling multiple instances at the same time. "
            )
        cls.profiling.add(profile_type)
        begin = time.monotonic()
        try:
            with phases(_name(profile_type)):
                yield
        finally:
            cls.results[profile_type] += time.monotonic() - begin
            cls.profiling.remove(profile_type)

    @classmethod
    def dump_and_reset(cls, msg: str) -> None:
        """Log the results on rank 0 at debug level INFO, and clear them.

        Not at level DETAIL, which checks every collective and so spoils the times.
        """
        if dist.get_rank() == 0 and get_debug_level() == DebugLevel.INFO:
            _LOGGER.info("%s %s", msg, cls.results)
        cls.reset()


def _name(profile_type: object) -> str:
    return str(profile_type.value if isinstance(profile_type, Enum) else profile_type)
