"""A recording as one HTML file that opens offline, sends no requests and runs only our own code."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from shardscope.record import Recording, escape_controls
from shardscope.record.encoding import encode_json
from shardscope.report.compare.changes_text import judge_changes
from shardscope.report.compare.compare_recordings import compare
from shardscope.report.html.communication_rows import ServedCalls, make_communication
from shardscope.report.html.comparison_rows import build_comparison
from shardscope.report.html.compiler_rows import make_compiler, make_coverage
from shardscope.report.html.correctness_rows import make_proof
from shardscope.report.html.earlier_modules import make_earlier, make_earlier_recording
from shardscope.report.html.figure_rows import make_figures
from shardscope.report.html.memory_rows import make_memory
from shardscope.report.html.module_rows import ModuleTree, make_modules
from shardscope.report.html.overview_rows import (
    make_empty_views,
    make_facts,
    make_findings,
    make_gaps,
    make_run,
    make_terms,
    make_verdict,
)
from shardscope.report.html.page import Page
from shardscope.report.html.sharding_rows import make_sharding
from shardscope.report.model.select import infer_modules
from shardscope.report.model.traffic_totals import (
    TrafficSummary,
    summarize_traffic,
)
from shardscope.report.text.verdict import judge

_Record = TypeVar("_Record", bound=Struct)


def sanitize_page(record: _Record) -> _Record:
    """Return the record with control and bidirectional characters in its texts escaped.

    Line breaks are preserved, except those that only Unicode defines.
    """
    changed = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        safe = _make_safe(value)
        if safe is not value:
            changed[name] = safe
    return replace(record, **changed) if changed else record


def _make_safe(value: Any) -> Any:
    if isinstance(value, str):
        return _make_text_safe(value)
    if isinstance(value, Struct):
        return sanitize_page(value)
    # Columns of numbers make up most of a page and need no check of each element.
    if isinstance(value, tuple) and value and not isinstance(value[0], int | float):
        safe = tuple(map(_make_safe, value))
        return value if all(map(_is, safe, value)) else safe
    return value


def _is(left: object, right: object) -> bool:
    return left is right


def _make_text_safe(text: str) -> str:
    if text.isascii() and text.isprintable():
        return str(text)
    return "\n".join("\t".join(map(escape_controls, line.split("\t"))) for line in text.split("\n"))


def build_page(
    recording: Recording,
    *,
    against: Recording | None = None,
    titles: tuple[str, str] = ("before", "after"),
    files: Sequence[str] = (),
    summary: TrafficSummary | None = None,
    served: ServedCalls | None = None,
    findings_note: str = "",
) -> Page:
    """Build the page of a recording, compared with the earlier recording `against` if given.

    `files` are those of the recording, which commands on the page name. A server passes the
    collectives that it sends when the page asks for them, the `summary` of all collectives if not
    all of them are in the recording, and why findings may be missing.
    """
    page = _build_views(
        recording, against=against, titles=titles, files=files, summary=summary, served=served
    )
    page = replace(page, run=replace(page.run, findings_note=findings_note))
    figures, parts = make_figures(page)
    page = replace(page, figures=figures, figure_parts=parts)
    if against is not None:
        earlier_page = _build_views(against)
        earlier_figures, earlier_parts = make_figures(earlier_page)
        earlier = make_earlier_recording(page, earlier_page, recording, against)
        page = replace(
            page,
            earlier_figures=earlier_figures,
            earlier=replace(earlier, figure_parts=earlier_parts),
        )
    return sanitize_page(page)


def _build_views(
    recording: Recording,
    *,
    against: Recording | None = None,
    titles: tuple[str, str] = ("", ""),
    files: Sequence[str] = (),
    summary: TrafficSummary | None = None,
    served: ServedCalls | None = None,
) -> Page:
    recording = infer_modules(recording)
    summary = summary or summarize_traffic(recording)
    rank_sets = summary.rank_sets
    tree = ModuleTree(recording, rank_sets)
    index = tree.index
    verdict = judge(recording, rank_sets)
    changes = compare(against, recording, titles=titles) if against else None
    if changes is not None:
        verdict = verdict.with_concern(judge_changes(changes))
    modules = make_modules(recording, tree)
    if against:
        modules = replace(modules, earlier=make_earlier(modules, recording, against))
    return Page(
        run=make_run(recording, files),
        verdict=make_verdict(
            recording,
            verdict,
            index,
            tree.subjects,
            files=files,
            against=titles[0] if against and files else "",
        ),
        facts=make_facts(recording, rank_sets),
        findings=make_findings(recording, rank_sets, index, tree.subjects),
        gaps=make_gaps(recording),
        modules=modules,
        communication=make_communication(recording, summary, index, served),
        sharding=make_sharding(recording, index),
        coverage=make_coverage(recording, index),
        compiler=make_compiler(recording, index),
        memory=make_memory(recording, index),
        proof=make_proof(recording, index),
        comparison=build_comparison(against, recording, index, titles=titles, changes=changes)
        if against
        else None,
        empty_views=make_empty_views(recording, files),
        terms=make_terms(),
        sources=index.sources(),  # last: views ask for lines as they are made
    )


# Characters that could end a script element, start a comment in it, or break a line of JavaScript.
_ESCAPES = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}
_TABLE = str.maketrans(_ESCAPES)

_DOCUMENT = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="shardscope">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript>{apology}</noscript>
<div id="app"></div>
<script type="application/json" id="page">{data}</script>
<script>{script}</script>
</body>
</html>
"""
_APOLOGY = (
    "This report needs JavaScript. Allow scripts for this file, or run `shardscope show` for "
    "the same figures in a terminal."
)


def render_html(
    recording: Recording,
    *,
    against: Recording | None = None,
    titles: tuple[str, str] = ("before", "after"),
    files: Sequence[str] = (),
) -> str:
    """Render the document, deterministically.

    `titles` name the two recordings of a comparison, and `files` are those of `recording`.
    """
    return render_page(build_page(recording, against=against, titles=titles, files=files))


def render_page(page: Page, *, is_served: bool = False) -> str:
    """Render the document of a page that was built already; a served one may ask its server."""
    bundle = files("shardscope.report") / "bundle"
    script = _check_inline((bundle / "app.js").read_text(encoding="utf-8"), "</script", "<!--")
    style = _check_inline((bundle / "app.css").read_text(encoding="utf-8"), "</style")
    return _DOCUMENT.format(
        policy=_make_policy(script, is_served=is_served),
        title=escape(page.run.title),
        style=style,
        apology=escape(_APOLOGY),
        data=encode_page(page),
        script=script,
    )


def encode_page(page: Page) -> str:
    """Encode the page as JSON that is safe to embed in HTML."""
    return encode_json(page).decode("utf-8").translate(_TABLE)


def _check_inline(text: str, *ends: str) -> str:
    for end in ends:
        assert end not in text.lower(), f"the bundle holds {end}, which would end its element"
    return text


def _make_policy(script: str, *, is_served: bool) -> str:
    """Return a policy that forbids scripts other than ours, and requests but to our own server."""
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
        + ("; connect-src 'self'" if is_served else "")
    )
