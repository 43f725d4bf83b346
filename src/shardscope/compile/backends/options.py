"""Reads the `options=` of a backend; BackendError if they are wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from shardscope.errors import BackendError


@dataclass(frozen=True)
class Option:
    """An option: the values it takes, as text; a check of a value; its default."""

    takes: str
    accepts: Callable[[Any], bool]
    default: Any = None
    is_required: bool = False


def choice_of(*choices: str, default: str) -> Option:
    """An option that takes one of `choices`."""
    takes = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
    return Option(takes, lambda value: value in choices, default)


def read_options(
    backend: str,
    options: Mapping[str, Any] | None,
    mode: str | None,
    accepted: Mapping[str, Option],
) -> dict[str, Any]:
    """A value for each option in `accepted`: the user's, or its default."""
    _refuse_mode(backend, mode)
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise refuse(backend, f"was given options {options!r}, which are not a dict", accepted)
    _refuse_unknown(backend, options, accepted)
    for name, option in accepted.items():
        if name in options:
            _refuse_wrong(backend, name, options[name], option, accepted)
        elif option.is_required:
            raise refuse(backend, f"needs the option {name!r}: {option.takes}", accepted)
    return {name: options.get(name, option.default) for name, option in accepted.items()}


def refuse(backend: str, fact: str, accepted: Mapping[str, Option]) -> BackendError:
    """An error with `fact` about a backend, and the options that it takes."""
    return BackendError(f"Backend shardscope_{backend} {fact}. {_list(accepted)}")


def _refuse_mode(backend: str, mode: str | None) -> None:
    if mode not in (None, "default"):
        raise BackendError(
            f"Backend shardscope_{backend} was given mode={mode!r}, but modes only tune "
            "Inductor. Remove mode=."
        )


def _refuse_unknown(backend: str, options: Iterable[Any], accepted: Mapping[str, Option]) -> None:
    for name in options:
        if name not in accepted:
            near = get_close_matches(str(name), accepted, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise refuse(backend, f"has no option {name!r}{hint}", accepted)


def _refuse_wrong(
    backend: str, name: str, value: Any, option: Option, accepted: Mapping[str, Option]
) -> None:
    # Comparing a tensor or array with a choice gives no bool: also a wrong value.
    try:
        is_accepted = bool(option.accepts(value))
    except (TypeError, ValueError, RuntimeError):
        is_accepted = False
    if not is_accepted:
        raise refuse(backend, f"was given {name}={value!r}, not {option.takes}", accepted)


def _list(accepted: Mapping[str, Option]) -> str:
    if not accepted:
        return "It takes no options."
    return f"It takes {'; '.join(f'{name} ({option.takes})' for name, option in accepted.items())}."
