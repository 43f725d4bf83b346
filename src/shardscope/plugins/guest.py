"""What a guest in somebody else's trainer minds: it comes when asked, and it breaks nothing.

Trainers take callbacks of their own class only. Importing us must not import a trainer, so that the
class is found when the first callback is made.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any, TypeVar

from shardscope.errors import PluginError
from shardscope.plugins.step_recorder import StepRecorder

__all__ = ["close_quietly", "find_bases", "harmless", "make_guest"]

GuestT = TypeVar("GuestT")
HookT = TypeVar("HookT", bound=Callable[..., None])


def make_guest(cls: type[GuestT], homes: Sequence[str], name: str, *, package: str) -> GuestT:
    """An object of the class, not initialized yet, that is of the trainers' class too."""
    bases = find_bases(homes, name, package=package)
    facts = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    made: object = object.__new__(type(cls.__name__, (cls, *bases), facts))
    assert isinstance(made, cls)
    return made


def find_bases(homes: Sequence[str], name: str, *, package: str) -> tuple[type, ...]:
    """The class `name` of each module that the program has imported, else of the first it can.

    Lightning lives under two names. A callback that is of both classes serves either.
    """
    loaded = [home for home in homes if home in sys.modules]
    for home in () if loaded else homes:
        if find_spec(home.split(".")[0]) is not None:
            loaded = [import_module(home).__name__]
            break
    if not loaded:
        raise PluginError(
            f"ShardscopeCallback needs {package}, which is not installed here. "
            f"Install it: pip install {homes[0].split('.')[0]}"
        )
    return tuple(getattr(sys.modules[home], name) for home in loaded)


def harmless(hook: HookT) -> HookT:
    """A hook of an object that has a `recorder`; what it raises becomes a warning."""

    @functools.wraps(hook)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - watching must not kill
            with suppress(Exception):
                self.recorder.give_up(error)

    return call  # type: ignore[return-value]


def close_quietly(recorder: StepRecorder) -> None:
    """When a callback is no more: write what it had, if nobody said that training was over."""
    try:
        recorder.close()
    except Exception as error:  # noqa: BLE001 - nobody is there to hear
        with suppress(Exception):
            recorder.give_up(error)
