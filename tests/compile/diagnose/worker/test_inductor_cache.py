"""Inductor's trials and headers are copied from the user's caches, and kernels are not."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from shardscope._torch.inductor import header_folder
from shardscope.compile.diagnose.worker.sandbox import Sandbox, seed_inductor_cache


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's: a trial, a kernel, headers, and one that is being written."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for name, text in {
        "cache/aa/trial.cpp": 'extern "C" void __avx_chk_kernel() {}',
        "cache/aa/trial.so": "library",
        "cache/aa/kernel.cpp": 'extern "C" void kernel() {}',
        "cache/aa/kernel.so": "library",
        "cache/bb/alone.cpp": 'extern "C" void __amx_chk_kernel() {}',
    }.items():
        write(tmp_path / name, text)
    for order in range(5):
        write(header_folder() / f"header{order}.h", "header", age_s=1000 + order)
        write(header_folder() / f"header{order}.h.gch", "compiled", age_s=1000 + order)
    write(header_folder() / "fresh.h", "header", age_s=0)
    write(header_folder() / "fresh.h.gch", "half of", age_s=0)
    return tmp_path


def write(path: Path, text: str, *, age_s: float = 1000) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    changed = path.stat().st_mtime - age_s
    os.utime(path, (changed, changed))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


def test_only_trials_and_the_newest_headers_are_copied(caches: Path) -> None:
    before = names(caches)
    with Sandbox(caches / "output") as sandbox:
        seed_inductor_cache(sandbox)
        assert names(sandbox.inductor_cache) == {"trial.cpp", "trial.so"}
        headers = header_folder(temporary=sandbox.temporary)
        newest = {f"header{order}" for order in range(2)}
        assert names(headers) == {f"{name}.h{end}" for name in newest for end in ("", ".gch")}
    assert names(caches) == before


def test_without_caches_there_is_nothing_to_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Sandbox(tmp_path / "output") as sandbox:
        seed_inductor_cache(sandbox)
        assert names(sandbox.folder) == set()
    assert not (tmp_path / "none").exists()
