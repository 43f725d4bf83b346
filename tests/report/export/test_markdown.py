"""Markdown for pull requests: its content, that names are escaped, and its maximum length."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from msgspec.structs import replace

from compared_recordings import (
    make_explanation,
    make_memory,
    make_module,
    make_pair,
    make_parameter,
    make_traced,
)
from sample_recordings import (
    HOSTILE_NAMES,
    make_diagnosed,
    make_holdings,
    make_parallel,
    make_recording,
    make_run,
    make_varied,
)
from shardscope.record import Finding, Gap, MemoryKind, Severity
from shardscope.report.compare.changes_markdown import render_changes_markdown
from shardscope.report.compare.compare_recordings import compare
from shardscope.report.export.markdown import render_markdown
from shardscope.report.text.markdown_text import make_code, make_prose

markdown_it = pytest.importorskip("markdown_it")
pytest.importorskip("linkify_it")  # what GitHub makes links of, it does too

_OURS = {"h2", "h3", "p", "table", "thead", "tbody", "tr", "th", "td", "code", "strong", "br"} | {
    "ul",
    "li",
    "em",
}
TRICKS = (
    *HOSTILE_NAMES,
    "a|b",
    "a\\|b",
    "`code`",
    "``",
    "\\",
    "@everyone",
    "see @torvalds/kernel and #1 or GH-7",
    "https://evil.example/x www.evil.example mail@evil.example",
    "<img src=x onerror=alert(1)>",
    "<!-- gone",
    "![x](https://evil.example/p.png)",
    "[click](javascript:alert(1))",
    "**bold** _it_ ~~no~~ $x^2$",
    "&lt;b&gt; &amp;",
    "# heading",
    "- item",
    "</code></td></table>",
)


class Page(HTMLParser):
    """What a reader would see: tags, and text in code and outside it."""

    def __init__(self, markdown: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.code: list[str] = []
        self.prose: list[str] = []
        self.num_cells: list[int] = []
        self._in_code = 0
        html = markdown_it.MarkdownIt("gfm-like").render(markdown)
        assert "<!--" not in html
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._in_code += tag == "code"
        if tag == "tr":
            self.num_cells.append(0)
        if tag in ("td", "th"):
            self.num_cells[-1] += 1
            attrs = [
                attribute for attribute in attrs if attribute[0] != "style"
            ]  # which side numbers stand on
        assert attrs == []

    def handle_endtag(self, tag: str) -> None:
        self._in_code -= tag == "code"

    def handle_data(self, data: str) -> None:
        (self.code if self._in_code else self.prose).append(data)


@pytest.mark.parametrize("name", TRICKS)
def test_a_hostile_name_is_shown_as_it_is_in_a_table(name):
    page = Page(f"| a | b |\n| --- | --- |\n| {make_code(name)} | {make_prose(name)} |\n")
    assert page.tags <= {"table", "thead", "tbody", "tr", "th", "td", "code"}
    assert page.num_cells == [2, 2]
    if name.isprintable() and name.strip() and len(name) < 100:
        assert "".join(page.code).strip() == name.strip()
        prose = "".join(page.prose).replace("\u200b", "")
        assert name.strip() in prose


@pytest.mark.parametrize("name", TRICKS)
def test_a_hostile_name_at_the_start_of_a_line_makes_no_block(name):
    assert Page(make_prose(name) + "\n").tags <= {"p"}


def test_names_are_neither_mentions_nor_links():
    for name in TRICKS:
        prose = "".join(Page(make_prose(name)).prose)
        for forbidden in ("@e", "@t", "#1", "GH-", "://", "www."):
            assert forbidden not in prose


def test_hostile_recordings_leave_only_tags_of_ours(any_recording):
    against = make_recording(findings=(), gaps=(Gap(place="x", fact="y"),))
    for text in (render_markdown(any_recording), render_markdown(any_recording, against=against)):
        page = Page(text)
        assert page.tags <= _OURS
        assert len(text.encode()) <= 60_000
        assert not {"\x00", "\x07", "\x1b", "\r", "\u202e"} & set(text)


def test_a_summary_says_what_ran_and_what_it_cost(llama):
    text = render_markdown(llama)
    assert text.startswith("## shardscope: `Llama`\n\ndp=128 × tp=8 · rank 0 of 1,024 · simulated")
    assert "356 collectives per rank · 12.9 GiB input · 21.5 GiB sent (ring estimate)" in text
    assert "### Collectives (per rank, rank 0 of 1,024, simulated)" in text
    assert "| `tp` | all_gather | 128 | 1.00 GiB | 7.00 GiB | 33% |" in text
    assert "| `layers.{0…31}.attention` | 64 | 3.50 GiB | 16% |" in text
    assert "What changed" not in text


def test_findings_memory_breaks_and_gaps_are_in_the_summary():
    finding = Finding(
        rule="torn-tie", severity=Severity.ERROR, subject="head", fact="It is two.", remedy="Tie."
    )
    recording = make_recording(
        findings=(finding, replace(finding, rank=1)),
        gaps=(Gap(place="stream", fact="It ends early."),),
        memory=(
            make_memory((MemoryKind.PARAMETERS, "a", 1 << 20), needed_bytes=2, device_bytes=1),
        ),
        explanations=(make_explanation((7, "print(x)", 2)), make_explanation(rank=1)),
    )
    text = render_markdown(recording)
    assert "### Findings (1)" in text
    assert "- 🔴 **error** `torn-tie` `head`: It is two.<br>→ Tie." in text
    needs = "needs 2 B including the CUDA context: **does not fit** in 1 B"
    assert f"**1.00 MiB** at the peak, in backward · {needs}" in text
    assert "### Memory, rank 0 (estimated: the step ran on tensors without data)" in text
    assert "| parameters | 1.00 MiB | 100% |" in text
    assert "1 graph, 1 line that breaks graphs, 0 recompilations" in text
    assert "| `/home/me/train.py:7` | 2 | call of a builtin |" in text
    assert "- `stream`: It ends early." in text
    assert text.count("### torch.compile") == 1


def test_views_without_a_section_have_a_metric():
    diagnosed = make_diagnosed()
    text = render_markdown(diagnosed)
    assert text.count("\n- compiler: ") == len(diagnosed.diagnoses)
    assert ": hang\n" in text
    assert "No collectives" not in text
    assert "\n- proof: " in render_markdown(make_parallel())
    silent = make_recording(run=make_run(instruments=("trace",)))
    assert "\n\nNo collectives were issued while it was traced." in render_markdown(silent)
    assert "\n- sharding: " in render_markdown(make_holdings())


def test_changes_are_a_table_of_totals_and_a_table_for_each_area():
    before, after = make_pair()
    text = render_markdown(after, against=before, titles=("main.json", "pr.json"))
    assert "### What changed: `main.json` → `pr.json`" in text
    assert "| 🔴 | collectives | 48 | 52 | 4 | · | · |" in text
    assert "| ⚪&nbsp;changed | `torch` | 2.13.0 | 2.14.0 |" in text
    (row,) = [line for line in text.splitlines() if "`all_reduce[tp] in forward`" in line]
    assert row.startswith("| 🔴&nbsp;added | `layers.{0…3}.attention.wo` ×4 | ")
    assert row.endswith(" | – | 1 |")
    assert "Inputs changed in the same way (1 row)." in text


def test_no_change_and_notes_are_stated():
    traced = make_traced({"a": 1})
    assert "No change." in render_markdown(traced, against=traced)
    profiled = make_recording(memory=(make_memory(),))
    assert "only the second recording has memory: not compared" in render_markdown(
        profiled, against=traced
    )


def test_a_large_comparison_stays_within_the_limit_and_counts_what_is_left_out():
    names = [f"{'x' * 120}{index:04}é" for index in range(500)]
    modules = tuple(make_module(name, make_parameter(dtype=name)) for name in names)
    findings = tuple(
        Finding(rule=name, severity=Severity.ERROR, subject=name, fact=9 * name, remedy=9 * name)
        for name in names
    )
    before = make_recording()
    after = replace(
        make_varied(),
        modules=modules,
        findings=findings,
        collectives=make_traced(dict.fromkeys(names, 1)).collectives,
    )
    text = render_markdown(after, against=before)
    assert 40_000 < len(text.encode()) <= 60_000
    assert "… 460 more" in text  # findings, of which 40 have room
    assert text.splitlines()[-1].endswith("left out for lack of space.*")
    assert Page(text).tags <= _OURS
    alone = render_changes_markdown(compare(before, after))
    assert len(alone.encode()) <= 60_000
