"""One canary per private torch name: when torch moves it, a sentence says what is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from canaries import CANARIES, Canary, resolve
from older_torch import IS_OLDER
from private_names import find_private_names
from shardscope._torch.calls import OPS

SHIMS = Path(__file__).resolve().parents[2] / "src" / "shardscope" / "_torch"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_torch_still_has_every_name() -> None:
    known = [name for name, canary in CANARIES.items() if not (canary.is_new and IS_OLDER)]
    moved = [sentence for name in known if (sentence := tell_what_moved(name))]
    assert moved == [], "\n".join(moved)


def tell_what_moved(name: str) -> str | None:
    """What is lost with a name that torch has no more; None where it has it."""
    canary = CANARIES[name]
    sentence = (
        f"torch moved {name.removeprefix('.')}; _torch/{canary.shims} needs it to {canary.purpose}."
    )
    try:
        found = resolve(name) if canary.probe is None else canary.probe()
    except Exception as error:  # noqa: BLE001 - whatever it is, the sentence says what it means
        return f"{sentence} ({type(error).__name__}: {error})"
    return None if found else sentence


def test_a_name_that_torch_moved_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Canary("calls.py", "hear what is said")
    monkeypatch.setitem(CANARIES, "torch._never_there", gone)
    told = tell_what_moved("torch._never_there")
    assert told is not None
    assert told.startswith("torch moved torch._never_there; _torch/calls.py needs it to hear what")


OPS_BY_NAME = set(OPS) | {name for ops in OPS.values() for name in ops}


def test_every_private_name_has_a_canary_that_names_its_shim() -> None:
    missing, unnamed = [], []
    for path in sorted(SHIMS.glob("*.py")):
        used = {name for name in find_private_names(path) if name.lstrip(".") not in OPS_BY_NAME}
        used.discard("torch._C")
        missing += [(path.name, name) for name in used if name not in CANARIES]
        unnamed += [
            (path.name, name)
            for name in used
            if name in CANARIES and path.name not in CANARIES[name].shims
        ]
    assert missing == [], "write a canary for each"
    assert unnamed == [], "the canary of each does not say that this shim needs it"


def test_no_canary_watches_a_name_that_nobody_uses() -> None:
    used = {name for path in SHIMS.glob("*.py") for name in find_private_names(path)}
    assert sorted(set(CANARIES) - used) == []


def test_only_the_shims_touch_private_torch_names() -> None:
    others = [path for path in sorted(SHIMS.parent.rglob("*.py")) if SHIMS not in path.parents]
    assert len(others) > 100
    touched = [
        (str(path.relative_to(SHIMS.parent)), name)
        for path in others
        for name in sorted(find_private_names(path))
        if name.startswith("torch.") or name in CANARIES
    ]
    assert touched == [], "private names of torch; make a shim in _torch/"


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("import torch._dynamo", {"torch._dynamo"}),
        ("import torch._dynamo as d; d.reset", {"torch._dynamo"}),
        ("from torch._guards import detect_fake_mode", {"torch._guards.detect_fake_mode"}),
        ("from torch.autograd import _get_sequence_nr", {"torch.autograd._get_sequence_nr"}),
        ("from torch.autograd import graph; graph._engine", {"torch.autograd.graph._engine"}),
        ("import torch; torch._C._node()", {"torch._C", "torch._C._node"}),
        ("node._sequence_nr()", {"._sequence_nr"}),
        ("call().one._two", {"._two"}),
        ("getattr(state, '_fsdp_param_group', None)", {"._fsdp_param_group"}),
        ("import torch; torch.__version__", set()),
        ("from torch.distributed.tensor import DTensor", set()),
        ("from shardscope._torch.calls import OPS", set()),
        ("self._own", set()),
        ("class A:\n    __slots__ = ('_own',)", set()),
    ],
)
def test_private_names_are_found_however_they_are_reached(
    tmp_path: Path, line: str, names: set[str]
) -> None:
    file = tmp_path / "file.py"
    file.write_text(line)
    assert find_private_names(file) == names
