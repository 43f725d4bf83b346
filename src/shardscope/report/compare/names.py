"""Names of modules that compare as the same whatever the model is wrapped in."""

from __future__ import annotations

import re
from typing import final

from shardscope.record import Recording

__all__ = ["CleanNames", "clean_names"]

# As they stand in names that were written down; nothing of torch's is touched.
_WRAPPERS = re.compile(
    r"(?:^|\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)"
)
_DATA_PARALLEL = "module"  # what DDP calls the model in it


@final
class CleanNames:
    """The names of one recording, without the parts that wrappers put into them."""

    def __init__(self, names: set[str], *, is_data_parallel: bool) -> None:
        self._is_data_parallel = is_data_parallel
        self._clean: dict[str, str] = {}
        self.names = tuple(sorted({self.clean(name) for name in names}))

    def clean(self, name: str) -> str:
        """The name of a module, parameter or buffer as the user's own model has it."""
        found = self._clean.get(name)
        if found is None:
            found = self._clean[name] = self._strip(name)
        return found

    def _strip(self, name: str) -> str:
        name = _unwrap(name)
        if not self._is_data_parallel:
            return name
        return "" if name == _DATA_PARALLEL else name.removeprefix(f"{_DATA_PARALLEL}.")


def clean_names(before: Recording, after: Recording) -> tuple[CleanNames, CleanNames]:
    """The names of both."""
    names = (_list_names(before), _list_names(after))
    parts = [{_unwrap(name).split(".")[0] for name in some} - {""} for some in names]
    # A user's own module may be called `module`; DDP's holds all others, and is not in both.
    first, second = (
        mine == {_DATA_PARALLEL} and _DATA_PARALLEL not in other
        for mine, other in (parts, parts[::-1])
    )
    return (
        CleanNames(names[0], is_data_parallel=first),
        CleanNames(names[1], is_data_parallel=second),
    )


def _list_names(recording: Recording) -> set[str]:
    owners = {call.owner for call in recording.collectives if call.owner is not None}
    return owners | {module.name for module in recording.modules}


def _unwrap(name: str) -> str:
    cleaned = _WRAPPERS.sub("", name)
    return name if cleaned == name else cleaned.removeprefix(".")
