"""`explain(fn, …)` and `explaining()`: graphs, graph breaks and recompilations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, final

import torch
from msgspec.structs import replace
from torch import fx

from shardscope._torch.dynamo import Durations, read_durations, watch_compiles
from shardscope._torch.dynamo_caches import fresh_caches, is_compiler_off
from shardscope._torch.private import explain_moved_names
from shardscope.attribution.program_records import describe_run, find_torch_gaps, read_identity
from shardscope.compile.explain.assemble import assemble
from shardscope.compile.explain.frames import FrameLog
from shardscope.compile.preserved_state import preserved_call_state
from shardscope.errors import CompileError, TorchVersionError
from shardscope.record import (
    BreakSite,
    Explanation,
    Finding,
    Gap,
    Recording,
    Severity,
    Source,
    replace_surrogates,
)

_MANY_RECOMPILES = 3  # of one function: more are likely


def find_problems(explanation: Explanation) -> Iterator[Finding]:
    """The findings of a rank's explanation."""
    yield from _find_failure(explanation)
    yield from _find_skips(explanation)
    yield from _find_breaks(explanation)
    yield from _find_recompiles(explanation)


def _find_failure(explanation: Explanation) -> Iterator[Finding]:
    if explanation.failure:
        yield Finding(
            rule="raised",
            severity=Severity.ERROR,
            subject=explanation.target or "the function",
            fact=f"it raised {explanation.failure}; what was compiled until then is explained",
            remedy="call it without torch.compile to see whether it raises there too",
            rank=explanation.rank,
        )


def _find_skips(explanation: Explanation) -> Iterator[Finding]:
    for skip in explanation.skipped_frames:
        site = None if skip.break_site is None else explanation.break_sites[skip.break_site]
        is_limit = "too often" in skip.reason
        yield Finding(
            rule="recompile-limit" if is_limit else "skipped-frame",
            severity=Severity.ERROR if is_limit else Severity.WARNING,
            subject=skip.function,
            fact=f"{'the rest of it' if skip.is_rest else 'all of it'} runs eagerly: "
            f"{skip.reason}{_at(site)}",
            remedy=_STOP_RECOMPILING if is_limit else _remedy(site),
            rank=explanation.rank,
            source=skip.source,
        )


_STOP_RECOMPILING = (
    "turn the changing value into a tensor, or call mark_dynamic on sizes; see the recompilations"
)


def _at(site: BreakSite | None) -> str:
    return "" if site is None else f", at {_location(site.source)} ({site.reason})"


def _location(source: Source) -> str:
    return f"{source.file}:{source.line}"


def _remedy(site: BreakSite | None) -> str:
    if site is None:
        return "compile its caller, so that it becomes part of that graph"
    return site.fix or (site.hints[0] if site.hints else "move the line out of what is compiled")


def _find_breaks(explanation: Explanation) -> Iterator[Finding]:
    """One finding for all resumed breaks; the report has a row for each."""
    skipped = {skip.break_site for skip in explanation.skipped_frames}
    sites = [site for index, site in enumerate(explanation.break_sites) if index not in skipped]
    if not sites:
        return
    worst = max(sites, key=lambda site: site.num_events)
    lines = "1 line breaks" if len(sites) == 1 else f"{len(sites):,} lines break"
    yield Finding(
        rule="graph-break",
        severity=Severity.WARNING,
        subject=explanation.target or worst.source.function,
        fact=f"{lines} its graphs; most often {_location(worst.source)}: {worst.reason}",
        remedy=_remedy(worst),
        rank=explanation.rank,
        source=worst.source,
    )


def _find_recompiles(explanation: Explanation) -> Iterator[Finding]:
    last = {
        (recompile.function, recompile.source): recompile for recompile in explanation.recompiles
    }
    for recompile in last.values():
        if recompile.number >= _MANY_RECOMPILES:
            yield Finding(
                rule="recompiles",
                severity=Severity.WARNING,
                subject=recompile.function,
                fact=f"it was compiled {recompile.number + 1} times; the last time because "
                f"{recompile.description}",
                remedy=_STOP_RECOMPILING,
                rank=explanation.rank,
                source=recompile.source,
            )


