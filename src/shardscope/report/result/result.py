"""The JSON document that a command prints with `--json`, and the summary of a recording in it.

The document has at most `MAX_TOKENS`: of lists that are too long the last entries are left out and
counted in `truncated`, with the commands that print them. Tokens are estimated from above: some
tokenizers split numbers into digits, and other text of documents has at least 2.4 bytes a token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from shardscope.record import (
    Finding,
    Recording,
    Severity,
    compress_ranks,
    count_ranks,
    escape_controls,
    format_ranks,
)
from shardscope.record.base import name_line
from shardscope.record.encoding import encode_json
from shardscope.record.layer_names import join_layers_in_texts
from shardscope.record.units import plural
from shardscope.report.model.finding_groups import group_findings
from shardscope.report.model.traffic_totals import (
    IdenticalRanks,
    fold_ranks,
)
from shardscope.report.result.figures import Figures, read_code
from shardscope.report.result.recording_figures import read_figures
from shardscope.report.text.heading import list_run_facts, name_mesh
from shardscope.report.text.key_metrics import list_key_metrics
from shardscope.report.text.next_commands import suggest_commands
from shardscope.report.text.problems import fold_problem_ranks
from shardscope.report.text.verdict import NOTHING_JUDGED, RunVerdict, judge

FORMAT: Final = "shardscope.result"
SCHEMA: Final = 1
MAX_TOKENS = 4_000
_BYTES_PER_TOKEN = 2.4  # of what is no digit
_MAX_TEXT = 700  # characters of a single text
_MAX_ITEMS = 200  # of a list, before its tokens are counted
_HALVED = ("findings", "error")  # lists whose entries are worth twice their bytes


class CommandStatus(StrEnum):
    """Whether to act: `problems` if a finding is a warning or an error, numbers differ, a limit
    is exceeded or another check failed; `failed` if the command could not do its work.
    """

    OK = "ok"
    PROBLEMS = "problems"
    FAILED = "failed"


class FindingEntry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something to act on: where, what, and the remedy. `count` findings share the entry.

    What it costs a rank: collectives and the bytes that they send, or memory.
    """

    rule: str
    severity: str
    subject: str
    fact: str
    remedy: str
    count: int = 1
    ranks: str = ""
    line: str = ""
    code: str = ""
    num_collectives: int | None = None
    sent_bytes: int | None = None
    memory_bytes: int | None = None


class GapEntry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that was not recorded or not understood; `is_loss` if records were lost."""

    place: str
    fact: str
    count: int = 1
    ranks: str = ""
    is_loss: bool = False


class FileEntry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file that the command wrote, as a path from its working directory."""

    path: str
    note: str = ""


class RunEntry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which run the figures are of; `command` recorded it, if another command did."""

    mesh: str
    world_size: int
    ranks: str
    is_simulated: bool
    torch_version: str
    instruments: tuple[str, ...]
    command: str = ""


class ErrorEntry(Struct, frozen=True, kw_only=True):
    """Why the command failed: sentences with the fact, the place and the remedy."""

    message: str


class NextEntry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A command that is useful now, and the question that it answers."""

    command: str
    purpose: str = ""


class Truncation(Struct, frozen=True, kw_only=True):
    """How many entries of which list were left out, and commands that print them."""

    left_out: dict[str, int]
    commands: tuple[str, ...]


class CommandResult(Struct, frozen=True, kw_only=True):
    """What a command did, found and wrote.

    `summary` has the key figures in sentences. `messages` are what the command printed to standard
    error beside progress. `next` are commands that are useful now.
    """

    format: Literal["shardscope.result"] = FORMAT
    schema: Literal[1] = SCHEMA
    shardscope_version: str
    command: str
    exit_code: int
    verdict: CommandStatus
    summary: str
    error: ErrorEntry | None = None
    findings: tuple[FindingEntry, ...] = ()
    gaps: tuple[GapEntry, ...] = ()
    figures: Figures = Figures()
    run: RunEntry | None = None
    files: tuple[FileEntry, ...] = ()
    next: tuple[NextEntry, ...] = ()
    messages: tuple[str, ...] = ()
    truncated: Truncation | None = None


