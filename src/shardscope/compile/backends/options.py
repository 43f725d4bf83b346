"""What a backend is told by `options=`: read in one place, and refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from shardscope.errors import BackendError

__all__ = ["Option", "one_of", "read_options", "refuse"]


@dataclass(frozen=True)
class Option:
    """One option: what it takes, in words; whether a value is that; what it is if not given."""

    takes: str
    accepts: Callable[[Any], bool]
    default: Any = None
    is_required: bool = False


def one_of(*choices: str, default: str) -> Option:
    """An option that takes one of several words."""
    takes = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
    return Option(takes, lambda value: value in choices, default)


def read_options(
    backend: str, given: Mapping[str, Any] | None, mode: str | None, known: Mapping[str, Option]
) -> dict[str, Any]:
    """A value for each option that `backend` knows: the one given, or its default."""
    _refuse_mode(backend, mode)
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise refuse(backend, f"was given options {given!r}, which are not a dict", known)
    _refuse_unknown(backend, given, known)
    for name, option in known.items():
        if name in given:
            _refuse_wrong(backend, name, given[name], option, known)
        elif option.is_required:
            raise refuse(backend, f"needs the option {name!r}: {option.takes}", known)
    return {name: given.get(name, option.default) for name, option in known.items()}


def refuse(backend: str, fact: str, known: Mapping[str, Option]) -> BackendError:
    """The error that says `fact` of a backend, and what it takes."""
    return BackendError(f"Backend shardscope_{backend} {fact}. {_list(known)}")


def _refuse_mode(backend: str, mode: str | None) -> None:
    if mode not in (None, "default"):
        raise BackendError(
            f"Backend shardscope_{backend} was given mode={mode!r}, but modes only tune "
            "Inductor. Remove mode=."
        )


def _refuse_unknown(backend: str, given: Iterable[Any], known: Mapping[str, Option]) -> None:
    for name in given:
        if name not in known:
            near = get_close_matches(str(name), known, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise refuse(backend, f"has no option {name!r}{hint}", known)


def _refuse_wrong(
    backend: str, name: str, value: Any, option: Option, known: Mapping[str, Option]
) -> None:
    # Comparing a tensor or an array with a choice is no bool; that is a wrong value as well.
    try:
        is_accepted = bool(option.accepts(value))
    except (TypeError, ValueError, RuntimeError):
        is_accepted = False
    if not is_accepted:
        raise refuse(backend, f"was given {name}={value!r}, not {option.takes}", known)


def _list(known: Mapping[str, Option]) -> str:
    if not known:
        return "It takes no options."
    return f"It takes {'; '.join(f'{name} ({option.takes})' for name, option in known.items())}."
