"""Writes recordings with the figures of their pages, which the browser must compute likewise.

python web/figures_cases.py > web/src/store/figures.cases.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from shardscope.report.html.html import build_page

TESTS = Path(__file__).resolve().parents[1] / "tests"


def write_cases() -> str:
    """Recordings of several ranks and of memory, as JSON, with the figures of their pages."""
    sys.path.insert(0, str(TESTS))
    import sample_recordings
    from compared_recordings import make_pair

    varied = sample_recordings.make_varied()
    # Texts of a page are sanitized: names with control characters are not found in a recording.
    plain = tuple(call for call in varied.collectives if call.axis is None)
    recordings = (make_pair()[1], msgspec.structs.replace(varied, collectives=plain))
    fields = ("run", "collectives", "memory", "format")
    cases = [
        {
            "recording": {
                field: msgspec.to_builtins(getattr(recording, field)) for field in fields
            },
            "figures": msgspec.to_builtins(build_page(recording).figures),
        }
        for recording in recordings
    ]
    return json.dumps(cases, ensure_ascii=False, sort_keys=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(write_cases())
