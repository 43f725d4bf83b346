"""`with explaining() as e:` explains what is compiled meanwhile, by whichever backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import final

from shardscope._torch.compile_events import watch_compiles
from shardscope._torch.compile_times import Durations, read_durations
from shardscope.comm.run import describe_run, find_torch_gaps, read_identity
from shardscope.compile.explain.assemble import assemble
from shardscope.compile.explain.findings import find_problems
from shardscope.compile.explain.frames import FrameLog
from shardscope.errors import CompileError, TorchVersionError
from shardscope.record import Explanation, Gap, Recording, replace_surrogates

__all__ = ["Explaining", "explaining"]

_MAX_ERROR = 300  # characters of an exception's text


@final
class Explaining:
    """What `explaining` yields: the result, once the context has ended."""

    def __init__(self) -> None:
        self._recording: Recording | None = None

    @property
    def recording(self) -> Recording:
        """The recording, for `show`, `save` and `merge`."""
        if self._recording is None:
            raise CompileError(
                "what is compiled is explained when `with explaining()` ends, and it has not. "
                "Read the explanation after the block."
            )
        return self._recording

    @property
    def explanation(self) -> Explanation:
        """Graphs, graph breaks and recompilations that were observed."""
        return self.recording.explanations[0]

    def finish(self, recording: Recording) -> None:
        """The block is over."""
        self._recording = recording


@contextmanager
def explaining(*, guards: bool = False, target: str = "") -> Iterator[Explaining]:
    """Observe what torch.compile does until the context ends.

    Works with any backend. Of functions that are already compiled, only new compilations are
    observed. An exception ends the context as usual, and what was observed until then is reported.

    Args:
        guards: Also record the guards of each compilation.
        target: What reports call the program.

    Examples:
        >>> with explaining() as e:
        ...     for batch in batches:
        ...         compiled(batch)
        >>> e.explanation.num_recompiles
    """
    log = FrameLog(has_guards=guards)
    explained = Explaining()
    before = read_durations()
    failure = ""
    try:
        with ExitStack() as stack:
            try:
                stack.enter_context(watch_compiles(log))
            except TorchVersionError as error:  # watching must not kill
                log.errors.append(f"compilations are not observed: {error}")
            yield explained
    except BaseException as error:
        failure = describe_error(error)
        raise
    finally:
        explained.finish(_make_recording(log, target=target, failure=failure, before=before))


def _make_recording(log: FrameLog, *, target: str, failure: str, before: Durations) -> Recording:
    rank, world_size = read_identity()
    made = assemble(
        log, rank=rank, target=target, failure=failure, before=before, after=read_durations()
    )
    return Recording(
        run=describe_run(rank, world_size, (), instrument="explain"),
        explanations=(made,),
        findings=tuple(find_problems(made)),
        gaps=(
            *find_torch_gaps(rank),
            *(Gap(place="explain", fact=fact, rank=rank) for fact in dict.fromkeys(log.errors)),
        ),
    )


def describe_error(error: BaseException) -> str:
    """`ValueError: too long`, on one line."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return replace_surrogates(f"{name}: {text[:_MAX_ERROR]}" if text else name)
