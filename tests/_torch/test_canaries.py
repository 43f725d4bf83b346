"""One canary per private torch name: when torch moves it, a sentence says what is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from canaries import CANARIES, resolve
from private_names import find_private_names
from shardscope._torch.calls import OPS

SHIMS = Path(__file__).resolve().parents[2] / "src" / "shardscope" / "_torch"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CANARIES)
def test_torch_still_has_the_name(name: str) -> None:
    canary = CANARIES[name]
    sentence = (
        f"torch moved {name.removeprefix('.')}; _torch/{canary.shims} needs it to {canary.purpose}."
    )
    try:
        found = resolve(name) if canary.probe is None else canary.probe()
    except Exception as error:  # noqa: BLE001 - whatever it is, the sentence says what it means
        pytest.fail(f"{sentence} ({type(error).__name__}: {error})")
    assert found, sentence


OPS_BY_NAME = set(OPS) | {name for ops in OPS.values() for name in ops}


@pytest.mark.parametrize("path", sorted(SHIMS.glob("*.py")), ids=lambda path: path.name)
def test_every_private_name_has_a_canary_that_names_its_shim(path: Path) -> None:
    used = {name for name in find_private_names(path) if name.lstrip(".") not in OPS_BY_NAME}
    used.discard("torch._C")
    missing = sorted(name for name in used if name not in CANARIES)
    assert missing == [], f"{path.name} uses {missing}; write a canary for each."
    unnamed = sorted(name for name in used if path.name not in CANARIES[name].shims)
    assert unnamed == [], f"The canaries of {unnamed} do not say that {path.name} needs them."


def test_no_canary_watches_a_name_that_nobody_uses() -> None:
    used = {name for path in SHIMS.glob("*.py") for name in find_private_names(path)}
    assert sorted(set(CANARIES) - used) == []


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(SHIMS.parent.rglob("*.py")) if SHIMS not in path.parents],
    ids=lambda path: str(path.relative_to(SHIMS.parent)),
)
def test_only_the_shims_touch_private_torch_names(path: Path) -> None:
    private = find_private_names(path)
    names = sorted(name for name in private if name.startswith("torch.") or name in CANARIES)
    assert names == [], f"{path.name} uses private names of torch; make a shim in _torch/."


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
