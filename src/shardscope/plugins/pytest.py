"""The pytest plugin: the fixture of a simulated world. Assertions are in `shardscope.testing`.

Loaded whenever pytest runs, so it imports neither torch nor other modules of ours until it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from shardscope.world import World

__all__ = ["pytest_addoption", "pytest_configure", "shardscope_world"]

_MARKER = "shardscope"
_ARGUMENTS = ("mesh", "rank", "device")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the settings of the plugin; called by pytest.

    Args:
        parser: pytest's parser of options.
    """
    parser.addini(
        "shardscope_mesh",
        "Axes of the world that the fixture shardscope_world simulates, such as dp=2,tp=4; "
        "@pytest.mark.shardscope(mesh={...}) names others for a test.",
        default="",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of the plugin; called by pytest.

    Args:
        config: pytest's configuration.
    """
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(mesh, rank=0, device='cpu'): the world that shardscope_world simulates.",
    )


@pytest.fixture
def shardscope_world(request: pytest.FixtureRequest) -> Iterator[World]:
    """A simulated world of the axes that the test's marker or the setting shardscope_mesh names."""
    from shardscope.world import simulate

    with simulate(**_read_options(request)) as world:
        yield world


def _read_options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of the nearest marker, with the mesh of the setting if it has none."""
    marker = request.node.get_closest_marker(_MARKER)
    options = {} if marker is None else dict(zip(_ARGUMENTS, marker.args, strict=False))
    options |= {} if marker is None else marker.kwargs
    return options if "mesh" in options else options | {"mesh": _read_setting(request.config)}


def _read_setting(config: pytest.Config) -> dict[str, int]:
    """The setting `dp=2,tp=4` as sizes of axes, by name."""
    text = config.getini("shardscope_mesh")
    axes: dict[str, int] = {}
    for part in text.split(",") if text else ():
        name, _, size = (piece.strip() for piece in part.partition("="))
        if not name or not size.isdecimal():
            raise pytest.UsageError(
                f"shardscope_mesh = {text} is not understood at {part.strip()!r}. Give the name "
                "and size of each axis, such as dp=2,tp=4."
            )
        axes[name] = int(size)
    if not axes:
        raise pytest.UsageError(
            "shardscope_world does not know which world to simulate. Mark the test with "
            '@pytest.mark.shardscope(mesh={"dp": 2, "tp": 4}), or set shardscope_mesh = dp=2,tp=4.'
        )
    return axes
