"""The committed bundle is what the web folder's sources make; no Node is needed to see that."""

from __future__ import annotations

import hashlib
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "web"
BUNDLE = ROOT / "src" / "shardscope" / "report" / "bundle"
BESIDE = (
    "package-lock.json",
    "package.json",
    "sources_hash.ts",
    "tsconfig.json",
    "vite.config.ts",
)
MOST_BYTES = 300_000


def hash_sources() -> str:
    """As web/sources_hash.ts does when it builds."""
    files = [path.relative_to(WEB).as_posix() for path in (WEB / "src").rglob("*")]
    shipped = [path for path in files if (WEB / path).is_file() and is_shipped(path)]
    hashed = hashlib.sha256()
    for path in sorted([*BESIDE, *shipped]):
        content = (WEB / path).read_bytes()
        hashed.update(f"{path} {len(content)}\n".encode() + content)
    return hashed.hexdigest()


def is_shipped(path: str) -> bool:
    return not path.endswith((".test.ts", ".test.tsx", ".cases.json"))


def test_the_bundle_was_built_from_the_sources_that_are_here() -> None:
    built_from = (BUNDLE / "sources.sha256").read_text().strip()
    assert built_from == hash_sources(), (
        "web/ has changed since the bundle was built: run: make web"
    )


@pytest.mark.parametrize(
    ("script", "function", "written"),
    [
        ("page_types.py", "write_types", "src/page.ts"),
        ("units_cases.py", "write_cases", "src/parts/units.cases.json"),
        ("name_cases.py", "write_cases", "src/store/names.cases.json"),
        ("traffic_cases.py", "write_cases", "src/store/traffic.cases.json"),
        ("figures_cases.py", "write_cases", "src/store/figures.cases.json"),
    ],
)
def test_the_generated_types_and_cases_are_up_to_date(
    script: str, function: str, written: str
) -> None:
    actual = runpy.run_path(str(WEB / script))[function]()
    assert (WEB / written).read_text() == actual, "run: cd web && npm run types, then: make web"


def test_the_bundle_is_small_and_can_stand_inside_a_page() -> None:
    script, style = (BUNDLE / name for name in ("app.js", "app.css"))
    assert script.stat().st_size + style.stat().st_size <= MOST_BYTES
    text = script.read_text().lower()
    for harmful in ("</script", "<!--", "sourcemappingurl", "eval(", "new function"):
        assert harmful not in text
    assert "</style" not in style.read_text().lower()
    assert "url(" not in style.read_text().lower()