class RecordingSummary(Struct, frozen=True, kw_only=True):
    """The parts of a result that a recording gives."""

    summary: str
    findings: tuple[FindingEntry, ...]
    gaps: tuple[GapEntry, ...]
    figures: Figures
    run: RunEntry
    next: tuple[NextEntry, ...]

    @property
    def has_problems(self) -> bool:
        """Whether a finding is a warning or an error."""
        return any(finding.severity != Severity.INFO for finding in self.findings)


def summarize_recording(recording: Recording, files: Sequence[str] = ()) -> RecordingSummary:
    """Read a recording's key figures, findings and gaps; identical layers and ranks are folded.

    `files` have the recording, for the commands that are suggested.
    """
    rank_sets = fold_ranks(recording)
    verdict = judge(recording, rank_sets)
    return RecordingSummary(
        summary=_write_summary(recording, rank_sets, verdict),
        findings=_order_findings(map(_read_finding, group_findings(recording.findings))),
        gaps=_read_gaps(recording),
        figures=read_figures(recording, rank_sets),
        run=_read_run(recording),
        next=tuple(
            NextEntry(command=item.command, purpose=item.purpose)
            for item in suggest_commands(verdict, recording, files)
        ),
    )


def _write_summary(
    recording: Recording, rank_sets: tuple[IdenticalRanks, ...], verdict: RunVerdict
) -> str:
    """The verdict, the run, its key metrics, and the number of findings and gaps."""
    is_judged = verdict.concerns[0].rule != NOTHING_JUDGED
    judged = verdict.sentence if is_judged else verdict.unchecked_words
    facts = ", ".join(list_run_facts(recording))
    metrics = [metric.words.rstrip(".") for metric in list_key_metrics(recording, rank_sets)]
    parts = [judged.rstrip("."), facts, *metrics, _describe_problems(recording)]
    return ". ".join(filter(None, parts)) + "."


def _describe_problems(recording: Recording) -> str:
    counts = Counter(finding.severity for finding in recording.findings)
    found = ", ".join(
        plural(counts[severity], f"{severity} finding")
        for severity in (Severity.ERROR, Severity.WARNING, Severity.INFO)
        if counts[severity]
    )
    gaps = plural(len(recording.gaps), "gap") if recording.gaps else "no gaps"
    return f"{found or 'no findings'}; {gaps}"


def _order_findings(findings: Iterable[FindingEntry]) -> tuple[FindingEntry, ...]:
    """The gravest first, and of those the ones that cost most."""
    order = [str(severity) for severity in Severity]
    return tuple(
        sorted(
            findings,
            key=lambda entry: (
                order.index(entry.severity),
                -(entry.sent_bytes or entry.memory_bytes or 0),
            ),
        )
    )


def _read_run(recording: Recording) -> RunEntry:
    run = recording.run
    return RunEntry(
        mesh=name_mesh(run.axes),
        world_size=run.world_size,
        ranks=f"{format_ranks(run.ranks) or 'none'} ({count_ranks(run.ranks):,} recorded)",
        is_simulated=run.is_simulated,
        torch_version=run.torch_version,
        instruments=run.instruments,
        command=run.command,
    )


def _read_finding(group: Sequence[Finding]) -> FindingEntry:
    first = group[0]
    subject, fact, remedy = (
        join_layers_in_texts([getattr(finding, field) for finding in group])
        for field in ("subject", "fact", "remedy")
    )
    ranks = sorted({finding.rank for finding in group if finding.rank is not None})
    return FindingEntry(
        rule=first.rule,
        severity=str(first.severity),
        subject=subject,
        fact=fact,
        remedy=remedy,
        count=len(group),
        ranks=format_ranks(compress_ranks(ranks)),
        line=name_line(first.source),
        code=read_code(first.source),
        num_collectives=_sum_cost(group, "num_collectives"),
        sent_bytes=_sum_cost(group, "sent_bytes"),
        memory_bytes=_sum_cost(group, "memory_bytes"),
    )


def _sum_cost(group: Sequence[Finding], field: str) -> int | None:
    """What findings of several layers cost the rank that they cost most; None is not known."""
    sums: Counter[int | None] = Counter()
    for finding in group:
        cost = getattr(finding, field)
        if cost is not None:
            sums[finding.rank] += cost
    return max(sums.values(), default=None)


