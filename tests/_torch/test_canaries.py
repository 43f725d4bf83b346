"""A canary for each private name of torch: a sentence says what is lost if torch moves it."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from pathlib import Path

import pytest

import shardscope._torch
from canaries import CANARIES, Canary
from lookup_probes import PROBES
from older_torch import TORCH
from private_names import find_early_names, find_private_names
from shardscope._torch.collectives.schema import LOCAL_OPS, OPS
from shardscope._torch.frames import find_roles
from shardscope._torch.private import all_needs, missing_names

SHIMS = Path(shardscope._torch.__path__[0])


def looked_up() -> dict[str, tuple[str, str]]:
    """Each name that is looked up when shims are imported: a shim that uses it, and its need."""
    for module in pkgutil.walk_packages(shardscope._torch.__path__, "shardscope._torch."):
        import_module(module.name)
    find_roles()
    return {name: (shim, need) for (shim, name), need in all_needs().items()}


NEEDS = looked_up()


def all_canaries() -> dict[str, Canary]:
    """All canaries by name; for names that are looked up, with the need stated in the shim."""
    needed = {name: Canary(need, PROBES[name]) for name, (_, need) in NEEDS.items()}
    return {**CANARIES, **needed}


def users_of(name: str) -> list[str]:
    """The file names of the shims that use a name."""
    lookups = [f"{shim}.py" for shim, looked in all_needs() if looked == name]
    paths = (path for path in SHIMS.rglob("*.py") if name in find_private_names(path))
    return sorted({*lookups, *(path.name for path in paths)})


def describe_moved(name: str, canary: Canary) -> str | None:
    """A sentence on what is lost if the probe of a name fails; None if it succeeds."""
    try:
        if canary.probe():
            return None
        reason = ""
    except Exception as error:  # noqa: BLE001 - any error means that the name is unusable
        reason = f" ({type(error).__name__}: {error})"
    return (
        f"torch moved {name.removeprefix('.')}; _torch/{', '.join(users_of(name))} needs it to "
        f"{canary.purpose}.{reason}"
    )


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_every_private_name_of_torch_works_as_needed() -> None:
    canaries = {
        name: canary
        for name, canary in all_canaries().items()
        if canary.since <= TORCH < canary.until
    }
    moved = [sentence for name in canaries if (sentence := describe_moved(name, canaries[name]))]
    assert moved == [], "\n".join(moved)


def test_every_name_that_is_looked_up_exists() -> None:
    assert missing_names() == []


def test_a_moved_name_is_described_in_a_sentence() -> None:
    moved = describe_moved("._sequence_nr", Canary("count nodes", lambda: False))
    assert moved == "torch moved _sequence_nr; _torch/autograd.py needs it to count nodes."


def test_every_name_that_is_looked_up_has_a_probe() -> None:
    assert sorted(set(NEEDS) - set(PROBES)) == [], "write a probe for each"
    assert sorted(set(PROBES) - set(NEEDS)) == [], "no shim looks these up"
    assert sorted(set(CANARIES) & set(PROBES)) == []


OPS_BY_NAME = {*OPS, *(name for ops in (*OPS.values(), *LOCAL_OPS.values()) for name in ops)}


def test_every_private_name_that_is_not_looked_up_has_a_canary() -> None:
    missing = [
        (path.name, name)
        for path in sorted(SHIMS.rglob("*.py"))
        for name in sorted(find_private_names(path))
        if name not in {*NEEDS, *CANARIES, "torch._C"} and name.lstrip(".") not in OPS_BY_NAME
    ]
    assert missing == [], "write a canary for each"


def test_every_canary_is_for_a_name_in_use() -> None:
    used = {name for path in SHIMS.rglob("*.py") for name in find_private_names(path)}
    assert sorted(set(CANARIES) - used) == []


def test_no_shim_needs_a_private_name_to_be_imported() -> None:
    early = [
        (path.name, name)
        for path in sorted(SHIMS.rglob("*.py"))
        for name in sorted(find_early_names(path))
    ]
    assert early == [], "look them up with find_name() of _torch/private.py"


def test_only_the_shims_touch_private_torch_names() -> None:
    other_files = [path for path in sorted(SHIMS.parent.rglob("*.py")) if SHIMS not in path.parents]
    assert len(other_files) > 100
    touched = [
        (str(path.relative_to(SHIMS.parent)), name)
        for path in other_files
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
        ("from shardscope._torch.collectives.schema import OPS", set()),
        ("self._own", set()),
        ("class A:\n    __slots__ = ('_own',)", set()),
    ],
)
def test_private_names_are_found_in_every_form(tmp_path: Path, line: str, names: set[str]) -> None:
    file = tmp_path / "file.py"
    file.write_text(line)
    assert find_private_names(file) == names