_MAX_ERROR = 300  # characters of an exception's text


@final
class Explaining:
    """What `explaining` yields; has the result once the context has ended."""

    def __init__(self, log: FrameLog) -> None:
        self._log = log
        self._recording: Recording | None = None

    def _repr_html_(self) -> str | None:
        """The page of the recording, for notebooks; None before the context has ended."""
        return None if self._recording is None else self._recording._repr_html_()

    @property
    def has_compiled(self) -> bool:
        """Whether anything was compiled so far."""
        return bool(self._log.frames)

    @property
    def recording(self) -> Recording:
        """The recording, for `show`, `save` and `merge`."""
        if self._recording is None:
            raise CompileError(
                "the explanation is not ready before the block `with explaining()` ends. "
                "Read it after the block."
            )
        return self._recording

    @property
    def explanation(self) -> Explanation:
        """Graphs, graph breaks and recompilations that were observed."""
        return self.recording.explanations[0]

    def finish(self, recording: Recording) -> None:
        """Set the result at the end of the context."""
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
    explained = Explaining(log)
    before = read_durations()
    failure = ""
    try:
        with ExitStack() as stack:
            try:
                stack.enter_context(watch_compiles(log))
            except TorchVersionError as error:  # tracing must not fail the run
                log.errors.append(f"compilations are not observed: {error}")
            yield explained
    except BaseException as error:
        failure = describe_error(error)
        raise
    finally:
        explained.finish(_make_recording(log, target=target, failure=failure, before=before))


def _make_recording(log: FrameLog, *, target: str, failure: str, before: Durations) -> Recording:
    rank, world_size = read_identity()
    explanation = assemble(
        log, rank=rank, target=target, failure=failure, before=before, after=read_durations()
    )
    return Recording(
        run=describe_run(rank, world_size, (), instrument="explain"),
        explanations=(explanation,),
        findings=tuple(find_problems(explanation)),
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


compile_lock = threading.RLock()
"""For who sets dynamo's caches aside: they are one for all threads."""


@explain_moved_names
def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Recording:
    """Compile a function, call it once, and report graphs, graph breaks and recompilations.

    The function is compiled from scratch with a backend that runs its graphs eagerly. All compiler
    state, weights, buffers, gradients, arguments, train and eval mode and random state are
    restored. If the function raises, what was compiled until then is reported, with a finding. To
    observe many calls, another backend, or guards, use `explaining`.

    Args:
        fn: A function or module.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Examples:
        >>> recording = explain(model, tokens)
        >>> recording.explanations[0].num_graphs
    """
    if not callable(fn):
        raise CompileError(
            f"explain() got {type(fn).__name__}, which cannot be called. Give it the function or "
            "module first, and then what it is called with."
        )
    if is_compiler_off():
        raise CompileError(
            "torch.compile is switched off (TORCHDYNAMO_DISABLE, or torch._dynamo.config.disable), "
            "so there is nothing to explain. Switch it on."
        )
    with (
        compile_lock,
        preserved_call_state(fn, args, kwargs) as state,
        fresh_caches(),
        suppress(Exception),  # exceptions of the function are in the explanation
        explaining(target=name_of(fn)) as explained,
    ):
        torch.compile(fn, backend=run_as_it_is)(*args, **kwargs)
    recording = explained.recording
    if state.is_complete:
        return recording
    fact = (
        f"{name_of(fn)} can reach too many objects to restore all of them: what the call changed "
        "in the others stays changed"
    )
    gap = Gap(place="explain", fact=fact, rank=read_identity()[0])
    return replace(recording, gaps=(*recording.gaps, gap))


def run_as_it_is(graph: fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
    """A backend that runs the graph unchanged."""
    return graph.forward


def name_of(fn: Any) -> str:
    """The name of a function in a report."""
    inner = getattr(fn, "func", fn)  # a partial's
    name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
    return replace_surrogates(str(name).rpartition("<locals>.")[2])