def _read_gaps(recording: Recording) -> tuple[GapEntry, ...]:
    return tuple(
        GapEntry(
            place=gap.place,
            fact=gap.fact,
            count=max(1, len(ranks)),
            ranks=format_ranks(compress_ranks(sorted(set(ranks)))),
            is_loss=gap.is_loss,
        )
        for gap, ranks in fold_problem_ranks(recording.gaps)
    )


def encode_result(result: CommandResult, more: Sequence[str] = ()) -> bytes:
    """Encode a result within `MAX_TOKENS`; fields and their entries have lines of their own.

    Args:
        result: The result.
        more: Commands that print what is left out, if anything is.
    """
    document: dict[str, Any] = _shorten_texts(msgspec.to_builtins(result))
    left_out: Counter[str] = Counter()
    for path, items in list(_walk_lists(document)):
        if len(items) > _MAX_ITEMS:
            left_out[path] += len(items) - _MAX_ITEMS
            del items[_MAX_ITEMS:]
    while True:
        if left_out:
            document["truncated"] = {"left_out": dict(sorted(left_out.items())), "commands": more}
        data = _format_document(document)
        excess = estimate_tokens(data) - MAX_TOKENS
        path, num_dropped = _drop_entries(document, excess) if excess > 0 else ("", 0)
        if not num_dropped:
            return data
        left_out[path] += num_dropped


def estimate_tokens(data: bytes) -> int:
    """The most tokens that text takes: one for each digit, and 2.4 bytes of other text for one."""
    num_digits = len(data) - len(data.translate(None, b"0123456789"))
    return num_digits + math.ceil((len(data) - num_digits) / _BYTES_PER_TOKEN)


def _drop_entries(document: dict[str, Any], excess: int) -> tuple[str, int]:
    """Drop the last entries of the list that takes most room; return its path, and how many.

    As many as have `excess` tokens together, or make another list the largest.
    """
    lists = {
        path: items
        for path, items in _walk_lists(document)
        if items and not path.startswith("truncated")
    }
    sizes = {
        path: estimate_tokens(encode_json(items)) // (2 if path in _HALVED else 1)
        for path, items in lists.items()
    }
    if not sizes:
        return "", 0
    largest, *others = sorted(sizes, key=sizes.__getitem__, reverse=True)
    wanted = min(excess, sizes[largest] - (sizes[others[0]] if others else 0))
    num_dropped = 0
    while lists[largest] and (wanted > 0 or not num_dropped):
        wanted -= estimate_tokens(encode_json(lists[largest].pop()))
        num_dropped += 1
    return largest, num_dropped


def _walk_lists(value: Any, path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """All lists of objects, texts or rows in the document, with their paths: `figures.table.rows`.

    A list within an entry of another list is found first, so that its length is limited, too.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _walk_lists(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and not all(isinstance(item, int | float) for item in value):
        for index, item in enumerate(value):
            if isinstance(item, dict):
                yield from _walk_lists(item, f"{path}[{index}]")
        yield path, value


def _shorten_texts(value: Any) -> Any:
    if isinstance(value, str):
        # A terminal would obey control characters; line breaks are harmless.
        text = "\n".join(map(escape_controls, value[: _MAX_TEXT + 1].split("\n")))
        return text if len(value) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"
    if isinstance(value, dict):
        return {key: _shorten_texts(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shorten_texts(item) for item in value]
    return value


def _format_document(document: dict[str, Any]) -> bytes:
    """JSON with a line for each field, and for each entry of a list or object among them."""
    fields = [
        b"%s: %s" % (encode_json(key), _format_field(value)) for key, value in document.items()
    ]
    return b"{\n" + b",\n".join(fields) + b"\n}\n"


def _format_field(value: Any) -> bytes:
    if isinstance(value, list) and value:
        return b"[\n" + b",\n".join(map(encode_json, value)) + b"\n]"
    if isinstance(value, dict) and value:
        parts = [b"%s: %s" % (encode_json(key), encode_json(part)) for key, part in value.items()]
        return b"{\n" + b",\n".join(parts) + b"\n}"
    return encode_json(value)
